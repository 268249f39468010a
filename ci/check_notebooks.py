"""Checks the committed notebooks without running them: a line for each violation, `file: cell id: what [rule]`.

Leaves out the rules themselves (`notebook_rules.py`). Use: `python -m ci.check_notebooks [FILES...]`.
"""

import sys
from pathlib import Path

from ci import notebook as nbk
from ci.notebook_rules import RULES


def check(path: Path) -> list[str]:
    """Return a line for each violation in one notebook file; a file that is no notebook is one violation."""
    try:
        notebook = nbk.read(path)
    except nbk.NotebookError as error:
        return [str(error)]
    if not nbk.code_cells(notebook):
        return [f"{path}: has no code cell"]
    lines = []
    for rule in RULES:
        for cell, what in rule(path, notebook):
            where = f"cell {cell.get('id', '?')}: " if cell is not None else ""
            lines.append(f"{path}: {where}{what} [{rule.__name__}]")
    return lines


def main(arguments: list[str] | None = None, folder: Path = nbk.NOTEBOOKS) -> int:
    """Check the files named, or all of `folder`: 0 when clean, 1 with violations, 2 when there is nothing to check."""
    names = sys.argv[1:] if arguments is None else arguments
    try:
        paths = [Path(name) for name in names] or nbk.find([], folder)
    except nbk.NotebookError as error:
        print(f"check_notebooks: {error}", file=sys.stderr)
        return 2
    lines = [line for path in paths for line in check(path)]
    print("\n".join([*lines, f"{len(paths)} checked by {len(RULES)} rules: {len(lines)} violations"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
