"""Effective sample size and its kin, against fractions, decimals, closed forms and properties."""

import itertools
import math
from decimal import Decimal, getcontext
from fractions import Fraction
from functools import reduce
from operator import add
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlinfra_utils.offpolicy import WeightStats, ess, ess_from_log, normalized_ess, normalized_ess_from_log

log_weights = st.lists(st.floats(-300, 300), min_size=1, max_size=30)


def test_one_weight_dominates_p08():
    assert ess([1, 1, 1, 5]) == pytest.approx(16 / 7, rel=1e-14)
    assert normalized_ess([1, 1, 1, 5]) == pytest.approx(4 / 7, rel=1e-14)
    logs = np.log([1, 1, 1, 5]) + 5_000.0  # exp(5000) is beyond float64
    assert ess_from_log(logs) == pytest.approx(16 / 7, rel=1e-11)
    assert normalized_ess_from_log(logs - 10_000.0) == pytest.approx(4 / 7, rel=1e-11)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_ess_equals_exact_fractions(weights):
    assume(any(weights))
    exact = Fraction(sum(weights) ** 2, sum(w * w for w in weights))
    assert ess(weights) == pytest.approx(float(exact), rel=1e-12)
    assert normalized_ess(weights) == pytest.approx(float(exact / len(weights)), rel=1e-12)


@given(log_weights)
def test_statistics_equal_fifty_digits(logs):
    getcontext().prec = 50
    weights = [Decimal(x).exp() for x in logs]
    stats, n = WeightStats.of(logs), len(logs)
    assert stats.ess == pytest.approx(float(sum(weights) ** 2 / sum(w * w for w in weights)), rel=1e-11)
    assert stats.mean == pytest.approx(float(sum(weights) / n), rel=1e-11)
    assert stats.chi_square == pytest.approx(float(sum(w * w for w in weights) / n - 1), rel=1e-11, abs=1e-14)
    assert stats.mean_log == pytest.approx(math.fsum(logs) / n, rel=1e-12, abs=1e-12)
    assert stats.mean_abs_log == pytest.approx(math.fsum(map(abs, logs)) / n, rel=1e-12)
    assert stats.max_abs_log == max(map(abs, logs))


@given(log_weights, st.floats(-1e4, 1e4), st.randoms(use_true_random=False))
def test_ess_is_between_1_and_n_and_knows_neither_order_nor_scale(logs, shift, random):
    n, value = len(logs), ess_from_log(logs)
    assert 1 - 1e-12 <= value <= n * (1 + 1e-12)
    assert normalized_ess_from_log([x + shift for x in logs]) == pytest.approx(value / n, rel=1e-9)
    random.shuffle(logs)
    assert ess_from_log(logs) == pytest.approx(value, rel=1e-12)


def test_equal_weights_count_fully_and_zero_weights_not_at_all():
    assert ess([0.25] * 7) == pytest.approx(7)
    assert ess([3, 0, 0, 3]) == pytest.approx(2)
    assert normalized_ess([3, 0, 0, 3]) == pytest.approx(0.5)
    assert ess_from_log([-np.inf, 2.0, 2.0]) == pytest.approx(2)
    assert normalized_ess_from_log([-np.inf, 2.0, 2.0]) == pytest.approx(2 / 3)
    assert normalized_ess([5]) == 1.0


def test_log_normal_noise_of_the_field_case_b19():
    """E[ratio] = 1 and standard deviation 0.02 a token: normalised ESS of T tokens is exp(-T sigma^2)."""
    sigma, num = 0.02, 20_000
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)])
    one_token = normalized_ess_from_log(-(sigma**2) / 2 + sigma * quantiles)  # independent tokens multiply
    assert one_token**1_000 == pytest.approx(0.670320, abs=1e-3)
    assert one_token**9_000 == pytest.approx(0.027324, abs=1e-3)
    rng = np.random.default_rng(0)
    answers = rng.normal(-(sigma**2) / 2, sigma, (20_000, 1_000)).sum(axis=1)
    assert normalized_ess_from_log(answers) == pytest.approx(0.670320, abs=0.02)


