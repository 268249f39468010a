"""Rules that bound staleness, and what each does to long rollouts: drop them, or slow the trainer down.

Models versions published every `period_s` and rollouts that start at any instant between two of them. Leaves out
the queue: a rollout is judged, or used, when it ends. Use: `kept_share(35, period_s=10, max_lag=2)` is 0.

Lag counts every version published from the start of a rollout to its use, in flight and queued alike; it is
accepted iff lag <= max_lag. A counter of versions in flight alone calls a rollout fresh that has long been queued.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from rlinfra_utils.doors import number, numbers, whole

#: Forgiven in a count of periods, so that 0.3 s are three of 0.1 s.
_ROUNDING = 1e-9


def versions_published(start_s: float, end_s: float, period_s: float) -> int:
    """Versions published in (start, end], with one at every multiple of `period_s`.

    Raises ValueError for a time that is negative or not finite, an end before the start, and a period of 0.
    """
    number("period_s", period_s, above=True)
    end_s = number("end_s", end_s, number("start_s", start_s))
    periods = number("end_s / period_s", end_s / period_s)
    return math.floor(periods + _ROUNDING) - math.floor(start_s / period_s + _ROUNDING)


def kept_share(duration_s: float, period_s: float, max_lag: int) -> float:
    """Share of rollouts of this duration that see at most `max_lag` versions and so are not discarded.

    With the start spread evenly over a period P, a rollout of duration d is kept if start + d < (max_lag + 1) P:
    max_lag + 1 - d / P, cut to [0, 1]. Longer than (max_lag + 1) P it never is, however often it is repeated.
    Raises ValueError for a duration that is negative or not finite, a period of 0, and a lag that is not whole.
    """
    number("period_s", period_s, above=True)
    return min(1.0, max(0.0, whole("max_lag", max_lag, 0) + 1 - number("duration_s", duration_s) / period_s))


def consumed_mix(offered: ArrayLike, durations_s: ArrayLike, period_s: float, max_lag: int) -> np.ndarray:
    """Shares of the kinds of rollout that are trained on, from the shares `offered` and each kind's duration.

    Both are rows of one length, as is the answer. Discarding keeps the short ones: compare it with `offered`.
    Raises ValueError as `kept_share` does, for rows that differ in length, and if nothing at all is kept.
    """
    shares = numbers("offered", offered, some_above_zero=True)
    times_s = numbers("durations_s", durations_s)
    if len(shares) != len(times_s):
        raise ValueError(f"offered has {len(shares)} kinds, durations_s has {len(times_s)}: give one of each a kind")
    kept = shares * [kept_share(time_s, period_s, max_lag) for time_s in times_s.tolist()]
    if not kept.any():
        raise ValueError(f"max_lag={max_lag}: every rollout offered is discarded; allow more, or pace the trainer")
    return kept / kept.sum()


def paced_period_s(longest_s: float, train_s: float, max_lag: int) -> float:
    """The shortest period at which no rollout needs discarding: max(train, longest / max_lag).

    A rollout of duration d may start just before a version appears, and must then end before max_lag more do.
    Raises ValueError for max_lag 0, at which nothing may overlap and the loop is `sequential`, and for a time that
    is negative or not finite.
    """
    if whole("max_lag", max_lag, 0) == 0:
        raise ValueError("max_lag=0: no rollout may see an update, so the stages take turns; use sequential()")
    return max(number("train_s", train_s, above=True), number("longest_s", longest_s) / max_lag)


def admission_limit(batch: int, sync_interval: int, staleness_threshold: float) -> int:
    """Rollouts that verl's fully-async recipe admits between two weight syncs, those left from before included.

    int(batch * (1 + threshold) * steps per sync): the threshold is a share of a sync window, no number of
    versions. Once reached, `threshold` windows are outstanding when the next version appears.
    Source: verl, fully_async_rollouter.py, set_max_required_samples, as of 2026-08-22. Raises ValueError for a count
    that is not whole and a threshold below 0.
    """
    rollouts = whole("batch", batch) * (1 + number("staleness_threshold", staleness_threshold))
    return int(rollouts * whole("sync_interval", sync_interval))
