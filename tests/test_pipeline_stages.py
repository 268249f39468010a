"""Overlapped stages and stragglers: the course's values, field cases, and a recurrence that knows no formula."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlinfra_utils import pipeline

SECONDS = st.floats(0, 1e4, allow_subnormal=False)
STAGES = st.lists(SECONDS, min_size=1, max_size=6).filter(any)
#: SkyRL, docs/content/docs/examples/spec_decode.mdx, commit 0071a0fc: seconds of a step without and with the draft.
SKYRL = {"rollout": (310.1, 152.4), "step": (400.7, 246.8)}


def last_end(stage_s, n):
    """Batch by batch: a stage starts when it is free and the batch has left the stage before."""
    free_s = [0.0] * len(stage_s)
    for _ in range(n):
        ready_s = 0.0
        for stage, time_s in enumerate(stage_s):
            free_s[stage] = ready_s = max(free_s[stage], ready_s) + time_s
    return free_s[-1]


def test_problem_p05():
    assert pipeline.sequential([45, 30], n=8) == 600
    assert pipeline.pipelined([45, 30], n=8) == 390
    assert pipeline.speedup([45, 30], n=8) == pytest.approx(1.538, abs=5e-4)


def test_step_12_3_1_an_uneven_split_gains_little():
    assert pipeline.speedup({"generate": 90, "train": 10}) == pytest.approx(1.11, abs=5e-3)
    assert pipeline.stage_utilization({"generate": 90, "train": 10}, overlapped=True)["train"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(("stage_s", "gain"), [((30, 10), 4 / 3), ((20, 20), 2), ((10, 30), 4 / 3)])
def test_field_case_b43_a_one_step_off(stage_s, gain):
    assert pipeline.sequential(stage_s, 1) == 40
    assert pipeline.speedup(stage_s) == pytest.approx(gain)


def test_field_case_b43_a_idle_trainer():
    in_turns = pipeline.stage_utilization([30, 10], overlapped=False)[1]
    overlapped = pipeline.stage_utilization([30, 10], overlapped=True)[1]
    assert 1 - in_turns == pytest.approx(0.75)
    assert 1 - overlapped == pytest.approx(0.667, abs=5e-4)


@given(stage_s=STAGES, n=st.integers(1, 40))
def test_pipelined_is_the_recurrence(stage_s, n):
    assert pipeline.pipelined(stage_s, n) == pytest.approx(last_end(stage_s, n), rel=1e-12)


@given(stage_s=STAGES, n=st.integers(1, 1000))
def test_bounds_of_a_pipeline(stage_s, n):
    total_s = pipeline.pipelined(stage_s, n)
    assert n * max(stage_s) * (1 - 1e-12) <= total_s <= pipeline.sequential(stage_s, n) * (1 + 1e-12)
    assert total_s == pytest.approx(pipeline.pipelined(stage_s[::-1], n), rel=1e-12)
    assert pipeline.pipelined(stage_s, 1) == pipeline.sequential(stage_s, 1)
    assert pipeline.pipelined(stage_s, n + 1) >= total_s
    assert 1 - 1e-12 <= pipeline.speedup(stage_s, n) <= pipeline.speedup(stage_s) * (1 + 1e-12)
    assert pipeline.speedup(stage_s) <= len(stage_s) * (1 + 1e-12)


@given(stage_s=STAGES, n=st.integers(1, 100), data=st.data())
def test_a_slower_stage_never_helps(stage_s, n, data):
    slower = list(stage_s)
    slower[data.draw(st.integers(0, len(stage_s) - 1))] += data.draw(SECONDS)
    assert pipeline.pipelined(slower, n) >= pipeline.pipelined(stage_s, n) * (1 - 1e-12)


def test_skyrl_speculative_decoding():
    assert pipeline.amdahl(0.77, 2.03) == pytest.approx(1.64, abs=5e-3)
    share = SKYRL["rollout"][0] / SKYRL["step"][0]
    factor = SKYRL["rollout"][0] / SKYRL["rollout"][1]
    measured = SKYRL["step"][0] / SKYRL["step"][1]
    assert (share, factor, measured) == pytest.approx((0.77, 2.03, 1.62), abs=5e-3)
    # The draft head also made training slower, which the law does not know.
    assert measured < pipeline.amdahl(share, factor) < 1.02 * measured


def test_amdahl_at_its_ends():
    assert pipeline.amdahl(0.5, math.inf) == 2
    assert pipeline.amdahl(1, 7) == pytest.approx(7)
    assert pipeline.amdahl(1, math.inf) == math.inf
    assert pipeline.amdahl(0, math.inf) == 1


@given(stage_s=STAGES, factor=st.floats(0.01, 100), data=st.data())
def test_gain_of_a_stage_is_amdahls_law_in_turns_and_a_beat_when_overlapped(stage_s, factor, data):
    stage = data.draw(st.integers(0, len(stage_s) - 1))
    faster = [time_s / factor if i == stage else time_s for i, time_s in enumerate(stage_s)]
    assume(any(faster))
    gain = pipeline.stage_gain(stage_s, stage, factor)
    assert gain.sequential == pytest.approx(pipeline.amdahl(stage_s[stage] / sum(stage_s), factor), rel=1e-9)
    beats_s = [last_end(times_s, 3) - last_end(times_s, 2) for times_s in (stage_s, faster)]
    assume(min(beats_s) > 1e-3)
    assert gain.overlapped == pytest.approx(beats_s[0] / beats_s[1], rel=1e-6)


def test_a_hidden_stage_made_faster_brings_nothing():
    # Step 12.3.5: 70 % of the work in turns, and yet hidden behind another pool.
    stage_s = {"decode": 70, "verifier": 10, "train": 20}
    assert pipeline.stage_gain(stage_s, "decode", 2).sequential == pytest.approx(100 / 65)
    assert pipeline.stage_gain({**stage_s, "train": 75}, "decode", 2).overlapped == 1
    assert pipeline.stage_gain(stage_s, "decode", 10).overlapped == pytest.approx(70 / 20)


def test_problem_p06_and_step_12_3_2():
    assert pipeline.utilization([4, 4, 4, 12]) == pytest.approx(0.5, abs=1e-12)
    assert pipeline.utilization([4, 4, 5, 5, 5, 6, 6, 20]) == pytest.approx(0.34375, abs=1e-12)
    assert pipeline.group_s([4, 4, 5, 5, 5, 6, 6, 20]) == 20


def test_field_case_b43_c_slots_of_a_static_batch():
    assert pipeline.utilization([1000] * 15 + [8000]) == pytest.approx(0.1797, abs=5e-5)


@given(times_s=STAGES)
def test_utilization_is_what_is_not_waiting(times_s):
    slowest_s = sorted(times_s)[-1]
    waiting_s = math.fsum(slowest_s - time_s for time_s in times_s)
    assert pipeline.utilization(times_s) == pytest.approx(1 - waiting_s / (len(times_s) * slowest_s), abs=1e-9)
    assert 1 / len(times_s) * (1 - 1e-9) <= pipeline.utilization(times_s) <= 1


@given(times_s=st.lists(st.integers(0, 50), min_size=1, max_size=4), group_size=st.integers(1, 4))
def test_mean_group_time_is_the_mean_over_all_groups(times_s, group_size):
    groups = np.stack(np.meshgrid(*[times_s] * group_size), axis=-1).reshape(-1, group_size)
    assert pipeline.mean_group_s(times_s, group_size) == pytest.approx(groups.max(axis=1).mean())


def test_squared_coefficient_of_variation():
    assert pipeline.scv([3, 3, 3]) == 0
    assert pipeline.scv([1, 3]) == pytest.approx(0.25)  # mean 2, variance 1
    assert pipeline.scv([5e-324, 0, 0]) == pytest.approx(2)
    assert pipeline.scv(np.random.default_rng(0).exponential(7, 200_000)) == pytest.approx(1, abs=0.03)


def test_informative_groups():
    # Nine groups in ten with equal rewards: course step 12.2.5.
    assert pipeline.informative_groups_per_s(20, 0.9) == pytest.approx(2)
    assert pipeline.informative_groups_per_s(20, 1) == 0
    assert pipeline.informative_groups_per_s(20, 0) == 20
