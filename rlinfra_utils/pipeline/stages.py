"""A loop of stages, one after the other or overlapped, and what a faster stage would bring.

Models stages of constant duration, each on resources of its own, with room between them. Leaves out transfers,
spread of durations and bounded queues. Use: `sequential([45, 30], n=8)`, `pipelined([45, 30], n=8)`.

`stage_s` is the seconds of one batch in each stage, in order: a row, or a mapping from stage names.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from rlinfra_utils.doors import named, number, short, whole

Stages = Sequence[float] | Mapping[Hashable, float]


def sequential(stage_s: Stages, n: int) -> float:
    """Seconds for `n` batches, when each passes all stages before the next begins: n * sum.

    Raises ValueError for no stage, a duration that is negative or not finite, all of them 0, or n below 1.
    """
    return whole("n", n) * sum(named("stage_s", stage_s).values())


def pipelined(stage_s: Stages, n: int) -> float:
    """Seconds for `n` batches, when every stage may work on another batch: sum + (n - 1) * max.

    The first batch passes all stages; each other one leaves a beat of the slowest stage later. For two stages
    it is G + T + (n - 1) max(G, T), course step 12.3.1. Raises as `sequential`.
    """
    times_s = named("stage_s", stage_s).values()
    return sum(times_s) + (whole("n", n) - 1) * max(times_s)


def speedup(stage_s: Stages, n: int | None = None) -> float:
    """Sequential over pipelined time of `n` batches; None is a long stream: sum / max. Raises as `sequential`."""
    if n is None:
        times_s = named("stage_s", stage_s).values()
        return sum(times_s) / max(times_s)
    return sequential(stage_s, n) / pipelined(stage_s, n)


def stage_utilization(stage_s: Stages, overlapped: bool) -> dict[Hashable, float]:
    """Share of a long run in which each stage works: its time over the period, by name or position.

    The period is the slowest stage if `overlapped`, else the sum. The rest is the stage's idle share. Raises as
    `sequential`.
    """
    times_s = named("stage_s", stage_s)
    period_s = max(times_s.values()) if overlapped else sum(times_s.values())
    return {stage: time_s / period_s for stage, time_s in times_s.items()}


def amdahl(share: float, factor: float) -> float:
    """Speed-up of a sequential whole, `share` of which becomes `factor` times as fast: 1 / (1 - s + s / f).

    `share` in [0, 1]; `factor` above 0, and math.inf for a part that vanishes; ValueError for others. inf if all of
    it vanishes. Source: Amdahl, "Validity of the single processor approach", AFIPS 1967.
    """
    share = number("share", share, 0, 1)
    rest = 1 - share + share / number("factor", factor, high=math.inf, above=True)
    return 1 / rest if rest else math.inf


class StageGain(NamedTuple):
    """Speed-up of the whole loop in a long run, if its stages take turns and if they overlap."""

    sequential: float
    overlapped: float


def stage_gain(stage_s: Stages, stage: Hashable, factor: float) -> StageGain:
    """What the loop gains when one stage (its name or position) becomes `factor` times as fast.

    In turns it is Amdahl's law. Overlapped, only the slowest stage counts, and only down to the next slowest.
    `factor` is finite here. Raises as `sequential`, and ValueError for a stage that `stage_s` does not have.
    """
    times_s = named("stage_s", stage_s)
    if not isinstance(stage, Hashable) or stage not in times_s:
        raise ValueError(f"stage={short(stage)}: stage_s has {', '.join(map(short, times_s))}")
    faster_s = {**times_s, stage: times_s[stage] / number("factor", factor, above=True)}
    turns = sum(times_s.values()) / sum(faster_s.values())
    return StageGain(turns, max(times_s.values()) / max(faster_s.values()))
