"""The door: each number, name and array is looked at once, where it comes in, and trusted behind it.

Leaves out what a value means. Each function returns the value it was given, or raises ValueError in one line that
names the field, its value (or position) and what is needed. Sizes stop at 2**53: beyond it whole numbers are no longer
exact.
Use: `slots = whole("slots", slots)`; arrays: `values = floats("ratio", ratio)`.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from numbers import Rational, Real
from reprlib import Repr
from typing import Any

import numpy as np

LARGEST = 2.0**53
#: Rounding may lift the log of a probability of 1 this far above 0; more is not a log-probability.
LOGPROB_TOLERANCE = 1e-6


_brief = Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


def short(value: Any) -> str:
    """The value in a few characters of one line, or its type if it cannot be printed."""
    try:
        return " ".join(_brief.repr(value).split())
    except Exception:  # a foreign object's own __repr__, or an integer of more than some thousand digits
        return f"<{type(value).__name__}>"


def complaint(error: Any) -> str:
    """What a pydantic ValidationError found first, in one line: the field, its value and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # a check of our own, which has said it all
        return str(first["ctx"]["error"])
    field = short(".".join(map(str, first["loc"])))[1:-1] or "value"
    return " ".join(f"{field}={short(first['input'])}: {first['msg']}".split())


def is_number(value: Any) -> bool:
    """A real number, numpy's included; True and False are none, nor is an integer that float64 cannot hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    most = sys.float_info.max
    return not isinstance(value, Rational) or -most <= value <= most


def number(name: str, value: Any, low: float = 0, high: float = LARGEST, *, above: bool = False) -> float:
    """A number in [low, high], or in (low, high] if `above`."""
    good = is_number(value) and low <= value <= high
    if not good or (above and value == low):
        bound = f"{'above' if above else 'of at least'} {low:g}" + (f", at most {high:g}" if high < math.inf else "")
        raise ValueError(f"{name}={short(value)}: needs a number {bound}")
    return float(value)


def whole(name: str, value: Any, low: int = 1, high: float = LARGEST) -> int:
    """A whole number in [low, high]; 7e9 is one, "7" and True are not."""
    if not (is_number(value) and low <= value <= high and value == int(value)):
        bound = f"of at least {low}" if high == LARGEST else f"of {low} to {high:,}"
        raise ValueError(f"{name}={short(value)}: needs a whole number {bound}")
    return int(value)


def amount(name: str, value: Any, *, above: bool = False) -> float:
    """A finite number of at least 0, or above it; a whole one stays whole."""
    good = is_number(value) and math.isfinite(value)
    if not good or value < 0 or (above and value == 0):
        raise ValueError(f"{name}={short(value)}: needs a finite number {'above' if above else 'of at least'} 0")
    return value


def choice(name: str, value: Any, known: Collection[str]) -> str:
    """One of the names in `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={short(value)}: known are {', '.join(sorted(known))}")
    return value


def instance(name: str, value: Any, kind: type, how: str) -> Any:
    """A value of class `kind`; `how` says where one comes from."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name}={short(value)}: needs {article} {kind.__name__}, {how}")
    return value


def listed(name: str, values: Any, what: str) -> list[Any]:
    """What can be gone through, no text and no mapping, as a list; `what` says of what."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={short(values)}: needs a list of {what}")
    return list(values)


def divides(name: str, value: int, of_name: str, of: int) -> None:
    """`value` must go into `of` without a rest."""
    if of % value:
        raise ValueError(f"{name}={value}: does not divide {of_name}={of}")


def numbers(name: str, values: Any, *, some_above_zero: bool = False) -> np.ndarray:
    """A non-empty row of numbers of at least 0, as float64; one above 0 if `some_above_zero`."""
    try:
        row = np.asarray(values)
    except ValueError:  # rows of unequal lengths
        row = np.empty((0, 0))
    listed = isinstance(values, list | tuple) and any(isinstance(value, bool) for value in values)
    if row.ndim != 1 or row.dtype.kind not in "iuf" or listed:
        odd = [f" ([{i}]={short(v)} is none)" for i, v in _items(values) if not is_number(v)]
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


def _items(values: Any) -> list[tuple[int, Any]]:
    return list(enumerate(values)) if isinstance(values, list | tuple) else []


def floats(name: str, values: Any, kinds: str = "fiu") -> np.ndarray:
    """`values`, of numpy's dtype `kinds`, as float64 with at least one axis and one element; None becomes NaN."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: rows of unequal length; pad them and mask the padding") from None
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}; pass .detach().float().cpu()") from None
    is_numeric = array.dtype.kind in kinds
    if array.dtype.kind == "O":
        is_numeric = all(value is None or isinstance(value, bool) or is_number(value) for value in array.flat)
    if not is_numeric:
        raise ValueError(f"{name}: holds {array.dtype} values; needs numbers")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name}: shape {array.shape}; needs an axis and at least one value on it")
    return array.astype(np.float64)


def boolean_mask(mask: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """`mask` as booleans of `shape`, the shape of the argument `name`."""
    array = floats("mask", mask, kinds="fiub")
    if array.shape != shape:
        raise ValueError(f"mask: shape {array.shape} is not the shape {shape} of {name}")
    selected = array == 1
    refuse("mask", array, ~(selected | (array == 0)), "is neither 0 nor 1")
    return selected


def refuse(name: str, values: np.ndarray, bad: np.ndarray, why: str) -> None:
    """Raise for the first position at which `bad` is true."""
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}[{', '.join(map(str, position))}]={values[position]:g}: {why}")


def logprobs(name: str, values: np.ndarray, mask: np.ndarray, zero_mass: str) -> np.ndarray:
    """Log-probabilities under the mask, 0 off it; `zero_mass` says what -inf means here."""
    refuse(name, values, mask & np.isnan(values), "is missing under the mask; a trained token needs its log-prob")
    refuse(name, values, mask & (values > LOGPROB_TOLERANCE), "a log-probability is at most 0; ask who wrote it")
    refuse(name, values, mask & np.isneginf(values), zero_mass)
    return np.where(mask, values, 0.0)


def log_ratios(values: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Log-ratios, 0 off the mask, and the mask as booleans."""
    array = floats("log_ratio", values)
    selected = boolean_mask(mask, "log_ratio", array.shape)
    refuse("log_ratio", array, selected & ~np.isfinite(array), "is not finite under the mask")
    return np.where(selected, array, 0.0), selected


def installed(*modules: str, extra: str) -> None:
    """Refuse, in one line, where one of `modules` is not there; `extra` of this package brings them.

    Raises ModuleNotFoundError. Imports nothing.
    """
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed: pip install 'rlinfra-utils[{extra}]'", name=name)
