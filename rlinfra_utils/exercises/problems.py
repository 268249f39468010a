"""The problems as data, read from `data/problems.toml` (its head explains the fields).

Models: a problem asks for one or more named answers, each of one kind. Leaves out: checking (`checking`).
Use: `PROBLEMS["P02"].ask["gib"].label`; `PROBLEMS["P02"].question` is Markdown that also reads as plain text.
"""

from __future__ import annotations

import math
import tomllib
from fractions import Fraction
from importlib.resources import files
from string import ascii_uppercase
from typing import Literal

from pydantic import BaseModel, ConfigDict

#: A tolerance up to this is for rounding in floating point only.
EXACT = 1e-6


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Likely(_Model):
    """A wrong value that people arrive at, and what to tell them."""

    value: float
    hint: str


class Ask(_Model):
    """One answer that a problem asks for; which fields it has depends on its kind."""

    kind: Literal["number", "choice", "matching", "text"]
    label: str
    answer: float | str | None = None
    tolerance: float = 0.0
    hint: str = ""
    likely: list[Likely] = []
    options: list[str] = []
    items: list[str] = []
    hints: dict[str, str] | list[str] = {}
    at_least: int = 0

    @property
    def value(self) -> float:
        """The right number; a fraction in the file is divided here."""
        return float(Fraction(self.answer))

    @property
    def letters(self) -> str:
        """The letters of the options: "ABCD"."""
        return ascii_uppercase[: len(self.options)]

    @property
    def precision(self) -> str:
        """How exact a number has to be: "2 decimals"; empty where the exact value is asked for."""
        return f"{math.ceil(-math.log10(2 * self.tolerance))} decimals" if self.tolerance > EXACT else ""

    @property
    def described(self) -> str:
        """The label, and the form that an answer takes."""
        forms = {
            "number": f"to {self.precision}" if self.precision else "",
            "choice": 'a letter such as "A"',
            "matching": f"such as {len(self.items) * 'A'!r}",
            "text": "a few words in quotes",
        }
        return "; ".join(filter(None, [self.label, forms[self.kind]]))

    def listed(self) -> str:
        """Items and options as Markdown lists; empty where there are none."""
        lines = [f"{number}. {item}" for number, item in enumerate(self.items, 1)]
        lines += [""] * bool(self.items)
        lines += [f"- **{letter}** {option}" for letter, option in zip(self.letters, self.options)]
        return "\n".join(lines)


class Problem(_Model):
    """A question with its named answers and its worked solution; texts are Markdown."""

    id: str
    title: str
    lesson: str
    text: str
    solution: str
    ask: dict[str, Ask]

    @property
    def call(self) -> str:
        """The line that attempts it, with every answer left open."""
        return f'exercises.attempt("{self.id}", {", ".join(f"{name}=..." for name in self.ask)})'

    @property
    def question(self) -> str:
        """Title, text, options and how to answer."""
        parts = [f"**{self.id} · {self.title}** (lesson {self.lesson})", self.text.strip()]
        for name, ask in self.ask.items():
            parts += [f"Options for `{name}`:", ask.listed()] if ask.options else []
        parts += [f"`{self.call}`", "\n".join(f"- `{name}`: {ask.described}" for name, ask in self.ask.items())]
        return "\n\n".join(parts)


def _load() -> dict[str, Problem]:
    text = (files("rlinfra_utils") / "data" / "problems.toml").read_text(encoding="utf-8")
    return {name: Problem(id=name, **fields) for name, fields in tomllib.loads(text).items()}


PROBLEMS = _load()
