"""Gap series: the numbers of field cases B52 and B53, and series that must not raise an alarm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.mismatch import CAUSES
from rlinfra_utils.sync import hidden_lag, read_gaps


def test_b52_breaks_at_step_three_by_13_4():
    found = read_gaps([0.010, 0.018, 0.201], reference=[0.010, 0.018, 0.015], updates=[0, 0, 1])
    assert (found.cause, found.index) == ("stale_weights", 2)
    assert found.ratio == pytest.approx(13.4)
    assert "first real update" in found.sentence
    assert "not precision" in found.sentence


def test_b52_from_the_numbers_alone():
    found = read_gaps([0.010, 0.018, 0.201], reference=[0.010, 0.018, 0.015])
    assert (found.cause, found.index, round(found.ratio, 1)) == ("stale_weights", 2, 13.4)
    assert "at once" in str(found)


def test_b52_does_not_heal_at_a_restart():
    found = read_gaps([0.01, 0.2, 0.21, 0.22, 0.23], reference=0.01, restarts=[3])
    assert found.cause == "stale_weights"


def test_b53_hidden_lag_is_17():
    assert hidden_lag(20, [3]) == hidden_lag(20, [20, 3, 11]) == 17
    assert hidden_lag(20, [20, 20]) == hidden_lag(20, []) == 0
    with pytest.raises(ValueError, match=r"block_versions\[0\]=21"):
        hidden_lag(20, [21])


def test_b53_grows_with_updates_and_is_gone_after_the_restart():
    rising = [0.01 * lag for lag in range(1, 18)]
    found = read_gaps([*rising, 0.01, 0.02, 0.03], reference=0.01, restarts=[17])
    assert (found.cause, found.index) == ("stale_kv", 2)


def test_growth_alone_cannot_be_told():
    found = read_gaps([0.01 * lag for lag in range(1, 18)], reference=0.01)
    assert found.cause == "cannot_be_told"
    assert "restart" in found.sentence


def test_a_gap_before_any_update_is_no_sync():
    assert read_gaps([0.2, 0.2, 0.2], reference=0.01).cause == "before_any_update"


def test_causes_have_the_names_of_the_diagnoser():
    assert {"stale_weights", "stale_kv"} <= CAUSES.keys()


@given(st.lists(st.floats(0.010, 0.029), min_size=1, max_size=30))
def test_noise_below_three_times_is_silent(gaps):
    assert read_gaps(gaps, reference=0.010).cause == "no_break"


@given(st.floats(0.4, 5), st.integers(2, 12), st.integers(1, 5))
def test_any_jump_at_the_first_update_is_stale_weights(height, later, warm_up):
    updates = [0] * warm_up + list(range(1, later + 1))
    found = read_gaps([0.01] * warm_up + [height] * later, updates=updates)
    assert (found.cause, found.index) == ("stale_weights", warm_up)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gaps": []}, "gaps"),
        ({"gaps": [0.1, float("nan")]}, "gaps"),
        ({"gaps": [0.1, -0.2]}, "gaps"),
        ({"gaps": "abc"}, "gaps"),
        ({"gaps": [0.0, 0.1]}, "reference"),
        ({"gaps": [0.1, 0.1], "reference": [0.1]}, "reference"),
        ({"gaps": [0.1, 0.1], "reference": 0}, "reference"),
        ({"gaps": [0.1, 0.1], "restarts": [2]}, "restarts"),
        ({"gaps": [0.1, 0.1], "restarts": None}, "restarts=None"),
        ({"gaps": [0.1, 0.1], "updates": [1, 0]}, "updates"),
        ({"gaps": [0.1, 0.1], "updates": [1]}, "updates"),
    ],
)
def test_bad_series_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        read_gaps(**arguments)
