"""The door of `pipeline`: each number is looked at once, where it comes in.

Models nothing. Each function returns the value it was given, or raises ValueError in one line that names the
field, its value and what is needed. Sizes stop at 2**53: beyond it whole numbers are no longer exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from reprlib import repr as _repr
from typing import Any

import numpy as np

LARGEST = 2.0**53


def short(value: Any) -> str:
    """The value in a few characters of one line."""
    return " ".join(_repr(value).split())


def number(name: str, value: Any, low: float = 0, high: float = LARGEST, *, above: bool = False) -> float:
    """A number in [low, high], or in (low, high] if `above`."""
    good = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high
    if not good or (above and value == low):
        bound = f"{'above' if above else 'of at least'} {low:g}" + (f", at most {high:g}" if high < math.inf else "")
        raise ValueError(f"{name}={short(value)}: needs a number {bound}")
    return float(value)


def whole(name: str, value: Any, low: int = 1, high: float = LARGEST) -> int:
    """A whole number in [low, high]; 8.0 is none, nor is True."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={short(value)}: needs a whole number of at least {low}, at most {high:g}")
    return int(value)


def numbers(name: str, values: Any, *, some_above_zero: bool = False) -> np.ndarray:
    """A non-empty row of numbers of at least 0, as float64; one above 0 if `some_above_zero`."""
    try:
        row = np.asarray(values)
    except ValueError:  # rows of unequal lengths
        row = np.empty((0, 0))
    listed = isinstance(values, list | tuple) and any(isinstance(value, bool) for value in values)
    if row.ndim != 1 or row.dtype.kind not in "iuf" or listed:
        odd = [f" ([{i}]={short(v)} is none)" for i, v in _items(values) if not _is_number(v)]
        raise ValueError(f"{name}={short(values)}: needs a row of numbers{odd[0] if odd else ''}")
    if not row.size:
        raise ValueError(f"{name}={short(values)}: is empty, needs at least one number")
    row = row.astype(np.float64)
    bad = np.flatnonzero(~((row >= 0) & (row <= LARGEST)))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}]={row[bad[0]]:g}: needs a number of at least 0, at most {LARGEST:g}")
    if some_above_zero and not row.any():
        raise ValueError(f"{name}={short(values)}: all are 0, needs one above 0")
    return row


def named(name: str, values: Any) -> dict[Any, float]:
    """Numbers of at least 0, one of them above 0, by name: a mapping, or a row, whose names are 0, 1, 2, ..."""
    if not isinstance(values, Mapping) or not values:
        return dict(enumerate(numbers(name, values, some_above_zero=True).tolist()))
    checked = {key: number(f"{name}[{short(key)}]", value) for key, value in values.items()}
    if not any(checked.values()):
        raise ValueError(f"{name}={short(values)}: all are 0, needs one above 0")
    return checked


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _items(values: Any) -> list[tuple[int, Any]]:
    return list(enumerate(values)) if isinstance(values, list | tuple) else []
