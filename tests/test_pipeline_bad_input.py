"""Stages, stragglers and waits: everything malformed ends in one line that names the field."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import pipeline

#: Functions of one row of durations, and the name that their error must give.
ROWS = {
    "stage_s": [
        lambda x: pipeline.sequential(x, 1),
        lambda x: pipeline.pipelined(x, 1),
        lambda x: pipeline.stage_utilization(x, overlapped=True),
        lambda x: pipeline.stage_gain(x, 0, 2),
        pipeline.speedup,
    ],
    "durations_s": [pipeline.utilization, pipeline.group_s, lambda x: pipeline.mean_group_s(x, 2), pipeline.scv],
}
CALLS = [(name, call) for name, calls in ROWS.items() for call in calls]
BAD_ROWS = [
    [],
    (),
    {},
    np.array([]),
    [-1, 2],
    [1, math.nan],
    [1, math.inf],
    [1, 1e300],
    np.ones((2, 2)),
    np.array([1, 2j]),
    [[1, 2], [3]],
    ["1", "2"],
    [1, "2"],
    [1, None],
    [True, 2],
    {1, 2},
    "45, 30",
    45,
    None,
    [10**400],
]


def refused(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: repr(row).replace("\n", "")[:30])
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_bad_rows_are_refused(name, call, row):
    refused(lambda: call(row), rf"^{name}(\[\d+\])?=")


def test_the_bad_entry_is_named():
    refused(lambda: pipeline.sequential([45, -30], 8), r"stage_s\[1\]=-30")
    refused(lambda: pipeline.sequential({"generate": 45, "train": math.nan}, 8), r"stage_s\['train'\]=nan")
    refused(lambda: pipeline.sequential([45, None], 8), r"\[1\]=None is none")


@pytest.mark.parametrize("call", [pipeline.sequential, pipeline.pipelined, pipeline.speedup])
@pytest.mark.parametrize("n", [0, -1, 8.5, True, "8", math.nan, 2**60])
def test_bad_counts_are_refused(call, n):
    refused(lambda: call([45, 30], n), "n=")


@pytest.mark.parametrize("call", [lambda x: pipeline.sequential(x, 1), pipeline.utilization, pipeline.scv])
def test_all_zero_is_refused_where_a_share_is_asked_for(call):
    refused(lambda: call([0, 0.0]), "all are 0")
    refused(lambda: pipeline.speedup({"generate": 0}), "all are 0")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipeline.amdahl(1.1, 2), "share=1.1"),
        (lambda: pipeline.amdahl(77, 2), "share=77"),
        (lambda: pipeline.amdahl(0.5, 0), "factor=0"),
        (lambda: pipeline.amdahl(0.5, math.nan), "factor=nan"),
        (lambda: pipeline.stage_gain([45, 30], 2, 2), "stage=2: stage_s has 0, 1"),
        (lambda: pipeline.stage_gain({"generate": 45}, "train", 2), "stage='train': stage_s has 'generate'"),
        (lambda: pipeline.stage_gain([45, 30], [0], 2), r"stage=\[0\]"),
        (lambda: pipeline.stage_gain([45, 30], 0, math.inf), "factor=inf"),
        (lambda: pipeline.mean_group_s([1, 2], 0), "group_size=0"),
        (lambda: pipeline.informative_groups_per_s(-1, 0.5), "groups_per_s=-1"),
        (lambda: pipeline.informative_groups_per_s(1, 90), "degenerate_share=90"),
        (lambda: pipeline.mm1_wait_s(-1, 1), "arrival_per_s=-1"),
        (lambda: pipeline.mm1_wait_s(1, math.nan), "service_s=nan"),
        (lambda: pipeline.md1_wait_s("1", 1), "arrival_per_s='1'"),
        (lambda: pipeline.mg1_wait_s(0.5, 1, -1), "service_scv=-1"),
        (lambda: pipeline.mg1_wait_s(0.5, 1, math.inf), "service_scv=inf: the mean wait is infinite at any load"),
        (lambda: pipeline.mg1_wait_s(0.5, 1, math.nan), "service_scv=nan"),
        (lambda: pipeline.Rate(-1, "tokens/s"), "value=-1"),
        (lambda: pipeline.Rate(1, "tokens/s").counted_in("rollouts", each=0), "each=0"),
        (lambda: pipeline.Rate(1, "rollouts/s").counted_in("samples", each=2), "unit='samples/s'"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    refused(call, message)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.floats(), max_size=3)
)


@given(first=JUNK, second=JUNK, third=JUNK)
def test_whatever_comes_in_is_answered_or_refused_in_one_line(first, second, third):
    calls = [
        lambda: pipeline.sequential(first, second),
        lambda: pipeline.pipelined(first, second),
        lambda: pipeline.stage_gain(first, second, third),
        lambda: pipeline.amdahl(first, second),
        lambda: pipeline.mean_group_s(first, second),
        lambda: pipeline.mg1_wait_s(first, second, third),
        lambda: pipeline.queue_check(first, second),
        lambda: pipeline.littles_law(first, second, third),
        lambda: pipeline.Rate(first, second),
        lambda: pipeline.kept_share(first, second, third),
        lambda: pipeline.versions_published(first, second, third),
        lambda: pipeline.paced_period_s(first, second, third),
        lambda: pipeline.consumed_mix(first, second, third, 2),
        lambda: pipeline.best_split({"train": {8: first}}, second),
        lambda: pipeline.loop_period_s(first, 8, second, third),
        lambda: pipeline.Tail(first, second, third),
    ]
    for call in calls:
        message = None
        try:
            call()
        except ValueError as error:
            message = str(error)
        assert message is None or ("=" in message and "\n" not in message), message
