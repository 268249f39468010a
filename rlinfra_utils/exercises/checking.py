"""Reads one answer, whatever was typed, and says whether it is right or what to look at.

Models: decimal point or comma, simple fractions, numpy scalars, letters or numbers of options.
Leaves out: units, thousands separators, expressions. An answer that cannot be read is not a wrong one, nor is one
that is right but rounded too far. Use: `check(PROBLEMS["P02"].ask["gib"], "78,23")` -> (True, "right"); raises
`NotCounted` with one sentence.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from numbers import Integral, Real

from rlinfra_utils.doors import short
from rlinfra_utils.exercises.problems import Ask

MAX_TEXT = 10_000  # characters
MIN_WORDS = 3
_NUMBER = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_NEAR = 0.002  # a value this close to a likely mistake, as a fraction of it, is taken for that mistake


class NotCounted(ValueError):
    """The answer is not of the form that was asked for; the message is one sentence for the learner."""


def one_line(text: str, length: int = 60) -> str:
    """The beginning of `text` without characters that move the cursor or cannot be printed."""
    return "".join(char if char.isprintable() else " " for char in text[:length])


def shown(value: object) -> str:
    """`value` in one short line that can be printed, whatever it is."""
    return one_line(short(value))


def typed(value: object) -> str:
    """`value` as text to keep: what was typed, as far as it is text or a number."""
    try:
        text = str(value) if isinstance(value, str | float) else shown(value)
        return text[:MAX_TEXT].encode(errors="replace").decode()
    except Exception:  # a subclass of str or float with methods of its own
        return shown(value)


def read_number(value: object) -> float:
    """A finite float from a number or from text such as "2.5", "2,5" or "5/2"."""
    number = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.strip().replace("−", "-").split("/")] if len(value) <= 80 else [""]
        if len(parts) > 2 or not all(map(_NUMBER.fullmatch, parts)):
            raise NotCounted(f'{shown(value)} is not a number; write one such as 2.5, "2,5" or "5/2", without a unit')
        top, *bottom = (float(part.replace(",", ".")) for part in parts)
        if bottom == [0.0]:
            raise NotCounted(f"{shown(value)} divides by zero")
        number = top / bottom[0] if bottom else top
    elif isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise NotCounted(f"{shown(value)} is a {type(value).__name__}; give one number")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NotCounted(f"{shown(value)} is not a finite number")
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
    raise NotCounted(f"{shown(value)} is no option; give one of {', '.join(letters)}, or 1 to {len(letters)}")


def read_pairs(value: object, num_items: int, letters: str) -> str:
    """One letter for each item, from "ABCD" (spaces and commas do not matter) or {1: "A", ...}."""
    if isinstance(value, dict):
        given = [value.get(number, value.get(str(number))) for number in range(1, num_items + 1)]
        if len(value) != num_items or any(letter is None for letter in given):
            raise NotCounted(f"{shown(value)} does not name each of 1 to {num_items} once")
        return "".join(read_letter(letter, letters) for letter in given)
    text = re.sub(r"[\s,;]", "", value[:MAX_TEXT]) if isinstance(value, str) else ""
    if len(text) != num_items:
        example = "".join(letters[0] for _ in range(num_items))
        raise NotCounted(f'{shown(value)} is not {num_items} letters such as "{example}", nor a dict {{1: "A", ...}}')
    return "".join(read_letter(letter, letters) for letter in text)


def read_text(value: object) -> str:
    """A few words, as typed."""
    if not isinstance(value, str):
        raise NotCounted(f"{shown(value)} is a {type(value).__name__}; write a few words")
    if len(value) > MAX_TEXT:
        raise NotCounted(f"{len(value):,} characters; write at most {MAX_TEXT:,}")
    if len(value.split()) < MIN_WORDS:
        raise NotCounted(f"{shown(value)}: write at least {MIN_WORDS} words")
    if value != value.encode(errors="replace").decode():
        raise NotCounted("some characters are no Unicode text; type them anew")
    return value


def check(ask: Ask, value: object) -> tuple[bool | None, str]:
    """(right or wrong, a line about it); None for free text, which is not graded. Raises NotCounted."""
    read, judge = _KINDS[ask.kind]
    try:
        answer = read(ask, value)
    except NotCounted:
        raise
    except Exception as error:  # a foreign object's own method raised, such as __float__
        why = f"raises {type(error).__name__} when it is read"
        raise NotCounted(f"{shown(value)} {why}; give a plain number or text") from None
    return judge(ask, answer)


def _judge_number(ask: Ask, number: float) -> tuple[bool, str]:
    off = abs(number - ask.value)
    if off <= ask.tolerance:
        return True, "right"
    third_digit = 10.0 ** (math.floor(math.log10(abs(ask.value) or 1)) - 2)
    if off <= third_digit / 2 * (1 + 1e-9):
        raise NotCounted(f"{number:g} is right to three digits; give {ask.precision or 'the exact value'}")
    near = [likely for likely in ask.likely if abs(number - likely.value) <= _NEAR * abs(likely.value)]
    return False, min(near, key=lambda likely: abs(number - likely.value)).hint if near else ask.hint


def _judge_choice(ask: Ask, letter: str) -> tuple[bool, str]:
    return letter == ask.answer, "right" if letter == ask.answer else ask.hints[letter]


def _judge_matching(ask: Ask, letters: str) -> tuple[bool, str]:
    wrong = [i for i, (given, right) in enumerate(zip(letters, ask.answer)) if given != right]
    return not wrong, " ".join(f"{i + 1}: {ask.hints[i]}" for i in wrong) or "right"


def _judge_text(ask: Ask, text: str) -> tuple[None, str]:
    points = [point for point in re.split(r"[,;\n]|\band\b", text) if point.strip(" .-*•\t")]
    if len(points) < ask.at_least:
        return None, f"{len(points)} points found, at least {ask.at_least} asked for; compare with the solution"
    return None, "compare with the solution"


_KINDS = {
    "number": (lambda ask, value: read_number(value), _judge_number),
    "choice": (lambda ask, value: read_letter(value, ask.letters), _judge_choice),
    "matching": (lambda ask, value: read_pairs(value, len(ask.items), ask.letters), _judge_matching),
    "text": (lambda ask, value: read_text(value), _judge_text),
}
