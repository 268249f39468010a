"""How many ratios leave the trust region, and on which side: counts that merge, and the two clip fractions.

Models: ratios outside [1 - low, 1 + high]. Leaves out: the loss itself (`policy.grpo`).
Use: `clip_fraction(np.exp(d), 0.2, mask)` for the ratios; `ppo_clip_fraction(..., advantages)` for the loss.

Both are called "clip fraction" in the field. The first counts every ratio outside the region (|ratio - 1| >
eps, as in OpenAI Baselines, 2017). The second counts only tokens whose gradient the clipped loss drops:
above the region with a positive advantage, below it with a negative one. verl's `actor/pg_clipfrac`
(`core_algos.py`, 2026-08-22) and TRL's `clip_ratio/region_mean` (1.10, 2026-07-24) are the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils import doors
from rlinfra_utils.offpolicy.weights import share


@dataclass(frozen=True)
class Outside:
    """Of `num` values, `num_low` lie below a region and `num_high` above; `a + b` counts both sets together."""

    num: int
    num_low: int
    num_high: int

    def __add__(self, other: Outside) -> Outside:
        return Outside(self.num + other.num, self.num_low + other.num_low, self.num_high + other.num_high)

    @property
    def low(self) -> float:
        """Share below; NaN of no values. TRL's `clip_ratio/low_mean`."""
        return share(self.num_low, self.num)

    @property
    def high(self) -> float:
        """Share above; NaN of no values. TRL's `clip_ratio/high_mean`."""
        return share(self.num_high, self.num)

    @property
    def fraction(self) -> float:
        """Share outside; NaN of no values."""
        return share(self.num_low + self.num_high, self.num)


def clip_counts(ratio: Any, eps: float | tuple[float, float], mask: Any, advantages: Any = None) -> Outside:
    """Ratios under the mask that lie outside [1 - eps, 1 + eps], shape (..., tokens).

    `eps` may be a pair (low, high), as in DAPO. With `advantages`, of a shape that broadcasts to the ratio's,
    a low ratio counts only where the advantage is negative, a high one only where it is positive.
    Raises ValueError for a ratio that is negative or not finite under the mask, and for an eps below 0.
    """
    low, high = bounds(eps)
    values = doors.floats("ratio", ratio)
    mask = doors.boolean_mask(mask, "ratio", values.shape)
    doors.refuse("ratio", values, mask & ~((values >= 0) & (values < np.inf)), "needs a finite ratio of at least 0")
    below, above = mask & (values < 1 - low), mask & (values > 1 + high)
    if advantages is not None:
        signs = _signs(advantages, values.shape, mask)
        below, above = below & (signs < 0), above & (signs > 0)
    return Outside(int(mask.sum()), int(below.sum()), int(above.sum()))


def clip_fraction(ratio: Any, eps: float | tuple[float, float], mask: Any) -> float:
    """Share of the ratios under the mask with |ratio - 1| > eps, whatever the advantage.

    Raises ValueError as `clip_counts` does, and if the mask selects no token: the share is undefined then.
    """
    return _defined(clip_counts(ratio, eps, mask))


def ppo_clip_fraction(ratio: Any, eps: float | tuple[float, float], mask: Any, advantages: Any) -> float:
    """Share of the tokens under the mask whose gradient PPO's clipped loss drops.

    `advantages`: one a token, or (sequences, 1). Raises ValueError as `clip_fraction` does.
    """
    return _defined(clip_counts(ratio, eps, mask, advantages))


def bounds(eps: float | tuple[float, float]) -> tuple[float, float]:
    """`eps` as a pair (low, high). Raises ValueError for one that is negative or not finite."""
    pair = eps if isinstance(eps, (tuple, list)) else (eps, eps)
    if len(pair) != 2 or not all(doors.is_number(e) and 0 <= e < np.inf for e in pair):
        raise ValueError(f"eps={eps!r}: needs a finite number of at least 0, or a pair (low, high)")
    return float(pair[0]), float(pair[1])


def _signs(advantages: Any, shape: tuple[int, ...], mask: np.ndarray) -> np.ndarray:
    values = doors.floats("advantages", advantages)
    try:
        values = np.broadcast_to(values, shape)
    except ValueError:
        raise ValueError(f"advantages: shape {values.shape} does not spread over the ratio's {shape}") from None
    doors.refuse("advantages", values, mask & ~np.isfinite(values), "is not finite under the mask")
    return np.sign(np.where(mask, values, 0.0))


def _defined(counts: Outside) -> float:
    if counts.num == 0:
        raise ValueError("mask: selects no token; a clip fraction of no tokens is undefined, not 0")
    return counts.fraction
