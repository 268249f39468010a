"""Reads one answer, whatever was typed, and says whether it is right or what to look at.

Models: decimal point or comma, simple fractions, numpy scalars, letters or numbers of options.
Leaves out: units, thousands separators, expressions. An answer that cannot be read is not a wrong one.
Use: `check(PROBLEMS["P02"].ask["gib"], "78,23")` -> (True, "right"); raises `Unreadable` with one sentence.
"""

from __future__ import annotations

import math
import re
import reprlib
from numbers import Integral, Real

from rlinfra_utils.exercises.problems import Ask

MAX_TEXT = 10_000  # characters
MIN_WORDS = 3
_NUMBER = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_NEAR = 0.002  # a value this close to a likely mistake, as a fraction of it, is taken for that mistake


class Unreadable(ValueError):
    """The answer is not of the kind that was asked for; the message is one sentence for the learner."""


def shown(value: object) -> str:
    """`value` in one short line, whatever it is."""
    try:
        return reprlib.repr(value).replace("\n", " ")[:60]
    except Exception:  # a foreign object's own __repr__, or a whole number too long to print
        return f"<{type(value).__name__}>"


def read_number(value: object) -> float:
    """A finite float from a number or from text such as "2.5", "2,5" or "5/2"."""
    number = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip().replace("−", "-").split("/")] if len(value) <= 80 else [""]
        if len(parts) > 2 or not all(map(_NUMBER.fullmatch, parts)):
            raise Unreadable(f'{shown(value)} is not a number; write one such as 2.5, "2,5" or "5/2"')
        top, *bottom = (float(part.replace(",", ".")) for part in parts)
        if bottom == [0.0]:
            raise Unreadable(f"{shown(value)} divides by zero")
        number = top / bottom[0] if bottom else top
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise Unreadable(f"{shown(value)} is a {type(value).__name__}; give one number")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unreadable(f"{shown(value)} is not a finite number")
    return number


def read_letter(value: object, letters: str) -> str:
    """An option's letter from "B", "b", "2" or 2."""
    text = value.strip().upper() if isinstance(value, str) else value
    if isinstance(text, str) and len(text) == 1 and text in letters:
        return text
    if isinstance(text, str) and re.fullmatch("[0-9]{1,2}", text):
        text = int(text)
    if isinstance(text, Integral) and not isinstance(text, bool) and 1 <= text <= len(letters):
        return letters[int(text) - 1]
    raise Unreadable(f"{shown(value)} is no option; give one of {', '.join(letters)}, or 1 to {len(letters)}")


def read_pairs(value: object, num_items: int, letters: str) -> str:
    """One letter for each item, from "ABCD" (spaces and commas do not matter) or {1: "A", ...}."""
    if isinstance(value, dict):
        given = [value.get(number, value.get(str(number))) for number in range(1, num_items + 1)]
        if len(value) != num_items or any(letter is None for letter in given):
            raise Unreadable(f"{shown(value)} does not name each of 1 to {num_items} once")
        return "".join(read_letter(letter, letters) for letter in given)
    text = re.sub(r"[\s,;]", "", value[:MAX_TEXT]) if isinstance(value, str) else ""
    if len(text) != num_items:
        example = "".join(letters[0] for _ in range(num_items))
        raise Unreadable(f'{shown(value)} is not {num_items} letters such as "{example}", nor a dict {{1: "A", ...}}')
    return "".join(read_letter(letter, letters) for letter in text)


def read_text(value: object) -> str:
    """A few words, as typed."""
    if not isinstance(value, str):
        raise Unreadable(f"{shown(value)} is a {type(value).__name__}; write a few words")
    if len(value) > MAX_TEXT:
        raise Unreadable(f"{len(value):,} characters; write at most {MAX_TEXT:,}")
    if len(value.split()) < MIN_WORDS:
        raise Unreadable(f"{shown(value)}: write at least {MIN_WORDS} words")
    if value != value.encode(errors="replace").decode():
        raise Unreadable("some characters are no Unicode text; type them anew")
    return value


def check(ask: Ask, value: object) -> tuple[bool | None, str]:
    """(right or wrong, a line about it); None for free text, which is not graded. Raises Unreadable."""
    return _CHECKS[ask.kind](ask, value)


def _check_number(ask: Ask, value: object) -> tuple[bool, str]:
    number = read_number(value)
    if abs(number - ask.value) <= ask.tolerance:
        return True, "right"
    near = [likely for likely in ask.likely if abs(number - likely.value) <= _NEAR * abs(likely.value)]
    return False, min(near, key=lambda likely: abs(number - likely.value)).hint if near else ask.hint


def _check_choice(ask: Ask, value: object) -> tuple[bool, str]:
    letter = read_letter(value, ask.letters)
    return letter == ask.answer, "right" if letter == ask.answer else ask.hints[letter]


def _check_matching(ask: Ask, value: object) -> tuple[bool, str]:
    letters = read_pairs(value, len(ask.items), ask.letters)
    wrong = [i for i, (given, right) in enumerate(zip(letters, ask.answer)) if given != right]
    return not wrong, " ".join(f"{i + 1}: {ask.hints[i]}" for i in wrong) or "right"


def _check_text(ask: Ask, value: object) -> tuple[None, str]:
    text = read_text(value)
    points = [point for point in re.split(r"[,;\n]|\band\b", text) if point.strip(" .-*•\t")]
    if len(points) < ask.at_least:
        return None, f"{len(points)} points found, at least {ask.at_least} asked for; compare with the solution"
    return None, "compare with the solution"


_CHECKS = {"number": _check_number, "choice": _check_choice, "matching": _check_matching, "text": _check_text}
