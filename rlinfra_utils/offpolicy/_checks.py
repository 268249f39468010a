"""The door of `offpolicy`: arrays and masks are looked at once, where they come in.

Models nothing. Values off the mask are never looked at and leave as 0, so whatever a trainer or an engine
writes there (sentinels, NaN, None, inf) cannot reach an exponential. Raises ValueError in one line that
names the argument, the position and the value.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

#: Rounding may lift the log of a probability of 1 this far above 0; more is not a log-probability.
LOGPROB_TOLERANCE = 1e-6


def floats(name: str, values: Any, kinds: str = "fiu") -> np.ndarray:
    """`values`, of numpy's dtype `kinds`, as float64 with at least one axis and one element; None becomes NaN."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: rows of unequal length; pad them and mask the padding") from None
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}; pass .detach().float().cpu()") from None
    numbers = array.dtype.kind in kinds
    if array.dtype.kind == "O":
        numbers = all(value is None or isinstance(value, Real) for value in array.flat)
    if not numbers:
        raise ValueError(f"{name}: holds {array.dtype} values; needs numbers")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{name}: shape {array.shape} ; needs an axis and at least one value on it")
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
