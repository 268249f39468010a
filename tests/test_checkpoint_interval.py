"""Young's formula, its domain, and the simulation against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.checkpoint import overhead, simulate_overhead, young_interval

WRITE_S, MTBF_S = 120.0, 8 * 3600.0


def daly_share(interval_s, write_s, mtbf_s, restart_s):
    """Exact share for failures without memory and blocking saves (J. T. Daly, FGCS 22, 2006, eq. 13)."""
    wall_per_work = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s) / interval_s
    return 1 - 1 / wall_per_work


def test_p10():
    interval_s = young_interval(WRITE_S, MTBF_S)
    assert interval_s == pytest.approx(2629.07, abs=0.01)
    assert interval_s / 60 == pytest.approx(43.82, abs=0.01)


@given(st.floats(1, 1000), st.floats(2.5, 1e5), st.floats(0.3, 3))
def test_young_is_the_minimum_of_the_formula(write_s, ratio, factor):
    mtbf_s = ratio * write_s
    best_s = young_interval(write_s, mtbf_s)
    least = overhead(best_s, write_s, mtbf_s)
    assert least == pytest.approx(math.sqrt(2 * write_s / mtbf_s))
    if factor * best_s > write_s and write_s / (factor * best_s) + factor * best_s / (2 * mtbf_s) < 1:
        assert overhead(factor * best_s, write_s, mtbf_s) >= least * (1 - 1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: young_interval(0, 100), "write_s=0"),
        (lambda: young_interval(-1, 100), "write_s=-1"),
        (lambda: young_interval(10, 0), "mtbf_s=0"),
        (lambda: young_interval(math.nan, 100), "write_s=nan"),
        (lambda: young_interval(10, math.inf), "mtbf_s=inf"),
        (lambda: young_interval("10", 100), "write_s='10'"),
        (lambda: young_interval(50, 100), "write_s=50: needs less than half of mtbf_s=100"),
        (lambda: overhead(0, 10, 100), "interval_s=0"),
        (lambda: overhead(10, 10, 1000), "interval_s=10: the formula gives 1;"),
        (lambda: overhead(3000, 10, 1000), "interval_s=3000: the formula gives"),
        (lambda: simulate_overhead(0, 10, 100), "interval_s=0"),
        (lambda: simulate_overhead(10, 10, 100, restart_s=-1), "restart_s=-1"),
        (lambda: simulate_overhead(10, 10, 100, failure_shape=0), "failure_shape=0"),
        (lambda: simulate_overhead(10, 10, 100, num_failures=1), "num_failures=1"),
        (lambda: simulate_overhead(10, 10, 100, asynchronous="yes"), "asynchronous='yes'"),
        (lambda: simulate_overhead(10, 10, 100, seed=-1), "seed=-1"),
    ],
)
def test_the_domain_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("restart_s", [0, 600, 20_000])
@pytest.mark.parametrize("interval_s", [200, 2629, 30_000])
def test_the_simulation_equals_dalys_exact_form(interval_s, restart_s):
    run = simulate_overhead(interval_s, WRITE_S, MTBF_S, restart_s)
    assert run.share == pytest.approx(daly_share(interval_s, WRITE_S, MTBF_S, restart_s), abs=5 * run.standard_error)
    assert run.share == pytest.approx(run.writing + run.restarting + run.lost, abs=1e-9)
    assert 0 < run.standard_error < 0.005


def walked(up_times_s, interval_s, write_s, restart_s, asynchronous):
    """Kept work by walking every second between failures."""
    kept = 0
    for up_s in up_times_s:
        work = saved = in_write = since = 0
        snapshot = None
        for _ in range(max(0, up_s - restart_s)):
            if snapshot is not None:
                in_write += 1
            if snapshot is None or asynchronous:
                work, since = work + 1, since + 1
            if snapshot is not None and in_write == write_s:
                saved, snapshot = snapshot, None
            if snapshot is None and since >= interval_s:
                snapshot, in_write, since = work, 0, 0
        kept += saved
    return kept


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("interval_s", "write_s"), [(7, 3), (3, 7), (5, 5), (11, 1)])
def test_the_simulation_equals_a_walk_second_by_second(interval_s, write_s, asynchronous, monkeypatch):
    up_times_s = np.random.default_rng(1).integers(1, 80, 200)

    class Drawn:
        def weibull(self, shape, size):
            return up_times_s[:size] / 40

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Drawn())
    run = simulate_overhead(interval_s, write_s, 40, restart_s=4, asynchronous=asynchronous, num_failures=200)
    kept = walked(up_times_s.tolist(), interval_s, write_s, 4, asynchronous)
    assert run.share == pytest.approx(1 - kept / up_times_s.sum())


def best_interval(candidates_s, **kind):
    return min(candidates_s, key=lambda interval_s: simulate_overhead(interval_s, WRITE_S, MTBF_S, **kind).share)


def test_where_the_formula_is_good_and_where_it_is_not():
    young_s = young_interval(WRITE_S, MTBF_S)
    around_s = [young_s * factor for factor in (0.05, 0.25, 0.5, 0.8, 1, 1.25, 2, 4)]
    assert 0.8 * young_s <= best_interval(around_s) <= 1.25 * young_s
    # Restarts cost time that no interval saves: the optimum stays, the share does not.
    assert 0.8 * young_s <= best_interval(around_s, restart_s=3600) <= 1.25 * young_s
    formula = overhead(young_s, WRITE_S, MTBF_S)
    assert simulate_overhead(young_s, WRITE_S, MTBF_S).share == pytest.approx(formula, rel=0.05)
    assert simulate_overhead(young_s, WRITE_S, MTBF_S, restart_s=3600).share > 2 * formula
    # Saves that do not stop the work are best made all the time.
    assert best_interval(around_s, asynchronous=True) == around_s[0]


def test_equal_seeds_draw_equal_failures():
    assert simulate_overhead(300, 10, 9000, seed=4) == simulate_overhead(300, 10, 9000, seed=4)
    assert simulate_overhead(300, 10, 9000, seed=4) != simulate_overhead(300, 10, 9000, seed=5)
