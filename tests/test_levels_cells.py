"""The `%%level` cell magic: an ordinary cell where the level runs, one line and a stored result elsewhere."""

import json

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from traitlets.config import Config

from rlinfra_utils import levels
from rlinfra_utils.levels import results
from rlinfra_utils.levels import session as session_module

CPU = levels.Machine("CPU", 2, 8 * 2**30, torch_version="2.13.0", small_model="package")


@pytest.fixture
def shell(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(session_module, "detect", lambda: CPU)
    monkeypatch.setattr(results, "detect", lambda: CPU)
    monkeypatch.setattr(results, "_folder", lambda: tmp_path)
    InteractiveShell.clear_instance()
    yield InteractiveShell.instance(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    InteractiveShell.clear_instance()


def run(shell, source: str):
    with capture_output() as captured:
        outcome = shell.run_cell(source, store_history=True)
    return outcome, captured


def activate(shell, level: str):
    outcome, captured = run(shell, f"from rlinfra_utils import levels; session = levels.activate({level!r})")
    assert outcome.success
    return captured


def test_activate_shows_one_table_as_text_and_as_html(shell):
    captured = activate(shell, "B")
    assert len(captured.outputs) == 1
    shown = captured.outputs[0].data
    assert shown["text/html"].startswith("<table>")
    assert 'level B. LEVEL = "B" was asked for.' in shown["text/plain"]


def test_an_active_cell_is_an_ordinary_cell(shell):
    activate(shell, "B")
    outcome, captured = run(shell, "%%level B x\nkept = 41\nkept + 1")
    assert outcome.result == 42
    assert "42" in captured.stdout
    assert shell.user_ns["kept"] == 41
    assert run(shell, "kept + 2")[0].result == 43
    assert "44" not in run(shell, "%%level B x\nkept + 3;")[1].stdout  # a semicolon hides the value
    assert run(shell, "%%level B x\nimport asyncio\nawait asyncio.sleep(0, 'awaited')")[0].result == "awaited"
    assert "inner magic" not in run(shell, "%%level B x\n%%capture out\nprint('inner magic')")[1].stdout
    assert "inner magic" in str(shell.user_ns["out"])
    assert run(shell, "%%level B x")[0].success


def test_an_error_in_an_active_cell_is_the_cells_own(shell):
    activate(shell, "B")
    outcome, captured = run(shell, "%%level B x\nzero = 0\n1 / zero")
    assert isinstance(outcome.error_in_exec, ZeroDivisionError)
    traceback = outcome.error_in_exec.__traceback__
    assert not [frame for frame in iter_frames(traceback) if "rlinfra_utils" in frame.tb_frame.f_code.co_filename]
    assert list(iter_frames(traceback))[-1].tb_lineno == 3  # as in the cell that the reader sees
    assert captured.stdout.count("division by zero") == 1


def iter_frames(traceback):
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def test_a_cell_that_runs_says_first_what_it_took_and_stores_what_it_takes(shell, tmp_path):
    activate(shell, "B")
    slow = f"%%level B slow\nimport time; time.sleep(0.2)\nlevels.store('slow', {{'a': 1}}, {str(tmp_path)!r})"
    assert run(shell, slow)[1].stdout.startswith("Level B, slow: its time and memory are not stored.\n")
    cost = levels.stored("slow")["cost"]
    assert 0.2 <= cost["seconds"] < 60
    path = tmp_path / "slow.json"
    changed = {"cost": {"seconds": 74.6, "peak_memory_bytes": 2_950_000_000}, "date": "2026-11-29"}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    said = run(shell, slow)[1].stdout.splitlines()[0]
    expected = "about 75 s and 3.0 GB of memory, measured 2026-11-29 on 2 CPU cores (CPU), 8.0 GiB."
    assert said == f"Level B, slow: {expected}"
    assert run(shell, "print('ordinary')")[1].stdout == "ordinary\n"


def test_a_cell_that_does_not_run_starts_no_clock(shell, tmp_path):
    activate(shell, "A")
    run(shell, "%%level B idle\n1")
    levels.store("idle", {"a": 1}, tmp_path)
    assert levels.stored("idle")["cost"] is None


def test_a_malformed_stored_result_does_not_keep_a_cell_from_running(shell, tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    activate(shell, "B")
    outcome, captured = run(shell, "%%level B broken\nran = 5")
    assert outcome.success
    assert "stored result results/broken.json: " in captured.stdout.splitlines()[0]
    assert shell.user_ns["ran"] == 5


@pytest.mark.parametrize(("asked", "reason"), [("A", 'LEVEL = "A" was asked for'), ("auto", 'LEVEL = "B" runs it')])
def test_a_cell_that_does_not_run_shows_one_line_and_the_stored_result(shell, tmp_path, asked, reason):
    path = levels.store("decode", {"tokens_per_s": 41.52525, "deep": {"p50": 3}}, tmp_path, parameters={"num": 16})
    path.write_text(path.read_text().replace(levels.stored("decode")["date"], "2026-11-29"))
    activate(shell, asked)
    outcome, captured = run(shell, "%%level B decode\nnever = 1\nraise SystemExit")
    assert outcome.success
    assert outcome.result is None
    assert "never" not in shell.user_ns
    assert captured.stdout.count("\n") == 1
    assert captured.stdout.startswith("Level B is not run here: ")
    assert reason in captured.stdout
    assert "Stored result of 2026-11-29, 2 CPU cores (CPU), 8.0 GiB:" in captured.stdout
    shown = captured.outputs[0].data
    for words in ("41.53", "p50 3", "parameter num", "hardware", "versions", "2026-11-29"):
        assert words in shown["text/plain"]
        assert words in shown["text/html"]


def test_a_missing_stored_result_is_said_in_the_same_line(shell):
    activate(shell, "C")  # Ray is missing, so level B runs
    outcome, captured = run(shell, "%%level C cluster\n1 / 0")
    assert outcome.success
    assert captured.stdout.count("\n") == 1
    assert "Ray is not installed" in captured.stdout
    assert "no stored result 'cluster'" in captured.stdout


def test_a_malformed_stored_result_stops_the_run_in_one_line(shell, tmp_path):
    (tmp_path / "decode.json").write_text("{}")
    activate(shell, "A")
    outcome, captured = run(shell, "%%level B decode\n1")
    assert isinstance(outcome.error_in_exec, ValueError)
    assert captured.stdout.strip().startswith("LevelError: stored result results/decode.json: ")
    assert captured.stdout.strip().count("\n") == 0


@pytest.mark.parametrize("line", ["", "B", "x", "D x", "b x", "A x", "B X", "B ../x", "B x y", "B 'x'", "B x\\"])
@pytest.mark.parametrize("asked", ["A", "B"])
def test_bad_arguments_are_one_line_whether_or_not_the_level_runs(shell, asked, line):
    activate(shell, asked)
    outcome, captured = run(shell, f"%%level {line}\nnever = 1")
    assert isinstance(outcome.error_in_exec, levels.LevelError)
    assert "write %%level B name" in captured.stdout
    assert captured.stdout.strip().count("\n") == 0
    assert "never" not in shell.user_ns


def test_activating_again_replaces_the_earlier_level(shell):
    count = len(shell.input_transformers_cleanup)
    activate(shell, "B")
    activate(shell, "A")
    assert len(shell.input_transformers_cleanup) == count + 1
    assert sum("announce" in repr(each) for each in shell.events.callbacks["pre_run_cell"]) == 1
    run(shell, "%%level B x\nnever = 1")
    assert "never" not in shell.user_ns
    activate(shell, "B")
    run(shell, "%%level B x\nran = 1")
    assert shell.user_ns["ran"] == 1


def test_other_cells_and_magics_are_left_alone(shell):
    activate(shell, "A")
    assert run(shell, "text = '''\n%%level B x\n'''\nlen(text)")[0].result == len("\n%%level B x\n")
    assert not run(shell, "%%levels B x\n1")[0].success
    assert run(shell, "")[0].success


def test_a_real_kernel_fails_an_active_cell_and_says_a_bad_level_in_one_line(tmp_path):
    setup = "from rlinfra_utils import levels\nsession = levels.activate('B')"
    fake = "import rlinfra_utils.levels.session as s\nfrom rlinfra_utils.levels import Machine\n"
    fake += f"s.detect = lambda: {CPU!r}\n"
    cells = [new_code_cell(source) for source in (fake + setup, "%%level B x\nzero = 0\n1 / zero")]
    notebook = new_notebook(cells=cells)
    with pytest.raises(CellExecutionError) as caught:
        NotebookClient(notebook, kernel_name="python3", timeout=60).execute(cwd=tmp_path)
    assert caught.value.ename == "ZeroDivisionError"
    assert "rlinfra_utils" not in "\n".join(notebook.cells[1].outputs[-1].traceback)
    nbformat.validate(notebook)
    notebook = new_notebook(cells=[new_code_cell("from rlinfra_utils import levels\nlevels.activate('D')")])
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, kernel_name="python3", timeout=60).execute(cwd=tmp_path)
    (error,) = notebook.cells[0].outputs
    assert (error.output_type, len(error.traceback)) == ("error", 1)
    assert "LEVEL = 'D'" in error.traceback[0]
