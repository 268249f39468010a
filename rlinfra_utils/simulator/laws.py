"""Laws of lengths and durations, drawn by index so that every configuration meets the same workload.

Models independent draws. Leaves out correlation between the rollouts of a prompt. Use: `LogNormal(300, 0.8)`,
`Pareto(16, 1.2, cap=4096)`, `Measured(lengths_tokens)`; a plain number is `Constant`. The unit is that of the field
(tokens or seconds). A law of one's own has `mean` and `draw(rng, num)`. Each raises ValueError for a bad parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from rlinfra_utils.doors import number, numbers, short


class Law(Protocol):
    """What the simulator asks of a law."""

    @property
    def mean(self) -> float:
        """Its mean; infinite is refused where the law is used."""

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` numbers of at least 0; two calls give what one call for both would."""


@dataclass(frozen=True)
class Constant:
    """Always `value`."""

    value: float

    def __post_init__(self):
        number("value", self.value)

    @property
    def mean(self) -> float:
        """The value."""
        return float(self.value)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """The value, `num` times."""
        return np.full(num, float(self.value))


@dataclass(frozen=True)
class Exponential:
    """Exponential with this mean."""

    mean: float

    def __post_init__(self):
        number("mean", self.mean, above=True)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` draws, by inversion."""
        return -self.mean * np.log1p(-rng.random(num))


@dataclass(frozen=True)
class LogNormal:
    """The logarithm is normal: `median`, and `sigma`, the standard deviation of the log."""

    median: float
    sigma: float

    def __post_init__(self):
        number("median", self.median, above=True)
        number("sigma", self.sigma, 0, 8)

    @property
    def mean(self) -> float:
        """median * exp(sigma^2 / 2)."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` draws."""
        return self.median * np.exp(self.sigma * rng.standard_normal(num))


@dataclass(frozen=True)
class Pareto:
    """P(X > x) = (minimum / x)^alpha, cut at `cap`. Without a cap, alpha <= 1 has no mean and is refused."""

    minimum: float
    alpha: float
    cap: float | None = None

    def __post_init__(self):
        number("minimum", self.minimum, above=True)
        number("alpha", self.alpha, above=True)
        if self.cap is not None:
            number("cap", self.cap, self.minimum)
        elif self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: the mean is infinite; give alpha above 1, or a cap")

    @property
    def mean(self) -> float:
        """The integral of P(X > x) up to the cap."""
        low, alpha = self.minimum, self.alpha
        if self.cap is None:
            return low * alpha / (alpha - 1)
        if alpha == 1:
            return low * (1 + math.log(self.cap / low))
        return low + low * ((self.cap / low) ** (1 - alpha) - 1) / (1 - alpha)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` draws, by inversion."""
        with np.errstate(over="ignore"):
            drawn = self.minimum * (1 - rng.random(num)) ** (-1 / self.alpha)
        return drawn if self.cap is None else np.minimum(drawn, self.cap)


class Measured:
    """Measured values, drawn with replacement. Raises ValueError for an empty row, NaN or a negative value."""

    def __init__(self, values: Any):
        self.values = numbers("values", values)

    def __repr__(self):
        return f"Measured({len(self.values)} values, mean {self.mean:g})"

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(self.values.mean())

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """`num` of the values."""
        return self.values[(rng.random(num) * len(self.values)).astype(np.int64)]


def as_law(name: str, value: Any) -> Law:
    """The law itself, or `Constant` of a number. Raises ValueError for anything else and for an infinite mean."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return Constant(number(name, value))
    if not callable(getattr(value, "draw", None)) or not hasattr(value, "mean"):
        raise ValueError(f"{name}={short(value)}: needs a number or a law with mean and draw, as LogNormal has")
    if not value.mean < math.inf:
        raise ValueError(f"{name}={short(value)}: the mean is {value.mean}; cap the law")
    return value


class Stream:
    """The draws of one law by index, in blocks: the n-th is the same however many are asked for."""

    BLOCK = 1024

    def __init__(self, law: Law, seed: int, purpose: int):
        self.law, self.rng = law, np.random.default_rng([seed, purpose])

    def block(self) -> np.ndarray:
        """The next `BLOCK` draws."""
        return self.law.draw(self.rng, self.BLOCK)
