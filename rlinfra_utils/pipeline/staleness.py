"""Mean staleness of an asynchronous loop in closed form, by Little's law with versions as the clock.

Models engines that keep a number of rollouts in flight, a queue, and a trainer that takes whole batches and
publishes a version after each (or each k-th). Leaves out discarding. Use: `mean_staleness(256, 64, 32, 0.8, tail(x))`.

Staleness of a token: the versions published between its sampling and the moment when the trainer takes its rollout.

The count. Each publication makes every rollout that is outstanding (started, not taken) one version staler, and
between two publications k batches of B are taken. So, whatever the order, the lengths and the lags of single rollouts,

    mean staleness of first tokens = outstanding rollouts at a publication / (k B).                            (1)

In flight. N rollouts are always in flight, as a finished one is replaced at once. By (1) their share is N / (k B);
the tail of the durations L does not enter. It does when tokens are counted: a random token lies in a rollout with
probability in proportion to L, evenly placed, so that E[L^2] / (2 E[L]) is left on average, where a first token has
E[L]. With scv = var L / E[L]^2, tokens see N / (k B) * (1 + scv) / 2.

Group. A rollout waits for the slowest of its group, E[max] - E[L] on average, and N / (k B) versions pass in E[L].
Over tokens a long rollout weighs more and waits less: E[L max] / E[L] - E[L^2] / E[L].

Queue. The trainer takes a batch, works for the share U of the period, publishes, and waits for the next. Rollouts
arrive evenly and add B in a period, so from the depth q left behind it rises to q + U B at the publication and q + B
at the next batch; the average is Q = q + B / 2. By (1), with q = Q - B / 2, the queue's share is (Q / B + U - 1/2) / k.

It holds where rollouts end at a steady rate: N large beside a group, durations that differ, batches of many groups.
The mean needs no more than that; U and Q are measured, or, where generation is the bottleneck with U below about 0.9,
Q = (B - group size) / 2 and U = train_s / loop_period_s. It does not hold where
- durations are all equal and started together: they arrive in waves;
- a limit, not the slots, holds generation back: starts then come in bursts, and `staleness_at_limit` holds instead;
- rollouts are discarded, or picked by length, or the run is younger than its longest rollout;
- decoding speed changes within a rollout (tokens only; tool turns do that).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rlinfra_utils.doors import choice, number, numbers, short, whole
from rlinfra_utils.pipeline.stragglers import slowest_chances

#: What counts once: a rollout, by its first token; a token, by the version that sampled it; a token, by the version
#: that its rollout started with (engines that finish on the old weights).
COUNTS = ("rollout", "token", "token_of_start")


@dataclass(frozen=True)
class Tail:
    """The shape of rollout durations L and of the slowest of a group, as ratios without a unit.

    `scv` var L / E[L]^2; `slowest` E[max] / E[L]; `weighted_slowest` E[L max] / E[L]^2. `tail` works them out.
    Raises ValueError for ratios that no law has, and for an infinite variance.
    """

    scv: float
    slowest: float
    weighted_slowest: float

    def __post_init__(self):
        if number("scv", self.scv, high=math.inf) == math.inf:
            raise ValueError("scv=inf: without a variance, tokens have no mean staleness; cap the lengths")
        number("slowest", self.slowest, 1 - 1e-9)
        number("weighted_slowest", self.weighted_slowest, (1 + self.scv) * (1 - 1e-9))


def tail(durations: ArrayLike, group_size: int = 1) -> Tail:
    """The tail of measured durations, in any unit, in groups of `group_size` drawn from them with replacement.

    `durations`: one a rollout. Raises ValueError for none, one below 0 or not finite, or all of them 0.
    """
    times = np.sort(numbers("durations", durations, some_above_zero=True))
    times = times / times.max()  # first, so that the mean of tiny values is no zero
    times = times / times.mean()
    group_size, num = whole("group_size", group_size), len(times)
    slowest = times @ slowest_chances(num, group_size)
    if group_size == 1:
        others, below = np.zeros(num), np.ones(num)
    else:
        others = slowest_chances(num, group_size - 1)
        below = np.cumsum(others)
    # E[max | own duration] = own * P(all others are at most that) + the others' slowest where it is longer.
    longer = np.cumsum((times * others)[::-1])[::-1] - times * others
    weighted = np.mean(times * (times * below + longer))
    return Tail(float(np.var(times)), float(slowest), float(weighted))


@dataclass(frozen=True)
class Staleness:
    """Mean versions published while a token's rollout is in flight, waits for its group, and is queued."""

    in_flight: float
    group: float
    queued: float
    steps_per_version: int = 1

    @property
    def versions(self) -> float:
        """All three."""
        return self.in_flight + self.group + self.queued

    @property
    def steps(self) -> float:
        """In optimizer steps: k steps a version, and (k - 1) / 2 on average since the trainer's last one."""
        return self.steps_per_version * self.versions + (self.steps_per_version - 1) / 2


