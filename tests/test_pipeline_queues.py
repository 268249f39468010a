"""Queue check, Little's law, and waits against SimPy's own queue."""

import math

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import pipeline
from rlinfra_utils.pipeline import Rate

POSITIVE = st.floats(1e-3, 1e6)
SERVICE_S = 2.0
LAWS = {  # draws of a service time with mean SERVICE_S, and its squared coefficient of variation
    "exponential": (lambda rng: rng.exponential(SERVICE_S), 1),
    "equal": (lambda rng: SERVICE_S, 0),
    "uniform": (lambda rng: rng.uniform(0, 2 * SERVICE_S), 1 / 3),
    "two kinds": (lambda rng: SERVICE_S * rng.choice([0.5, 5.5], p=[0.9, 0.1]), 0.25 * 0.9 + 20.25 * 0.1),
}


def waits_in_simpy(arrival_per_s, draw, seed, num=2500, warm_up=500):
    """Mean wait of `num` customers at one SimPy resource, after a warm-up."""
    rng, waits_s, env = np.random.default_rng(seed), [], simpy.Environment()
    server = simpy.Resource(env)

    def customer():
        arrived_s = env.now
        with server.request() as turn:
            yield turn
            waits_s.append(env.now - arrived_s)
            yield env.timeout(draw(rng))

    def source():
        for _ in range(warm_up + num):
            yield env.timeout(rng.exponential(1 / arrival_per_s))
            env.process(customer())

    env.process(source())
    env.run()
    return np.mean(waits_s[warm_up:])


@pytest.mark.parametrize("law", LAWS)
def test_waits_are_those_of_simpy(law):
    draw, scv = LAWS[law]
    arrival_per_s = 0.6 / SERVICE_S
    runs_s = [waits_in_simpy(arrival_per_s, draw, seed) for seed in range(14)]
    error_s = np.std(runs_s, ddof=1) / len(runs_s) ** 0.5
    wait_s = pipeline.mg1_wait_s(arrival_per_s, SERVICE_S, scv)
    assert abs(wait_s - np.mean(runs_s)) < 3 * error_s
    assert error_s < 0.06 * wait_s  # narrow enough to tell the laws apart


def test_named_queues_are_special_cases():
    # Load 1/2: an exponential server makes one wait for one service, a steady one for half of it.
    assert pipeline.mm1_wait_s(0.25, 2) == pytest.approx(2)
    assert pipeline.md1_wait_s(0.25, 2) == pytest.approx(1)


@given(load=st.floats(0.01, 0.99), service_s=POSITIVE)
def test_mm1_waiting_line_is_the_sum_over_its_geometric_law(load, service_s):
    num_waiting = sum((n - 1) * (1 - load) * load**n for n in range(2, 5000))
    wait_s = pipeline.mm1_wait_s(load / service_s, service_s)
    assert pipeline.littles_law(rate=load / service_s, time=wait_s) == pytest.approx(num_waiting, rel=1e-6)


@given(load=st.floats(0.01, 0.9), more=st.floats(0.001, 0.09), scv=st.floats(0, 100))
def test_waits_grow_with_load_and_spread(load, more, scv):
    wait_s = pipeline.mg1_wait_s(load, 1, scv)
    assert pipeline.mg1_wait_s(load + more, 1, scv) > wait_s
    assert pipeline.mg1_wait_s(load, 1, scv + 0.1) > wait_s


@pytest.mark.parametrize("load", [1, 1.5])
def test_an_overloaded_queue_waits_without_end(load):
    assert pipeline.mm1_wait_s(load, 1) == pipeline.md1_wait_s(load, 1) == math.inf
    assert not pipeline.queue_check(load, 1).stable


def test_an_empty_queue_does_not_wait():
    assert pipeline.mm1_wait_s(0, 1) == 0


def test_problem_p07():
    rho, stable = pipeline.queue_check(8, 10)
    assert rho == pytest.approx(0.8)
    assert stable is True
    assert pipeline.queue_check(Rate(8_000, "tokens/s"), Rate(10_000, "tokens/s")) == (0.8, True)


def test_a_balanced_queue_is_not_stable():
    assert pipeline.queue_check(10, 10) == (1, False)


def test_rates_of_one_thing_may_use_different_clocks():
    assert pipeline.queue_check(Rate(480, "tokens/min"), Rate(10, "tokens/s")).rho == pytest.approx(0.8)
    assert pipeline.queue_check(Rate(28.8, "groups/h"), Rate(0.01, "groups/s")).rho == pytest.approx(0.8)


def test_rollouts_become_tokens_by_their_mean_length():
    arrival = Rate(15.625, "rollouts/s").counted_in("tokens", each=512)
    assert arrival == Rate(8000, "tokens/s")
    assert pipeline.queue_check(arrival, Rate(10_000, "tokens/s")).rho == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("arrival", "service", "message"),
    [
        (Rate(8, "tokens/s"), Rate(10, "rollouts/s"), "arrival=tokens/s, service=rollouts/s: count both in the same"),
        (Rate(8, "tokens/s"), 10, "one has a unit"),
        (8, Rate(10, "tokens/s"), "one has a unit"),
        (8, 0, "service=0"),
        (Rate(8, "tokens/s"), Rate(0, "tokens/s"), "service=0"),
        (-8, 10, "arrival=-8"),
        (math.nan, 10, "arrival=nan"),
        ("8 tokens/s", 10, "arrival='8 tokens/s'"),
    ],
)
def test_rates_that_do_not_go_together_are_refused(arrival, service, message):
    with pytest.raises(ValueError, match=message) as refused:
        pipeline.queue_check(arrival, service)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("unit", ["tokens", "tokens/", "/s", "token/s", "tokens/day", "tokens/s/s", "", None, 3])
def test_unknown_units_are_refused(unit):
    with pytest.raises(ValueError, match="unit="):
        Rate(1, unit)


@given(rate=POSITIVE, time=POSITIVE)
def test_littles_law_closes(rate, time):
    inside = pipeline.littles_law(rate=rate, time=time)
    assert pipeline.littles_law(number_inside=inside, rate=rate) == pytest.approx(time)
    assert pipeline.littles_law(number_inside=inside, time=time) == pytest.approx(rate)


@pytest.mark.parametrize(
    "given_values",
    [
        {},
        {"rate": 1},
        {"number_inside": 1, "rate": 1, "time": 1},
        {"number_inside": 1, "rate": 0},
        {"rate": 1, "time": -1},
        {"rate": "1", "time": 1},
    ],
)
def test_littles_law_needs_two_good_numbers(given_values):
    with pytest.raises(ValueError, match="="):
        pipeline.littles_law(**given_values)
