"""What the slowest of several parallel rollouts costs, and which groups teach anything.

Models workers that start together and wait for the last. Leaves out refilling a free worker (continuous
batching), where the barrier is gone. Use: `utilization([4, 4, 4, 12])` is 0.5.

Durations may be in any unit that fits all of them: with equal time per token, lengths in tokens do as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rlinfra_utils.doors import number, numbers, whole


def utilization(durations_s: ArrayLike) -> float:
    """Useful share of the workers' time until the slowest is done: sum / (count * max), course step 12.3.2.

    Raises ValueError for an empty row, a duration that is negative or not finite, or all of them 0.
    """
    times_s = numbers("durations_s", durations_s, some_above_zero=True)
    return float(np.mean(times_s / times_s.max()))


def group_s(durations_s: ArrayLike) -> float:
    """Seconds until a group that started together may be used: its slowest rollout.

    Raises ValueError for an empty row, and for a duration that is negative or not finite.
    """
    return float(numbers("durations_s", durations_s).max())


def mean_group_s(durations_s: ArrayLike, group_size: int) -> float:
    """Mean seconds of groups of `group_size` rollouts that are drawn from `durations_s` with replacement.

    Exact for the given sample: the k-th smallest of m durations is a group's slowest with probability
    (k / m)^G - ((k - 1) / m)^G. Raises ValueError as `group_s`.
    """
    times_s = np.sort(numbers("durations_s", durations_s))
    return float(times_s @ slowest_chances(len(times_s), whole("group_size", group_size)))


def scv(durations_s: ArrayLike) -> float:
    """Squared coefficient of variation, variance / mean^2: 0 for equal durations, 1 for exponential ones.

    The variance is that of the given values as the whole law (divisor n). Raises ValueError as `utilization`.
    """
    times_s = numbers("durations_s", durations_s, some_above_zero=True)
    times_s = times_s / times_s.max()  # first, so that the mean of tiny values is no zero
    return float(np.var(times_s / times_s.mean()))


def informative_groups_per_s(groups_per_s: float, degenerate_share: float) -> float:
    """Groups a second with a learning signal: groups/s * (1 - share with equal rewards), course step 12.2.5.

    Raises ValueError for a rate that is negative or not finite, and a share outside [0, 1].
    """
    return number("groups_per_s", groups_per_s) * (1 - number("degenerate_share", degenerate_share, 0, 1))


def slowest_chances(num: int, group_size: int) -> np.ndarray:
    """Chance of each of `num` sorted values to be the largest of `group_size` draws with replacement, shape (num,)."""
    return np.diff(np.linspace(0, 1, num + 1) ** group_size)
