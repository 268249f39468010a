"""Holds the claims of the notebooks and their register together: each mark has a row, and each row a mark.

A mark is `[S301]` in a markdown cell, right after a claim; its first digit is the notebook's number. The register is
`docs/SOURCES.md`: tables of id, claim, evidence, source, date checked, and where the conclusion ends. Checked are form,
dates, commits and paths; whether a source says what its row says, a reader has to. Use: `python -m ci.sources`.
"""

import datetime
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ci import notebook as nbk

ROOT = nbk.NOTEBOOKS.parent
REGISTER = ROOT / "docs" / "SOURCES.md"
COLUMNS = ("id", "claim", "evidence", "source", "checked", "limit")
#: Each kind of evidence: what its source has to hold, as a pattern and in words.
EVIDENCE = {
    "derived": (r"`\w+/", "a path of this repository in backticks"),
    "measured here": (r"`(results|tests|benchmarks|notebooks)/", "a result, test, benchmark or notebook in backticks"),
    "paper": (r"arXiv:\d{4}\.\d{4,5}\b|\b(19|20)\d\d\b", "an arXiv id or a year"),
    "official document": (r"https://", "a link"),
    "code at commit": (r"\b[0-9a-f]{12,40}\b", "a commit of at least 12 hex digits"),
    "field report": (r"https://github\.com/\S+/(issues|pull)/\d+", "a link to the issue or pull request"),
}
OWN_PATH = re.compile(r"`((?:results|tests|benchmarks|notebooks|rlinfra_utils|ci)/[^`\s]+)`")
MARK = re.compile(r"\[S(\d+)\]")
HEADING = re.compile(r"^#{1,6} .*", re.MULTILINE)


class Row(NamedTuple):
    """One claim as the register has it; `line` is its line in the file."""

    id: str
    claim: str
    evidence: str
    source: str
    checked: str
    limit: str
    line: int


def read_register(path: Path = REGISTER) -> tuple[list[Row], list[str]]:
    """The claims of `path`, and a finding for each line of a table of claims that is no row.

    A table of claims begins with a line of COLUMNS and ends where its lines no longer begin with a bar.
    """
    rows, findings, in_table = [], [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        cells = tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))
        in_table = line.startswith("|") and (in_table or cells == COLUMNS)
        if not in_table or cells == COLUMNS or not line.strip("|-: "):
            continue
        if len(cells) == len(COLUMNS):
            rows.append(Row(*cells, number))
        else:
            findings.append(f"line {number}: {len(cells)} cells; a row has {len(COLUMNS)}: {', '.join(COLUMNS)}")
    return rows, findings


def row_findings(row: Row, root: Path = ROOT) -> Iterator[str]:
    """What is wrong with one row by itself; paths of this repository are looked up under `root`."""
    if not re.fullmatch(r"S\d{3}", row.id):
        yield f"id {row.id!r} is not S and three digits"
    for name in ("claim", "source", "limit"):
        if not getattr(row, name):
            yield f"{name} is empty"
    for kind in row.evidence.split(", "):
        if kind not in EVIDENCE:
            yield f"evidence {kind!r} is not one of {', '.join(EVIDENCE)}"
        elif not re.search(EVIDENCE[kind][0], row.source):
            yield f"evidence is {kind!r}, so the source has to hold {EVIDENCE[kind][1]}"
    if not _is_date(row.checked):
        yield f"checked {row.checked!r} is not a date such as 2026-11-29"
    for name in OWN_PATH.findall(row.source):
        if not (root / name).exists():
            yield f"there is no {name}"
        elif name.startswith("results/") and (stored := _stored_on(root / name)) != row.checked:
            yield f"checked {row.checked}, but {name} is of {stored}: read the claim against it, then date the row"


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _stored_on(path: Path) -> str:
    return json.loads(path.read_text(encoding="utf-8"))["date"]


def read_marks(paths: list[Path]) -> tuple[set[str], list[str]]:
    """The ids marked in these notebooks, and a finding for each mark that stands where none may."""
    marks, findings = set(), []
    for path in paths:
        for cell in nbk.read(path).cells:
            headings = " ".join(HEADING.findall(cell.source))
            for name in sorted({f"S{digits}" for digits in MARK.findall(cell.source)}):
                marks.add(name)
                where = f"{path.name}: cell {cell.get('id', '?')}: [{name}]"
                if cell.cell_type != "markdown":
                    findings.append(f"{where} stands in a {cell.cell_type} cell; a mark belongs to text")
                elif f"[{name}]" in headings:
                    findings.append(f"{where} stands in a heading; put it after the sentence that claims")
                if name[1] != path.stem[1:2]:
                    findings.append(f"{where} is not of this notebook, whose ids begin with S{path.stem[1:2]}")
    return marks, findings


def check(rows: list[Row], marks: set[str], root: Path = ROOT) -> list[str]:
    """A line for each fault of a row, and for each mark or row without the other."""
    ids = [row.id for row in rows]
    findings = [f"line {row.line}: {row.id}: {what}" for row in rows for what in row_findings(row, root)]
    findings += [f"{name} has {count} rows" for name, count in Counter(ids).items() if count > 1]
    findings += [f"{after} stands after {before}: sort by id" for before, after in pairwise(ids) if after < before]
    findings += [f"{name} is marked in a notebook and has no row" for name in sorted(marks - set(ids))]
    findings += [f"{name} has a row and no mark in a notebook" for name in sorted(set(ids) - marks)]
    return findings


def main(register: Path = REGISTER, folder: Path = nbk.NOTEBOOKS, root: Path = ROOT) -> int:
    """Print every finding of register and notebooks: 0 when there is none, else 1."""
    rows, broken = read_register(register)
    marks, misplaced = read_marks(nbk.find([], folder))
    findings = [*broken, *misplaced, *check(rows, marks, root)]
    print("\n".join([*findings, f"{len(rows)} claims, {len(marks)} marks: {len(findings)} findings"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
