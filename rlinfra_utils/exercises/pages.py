"""What the exercises answer with: small objects that read well in a terminal and in a notebook.

Models: a page of Markdown, the result of an attempt, the score. Leaves out: colour codes in plain text.
Use: `print(result)`, or let a notebook show it; `result.status` is one of `STATUSES`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

#: Status of an attempt and the colour of its edge. "unreadable" is not counted as an attempt.
STATUSES = {
    "right": "#2a9d4a",
    "wrong": "#c8553d",
    "compare with the solution": "#3a6ea5",
    "not attempted": "#999999",
    "unreadable": "#d4a017",
}


class _Plain:
    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Page(_Plain):
    """A question or a solution; `text` is Markdown that also reads as plain text."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Result(_Plain):
    """What became of an attempt: one line an answer, and lines about the file where answers are kept."""

    problem_id: str
    status: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.problem_id}: {self.status}", *(f"  {line}" for line in self.lines)])

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.lines)
        head = html.escape(f"{self.problem_id}: {self.status}")
        style = f"border-left: 4px solid {STATUSES[self.status]}; padding-left: 0.7em"
        return f'<div style="{style}"><b>{head}</b>{lines}</div>'


@dataclass(frozen=True, repr=False)
class Score(_Plain):
    """`correct` counts latest attempts, `first_try` first ones; `compared` are open answers, which nobody grades."""

    checked: int
    total: int
    correct: int
    first_try: int
    compared: int
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"Checked {self.checked} / {self.total}", f"correct {self.correct}"]
        parts += [f"at the first try {self.first_try}"] * (self.correct > 0)
        parts += [f"open, compared by yourself {self.compared}"] * (self.compared > 0)
        return "\n".join([" · ".join(parts), *self.lines])

    def _repr_html_(self) -> str:
        head, *lines = str(self).split("\n")
        return f"<b>{html.escape(head)}</b>" + "".join(f"<div>{html.escape(line)}</div>" for line in lines)
