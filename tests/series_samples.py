"""Notebooks for the tests of `ci`: one that keeps every rule, and the same with cells of the test's own."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ci import bootstrap

PARAMETERS = (
    'LEVEL = "auto"\nSEED = 3\nSTEPS = 10\nRATE = 0.5\nFAST = True\nOUT_DIR = "out"\nSIZES = [1, 2]\nNOTE = None'
)
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})"
LINK = "https://colab.research.google.com/github/o/r/blob/main/notebooks/{}.ipynb"


def code(source: str, *tags: str, cell_id: str):
    return new_code_cell(source, id=cell_id, metadata={"tags": list(tags)} if tags else {})


def good(name: str, *sources: str):
    """A notebook as the series wants it, with `sources` as its code cells body-0, body-1, ... before the sentinel."""
    title = f"# The *loop* as dataflow\n\n{BADGE.format(LINK.format(name))}\n\nOne rollout is followed. It is timed."
    cells = [
        new_markdown_cell(title, id="title"),
        code(bootstrap.cell_source(bootstrap.repository()), "bootstrap", cell_id="boot"),
        code(PARAMETERS, "parameters", cell_id="params"),
        *(code(source, cell_id=f"body-{i}") for i, source in enumerate(sources)),
        code("assert SEED == 3\nprint('lesson ok')", "sentinel", cell_id="end"),
    ]
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def cell(notebook, cell_id: str):
    return next(cell for cell in notebook.cells if cell.id == cell_id)


def write(folder: Path, name: str, notebook) -> Path:
    """Write a notebook without mending it, into `folder`/notebooks."""
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.v4.writes(notebook) + "\n", encoding="utf-8")
    return path


def as_if_run(notebook):
    """Give the code cells the counts of a whole run, and the sentinel its output."""
    for count, each in enumerate((each for each in notebook.cells if each.cell_type == "code"), start=1):
        each.execution_count = count
    cell(notebook, "end").outputs = [nbformat.v4.new_output("stream", name="stdout", text="lesson ok\n")]
    return notebook
