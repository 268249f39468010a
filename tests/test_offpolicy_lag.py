"""Lag in versions: by rollout, by token over spans, and refused across branches."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.offpolicy import is_fresh, lag
from rlinfra_utils.rollouts import Rollout, VersionSpan


def test_four_rollouts_of_problem_p09():
    lags = lag(112, [108, 109, 110, 110])
    assert lags.tolist() == [4, 3, 2, 2]
    assert (lags.mean(), lags.max()) == (2.75, 4)


def test_waiting_in_a_queue_counts_b38():
    assert lag(14, 10) == 4  # no update while it was generated: an in-flight counter would say 0
    oldest, newest = lag(14, [10, 13])
    assert (oldest, newest) == (4, 1)


def test_the_limit_is_inclusive_b38():
    lags = lag(6, [5, 6])
    assert not is_fresh(lags, 0).all()
    assert is_fresh(lags, 1).all()
    assert [is_fresh(n, 2) for n in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("as_span", [lambda a, b, v: VersionSpan(start=a, end=b, version=v), None])
def test_a_rollout_over_an_update_has_a_lag_by_token_b44(as_span):
    as_span = as_span or (lambda a, b, v: {"start": a, "end": b, "version": v})
    lags = lag(9, [as_span(0, 57, 7), as_span(57, 128, 8)])
    assert lags.shape == (128,)
    assert lags.max() == 2
    assert lags.mean() == 185 / 128
    assert is_fresh(lags, 1).sum() == 71


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=6), st.integers(50, 99))
def test_spans_agree_with_the_record(pieces, current):
    spans, start = [], 0
    for length, version in pieces:
        spans.append(VersionSpan(start=start, end=start + length, version=version))
        start += length
    record = Rollout(response_tokens=[1] * start, version_spans=spans)
    assert lag(current, spans).tolist() == [current - v for v in record.versions()]


def test_shapes_and_types():
    assert type(lag(3, 1)) is int
    assert type(is_fresh(2, 2)) is bool
    assert lag(np.int64(7), np.array([[1, 2], [3, 4]], dtype=np.uint8)).tolist() == [[6, 5], [4, 3]]


def test_a_branched_run_names_the_branch_on_both_sides():
    # Restarted from 105: version 107 of the abandoned branch is no ancestor of the restarted 108.
    assert lag(108, [106, 107], branch_id="b", branch_ids=["b", "b"]).tolist() == [2, 1]
    assert lag(108, [106, 107], branch_id="b", branch_ids="b").tolist() == [2, 1]
    spans = [VersionSpan(start=0, end=2, version=106), VersionSpan(start=2, end=3, version=107)]
    assert lag(108, spans, branch_id="b", branch_ids="b").tolist() == [2, 2, 1]


BAD = {
    "other branch": ((108, [106, 107], "b", ["b", "a"]), r"branch_ids\[1\]='a': the trainer is on 'b'"),
    "one side only": ((108, 106, None, "a"), "branch_id: missing"),
    "trainer only": ((108, 106, "b"), "branch_ids: missing"),
    "ids do not line up": ((108, [106, 107], "b", ["b"]), "branch_ids: 1 for 2 versions"),
    "record without an id": ((108, [106], "b", [None]), r"branch_ids\[0\]=None"),
    "future": ((5, [4, 6]), "versions: 6 is above current_version=5"),
    "negative": ((5, [-1]), "versions: -1 is negative"),
    "missing version": ((5, [4, None]), r"versions=\[4, None\]: needs whole numbers"),
    "fraction": ((5, 4.5), r"versions=4.5: needs whole numbers"),
    "text": ((5, "4"), "versions='4': needs whole numbers"),
    "bool among numbers": ((5, [4, True]), r"versions=\[4, True\]: needs whole numbers"),
    "beyond 64 bits": ((5, 2**63), r"versions: 9223372036854775808 is above 2\*\*53"),
    "beyond any type": ((10**5000, 5), "current_version=<int>: needs one whole number"),
    "bool": ((True, 0), "current_version=True: needs one whole number"),
    "several trainers": (([5, 6], 4), r"current_version=\[5, 6\]: needs one whole number"),
    "empty": ((5, []), r"versions=\[\]: needs whole numbers"),
    "ragged": ((5, [[1, 2], [3]]), "versions: rows of unequal length"),
    "gap": ((5, [{"start": 0, "end": 2, "version": 1}, {"start": 3, "end": 4, "version": 2}]), r"versions\[1\]: span"),
    "late start": ((5, [{"start": 1, "end": 2, "version": 1}]), r"versions\[0\]: span \[1, 2\) must begin at 0"),
    "empty span": ((5, [{"start": 0, "end": 0, "version": 1}]), r"versions\[0\]: span \[0, 0\)"),
    "span without end": ((5, [{"start": 0, "version": 1}]), r"versions\[0\]: needs start, end and version"),
    "span and number": ((5, [{"start": 0, "end": 1, "version": 1}, 3]), r"versions\[1\]: needs start"),
    "number and span": ((5, [3, {"start": 0, "end": 1, "version": 1}]), "versions=.*: needs whole numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_versions_are_named_in_one_line(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        lag(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lags", [-1, [2, -1], 1.5, None, "2", [[1], [1, 2]]])
def test_bad_lags_are_not_fresh(lags):
    with pytest.raises(ValueError, match=r"^lags"):
        is_fresh(lags, 2)


@pytest.mark.parametrize("limit", [-1, 1.5, None, "2"])
def test_bad_limits(limit):
    with pytest.raises(ValueError, match=f"max_lag.*{re.escape(str(limit))}"):
        is_fresh([1, 2], limit)
