"""Writes the repository's address where notebooks need it: the Colab badge and the bootstrap cell.

Leaves out: finding the address; it stands in pyproject.toml, and `--repository URL` (for a fork) changes
it there first. Nothing is written unless each notebook can be. Use: `python -m ci.badges [--repository URL]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

from ci.bootstrap import ROOT, cell_source, repository, require_address
from ci.notebook import NotebookError, find, read, tagged

_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
_LINK = re.compile(r"https://colab\.research\.google\.com/github/[^\s)\"']*")


def badge_link(repository: str, notebook: str) -> str:
    """The address that opens notebooks/`notebook` (a file name) of the main branch in Colab."""
    owner_and_name = require_address(repository).removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{owner_and_name}/blob/main/notebooks/{notebook}"


def rewritten(path: Path, repository: str) -> str:
    """The text of the notebook at `path` with badge and bootstrap cell for `repository`; all else as it is.

    The badge is in the first cell, a Markdown one; where it has none, one is added at its end.
    Raises NotebookError, in one line, where the notebook has no place for them.
    """
    notebook = read(path)
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown":
        raise NotebookError(f"{path}: the first cell is not Markdown, so there is no place for the Colab badge")
    bootstraps = tagged(notebook, "bootstrap")
    if [cell.cell_type for cell in bootstraps] != ["code"]:
        raise NotebookError(f"{path}: {len(bootstraps)} cells are tagged `bootstrap`; tag exactly one code cell")
    link = badge_link(repository, path.name)
    if _LINK.search(first.source):
        first.source = _LINK.sub(lambda _: link, first.source)
    else:
        first.source = f"{first.source.rstrip()}\n\n[![Open in Colab]({_IMAGE})]({link})".lstrip()
    bootstraps[0].source = cell_source(repository)
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def set_repository(pyproject: Path, repository: str) -> str:
    """The text of `pyproject` with `repository` as its address; raises ValueError unless one line holds it."""
    line = f'Repository = "{require_address(repository)}"'
    text, count = re.subn(r'^Repository = ".*"$', lambda _: line, pyproject.read_text("utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f'{pyproject.name} has {count} lines of the form Repository = "..."; it needs one')
    return text


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite what differs, print one line for each file changed, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ci.badges", description="Write the repository's address.")
    parser.add_argument("--repository", help="https://github.com/owner/name: put it into pyproject.toml first")
    chosen = parser.parse_args(arguments).repository
    pyproject = root / "pyproject.toml"
    try:
        texts = {pyproject: set_repository(pyproject, chosen)} if chosen is not None else {}
        address = chosen or repository(pyproject)
        texts |= {path: rewritten(path, address) for path in find([], root / "notebooks")}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    changed = [path for path, text in texts.items() if path.read_bytes() != text.encode()]
    for path in changed:
        path.write_bytes(texts[path].encode())
        print(f"rewrote {path.relative_to(root)}")
    print(f"{address}: {len(changed)} of {len(texts)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
