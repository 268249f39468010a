"""The dated map of seven stacks: which statement about which axis, read in which file at which commit.

Models: code and configuration as they were read at one commit of each stack, not run. Leaves out speed, and later
versions: check a cell against your own before you rely on it. Use: `AXES`; `table(axis="synchrony")`; `words()`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from rlinfra_utils.doors import choice
from rlinfra_utils.stacks.data import FOLDER, load

#: The seven stacks, in the order of the tables.
STACKS: tuple[str, ...] = tuple(load("stacks.json"))
#: axis -> what its cells are about.
AXIS_TITLES: Mapping[str, str] = {
    "placement": "where training and generation run",
    "synchrony": "overlap of the two, and the staleness rule",
    "version_record": "which weights version is recorded, and what an update does to running requests",
    "rollout_record": "what goes from generator to trainer, and what is missing in it",
    "correction": "off-policy correction and its metrics",
    "transport": "how weights reach the engine",
    "backends": "trainers and engines",
    "resume": "what a checkpoint holds, and what is lost",
    "tracing": "metrics, spans and rollout logs",
    "orchestration": "processes, launchers, nodes",
}
NOT_STATED = "not stated"
# Hides the rows that lack one of the words; without JavaScript every row stays.
_FILTER = (
    "const w=this.value.toLowerCase().split(/\\s+/);"
    "for(const r of this.parentNode.querySelectorAll('tbody tr'))"
    "r.hidden=!w.every(x=>r.textContent.toLowerCase().includes(x))"
)
_STYLE = "text-align:left;vertical-align:top;"
#: The long columns; paths break anywhere, so that the table fits a page.
_WIDTHS = {
    **dict.fromkeys(("value", "meaning"), "min-width:20em"),
    **dict.fromkeys(("config_key", "default"), "overflow-wrap:anywhere;font-size:85%"),
    "source": "min-width:16em;overflow-wrap:anywhere;font-size:85%",
    **dict.fromkeys(("commit_date", "date_checked"), "white-space:nowrap"),
}


def _read() -> pd.DataFrame:
    with (FOLDER / "axes.csv").open(encoding="utf-8") as file:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False).replace({"config_key": {"": NOT_STATED}})
    frame = frame.replace({"default": {"": NOT_STATED}})
    dates = pd.DataFrame.from_dict(load("stacks.json"), orient="index").rename_axis("stack").reset_index()
    return frame.merge(dates, on="stack", how="left", validate="many_to_one")


#: One row a statement: cell (its name), stack, axis, value, config_key, default, source (paths and lines), repository,
#: commit, commit_date, date_checked.
AXES: pd.DataFrame = _read()


@cache
def cell(name: str) -> pd.Series:
    """The row of `AXES` that is called `name`, such as "verl/synchrony/2"."""
    return AXES.set_index("cell").loc[name]


@dataclass(frozen=True)
class Table:
    """Rows of the map with an HTML face: a field above it filters the rows by words, where JavaScript runs."""

    rows: pd.DataFrame
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return self.rows[list(self.columns)].to_string(index=False)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(self._cells(row))}</tr>" for row in self.rows.to_dict("records"))
        field = f'<input size="40" placeholder="filter by words" aria-label="filter rows" oninput="{_FILTER}">'
        return f"<div>{field}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"

    def _cells(self, row: Mapping[str, str]) -> list[str]:
        text = {name: html.escape(str(row[name])) for name in self.columns}
        if "commit" in text:
            url = f"https://github.com/{row['repository']}/tree/{row['commit']}"
            text["commit"] = f'<a href="{html.escape(url)}">{text["commit"][:12]}</a>'
        return [f'<td style="{_STYLE}{_WIDTHS.get(name, "")}">{entry}</td>' for name, entry in text.items()]


def table(axis: str | None = None, stack: str | None = None) -> Table:
    """The map, or the part of it on one axis, on one stack, or both. Raises ValueError for an unknown name."""
    for name, value, known in (("axis", axis, AXIS_TITLES), ("stack", stack, STACKS)):
        if value is not None:
            choice(name, value, known)
    rows = AXES
    rows = rows if axis is None else rows[rows["axis"] == axis]
    rows = rows if stack is None else rows[rows["stack"] == stack]
    columns = ("stack", "axis", "value", "config_key", "default", "source", "commit", "commit_date", "date_checked")
    return Table(rows.reset_index(drop=True), columns)


def words() -> Table:
    """Words that the stacks use for different things: one row a word and stack, with the cell that it rests on."""
    rows = [
        {"word": entry["word"], "stack": stack, **meaning}
        for entry in load("words.json")
        for stack, meaning in entry["meanings"].items()
    ]
    rows = pd.DataFrame(rows).merge(AXES.drop(columns=["stack", "value"]), on="cell", validate="many_to_one")
    return Table(rows, ("word", "stack", "meaning", "source", "commit", "date_checked"))
