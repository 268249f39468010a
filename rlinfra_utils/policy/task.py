"""Seeded addition problems and the verifier that rewards their answers.

Models: prompts such as "12+30=" whose right answer is "42" and then the end-of-sequence token, and a
program that rewards correctness and format apart. Leaves out: partial credit, several turns, timeouts.
Use: `batch = prompts(32, seed=0)`, then `verify(answer_text, batch[0].answer, truncated=False)`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from rlinfra_utils.doors import whole

#: Name of the rules in `verify`; a change of what they accept takes another name.
VERIFIER_VERSION = "arith-v4"
#: Total reward = sum of weight x part, between 0 and 1.
REWARD_WEIGHTS = {"correctness": 0.9, "format": 0.1}
#: A longer answer is not read at all, so that no answer can make the verifier slow.
MAX_ANSWER_CHARS = 64

# [0-9], not \d: \d also matches the digits of other scripts. fullmatch, not $: $ lets a line end pass.
_READABLE = re.compile(r" *([0-9]+) *")
_CANONICAL = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class Prompt:
    """One problem: `text` goes to the policy, `answer` only to the verifier."""

    prompt_id: str
    text: str
    answer: int


def prompts(num: int, seed: int, digits: int = 2) -> list[Prompt]:
    """Draw `num` additions of two `digits`-digit numbers, with replacement.

    The same arguments give the same prompts on every machine. More digits make longer prompts and
    answers: an answer has `digits` or `digits + 1` characters. Raises ValueError for num < 1, seed < 0 or
    digits outside 1 .. `MAX_ANSWER_CHARS` - 1.
    """
    num, digits = whole("num", num), whole("digits", digits, 1, MAX_ANSWER_CHARS - 1)
    draw = random.Random(whole("seed", seed, 0))
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    pairs = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(num)]
    return [Prompt(prompt_id=f"add-{a}+{b}", text=f"{a}+{b}=", answer=a + b) for a, b in pairs]


def verify(text: str, answer: int, truncated: bool) -> dict[str, float]:
    """Reward one answer; each part is 0.0 or 1.0.

    - format: the answer is the number as one writes it, ASCII digits 0-9 and nothing else: "42", "0".
    - correctness: the digits read as a number equal `answer`. Read leniently in two ways only: leading
      zeros and ASCII spaces at either end are allowed, so "042" and " 42 " are correct without format.
    - Everything else is neither: signs ("+42", "-0"), "42.0", "4 2", "42=", words, tabs and line ends,
      NUL, digits of other scripts or full width, special tokens spelt out, the empty answer, more than
      `MAX_ANSWER_CHARS` characters.
    - An answer cut off before its end-of-sequence token gets 0 for both, even "42": what was to follow
      is unknown.

    Raises TypeError if `text` is not a str, `answer` not an int or `truncated` not a bool (an answer that
    "is None" is an engine's failure, not a wrong answer; a stop reason would pass for True).
    """
    for name, value, kind in (("text", text, str), ("answer", answer, int), ("truncated", truncated, bool)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} has type {type(value).__name__}: the verifier needs {kind.__name__}")
    readable = None if truncated or len(text) > MAX_ANSWER_CHARS else _READABLE.fullmatch(text)
    correct = readable is not None and int(readable[1]) == answer
    well_formed = readable is not None and _CANONICAL.fullmatch(text) is not None
    return {"correctness": float(correct), "format": float(well_formed)}


def total_reward(reward: dict[str, float]) -> float:
    """Weighted sum of the verifier's parts (`REWARD_WEIGHTS`); raises KeyError if a part is missing."""
    return sum(weight * reward[part] for part, weight in REWARD_WEIGHTS.items())
