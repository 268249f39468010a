"""How many GPUs to which stage of an overlapped loop, when each stage has its own scaling curve.

Models the period of a long run: the slowest stage sets it. Leaves out start-up, transfers and spread.
Use: `best_split({"generate": {32: 357, 64: 151}, "train": scaling_curve(114, at_gpus=128)}, num_gpus=128)`.

A curve gives the seconds of a batch for a number of GPUs. A table holds what was measured: no count between its
entries is made up. A function is asked for every whole number. Stages that share a pool are one curve, their sum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlinfra_utils.doors import number, short, whole

#: A curve given as a function is asked for each count up to this.
LARGEST_POOL = 2**16

Curve = Mapping[int, float] | Callable[[int], float]


@dataclass(frozen=True)
class Split:
    """GPUs of each stage, and the seconds of a batch there. `idle_gpus` would not shorten the period."""

    gpus: dict[str, int]
    stage_s: dict[str, float]
    idle_gpus: int

    @property
    def period_s(self) -> float:
        """Seconds from one batch to the next."""
        return max(self.stage_s.values())

    @property
    def bottleneck(self) -> str:
        """The stage that sets the period."""
        return max(self.stage_s, key=self.stage_s.get)


def best_split(curves: Mapping[str, Curve], num_gpus: int) -> Split:
    """The split of at most `num_gpus` with the shortest period; each stage gets the fewest GPUs that reach it.

    A curve may fall, flatten or rise with GPUs; math.inf says that the stage cannot run on so few. Exact: the
    best period is a time of some curve, and a longer period never needs more GPUs, so bisection finds the first
    that fits. Raises ValueError for no curve, a bad one, or when no split fits.
    """
    whole("num_gpus", num_gpus, high=LARGEST_POOL)
    if not isinstance(curves, Mapping) or not curves:
        raise ValueError(f"curves={short(curves)}: needs a mapping from a stage to its curve")
    tables = {stage: _table(stage, curve, num_gpus) for stage, curve in curves.items()}

    def needed(stage: str, period_s: float) -> float:
        return min((gpus for gpus, time_s in tables[stage].items() if time_s <= period_s), default=math.inf)

    def fits(period_s: float) -> bool:
        return sum(needed(stage, period_s) for stage in tables) <= num_gpus

    periods_s = sorted({time_s for table in tables.values() for time_s in table.values()})
    best = bisect_left(periods_s, True, key=fits)
    if best == len(periods_s):
        fewest = {stage: min(table, default=None) for stage, table in tables.items()}
        raise ValueError(f"num_gpus={num_gpus}: no split fits, the stages need at least {fewest}")
    gpus = {stage: needed(stage, periods_s[best]) for stage in tables}
    return Split(gpus, {stage: tables[stage][gpus[stage]] for stage in tables}, num_gpus - sum(gpus.values()))


def scaling_curve(stage_s: float, at_gpus: int, serial_share: float = 0.0) -> Callable[[int], float]:
    """A curve through one measured point: `stage_s` at `at_gpus`, of which `serial_share` does not shrink with GPUs.

    seconds(n) = stage_s * (serial + (1 - serial) * at_gpus / n). With serial_share 0 the work is constant, and
    then no split beats all GPUs taking turns: the GPU-seconds are the same. It and its curve raise ValueError for
    GPUs that are no whole number, for negative seconds, and for a share outside [0, 1].
    """
    number("stage_s", stage_s)
    whole("at_gpus", at_gpus)
    number("serial_share", serial_share, 0, 1)

    def curve(gpus: int) -> float:
        return stage_s * (serial_share + (1 - serial_share) * at_gpus / whole("gpus", gpus))

    return curve


def _table(stage: str, curve: Curve, num_gpus: int) -> dict[int, float]:
    """The curve as seconds for each number of GPUs that it can run on, up to `num_gpus`."""
    name = f"curves[{stage!r}]"
    if isinstance(curve, Mapping):
        counts = [whole(f"{name}: GPUs", gpus) for gpus in curve]
        seconds = {gpus: curve[gpus] for gpus in counts if gpus <= num_gpus}
    elif callable(curve):
        seconds = {gpus: curve(gpus) for gpus in range(1, num_gpus + 1)}
    else:
        raise ValueError(f"{name}={short(curve)}: needs a table from GPUs to seconds, or a function")
    checked = {gpus: number(f"{name} at {gpus} GPUs", time_s, high=math.inf) for gpus, time_s in seconds.items()}
    return {gpus: time_s for gpus, time_s in checked.items() if time_s < math.inf}
