"""How much of one side's working time the other side works too: `share_beside`, of measured and of simulated intervals.

Models intervals on one clock. Leaves out how many of a side are at work at once. Use: `share_beside(mine, others)`,
each an array of (start, end) rows in seconds.
"""

from __future__ import annotations

import numpy as np


def share_beside(mine: np.ndarray, others: np.ndarray) -> float:
    """The part of the time in which `mine` has an interval open, in which `others` has one too; 0 where mine is none.

    Shapes (n, 2) and (m, 2), seconds.
    """
    if not len(mine):
        return 0.0
    cuts = np.unique(np.concatenate([mine.ravel(), others.ravel()]))
    length_s, middle = np.diff(cuts), (cuts[1:] + cuts[:-1]) / 2
    at_work, beside = num_open(mine, middle) > 0, num_open(others, middle) > 0
    return float(length_s[at_work & beside].sum() / length_s[at_work].sum())


def time_open(spans: np.ndarray) -> float:
    """Seconds in which at least one of the spans, (n, 2), is open."""
    cuts = np.unique(spans)
    return float(np.diff(cuts)[num_open(spans, (cuts[1:] + cuts[:-1]) / 2) > 0].sum())


def num_open(spans: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How many of the spans are open at each instant of `at`, ends excluded."""
    starts, ends = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    return np.searchsorted(starts, at) - np.searchsorted(ends, at)
