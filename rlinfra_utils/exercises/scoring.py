"""The score: a line a lesson in a terminal, a table in a notebook, and one HTML file to keep or hand in.

Models: the latest attempt of each problem, and whether the first one was right. Leaves out: marks and weights; an
open answer is compared by its author, so it is never "right". Use: `score = exercises.score()`, then `score` as the
last line of a cell, or `score.to_html("score.html")`.
"""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from rlinfra_utils.exercises.pages import COMPARE, NOT_ATTEMPTED, STATUSES, Plain

COLUMNS = ("lesson", "problems", "right", "wrong", "to compare", "to do")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Score of the exercises</title>
<style>
:root {{ --ink: #1c2733; --paper: #fbfcfd; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4eaf0; --paper: #12181f; }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, sans-serif; }}
main {{ max-width: 60rem; margin: 0 auto; padding: 2rem 1rem; overflow-x: auto; }}
</style>
</head>
<body>
<main>
<h1>Score of the exercises</h1>
<p><b>{head}</b></p>
{by_lesson}
{notes}
<h2>Problem by problem</h2>
{by_problem}
</main>
</body>
</html>
"""


@dataclass(frozen=True)
class Mark:
    """Where one problem stands: the status of its latest attempt, or "not attempted"."""

    problem_id: str
    title: str
    lesson: str
    status: str
    attempts: int
    first_try: bool


@dataclass(frozen=True, repr=False)
class Score(Plain):
    """All problems in order; `lines` are sentences about the file of answers."""

    marks: tuple[Mark, ...]
    lines: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """How many problems there are."""
        return len(self.marks)

    @property
    def checked(self) -> int:
        """How many were attempted."""
        return sum(mark.attempts > 0 for mark in self.marks)

    @property
    def correct(self) -> int:
        """How many are right at the latest attempt."""
        return sum(mark.status == "right" for mark in self.marks)

    @property
    def first_try(self) -> int:
        """How many were right at the first attempt."""
        return sum(mark.first_try for mark in self.marks)

    @property
    def compared(self) -> int:
        """How many are open answers, which nobody grades."""
        return sum(mark.status == COMPARE for mark in self.marks)

    def by_lesson(self) -> list[tuple[str | int, ...]]:
        """A row a lesson, with the numbers that `COLUMNS` names, and a row of sums."""
        lessons = self._lessons()
        return [*(self._row(lesson, [lesson]) for lesson in lessons), self._row("all", lessons)]

    def _lessons(self) -> list[str]:
        return sorted({mark.lesson for mark in self.marks})

    def _row(self, name: str, lessons: list[str]) -> tuple[str | int, ...]:
        found = Counter(mark.status for mark in self.marks if mark.lesson in lessons)
        return name, found.total(), *(found[each] for each in ("right", "wrong", COMPARE, NOT_ATTEMPTED))

    def _head(self) -> str:
        parts = [f"Checked {self.checked} / {self.total}", f"correct {self.correct}"]
        parts += [f"at the first try {self.first_try}"] * (self.correct > 0)
        parts += [f"open, compared by yourself {self.compared}"] * (self.compared > 0)
        return " · ".join(parts)

    def __str__(self) -> str:
        rows = ["  ".join(f"{cell!s:>{len(name)}}" for name, cell in zip(COLUMNS, row)) for row in self.by_lesson()]
        return "\n".join([self._head(), "  ".join(COLUMNS), *rows, *self.lines])

    def _repr_html_(self) -> str:
        signs = {name: " ".join(_sign(mark) for mark in self.marks if mark.lesson == name) for name in self._lessons()}
        rows = [(*row, signs.get(row[0], "")) for row in self.by_lesson()]
        return f"<b>{html.escape(self._head())}</b>{_table((*COLUMNS, ''), rows)}{_notes(self.lines)}"

    def to_html(self, path: str | PathLike) -> Path:
        """Write the score as one HTML file that needs no network, and return its path. Raises OSError."""
        rows = [
            (
                each.lesson,
                f"<b>{each.problem_id}</b> {html.escape(each.title)}",
                _sign(each, each.status),
                each.attempts,
            )
            for each in sorted(self.marks, key=lambda mark: mark.lesson)
        ]
        page = PAGE.format(
            head=html.escape(self._head()),
            by_lesson=_table(COLUMNS, self.by_lesson()),
            by_problem=_table(("lesson", "problem", "status", "attempts"), rows),
            notes=_notes(self.lines),
        )
        target = Path(path)
        target.write_text(page, encoding="utf-8")
        return target


def _notes(lines: tuple[str, ...]) -> str:
    return "".join(f"<div>{html.escape(line)}</div>" for line in lines)


def _sign(mark: Mark, text: str | None = None) -> str:
    """The problem (or `text`) behind the sign of its status; the colour repeats what the sign says."""
    sign, color = STATUSES[mark.status]
    label = html.escape(f"{mark.title}: {mark.status}")
    name, space = html.escape(text or mark.problem_id), "normal" if text else "nowrap"
    return f'<span title="{label}" style="white-space: {space}"><b style="color: {color}">{sign}</b> {name}</span>'


def _table(columns: tuple[str, ...], rows: list[tuple]) -> str:
    """A table in the ink of the page around it, so that it reads in light and in dark."""
    style = "border-bottom: 1px solid rgba(128, 128, 128, 0.35); padding: 0.25em 0.6em; text-align: left"

    def line(tag: str, cells: tuple) -> str:
        return "<tr>" + "".join(f'<{tag} style="{style}">{cell}</{tag}>' for cell in cells) + "</tr>"

    head, body = line("th", columns), "".join(line("td", row) for row in rows)
    frame = "border-collapse: collapse; margin: 0.5em 0; color: inherit; background: none"
    return f'<table style="{frame}"><thead>{head}</thead><tbody>{body}</tbody></table>'
