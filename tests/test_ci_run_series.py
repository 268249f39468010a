"""Running the series: what is refused before it starts, what one run writes and says, and what counts as failed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from series_samples import cell, good, write

from ci import check_notebooks, execute, run_series
from ci import notebook as nbk

ROOT = Path(__file__).parent.parent

SEES = """import sys, os, json, pathlib
folder = pathlib.Path(OUT_DIR)
seen = dict(python=sys.executable, level=LEVEL, steps=STEPS, rate=RATE, backend=os.environ["MPLBACKEND"],
            offline=os.environ.get("HF_HUB_OFFLINE"), answers=os.environ["RLINFRA_ANSWERS"], cwd=os.getcwd())
(folder / "seen.json").write_text(json.dumps(seen))
(folder / "results").mkdir()
(folder / "results" / "decode_rate.json").write_text("{}")"""
SHOWS = """import matplotlib.pyplot as plt, asyncio
await asyncio.sleep(0)
plt.plot([1, 2]);"""
HAS_RESULT = 'import json, pathlib\n(pathlib.Path(OUT_DIR) / "result.json").write_text(json.dumps({"level": "B"}));'


def main(folder: Path, *arguments: str) -> int:
    return run_series.main(["--notebooks", str(folder / "notebooks"), "--out", str(folder / "lab"), *arguments])


# Before anything runs.


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("7", 3, 7),
        (" -7 ", 3, -7),
        ("0.25", 0.5, 0.25),
        ("1e-3", 0.5, 0.001),
        ("2", 0.5, 2.0),
        ("False", True, False),
        ("7", "text", "7"),
        ("B", "auto", "B"),
        ("[3]", [1, 2], [3]),
        ("None", None, None),
        ("4", None, 4),
    ],
)
def test_a_value_reads_as_the_type_of_its_default(text, default, value):
    found = run_series.typed("X", text, default)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("ten", 3),
        ("3.0", 3),
        ("3,", 3),
        ("True", 3),
        ("", 3),
        ("1", True),
        ("true", True),
        ("nan", 0.5),
        ("True", 0.5),
        ("(1, 2)", [1, 2]),
        ("__import__('os')", 3),
        (3.0, 3),
        (True, 3),
        (3, "text"),
        (None, 3),
    ],
)
def test_trap_3_a_value_of_another_type_is_refused_in_one_line(value, default):
    with pytest.raises(ValueError, match=r"^X = .*\(default .*\)$"):
        run_series.typed("X", value, default)


def test_trap_3_a_misspelt_parameter_is_refused_before_anything_runs(tmp_path, capsys):
    write(tmp_path, "00_start", good("00_start"))
    write(tmp_path, "01_loop", good("01_loop"))
    assert main(tmp_path, "-p", "STEP", "3") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("run_series: 00_start.ipynb: no parameter STEP; it has LEVEL, SEED, STEPS, ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "lab").exists()


def test_trap_3_without_a_tagged_cell_a_parameter_is_refused(tmp_path, capsys):
    notebook = good("01_loop")
    del cell(notebook, "params").metadata["tags"]
    write(tmp_path, "01_loop", notebook)
    assert main(tmp_path, "-p", "STEPS", "3") == 2
    assert capsys.readouterr().err == "run_series: 01_loop.ipynb: no parameter STEPS; it has none\n"


def test_trap_8_a_kernel_of_its_own_is_refused(tmp_path, capsys):
    notebook = good("01_loop")
    notebook.metadata.kernelspec.name = "my-env"
    write(tmp_path, "01_loop", notebook)
    assert main(tmp_path) == 2
    assert capsys.readouterr().err == "run_series: 01_loop.ipynb: kernelspec is 'my-env', not 'python3'\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["99_missing"], "'99_missing' fits no notebook; there are: 01_loop"),
        (["-p", "STEPS", "many"], "01_loop.ipynb: STEPS = 'many' does not read as int (default 10)"),
        (["-p", "OUT_DIR", "x"], "OUT_DIR is not a parameter of the series"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, says):
    write(tmp_path, "01_loop", good("01_loop"))
    assert main(tmp_path, *arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--level", "D"], ["--cell-timeout", "0"], ["-p", "STEPS"], ["--no-such"]])
def test_a_wrong_option_is_exit_code_2(tmp_path, capsys, arguments):
    write(tmp_path, "01_loop", good("01_loop"))
    with pytest.raises(SystemExit) as caught:
        main(tmp_path, *arguments)
    assert caught.value.code == 2
    assert "error: argument" in capsys.readouterr().err or arguments == ["--no-such"]


def test_an_empty_folder_and_a_file_that_is_no_notebook_are_one_line(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    assert main(tmp_path) == 2
    assert "no notebook (*.ipynb) in this folder" in capsys.readouterr().err
    (tmp_path / "notebooks" / "01_loop.ipynb").write_text("{")
    assert main(tmp_path) == 2
    assert "01_loop.ipynb: not a notebook: not UTF-8 JSON" in capsys.readouterr().err


def test_level_and_out_dir_go_only_to_notebooks_that_have_them(tmp_path):
    notebook = good("01_loop")
    cell(notebook, "params").source = "SEED = 3"
    paths = [write(tmp_path, "01_loop", notebook), write(tmp_path, "02_more", good("02_more"))]
    plans = run_series.plan(paths, {"SEED": "4"}, "B", tmp_path / "lab")
    assert plans == {paths[0]: {"SEED": 4}, paths[1]: {"SEED": 4, "LEVEL": "B", "OUT_DIR": "../lab/out/02_more"}}


def test_at_level_b_those_without_level_b_cells_are_left_out(tmp_path):
    write(tmp_path, "00_plain", good("00_plain"))
    write(tmp_path, "01_real", good("01_real", "%%level B some_result\nx = 1"))
    paths = nbk.find([], tmp_path / "notebooks")
    assert [path.stem for path in run_series.with_level_b(paths)] == ["01_real"]
    assert run_series.with_level_b(paths[:1]) == paths[:1]


# One run of a good and several bad notebooks.


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """A run, in a process of its own, of notebooks that pass and fail; beside it a `python3` kernel that cannot run."""
    folder = tmp_path_factory.mktemp("series {brace}")
    bodies = {
        "00_start": [SEES, SHOWS],
        "01_level": [HAS_RESULT],
        "02_error": ["x = 1", "raise ValueError('first\\nlast')", "x = 2"],
        "03_level_d": ["from rlinfra_utils import levels\nif LEVEL != 'A': levels.activate(LEVEL)"],
        "04_exit": ["import sys\nsys.exit(0)"],
        "05_killed": ["import os\nos.kill(os.getpid(), 9)"],
        "06_magic": ["%no_such_magic\nx = 1"],
        "07_hang": ["!sleep 120"],
        "08_asyncio": ["import asyncio\nasyncio.run(asyncio.sleep(0))"],
    }
    for name, sources in bodies.items():
        write(folder, name, good(name, *sources))
    silent = good("09_silent")
    cell(silent, "end").source = "assert SEED == 3"
    write(folder, "09_silent", silent)
    foreign = folder / "data" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x", "language": "python"}')
    environment = os.environ | {
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "PATH": "/usr/bin:/bin",
        "MPLBACKEND": "Agg",
        "RLINFRA_ANSWERS": str(folder / "reader.json"),
    }
    command = [sys.executable, "-m", "ci.run_series", "--notebooks", folder / "notebooks", "--out", folder / "lab"]
    command += ["--cell-timeout", "12", "-p", "STEPS", "3", "-p", "RATE", "1"]
    before = {path.name: path.read_bytes() for path in (folder / "notebooks").iterdir()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert {path.name: path.read_bytes() for path in (folder / "notebooks").iterdir()} == before
    return folder, done


runs_notebooks = pytest.mark.slow


@runs_notebooks
def test_each_notebook_has_one_line_of_progress(series):
    _, done = series
    lines = done.stdout.splitlines()
    shape = re.compile(r"(\d\d_\w+) +\d+\.\d s +(\d+) cells   level (\S+)   (ok|FAILED)")
    found = [shape.fullmatch(line).groups() for line in lines[:10]]
    assert found[0] == ("00_start", "6", "A", "ok")  # bootstrap, parameters, injected, two bodies, sentinel
    assert found[1] == ("01_level", "5", "B", "ok")  # the level that result.json states
    assert [verdict for *_, verdict in found] == ["ok", "ok", "FAILED", "ok"] + ["FAILED"] * 6
    assert lines[10].startswith("pages: ")
    assert re.fullmatch(r"3 of 10 notebooks passed in \d+\.\d s", lines[11])
    assert len(lines) == 12
    assert done.returncode == 1


@runs_notebooks
def test_each_failure_names_its_cell_and_its_last_error(series):
    _, done = series
    failures = dict(re.findall(r"^FAILED (\w+): (.*)$", done.stderr, re.MULTILINE))
    # No log line beside them; but a kernel that dies with its sockets open may say so itself, in libzmq's words.
    of_libzmq = re.compile(r"Assertion failed: |.+ \(src/\w+\.[ch]pp:\d+\)$")
    assert len(failures) == sum(not of_libzmq.match(line) for line in done.stderr.splitlines()) == 7
    assert failures["02_error"] == "cell body-1 `raise ValueError('first\\nlast')`: ValueError: first last"
    assert failures["05_killed"].startswith("cell body-0 `import os`: the kernel died")
    assert failures["07_hang"] == "cell body-0 `!sleep 120`: over the limit of 12 s a cell"


@runs_notebooks
def test_trap_2_an_unknown_magic_fails(series):
    assert "cell body-0 `%no_such_magic`" in series[1].stderr
    assert "(UsageError: Line magic function `%no_such_magic` not found.)" in series[1].stderr


@runs_notebooks
def test_trap_2_a_run_that_stops_early_or_a_silent_sentinel_fails(series):
    assert "FAILED 04_exit: cell body-0 `import sys`: the run stopped here without an error" in series[1].stderr
    assert "FAILED 09_silent: no cell tagged `sentinel` printed anything" in series[1].stderr


@runs_notebooks
def test_trap_9_asyncio_run_fails_and_await_works(series):
    folder, done = series
    assert "FAILED 08_asyncio: cell body-0 `import asyncio`: RuntimeError: asyncio.run() cannot be" in done.stderr
    assert "await asyncio.sleep(0)" in (folder / "notebooks" / "00_start.ipynb").read_text()
    assert "00_start" not in done.stderr


@runs_notebooks
def test_trap_7_the_marker_stays_in_the_executed_copy(series):
    folder, _ = series
    copy = folder / "lab" / "notebooks" / "02_error.ipynb"
    assert "papermill-error-cell" in copy.read_text()
    assert any(line.endswith("[papermill]") for line in check_notebooks.check(copy))
    assert "papermill" not in (folder / "notebooks" / "02_error.ipynb").read_text()


@runs_notebooks
def test_field_case_b60_values_arrive_with_the_type_of_the_default(series):
    folder, _ = series
    seen = json.loads((folder / "lab" / "out" / "00_start" / "seen.json").read_text())
    assert (seen["level"], seen["steps"], seen["rate"]) == ("A", 3, 1.0)
    assert type(seen["steps"]) is int
    assert type(seen["rate"]) is float


@runs_notebooks
def test_the_kernel_is_this_interpreter_in_a_quiet_environment(series):
    folder, _ = series
    seen = json.loads((folder / "lab" / "out" / "00_start" / "seen.json").read_text())
    assert seen["python"] == sys.executable
    assert seen["offline"] == "1"
    assert seen["cwd"] == str(folder / "notebooks")
    assert Path(seen["answers"]).is_relative_to(folder / "lab")
    assert not (folder / "reader.json").exists()
    outputs = nbformat.read(folder / "lab" / "notebooks" / "00_start.ipynb", 4).cells[-2].outputs
    assert "image/png" in outputs[0].data  # although MPLBACKEND was Agg


@runs_notebooks
def test_the_index_links_to_what_is_there_and_to_nothing_elsewhere(series):
    folder, _ = series
    text = (folder / "lab" / "index.html").read_text()
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert len(links) == 22  # two a notebook, and the pages of pictures and of results
    assert all((folder / "lab" / link).is_file() for link in links)
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("The loop as dataflow") == 10
    assert "One rollout is followed." in text
    assert "ValueError: first last" in text


def test_results_of_the_notebooks_that_passed_are_kept(tmp_path):
    outcome = lambda name, failure: run_series.Outcome(name, "", "", "B", 1.0, 1, failure)  # noqa: E731
    for name in ("00_good", "01_bad"):
        folder = tmp_path / "lab" / "out" / name / "results"
        folder.mkdir(parents=True)
        (folder / f"{name}.json").write_text(name)
        (folder / "note.txt").write_text("x")
    kept = run_series.keep_results([outcome("00_good", None), outcome("01_bad", "cell x")], tmp_path / "lab", tmp_path)
    assert kept == [tmp_path / "00_good.json"]
    assert kept[0].read_text() == "00_good"


@runs_notebooks
def test_level_d_ends_in_the_notebooks_own_one_line(tmp_path, capsys):
    write(tmp_path, "01_loop", good("01_loop", "from rlinfra_utils import levels\nlevels.activate(LEVEL)"))
    assert main(tmp_path, "--no-html", "-p", "LEVEL", "D") == 1
    assert "FAILED 01_loop: cell body-0 `from rlinfra_utils import levels`: LevelError: LEVEL = 'D'" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "lab" / "index.html").exists()


@runs_notebooks
def test_trap_3_is_real_papermill_itself_runs_a_misspelt_parameter(tmp_path):
    path = write(tmp_path, "01_loop", good("01_loop", "print(STEPS)"))
    with execute.environment(tmp_path / "kernel"):
        done = papermill.execute_notebook(str(path), None, {"STEP": 3}, progress_bar=False)
    assert nbk.code_cells(done)[-2].outputs[0].text == "10\n"


def test_the_environment_is_put_back(tmp_path):
    before = dict(os.environ)
    with execute.environment(tmp_path / "kernel", offline=False, EXTRA="1"):
        assert os.environ["EXTRA"] == "1"
        assert os.environ.get("HF_HUB_OFFLINE") == before.get("HF_HUB_OFFLINE")
    assert dict(os.environ) == before
