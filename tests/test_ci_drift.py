"""Drift: what differs from the pins is listed, nothing else is, and the jobs on GitHub keep their rules."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from ci import drift

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_pins_of_a_file_with_comments_options_and_markers():
    text = "# head\n-r other.txt\n--no-deps\nNumPy==2.0.2  # why\n\nPyYAML == 6.0.3\nruamel.yaml==1.0; os_name>'3'\n"
    assert drift.pins(text) == {"numpy": "2.0.2", "pyyaml": "6.0.3", "ruamel-yaml": "1.0"}


@pytest.mark.parametrize(
    "line", ["numpy", "numpy>=2", "numpy>=2,<3", "numpy==2,!=2.1", "numpy==2.*", "./wheel.whl", "numpy=2", "=="]
)
def test_a_line_that_is_no_pin_is_named(line):
    with pytest.raises(ValueError, match=re.escape(f"line {line!r} is not a pin of the form name==version")):
        drift.pins(f"attrs==1\n{line}\n")


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements-*.txt")), ids=lambda path: path.name)
def test_every_requirements_file_is_pins_alone(path):
    lines = [line for line in path.read_text().splitlines() if "==" in line.split("#")[0]]
    assert len(drift.pins(path.read_text())) == len(lines)


@pytest.mark.parametrize(
    ("pinned", "installed", "kind"),
    [
        ("1.2.3", "2.0.0", "major"),
        ("1.2.3", "1.10.0", "minor"),
        ("1.2.3", "1.2.10", "micro"),
        ("1.2", "1.2.1", "micro"),
        ("1.2.3", "1.2.2", "older"),
        ("2.13.0", "2.9.0", "older"),
        ("2026.1.0.post1", "2026.1.0.post2", "other"),
        ("1.2.3", "-", "not installed"),
        ("-", "1.2.3", "not pinned"),
    ],
)
def test_how_far_a_package_moved(pinned, installed, kind):
    sides = ({"x": version} if version != "-" else {} for version in (pinned, installed))
    (move,) = drift.moves(*sides)
    assert move == ("x", pinned, installed)
    assert move.kind == kind


def test_what_is_at_its_pin_is_not_listed():
    pinned = {"torch": "2.13.0", "idna": "3.20", "attrs": "26.1.0"}
    assert drift.moves(pinned, {"torch": "2.13.0+cpu", "idna": "3.20.0", "attrs": "26.1.0"}) == []
    assert drift.table([]) == "Every package is at its pin."


def test_the_table_has_a_row_for_each_in_the_order_of_names():
    found = drift.moves({"b": "1.0", "a": "1.0", "c": "1"}, {"b": "2.0", "c": "1", "d": "3"})
    lines = drift.table(found).splitlines()
    assert lines[0].endswith(": 3.")
    rows = ["| a | 1.0 | - | not installed |", "| b | 1.0 | 2.0 | major |", "| d | - | 3 | not pinned |"]
    assert lines[-3:] == rows


def test_this_environment_is_read():
    found = drift.installed()
    assert found["pytest"] == pytest.__version__
    assert "rlinfra-utils" not in found


def test_a_file_that_holds_no_pins_is_one_line(tmp_path, capsys):
    (tmp_path / "bad.txt").write_text("numpy>=2\n")
    for path in (tmp_path / "bad.txt", tmp_path / "none.txt"):
        assert drift.main([str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("drift: ")
        assert said.count("\n") == 1


# The jobs on GitHub.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_reads_alone_ends_in_time_and_runs_actions_at_a_commit(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", "actions/x@" + "0" * 40)), step
    for line in path.read_text().splitlines():
        assert "uses:" not in line or re.search(r" # v\d+\.\d+\.\d+$", line), line


def test_ci_runs_what_a_clean_clone_runs():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_the_drift_job_installs_every_extra_and_no_pin():
    text = (ROOT / ".github" / "workflows" / "drift.yml").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"-e '\.\[([\w,-]+)\]'", text)[1].split(",")) == set(extras)
    assert "requirements" not in text