def test_two_point_noise_has_an_exact_closed_form():
    """Every answer of 12 tokens whose log-ratio is +s or -s, once each: E[w] = cosh(s)^12, E[w^2] = cosh(2 s)^12."""
    s, num_tokens = 0.4, 12
    answers = [s * sum(signs) for signs in itertools.product((1, -1), repeat=num_tokens)]
    expected = (math.cosh(s) ** 2 / math.cosh(2 * s)) ** num_tokens
    assert normalized_ess_from_log(answers) == pytest.approx(expected, rel=1e-12)
    stats = WeightStats.of(answers)
    assert stats.mean == pytest.approx(math.cosh(s) ** num_tokens, rel=1e-12)
    assert stats.chi_square == pytest.approx(math.cosh(2 * s) ** num_tokens - 1, rel=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_ess_mean_and_chi_square_are_bound_together(logs):
    stats = WeightStats.of(logs)
    assert stats.normalized_ess == pytest.approx(stats.mean**2 / (1 + stats.chi_square), rel=1e-9)


@given(st.lists(st.lists(st.floats(-2_000, 2_000), max_size=8), min_size=1, max_size=6))
def test_parts_merge_to_the_whole(parts):
    whole = WeightStats.of([x for part in parts for x in part])
    merged = reduce(add, map(WeightStats.of, parts))
    assert (merged.num, merged.min_log, merged.max_log) == (whole.num, whole.min_log, whole.max_log)
    for name in ("sum_log", "sum_abs_log", "sum_relative", "sum_sq_relative"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-12, abs=1e-9)


def test_no_weights_are_undefined_and_merge_without_effect():
    nothing, some = WeightStats.of([]), WeightStats.of([0.5, -1.0])
    for name in ("mean", "mean_log", "mean_abs_log", "max_abs_log", "ess", "normalized_ess", "chi_square"):
        assert math.isnan(getattr(nothing, name)), name
    assert nothing + some == some == some + nothing
    assert (nothing + nothing).num == 0


def test_what_exceeds_float64_is_inf_and_the_logs_are_not():
    stats = WeightStats.of([900.0, 901.0])
    assert (stats.mean, stats.chi_square) == (math.inf, math.inf)
    assert stats.ess == pytest.approx((1 + math.e) ** 2 / (1 + math.e**2))
    assert stats.mean_log == 900.5


BAD = {
    "empty group": (ess, [], r"weights: shape \(0,\)"),
    "empty logs": (ess_from_log, [], r"log_weights: shape \(0,\)"),
    "all zero": (ess, [0, 0], "weights: all 2 weights are 0; .* undefined"),
    "all zero logs": (normalized_ess_from_log, [-math.inf], "log_weights: all 1 weights are 0"),
    "negative": (normalized_ess, [1, -2], r"weights\[1\]=-2: needs a finite number"),
    "nan": (ess, [1, math.nan], r"weights\[1\]=nan"),
    "missing": (ess, [1, None], r"weights\[1\]=nan"),
    "inf": (ess, [math.inf], r"weights\[0\]=inf"),
    "nan log": (ess_from_log, [0.0, math.nan], r"log_weights\[1\]=nan"),
    "inf log": (ess_from_log, [math.inf], r"log_weights\[0\]=inf"),
    "a table": (ess, [[1, 2]], r"weights: shape \(1, 2\)"),
    "one number": (ess, 3.0, r"weights: shape \(\)"),
    "text": (ess, ["1", "2"], "weights: holds .* needs numbers"),
    "ragged": (ess, [[1], [2, 3]], "weights: rows of unequal length"),
    "nan in statistics": (WeightStats.of, [0.0, math.nan], r"log_weights\[1\]=nan: is not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_are_named_in_one_line(name):
    function, weights, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        function(weights)
    assert "\n" not in str(caught.value)
