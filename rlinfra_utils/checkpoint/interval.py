"""How often to save: Young's interval, its overhead, and a simulation that shows where they stop being good.

Models failures at random times, saves of a fixed length, work lost back to the last save. Leaves out several levels
of storage and a run's end. Use: `young_interval(120, 28_800)`; `simulate_overhead(2629, 120, 28_800, restart_s=600)`.

Young: the share of time spent on saves and lost work is about H(I) = C / I + I / (2 M), with interval I, write time C
and mean time between failures M. Its minimum is sqrt(2 C / M) at I = sqrt(2 C M). Source: J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17(9), 1974. To first order means: C far below I, I far below
M, restarts free, saves that stop the work, failures without memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlinfra_utils.doors import number, short, whole


def young_interval(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves, sqrt(2 C M).

    Raises ValueError where 2 C >= M: the interval would reach the mean time between failures.
    """
    _check_times(write_s, mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s)


def overhead(interval_s: float, write_s: float, mtbf_s: float) -> float:
    """Share of time spent on saves and lost work, C / I + I / (2 M).

    Raises ValueError where that reaches 1, which no share is: the interval is outside the formula's domain.
    """
    number("interval_s", interval_s, above=True)
    _check_times(write_s, mtbf_s)
    share = write_s / interval_s + interval_s / (2 * mtbf_s)
    if share >= 1:
        needed = f"a share below 1, so an interval between write_s={write_s:g} and 2 * mtbf_s={2 * mtbf_s:g}"
        raise ValueError(f"interval_s={interval_s:g}: the formula gives {share:.3g}; it needs {needed}")
    return share


def _check_times(write_s: float, mtbf_s: float) -> None:
    number("write_s", write_s, above=True)
    number("mtbf_s", mtbf_s, above=True)
    if 2 * write_s >= mtbf_s:
        raise ValueError(f"write_s={write_s:g}: needs less than half of mtbf_s={mtbf_s:g}, or no interval helps")


@dataclass(frozen=True)
class SimulatedOverhead:
    """Shares of wall time: `share` = not kept as progress = `writing` + `restarting` + `lost`, with standard error."""

    share: float
    standard_error: float
    writing: float
    restarting: float
    lost: float


def simulate_overhead(
    interval_s: float,
    write_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    asynchronous: bool = False,
    failure_shape: float = 1.0,
    num_failures: int = 100_000,
    seed: int = 0,
) -> SimulatedOverhead:
    """The share of wall time that a long run does not keep, from `num_failures` simulated failures.

    After each failure come `restart_s` seconds without work (a failure may hit them too), then work from the last
    finished save. `asynchronous` saves leave the work running; one that is not finished protects nothing, and the
    next is put off until then. Times between failures are Weibull with mean `mtbf_s`: shape 1 has no memory,
    a shape below 1 brings failures in clusters, as a fault does that outlives its restart. Equal seeds draw equal
    failures, so that intervals can be compared. Raises ValueError for a bad number.
    """
    number("interval_s", interval_s, above=True)
    number("write_s", write_s)
    number("mtbf_s", mtbf_s, above=True)
    number("restart_s", restart_s)
    number("failure_shape", failure_shape, 0.2, 20)
    if not isinstance(asynchronous, bool):
        raise ValueError(f"asynchronous={short(asynchronous)}: needs True or False")
    rng = np.random.default_rng(whole("seed", seed, 0))
    draws = rng.weibull(failure_shape, whole("num_failures", num_failures, 2, 10**7))
    up_s = draws * (mtbf_s / math.gamma(1 + 1 / failure_shape))

    # Every failure throws the run back to a save, so each time between two failures begins alike.
    running_s = np.maximum(up_s - restart_s, 0)
    kept_s, writing_s = _kept_and_writing(running_s, interval_s, write_s, asynchronous)
    wall_s, share = up_s.sum(), 1 - kept_s.sum() / up_s.sum()
    residual_s = up_s - kept_s - share * up_s
    restarting_s = up_s - running_s
    return SimulatedOverhead(
        share=float(share),
        standard_error=float(residual_s.std() / (math.sqrt(num_failures) * up_s.mean())),
        writing=float(writing_s.sum() / wall_s),
        restarting=float(restarting_s.sum() / wall_s),
        lost=float((running_s - kept_s - writing_s).sum() / wall_s),
    )


def _kept_and_writing(
    running_s: np.ndarray, interval_s: float, write_s: float, asynchronous: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Of each time that the run worked until a failure: seconds of progress kept, and of work stopped for a save."""
    if asynchronous:
        # The first save starts after one interval; later ones also wait for the disk.
        later = np.floor((running_s - interval_s - write_s) / max(interval_s, write_s))
        kept_s = np.where(later >= 0, interval_s + later * max(interval_s, write_s), 0)
        return kept_s, np.zeros_like(running_s)
    cycles, rest_s = np.divmod(running_s, interval_s + write_s)
    return cycles * interval_s, cycles * write_s + np.maximum(rest_s - interval_s, 0)
