"""Is a queue stable, and how long does work wait in it?

Models one server, Poisson arrivals and unlimited room. Leaves out bounded buffers, batches and correlated
bursts. Use: `rho, stable = queue_check(Rate(8_000, "tokens/s"), Rate(10_000, "tokens/s"))`.

An overloaded queue (rho >= 1) is no error: its mean wait is `math.inf`, as it grows for as long as the load
lasts. A service time of infinite variance is an error: its wait is infinite at any load, and hides a missing cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rlinfra_utils.doors import number, short

COUNTED = ("tokens", "rollouts", "groups", "batches")
SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Rate:
    """A rate that carries its unit, "tokens/s" or any other of `COUNTED` over one of `SECONDS`.

    Raises ValueError for a value that is negative or not finite, and for an unknown unit.
    """

    value: float
    unit: str

    def __post_init__(self):
        number("value", self.value)
        counted, _, time = self.unit.partition("/") if isinstance(self.unit, str) else ("", "", "")
        if counted not in COUNTED or time not in SECONDS:
            raise ValueError(f"unit={short(self.unit)}: needs one of {', '.join(COUNTED)} over {', '.join(SECONDS)}")

    @property
    def counted(self) -> str:
        """What is counted."""
        return self.unit.partition("/")[0]

    @property
    def per_s(self) -> float:
        """The rate a second."""
        return self.value / SECONDS[self.unit.partition("/")[2]]

    def counted_in(self, counted: str, each: float) -> Rate:
        """The same flow counted in something else, of which each unit has `each`: rollouts of 512 tokens.

        Raises ValueError for an `each` that is not above 0 and for what is not in `COUNTED`.
        """
        return Rate(self.per_s * number("each", each, above=True), f"{counted}/s")


class QueueCheck(NamedTuple):
    """`rho` is arrival over service rate; `stable` says that it is below 1."""

    rho: float
    stable: bool


def queue_check(arrival: Rate | float, service: Rate | float) -> QueueCheck:
    """Load rho = lambda / mu of a queue and whether it is below 1, course step 12.3.4.

    Both are `Rate`s that count the same thing (seconds, minutes and hours may mix), or both plain numbers,
    which are then taken to have one unit. Anything else raises ValueError, as does a service rate of 0. It
    speaks of averages: below 1, bursts and tails can still make long waits (`mg1_wait_s`).
    """
    for name, rate in (("arrival", arrival), ("service", service)):
        if not isinstance(rate, Rate):
            number(name, rate)
    if isinstance(arrival, Rate) != isinstance(service, Rate):
        raise ValueError(f"arrival={arrival}, service={service}: one has a unit; give both as Rate or both as numbers")
    if isinstance(arrival, Rate):
        if arrival.counted != service.counted:
            raise ValueError(
                f"arrival={arrival.unit}, service={service.unit}: count both in the same, e.g. "
                f"arrival.counted_in({service.counted!r}, each=...)"
            )
        arrival, service = arrival.per_s, service.per_s
    rho = arrival / number("service", service, above=True)
    return QueueCheck(rho, rho < 1)


def littles_law(number_inside: float | None = None, rate: float | None = None, time: float | None = None) -> float:
    """The third of L = lambda W from the other two: mean number inside, rate through, mean time inside.

    Holds for any steady system, whatever its order or laws, when the three speak of the same things and one
    clock. The clock may be versions: rollouts outstanding at a publication = rollouts per version * mean
    staleness. Source: Little, Operations Research 9(3), 1961. Raises ValueError unless just one is missing.
    """
    given = {"number_inside": number_inside, "rate": rate, "time": time}
    if sum(value is None for value in given.values()) != 1:
        raise ValueError(f"number_inside={number_inside}, rate={rate}, time={time}: give two, the third is returned")
    divisor = "time" if rate is None else "rate"
    for name, value in given.items():
        if value is not None:
            number(name, value, above=name == divisor and number_inside is not None)
    if number_inside is None:
        return float(rate * time)
    return number_inside / given[divisor]


def mm1_wait_s(arrival_per_s: float, service_s: float) -> float:
    """Mean seconds in the queue, service not counted, with exponential service times: rho / (1 - rho) * service.

    math.inf at rho >= 1; raises ValueError as `mg1_wait_s` does.
    """
    return mg1_wait_s(arrival_per_s, service_s, 1)


def md1_wait_s(arrival_per_s: float, service_s: float) -> float:
    """Mean seconds in the queue, service not counted, with equal service times: half of M/M/1.

    math.inf at rho >= 1; raises ValueError as `mg1_wait_s` does.
    """
    return mg1_wait_s(arrival_per_s, service_s, 0)


def mg1_wait_s(arrival_per_s: float, service_s: float, service_scv: float) -> float:
    """Mean seconds in the queue, service not counted, for any law of service times (Pollaczek-Khinchine, 1930-32).

    rho / (1 - rho) * (1 + scv) / 2 * service, with rho = arrival * service, the mean `service_s` and the squared
    coefficient of variation `service_scv` (`scv` of measured times). In order of arrival, one server.
    math.inf at rho >= 1. Raises ValueError for a number that is negative or not finite, an infinite scv among them.
    """
    rho = number("arrival_per_s", arrival_per_s) * number("service_s", service_s)
    if number("service_scv", service_scv, high=math.inf) == math.inf:
        raise ValueError("service_scv=inf: the mean wait is infinite at any load; cap the durations")
    spread = (1 + service_scv) / 2
    return rho / (1 - rho) * spread * service_s if rho < 1 else math.inf
