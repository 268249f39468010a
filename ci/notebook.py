"""Reads a notebook file and answers what the tools of `ci` ask of it: its parameters, cells, title.

It leaves every file as it is. A file that is missing, is not JSON or is not a notebook ends in a `NotebookError` of
one line. Use: `notebook = read(path)`, then `parameters(notebook)`, `code_cells(notebook)`, `heading(notebook)`.
"""

import ast
import json
import re
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


class NotebookError(ValueError):
    """A notebook that cannot be used as it is. The message is one line: file, what is wrong, what to do."""


def find(names: list[str], folder: Path = NOTEBOOKS) -> list[Path]:
    """Return the notebooks of `folder` in name order: all of them, or those that `names` names.

    A name is a path, a file name, or the beginning of a file name, such as `01`.

    Raises NotebookError for an empty folder and for a name that fits no notebook or several.
    """
    every = sorted(Path(folder).glob("*.ipynb"))
    if not every:
        raise NotebookError(f"{folder}: no notebook (*.ipynb) in this folder")
    return sorted({_named(name, every) for name in names}) if names else every


def _named(name: str, every: list[Path]) -> Path:
    stem = Path(name).name.removesuffix(".ipynb")
    exact = [path for path in every if path.stem == stem]
    fitting = exact or [path for path in every if stem and path.stem.startswith(stem)]
    if len(fitting) != 1:
        what = f"fits {len(fitting)} notebooks" if fitting else "fits no notebook"
        raise NotebookError(f"{name!r} {what}; there are: {', '.join(path.stem for path in every)}")
    return fitting[0]


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook of format 4 as it stands: no id is added, no cell is mended.

    Raises NotebookError when the file is missing, is not UTF-8 JSON, or breaks the notebook schema.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        raw = json.loads(text)
    except OSError as error:
        raise NotebookError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise NotebookError(f"{path}: not a notebook: not UTF-8 JSON") from None
    version = (raw.get("nbformat"), raw.get("nbformat_minor")) if isinstance(raw, dict) else None
    if version is None or version[0] != 4 or not isinstance(version[1], int):
        raise NotebookError(f"{path}: not a notebook of format 4: (nbformat, nbformat_minor) is {version}")
    for error in nbformat.validator.iter_validate(raw):
        where = ".".join(str(step) for step in list(error.path)[:3]) or "top level"
        raise NotebookError(f"{path}: breaks the notebook schema at {where}: {error.message.splitlines()[0][:120]}")
    return nbformat.v4.reads(text)


def kernel(notebook) -> str | None:
    """Return the name of the kernel that the notebook asks for."""
    return notebook.metadata.get("kernelspec", {}).get("name")


def code_cells(notebook) -> list:
    """Return the code cells in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag: str) -> list:
    """Return the cells that carry `tag`, in order."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def label(cell) -> str:
    """Name a cell for a message: its id and its first line."""
    return f"cell {cell.get('id', '?')} `{first_line(cell)}`"


def first_line(cell) -> str:
    """Return the first line of a cell that says something, cut at 60 characters."""
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    return lines[0][:60] if lines else ""


def literals(source: str) -> dict:
    """Return `{name: value}` of a cell that holds nothing but assignments of literals.

    Raises ValueError that quotes the first statement of another kind.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} is not Python: {error.msg}") from None
    values = {}
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        try:
            if len(targets) != 1 or isinstance(statement, ast.AugAssign):
                raise ValueError
            values[targets[0].id] = ast.literal_eval(statement.value)
        except (ValueError, AttributeError):
            raise ValueError(f"`{ast.unparse(statement)}` is not NAME = literal") from None
    return values


def parameters(notebook) -> dict:
    """Return the defaults of the one cell tagged `parameters`, by name; empty when no cell has the tag.

    Raises ValueError when two cells have it, or when the cell holds more than literals.
    """
    cells = tagged(notebook, "parameters")
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} cells are tagged `parameters`; papermill fills only the first")
    return literals(cells[0].source) if cells else {}


def heading(notebook) -> tuple[str, str]:
    """Return the title (first `# ` heading) and the first sentence of prose after it, both as plain text."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# +(.+)$", prose, re.MULTILINE)
    after = prose[title.end() :] if title else prose
    paragraphs = [_plain(part) for part in re.split(r"\n\s*\n", after)]
    words = next((part for part in paragraphs if part and part[0] not in "#|-*>"), "")
    return _plain(title[1]) if title else "", re.split(r"(?<=[.!?])\s", words, maxsplit=1)[0]


def _plain(markdown: str) -> str:
    """Drop images, links' addresses, HTML tags and emphasis marks from a piece of Markdown."""
    text = re.sub(r"\[?!\[[^]]*\]\([^)]*\)(\]\([^)]*\))?", "", markdown)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"<[^>]+>|\*|`|__", "", text).split())
