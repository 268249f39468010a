"""Discarding against pacing: field cases B38, B41 and B43, and rollouts that start at random instants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import pipeline

SECONDS = st.floats(0.01, 1000)


def lags(duration_s, period_s, num=2000):
    """Versions seen by rollouts that start evenly over one period, counted one publication at a time."""
    seen = []
    for start_s in period_s * (np.arange(num) + 0.5) / num:
        published_s, count = period_s, 0
        while published_s <= start_s + duration_s:
            published_s, count = published_s + period_s, count + 1
        seen.append(count)
    return np.array(seen)


def test_field_case_b38_waiting_in_the_queue_counts():
    # Sampled from 101 s to 105 s at version 10, taken at 141 s at version 14; a version every 10 s.
    assert pipeline.versions_published(101, 105, period_s=10) == 0
    assert pipeline.versions_published(101, 141, period_s=10) == 4


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 90))
def test_versions_at_times_in_decimals_are_those_of_whole_numbers(start, more, period):
    expected = sum(time % period == 0 for time in range(start + 1, start + more + 1))
    assert pipeline.versions_published(start / 10, (start + more) / 10, period / 10) == expected


@pytest.mark.parametrize(("duration_s", "expected"), [(35, {3, 4}), (5, {0, 1})])
def test_field_case_b41_versions_seen(duration_s, expected):
    seen = {pipeline.versions_published(phase_s, phase_s + duration_s, 10) for phase_s in np.arange(0.05, 10, 0.1)}
    assert seen == set(lags(duration_s, 10)) == expected


def test_field_case_b41_discarding_starves_the_long_ones():
    offered, durations_s = [0.75, 0.25], [5, 35]
    assert [pipeline.kept_share(duration_s, 10, max_lag=2) for duration_s in durations_s] == [1, 0]
    assert pipeline.consumed_mix(offered, durations_s, 10, max_lag=2).tolist() == [1, 0]


def test_field_case_b41_pacing_keeps_them():
    period_s = pipeline.paced_period_s(longest_s=35, train_s=10, max_lag=2)
    assert period_s == 17.5
    assert 10 / period_s == pytest.approx(0.571, abs=5e-4)
    assert pipeline.consumed_mix([0.75, 0.25], [5, 35], period_s, max_lag=2).tolist() == [0.75, 0.25]


def test_field_case_b43_b_outstanding():
    assert pipeline.admission_limit(batch=128, sync_interval=2, staleness_threshold=0.5) == 384
    assert pipeline.admission_limit(128, 2, 0) == 256


@given(duration_s=st.floats(0, 50), period_s=st.floats(1, 20), max_lag=st.integers(0, 5))
def test_kept_share_is_that_of_random_starts(duration_s, period_s, max_lag):
    kept = np.mean(lags(duration_s, period_s, num=400) <= max_lag)
    assert pipeline.kept_share(duration_s, period_s, max_lag) == pytest.approx(kept, abs=1 / 399)


@given(longest_s=SECONDS, train_s=SECONDS, max_lag=st.integers(1, 8))
def test_the_paced_period_is_the_shortest_that_discards_nothing(longest_s, train_s, max_lag):
    period_s = pipeline.paced_period_s(longest_s, train_s, max_lag)
    assert pipeline.kept_share(longest_s, period_s, max_lag) == pytest.approx(1)
    if period_s > train_s * 1.001:
        assert pipeline.kept_share(longest_s, 0.999 * period_s, max_lag) < 1


@given(
    kinds=st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 40)), min_size=2, max_size=5),
    max_lag=st.integers(4, 6),
)
def test_discarding_never_makes_a_batch_longer(kinds, max_lag):
    offered, durations_s = np.array(kinds).T
    consumed = pipeline.consumed_mix(offered, durations_s, 10, max_lag)
    assert consumed.sum() == pytest.approx(1)
    assert consumed @ durations_s <= np.average(durations_s, weights=offered) + 1e-9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipeline.versions_published(5, 4, 10), "end_s=4"),
        (lambda: pipeline.versions_published(-1, 4, 10), "start_s=-1"),
        (lambda: pipeline.versions_published(0, 4, 0), "period_s=0"),
        (lambda: pipeline.versions_published(0, 4, 5e-324), "end_s / period_s=inf"),
        (lambda: pipeline.kept_share(float("nan"), 10, 2), "duration_s=nan"),
        (lambda: pipeline.kept_share(5, 10, -1), "max_lag=-1"),
        (lambda: pipeline.kept_share(5, 10, 1.5), "max_lag=1.5"),
        (lambda: pipeline.consumed_mix([1, 2], [5], 10, 2), "offered has 2 kinds"),
        (lambda: pipeline.consumed_mix([0, 0], [5, 6], 10, 2), "offered=.*all are 0"),
        (lambda: pipeline.consumed_mix([1, 2], [50, 60], 10, 2), "max_lag=2: every rollout offered is discarded"),
        (lambda: pipeline.paced_period_s(35, 10, 0), "max_lag=0"),
        (lambda: pipeline.paced_period_s(35, 0, 1), "train_s=0"),
        (lambda: pipeline.paced_period_s(float("inf"), 10, 1), "longest_s=inf"),
        (lambda: pipeline.admission_limit(0, 2, 0.5), "batch=0"),
        (lambda: pipeline.admission_limit(128, 2, -0.5), "staleness_threshold=-0.5"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)