def mean_staleness(
    in_flight: float,
    batch: int,
    mean_queued: float,
    trainer_utilization: float,
    tail: Tail,
    count: str = "rollout",
    steps_per_version: int = 1,
) -> Staleness:
    """Mean staleness at the trainer, by the formulas and within the limits that the module's head derives.

    `in_flight` rollouts being decoded, `batch` rollouts a step, `mean_queued` rollouts in complete groups and not
    yet taken (average over time), `trainer_utilization` the share of time from taking a batch to the end of its
    step, weight sync included. `count` is one of `COUNTS`. Raises ValueError for a bad number or name.
    """
    number("in_flight", in_flight, above=True)
    number("mean_queued", mean_queued)
    number("trainer_utilization", trainer_utilization, 0, 1)
    per_version = whole("batch", batch) * whole("steps_per_version", steps_per_version)
    choice("count", count, COUNTS)
    if not isinstance(tail, Tail):
        raise ValueError(f"tail={short(tail)}: needs a Tail, as tail(durations, group_size) makes")
    flight = {"rollout": 1, "token": (1 + tail.scv) / 2, "token_of_start": 1 + tail.scv}[count]
    group = tail.slowest - 1 if count == "rollout" else tail.weighted_slowest - (1 + tail.scv)
    group = max(0.0, group)  # what rounding leaves below it
    at_publication = max(0.0, mean_queued + (trainer_utilization - 0.5) * batch)  # a queue holds no fewer than 0
    per_period = in_flight / per_version
    return Staleness(per_period * flight, per_period * group, at_publication / per_version, steps_per_version)


def staleness_at_limit(outstanding: float, batch: int, steps_per_version: int = 1) -> float:
    """Mean staleness of first tokens where `outstanding` rollouts are started and not taken at each publication.

    Formula (1), exact. With a trainer that is the bottleneck, a limit C on started and untaken rollouts is reached
    by the time that a version appears: C. A queue of K whose full state blocks N slots: N + K. A rule that counts
    the batch in training as well (AReaL's, with limit (max_lag + 1) * batch) leaves C - batch: max_lag versions.
    Raises ValueError for a number that is negative or not finite, and a count that is not whole.
    """
    return number("outstanding", outstanding) / (whole("batch", batch) * whole("steps_per_version", steps_per_version))


def loop_period_s(in_flight: float, batch: int, rollout_s: float, train_s: float) -> float:
    """Seconds from batch to batch: the slower of generation, batch * rollout_s / in_flight, and of `train_s`.

    `rollout_s` is the mean duration at this load. Generation's side is Little's law: rate = in_flight / rollout_s.
    Raises ValueError for a number that is negative or not finite, and for no rollout in flight.
    """
    rollout_slots_s = whole("batch", batch) * number("rollout_s", rollout_s, above=True)
    return max(rollout_slots_s / number("in_flight", in_flight, above=True), number("train_s", train_s))
