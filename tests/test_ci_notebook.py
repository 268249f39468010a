"""Reading notebooks: what is found in a good one, and one line for each bad one."""

import papermill
import pytest
from series_samples import PARAMETERS, good, write

from ci import notebook as nbk

EMPTY = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not UTF-8 JSON"),
        (b"# not a notebook", "not UTF-8 JSON"),
        (b"\xff\xfe{", "not UTF-8 JSON"),
        (b"[" * 100_000, "not UTF-8 JSON"),
        (b"[]", "not a notebook of format 4"),
        (b"null", "not a notebook of format 4"),
        (b"{}", "(None, None)"),
        (b'{"cells": [], "metadata": {}, "nbformat": 3, "nbformat_minor": 0}', "(3, 0)"),
        (b'{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": "5"}', "(4, '5')"),
        (EMPTY.replace("[]", "7").encode(), "breaks the notebook schema at cells"),
        (EMPTY.replace("[]", '[{"cell_type": "code"}]').encode(), "is a required property"),
    ],
)
def test_a_file_that_is_no_notebook_is_one_line(tmp_path, content, says):
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content)
    with pytest.raises(nbk.NotebookError) as caught:
        nbk.read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(nbk.NotebookError, match=r"none\.ipynb: cannot be read: No such file"):
        nbk.read(tmp_path / "none.ipynb")


def test_notebooks_are_found_in_name_order_and_by_the_beginning_of_their_names(tmp_path):
    for name in ("01_b", "00_a", "01_c", "10_d"):
        (tmp_path / f"{name}.ipynb").write_text(EMPTY)
    names = lambda *asked: [path.stem for path in nbk.find(list(asked), tmp_path)]  # noqa: E731
    assert names() == ["00_a", "01_b", "01_c", "10_d"]
    assert names("10", "notebooks/00_a.ipynb") == ["00_a", "10_d"]
    assert names("10", "10_d") == ["10_d"]
    with pytest.raises(nbk.NotebookError, match="'01' fits 2 notebooks; there are: 00_a, 01_b"):
        names("01")
    with pytest.raises(nbk.NotebookError, match="'99' fits no notebook; there are: 00_a"):
        names("99")
    with pytest.raises(nbk.NotebookError, match="'' fits no notebook"):
        names("")


def test_a_folder_without_notebooks_is_named(tmp_path):
    with pytest.raises(nbk.NotebookError, match="no notebook"):
        nbk.find([], tmp_path)


def test_parameters_are_those_that_papermill_finds(tmp_path):
    path = write(tmp_path, "01_loop", good("01_loop"))
    assert list(nbk.parameters(nbk.read(path))) == list(papermill.inspect_notebook(str(path)))


def test_parameters_have_the_values_that_python_gives_them():
    given = {}
    exec(PARAMETERS, given)
    del given["__builtins__"]
    assert nbk.literals(PARAMETERS) == given


@pytest.mark.parametrize(
    "statement",
    [
        "x = f()",
        "x = 1 + n",
        "x += 1",
        "x = y = 1",
        "a, b = 1, 2",
        "x.y = 1",
        "x[0] = 1",
        "import os",
        "x: int",
        "del x",
    ],
)
def test_anything_but_a_literal_is_quoted(statement):
    with pytest.raises(ValueError, match=r"^`.*` is not NAME = literal$"):
        nbk.literals(f"SEED = 3\n{statement}")


def test_a_parameters_cell_that_is_not_python_is_named_by_its_line():
    with pytest.raises(ValueError, match="line 2 is not Python"):
        nbk.literals("SEED = 3\nx = (")


def test_two_parameters_cells_are_refused():
    notebook = good("01_loop", "x = 1")
    notebook.cells[3].metadata.tags = ["parameters"]
    with pytest.raises(ValueError, match="2 cells are tagged `parameters`"):
        nbk.parameters(notebook)


def test_heading_is_plain_text_without_the_badge():
    assert nbk.heading(good("01_loop")) == ("The loop as dataflow", "One rollout is followed.")


def test_a_notebook_without_prose_has_an_empty_heading():
    notebook = good("01_loop")
    notebook.cells = notebook.cells[1:]
    assert nbk.heading(notebook) == ("", "")
