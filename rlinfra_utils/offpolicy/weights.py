"""How concentrated importance weights are: effective sample size, chi-square, spread; and sums that merge.

Models: a set of non-negative weights given by their logs. Leaves out: bias; a high effective sample size
(ESS) says that no weight dominates, not that the estimate is right.
Use: `normalized_ess(weights)`; or `WeightStats.of(log_weights)` on each rank and `a + b` over the ranks.

Means do not merge: ranks hold different numbers of tokens. So a `WeightStats` keeps counts and sums, and
every mean is a property. Sums of weights are relative to the largest weight, so that none overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils import doors


@dataclass(frozen=True)
class WeightStats:
    """Counts and sums over `num` weights w; `a + b` describes both sets together.

    A set without weights (a rank whose tokens are all masked) merges without effect, and its means are NaN:
    undefined, not 0. `mean` and `chi_square` are inf where they exceed float64; the log fields are not.
    """

    num: int
    sum_log: float
    sum_abs_log: float
    min_log: float
    max_log: float
    sum_relative: float  # sum of w / max(w)
    sum_sq_relative: float  # sum of (w / max(w)) ** 2

    @classmethod
    def of(cls, log_weights: np.ndarray) -> WeightStats:
        """Statistics of log weights of any shape; none at all is allowed. Raises ValueError if one is not finite."""
        logs = np.asarray(log_weights, dtype=np.float64)
        doors.refuse("log_weights", logs, ~np.isfinite(logs), "is not finite; leave undefined and zero weights out")
        top = logs.max(initial=-np.inf)
        relative = np.exp(logs - top)
        return cls(
            num=logs.size,
            sum_log=float(logs.sum()),
            sum_abs_log=float(np.abs(logs).sum()),
            min_log=float(logs.min(initial=np.inf)),
            max_log=float(top),
            sum_relative=float(relative.sum()),
            sum_sq_relative=float((relative**2).sum()),
        )

    def __add__(self, other: WeightStats) -> WeightStats:
        if 0 in (self.num, other.num):
            return self if other.num == 0 else other
        top = max(self.max_log, other.max_log)
        mine, theirs = np.exp(self.max_log - top), np.exp(other.max_log - top)
        return WeightStats(
            num=self.num + other.num,
            sum_log=self.sum_log + other.sum_log,
            sum_abs_log=self.sum_abs_log + other.sum_abs_log,
            min_log=min(self.min_log, other.min_log),
            max_log=top,
            sum_relative=float(self.sum_relative * mine + other.sum_relative * theirs),
            sum_sq_relative=float(self.sum_sq_relative * mine**2 + other.sum_sq_relative * theirs**2),
        )

    @property
    def mean(self) -> float:
        """Mean weight."""
        return self._scaled(self.sum_relative, 1)

    @property
    def mean_log(self) -> float:
        """Mean log weight."""
        return share(self.sum_log, self.num)

    @property
    def mean_abs_log(self) -> float:
        """Mean |log w|, nats."""
        return share(self.sum_abs_log, self.num)

    @property
    def max_abs_log(self) -> float:
        """Largest |log w|, nats."""
        return max(abs(self.min_log), abs(self.max_log)) if self.num else np.nan

    @property
    def ess(self) -> float:
        """Effective sample size (sum w)^2 / sum w^2, from 1 to `num` (Kish 1965; Kong 1992)."""
        return share(self.sum_relative**2, self.sum_sq_relative)

    @property
    def normalized_ess(self) -> float:
        """ESS / num, from 1 / num to 1."""
        return share(self.ess, self.num)

    @property
    def chi_square(self) -> float:
        """Estimate of the chi-square divergence E[w^2] - 1 of trainer from behaviour.

        verl's `chi2_token` and `chi2_seq` (`compute_offpolicy_metrics`, 2026-08-22, there with log w clamped
        to 20 in size). The divergence is never negative; its estimate is where weights lie below 1.
        """
        return self._scaled(self.sum_sq_relative, 2) - 1.0

    def _scaled(self, relative_sum: float, power: int) -> float:
        if not self.num:
            return np.nan
        with np.errstate(over="ignore"):
            return float(np.exp(power * self.max_log + np.log(relative_sum / self.num)))


def share(part: float, whole: float) -> float:
    """`part / whole`, NaN where there is no whole."""
    return part / whole if whole else np.nan


def ess(weights: Any) -> float:
    """Effective sample size (sum w)^2 / sum w^2 of non-negative `weights`, shape (n,): from 1 to n.

    Equal weights give n; one that dominates gives 1. Raises ValueError for an empty set, a weight that is
    negative or not finite, and weights that are all 0, of which it is undefined.
    """
    return ess_from_log(_logs(weights))


def normalized_ess(weights: Any) -> float:
    """ESS / n, from 1 / n to 1, which compares between batches. Raises ValueError as `ess` does.

    verl's `rollout_is_eff_sample_size` (2026-08-22) is this number over the tokens of the corrected weights.
    """
    logs = _logs(weights)
    return ess_from_log(logs) / logs.size


def ess_from_log(log_weights: Any) -> float:
    """ESS from the logs of the weights, shape (n,), which may be of any size; -inf is a weight of 0.

    Raises ValueError for an empty set, for NaN or +inf, and if all are -inf.
    """
    logs = _row("log_weights", log_weights)
    doors.refuse("log_weights", logs, np.isnan(logs) | np.isposinf(logs), "needs a number or -inf")
    positive = logs[logs > -np.inf]
    if positive.size == 0:
        raise ValueError(f"log_weights: all {logs.size} weights are 0; their effective sample size is undefined")
    return WeightStats.of(positive).ess


def normalized_ess_from_log(log_weights: Any) -> float:
    """ESS / n from the logs of the weights. Raises ValueError as `ess_from_log` does."""
    return ess_from_log(log_weights) / np.size(log_weights)


def _logs(weights: Any) -> np.ndarray:
    values = _row("weights", weights)
    doors.refuse("weights", values, ~((values >= 0) & (values < np.inf)), "needs a finite number of at least 0")
    with np.errstate(divide="ignore"):
        return np.log(values)


def _row(name: str, values: Any) -> np.ndarray:
    row = doors.floats(name, values)
    if row.ndim != 1:
        raise ValueError(f"{name}: shape {row.shape}; needs (n,)")
    return row
