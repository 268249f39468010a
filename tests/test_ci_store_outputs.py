"""Storing outputs: the same run gives the same file, ids stay, and a run that fails changes nothing."""

import nbformat
import pytest
from series_samples import cell, good, write

from ci import check_notebooks, store_outputs
from ci import notebook as nbk

pytestmark = pytest.mark.slow


def main(folder, *arguments: str) -> int:
    return store_outputs.main(["--notebooks", str(folder / "notebooks"), *arguments])


def test_trap_7_stored_outputs_keep_ids_and_leave_no_noise(tmp_path):
    source = "import os\nprint(LEVEL, STEPS, os.environ['CUDA_VISIBLE_DEVICES'] == '')\nSTEPS + 1"
    notebook = good("01_loop", source)
    notebook.metadata |= {"papermill": {"duration": 1.0}, "rlinfra": {"needs": []}}
    cell(notebook, "body-0").metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    notebook.metadata.kernelspec = nbformat.from_dict({"name": "my-env", "display_name": "mine"})
    path = write(tmp_path, "01_loop", notebook)
    assert main(tmp_path, "01") == 0
    first = path.read_bytes()
    stored = nbk.read(path)
    assert [each.id for each in stored.cells] == [each.id for each in notebook.cells]
    assert [each.source for each in stored.cells] == [each.source for each in notebook.cells]
    assert set(stored.metadata) == {"kernelspec", "language_info", "rlinfra"}
    printed, value = cell(stored, "body-0").outputs
    assert printed.text == "auto 10 True\n"
    assert value.data["text/plain"] == "11"
    assert value.execution_count == cell(stored, "body-0").execution_count == 3
    assert check_notebooks.check(path) == []
    assert main(tmp_path, "01") == 0
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nprint('odd', file=sys.stderr)", "wrote to stderr, which is not stored (odd)"),
    ],
)
def test_a_notebook_that_fails_or_writes_to_stderr_stays_as_it_was(tmp_path, capsys, source, says):
    path = write(tmp_path, "01_loop", good("01_loop", source))
    before = path.read_bytes()
    assert main(tmp_path) == 1
    first_line = source.splitlines()[0]
    assert capsys.readouterr().out == f"01_loop: FAILED, left as it was: cell body-0 `{first_line}`: {says}\n"
    assert path.read_bytes() == before


def test_wrong_use_is_one_line_and_exit_code_2(tmp_path, capsys):
    write(tmp_path, "01_loop", good("01_loop"))
    assert main(tmp_path, "99") == 2
    assert capsys.readouterr().err == "store_outputs: '99' fits no notebook; there are: 01_loop\n"
