"""The bootstrap cell against a pip that behaves, fails or moves a package; badges; the Colab imitation's parts.

The cell runs in a process of its own with fake distributions on its path; only pip is a fake. The whole
imitation, with real packages, is `python -m ci.colab`.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ci import badges, colab
from ci import notebook as nbk
from ci.bootstrap import ROOT, cell_source, repository, require_address

HERE = "https://github.com/example/lab"

#: Stands in for `python -m pip`: notes its arguments, then does in the fake site folder what the scenario says.
FAKE_PIP = """
import os, pathlib, shutil, sys
site = pathlib.Path(__file__).parent
(site / "arguments").write_text(" ".join(sys.argv[1:]))
scenario = os.environ["SCENARIO"]
if scenario == "fails":
    print("Collecting it\\n" * 50 + "ERROR: no matching distribution")
    sys.exit(1)
(site / "rlinfra_utils.py").touch()
def move(name, old, new):
    (site / f"{name}-{old}.dist-info").rename(site / f"{name}-{new}.dist-info")
    (site / f"{name}-{new}.dist-info" / "METADATA").write_text(f"Name: {name}\\nVersion: {new}\\n")
if scenario == "moves":
    move("numpy", "2.0.2", "2.4.6")
if scenario == "removes":
    shutil.rmtree(site / "pandas-2.2.2.dist-info")
if scenario == "moves another":
    move("tqdm", "4.67.3", "4.70.0")
"""
COLAB_BRINGS = {"torch": "2.11.0+cu128", "numpy": "2.0.2", "pandas": "2.2.2", "transformers": "5.9.0", "tqdm": "4.67.3"}
#: Runs the cell with the fake site alone on the path, as `-I -S` leaves nothing but the standard library.
RUN = """
import importlib.util, sys
sys.path.insert(0, {site!r})
import subprocess
real = subprocess.run
def run(command, **options):
    assert command[:3] == [sys.executable, "-m", "pip"], command
    return real([sys.executable, {site!r} + "/pip.py", *command[3:]], **options)
