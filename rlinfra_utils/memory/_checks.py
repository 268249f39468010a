"""The door of `memory`: each number and name is looked at once, where it comes in.

Models nothing. Each function returns the value it was given, or raises ValueError in one line that
names the field, its value and what is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from reprlib import repr as short
from typing import Any


def whole(name: str, value: Any, minimum: int = 1, maximum: float = math.inf) -> int:
    """A whole number between two bounds, both allowed; 7e9 is one, "7" and True are not."""
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not good or not minimum <= value <= maximum:
        bound = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum:,}"
        raise ValueError(f"{name}={short(value)}: needs a whole number of {bound}")
    return int(value)


def amount(name: str, value: Any, above_zero: bool = False) -> float:
    """A finite number of at least zero (or above zero), whole or not."""
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above_zero and value == 0):
        raise ValueError(f"{name}={short(value)}: needs a finite number {'above' if above_zero else 'of at least'} 0")
    return value


def choice(name: str, value: Any, known: Collection[str]) -> str:
    """One of the names in `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={short(value)}: known are {', '.join(sorted(known))}")
    return value


def divides(name: str, value: int, of_name: str, of: int) -> None:
    """`value` must go into `of` without a rest."""
    if of % value:
        raise ValueError(f"{name}={value}: does not divide {of_name}={of}")
