"""What the exercises answer with: small objects that read well in a terminal and in a notebook.

Models: a page of Markdown, the result of an attempt. Leaves out: the score (`scoring`), colour codes in plain text.
Use: `print(result)`, or let a notebook show it; `result.status` is one of `STATUSES`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

COMPARE = "compare with the solution"
NOT_ATTEMPTED = "not attempted"
NOT_COUNTED = "not counted"

#: Status of an attempt: a sign, and the colour of its edge, which stands out on white and on black.
STATUSES = {
    "right": ("✓", "#2a9d4a"),
    "wrong": ("✗", "#c8553d"),
    COMPARE: ("≈", "#3a7ebf"),
    NOT_ATTEMPTED: ("○", "#888888"),
    NOT_COUNTED: ("?", "#b8860b"),
}


class Plain:
    """An object whose `repr` is its text, so that a terminal shows it like `print` does."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Page(Plain):
    """A question or a solution; `text` is Markdown that also reads as plain text."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Result(Plain):
    """What became of an attempt: one line an answer, and lines about what comes next."""

    problem_id: str
    status: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.problem_id}: {self.status}", *(f"  {line}" for line in self.lines)])

    def _repr_html_(self) -> str:
        sign, color = STATUSES[self.status]
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.lines)
        head = html.escape(f"{self.problem_id}: {self.status}")
        style = f"border-left: 4px solid {color}; padding-left: 0.7em"
        return f'<div style="{style}"><b>{sign} {head}</b>{lines}</div>'