subprocess.run = run
exec(compile({cell!r}, "cell", "exec"))
assert not {{"torch", "numpy", "pandas", "transformers"}} & set(sys.modules), "the cell imported what it guards"
import rlinfra_utils
print("importable")
"""


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    for name, version in COLAB_BRINGS.items():
        (folder / f"{name}-{version}.dist-info").mkdir()
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
    return folder


def run_cell(site: Path, **environment: str) -> subprocess.CompletedProcess:
    script = RUN.format(site=str(site), cell=cell_source(HERE))
    command = [sys.executable, "-I", "-S", "-c", script]
    return subprocess.run(command, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True)


def in_colab(site: Path, scenario: str, **environment: str) -> subprocess.CompletedProcess:
    return run_cell(site, COLAB_RELEASE_TAG="release-colab_20260601", SCENARIO=scenario, **environment)


def test_in_colab_the_cell_installs_the_package_alone(site):
    done = in_colab(site, "behaves")
    assert (done.returncode, done.stdout) == (0, "importable\n"), done.stderr
    assert (site / "arguments").read_text() == f"install --quiet --no-deps git+{HERE}"


def test_a_fork_or_a_checkout_can_be_the_source(site):
    assert in_colab(site, "behaves", RLINFRA_SOURCE="/a/checkout").returncode == 0
    assert (site / "arguments").read_text().endswith(" --no-deps /a/checkout")


@pytest.mark.parametrize(("scenario", "named"), [("moves", ("numpy", "2.0.2", "2.4.6")), ("removes", ("pandas",))])
def test_a_moved_package_is_an_error_that_names_it(site, scenario, named):
    done = in_colab(site, scenario)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: the install moved ")
    assert not [word for word in named if word not in error]
    assert "torch" not in error


def test_the_cell_guards_four_packages_only(site):
    assert in_colab(site, "moves another").returncode == 0


def test_a_failing_pip_shows_its_last_lines(site):
    done = in_colab(site, "fails")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ERROR: no matching distribution"
    assert f"RuntimeError: pip could not install git+{HERE}" in done.stderr
    assert done.stderr.count("Collecting it") < 10


def test_an_installed_package_is_left_alone(site):
    (site / "rlinfra_utils.py").touch()
    for done in (in_colab(site, "moves"), run_cell(site)):
        assert (done.returncode, done.stdout) == (0, "importable\n"), done.stderr
    assert not (site / "arguments").exists()


def test_elsewhere_the_cell_changes_nothing_and_says_what_to_do(site):
    before = sorted(site.rglob("*"))
    done = run_cell(site)
    assert done.returncode == 1
    assert "make lab" in done.stderr.splitlines()[-1]
    assert sorted(site.rglob("*")) == before


def test_a_distribution_without_metadata_does_no_harm(site):
    (site / "broken-1.0.dist-info").mkdir()
    assert in_colab(site, "behaves").returncode == 0


def test_the_cell_is_short_and_of_the_standard_library():
    source = cell_source(HERE)
    assert len(source.splitlines()) <= 25
    assert source.startswith("# ")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in nodes for alias in node.names}
    assert names <= sys.stdlib_module_names


BAD_ADDRESSES = [
    "http://github.com/a/b",
    "https://gitlab.com/a/b",
    "https://github.com/a",
    "https://github.com/a/b/",
    "https://github.com/a/b.git",
    "https://github.com/a/b/c",
    "https://github.com/a/..",
    'https://github.com/a/b"\nx = "',
    "https://github.com/a/b\n",
    "",
]


@pytest.mark.parametrize("bad", BAD_ADDRESSES)
def test_an_address_of_another_form_is_named(bad, lab, capsys):
    before = snapshot(lab)
    with pytest.raises(ValueError, match="repository"):
        require_address(bad)
    assert badges.main(["--repository", bad], lab) == 1
    assert repr(bad) in capsys.readouterr().err
    assert snapshot(lab) == before


def tagged(cell, *tags):
    cell.metadata["tags"] = list(tags)
    return cell


def small_notebook():
    cells = [
        new_markdown_cell(
            "# Title\n\n[![Open](x.svg)](https://colab.research.google.com/github/old/x/blob/main/y.ipynb)"
        ),
        tagged(new_code_cell("old"), "bootstrap"),
        tagged(new_code_cell('LEVEL = "auto"'), "parameters"),
        new_code_cell("print('é')", outputs=[nbformat.v4.new_output("stream", text="é\n")], execution_count=3),
    ]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernelspec})


@pytest.fixture
def lab(tmp_path):
    root = tmp_path / "lab"
    (root / "notebooks").mkdir(parents=True)
    (root / "pyproject.toml").write_text(f'[project]\nname = "x"\n\n[project.urls]\n# Here.\nRepository = "{HERE}"\n')
    nbformat.write(small_notebook(), root / "notebooks" / "01_x.ipynb")
    return root


def snapshot(root: Path) -> dict:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_badges_write_address_and_cell_and_nothing_else(lab):
    path = lab / "notebooks" / "01_x.ipynb"
    before = json.loads(path.read_text())
    assert badges.main([], lab) == 0
    after = json.loads(path.read_text())
    link = "https://colab.research.google.com/github/example/lab/blob/main/notebooks/01_x.ipynb"
    assert after["cells"][0]["source"] == ["# Title\n", "\n", f"[![Open](x.svg)]({link})"]
    assert "".join(after["cells"][1]["source"]) == cell_source(HERE)
    for cell in (0, 1):
        before["cells"][cell]["source"] = after["cells"][cell]["source"]
    assert after == before
    lines = path.read_text().splitlines()
    assert lines[1].startswith(' "')  # nbformat's own form: one blank of indent, text as it is, a newline at the end
    assert "é" in path.read_text()
    assert path.read_text().endswith("}\n")


def test_badges_twice_change_nothing_more(lab, capsys):
    assert badges.main([], lab) == 0
    before = snapshot(lab)
    capsys.readouterr()
    assert badges.main([], lab) == 0
    assert snapshot(lab) == before
    assert "0 of 1 files changed" in capsys.readouterr().out


def test_a_fork_rewrites_the_one_line_of_pyproject_and_every_notebook(lab):
    assert badges.main(["--repository", "https://github.com/my-fork/lab.py"], lab) == 0
    text = (lab / "pyproject.toml").read_text()
    assert text.splitlines()[4:] == ["# Here.", 'Repository = "https://github.com/my-fork/lab.py"']
    assert repository(lab / "pyproject.toml") == "https://github.com/my-fork/lab.py"
    notebook = (lab / "notebooks" / "01_x.ipynb").read_text()
    assert "github/my-fork/lab.py/blob/main/notebooks/01_x.ipynb" in notebook
    assert "git+https://github.com/my-fork/lab.py" in notebook
    assert "example" not in notebook


def test_a_first_cell_without_a_badge_gets_one(lab):
    path = lab / "notebooks" / "01_x.ipynb"
    notebook = small_notebook()
    notebook.cells[0].source = "# Title\n\nWhat you will be able to do.\n"
    nbformat.write(notebook, path)
    assert badges.main([], lab) == 0
    source = nbk.read(path).cells[0].source
    assert source.startswith("# Title\n\nWhat you will be able to do.\n\n[![Open in Colab](")
    assert source.endswith(f"({badges.badge_link(HERE, '01_x.ipynb')})")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda notebook: notebook.cells.pop(0), "first cell"),
        (lambda notebook: notebook.cells.clear(), "first cell"),
        (lambda notebook: notebook.cells.pop(1), "0 cells are tagged `bootstrap`"),
        (lambda notebook: tagged(notebook.cells[3], "bootstrap"), "2 cells are tagged `bootstrap`"),
    ],
)
def test_a_notebook_without_a_place_is_named_and_no_file_changes(lab, capsys, spoil, named):
    notebook = small_notebook()
    spoil(notebook)
    nbformat.write(notebook, lab / "notebooks" / "02_bad.ipynb")
    before = snapshot(lab)
    assert badges.main(["--repository", "https://github.com/my/fork"], lab) == 1
    error = capsys.readouterr().err
    assert "02_bad.ipynb" in error
    assert named in error
    assert error.count("\n") == 1
    assert snapshot(lab) == before


@pytest.mark.parametrize(
    "text", ["", "[project]\n", '[project.urls]\nRepository = "x"\n', "[project.urls]\nRepository = 7\n", "[project\n"]
)
def test_a_pyproject_without_the_address_is_named(lab, capsys, text):
    (lab / "pyproject.toml").write_text(text)
    assert badges.main([], lab) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_every_notebook_of_the_series_carries_this_address():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert path.read_text(encoding="utf-8") == badges.rewritten(path, repository()), "run python -m ci.badges"


def test_a_notebook_starts_at_level_a_in_colab():
    notebook = colab.at_level_a(small_notebook())
    assert [cell.source for cell in notebook.cells[2:4]] == ['LEVEL = "auto"', 'LEVEL = "A"']


@pytest.mark.parametrize(
    ("after", "named"),
    [
        ({"numpy": "numpy==2.0.2"}, "did not install"),
        ({"numpy": "numpy==2.4.6", "rlinfra-utils": "x"}, "numpy==2.0.2 -> numpy==2.4.6"),
        ({"rlinfra-utils": "x"}, "numpy==2.0.2 -> absent"),
        ({"numpy": "numpy==2.0.2", "rlinfra-utils": "x", "simpy": "simpy==4.1"}, "absent -> simpy==4.1"),
    ],
)
def test_the_imitation_names_what_else_moved(after, named):
    with pytest.raises(colab.ColabError, match=named):
        colab.require_only_ours({"numpy": "numpy==2.0.2"}, after)


def test_the_imitation_is_content_when_only_our_package_came():
    colab.require_only_ours({"numpy": "numpy==2.0.2"}, {"numpy": "numpy==2.0.2", "rlinfra-utils": "x"})


def test_freeze_reads_each_form_of_a_line(monkeypatch):
    text = "numpy==2.0.2\nrlinfra-utils @ file:///somewhere\n# a remark\n-e /somewhere/else\nJinja2==3.1.6\n"
    monkeypatch.setattr(colab, "_call", lambda *command: text)
    assert set(colab.freeze(Path("python"))) == {"numpy", "rlinfra-utils", "jinja2"}


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("# a name\n1 / 0", "`# a name`: ZeroDivisionError: division by zero"),
        ("%no_such_magic", "`%no_such_magic`: UsageError"),  # nbval calls this one a success
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the kernel died"),
    ],
)
def test_the_imitation_names_the_failing_cell(tmp_path, cell, named):
    notebook = new_notebook(cells=[new_code_cell("1"), new_code_cell(cell), new_code_cell("2")])
    failure = colab.run_notebook(notebook, tmp_path)
    assert named in failure
    assert notebook.cells[1].id in failure
    assert "\n" not in failure


@pytest.mark.slow
def test_a_pip_that_fails_ends_the_imitation_in_its_last_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(colab, "REQUIREMENTS", tmp_path / "requirements-colab.txt")
    colab.REQUIREMENTS.write_text("not a requirement!\n")
    assert colab.main(["--venv", str(tmp_path / "venv"), "--notebooks", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "pip install failed" in error
    assert "Traceback" not in error
