"""The best pool split against all splits, and verl's published table."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import pipeline
from rlinfra_utils.pipeline import best_split, scaling_curve

#: verl, docs/advance/fully_async.md, commit 1947b755: Qwen2.5-Math-7B on H20, seconds of a step by number of GPUs.
COLOCATED_STEP_S = {32: 790.10, 64: 365.28, 128: 356.30}
GENERATE_S = {32: 357.41, 64: 150.72, 128: 177.85}
OLD_LOGPROB_S = {32: 107.71, 64: 70.26, 128: 53.92}
UPDATE_S = {32: 269.80, 64: 133.41, 128: 113.81}
ASYNC_STEP_S = 150.63  # 64 GPUs generate, 64 train; no old log-probs

TABLE = st.dictionaries(st.integers(1, 12), st.integers(0, 20), min_size=1)


def shortest_period(tables, num_gpus):
    """Every combination of counts, one after the other."""
    periods_s = [
        max(table[count] for table, count in zip(tables, counts))
        for counts in itertools.product(*tables)
        if sum(counts) <= num_gpus
    ]
    return min(periods_s, default=None)


@given(tables=st.lists(TABLE, min_size=1, max_size=4), num_gpus=st.integers(1, 30))
def test_no_other_split_is_faster(tables, num_gpus):
    curves = {f"stage {i}": table for i, table in enumerate(tables)}
    expected_s = shortest_period(tables, num_gpus)
    if expected_s is None:
        with pytest.raises(ValueError, match="no split fits"):
            best_split(curves, num_gpus)
        return
    split = best_split(curves, num_gpus)
    assert split.period_s == expected_s
    assert split.stage_s == {stage: curves[stage][gpus] for stage, gpus in split.gpus.items()}
    assert split.stage_s[split.bottleneck] == split.period_s
    assert sum(split.gpus.values()) + split.idle_gpus == num_gpus
    for stage, gpus in split.gpus.items():  # none could do with fewer
        assert not any(fewer < gpus and time_s <= expected_s for fewer, time_s in curves[stage].items())


@given(
    points=st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1)), min_size=1, max_size=3),
    num_gpus=st.integers(3, 24),
)
def test_functions_are_asked_for_every_count(points, num_gpus):
    curves = {f"stage {i}": scaling_curve(time_s, num_gpus, serial) for i, (time_s, serial) in enumerate(points)}
    tables = [{gpus: curve(gpus) for gpus in range(1, num_gpus + 1)} for curve in curves.values()]
    assert best_split(curves, num_gpus).period_s == shortest_period(tables, num_gpus)


@given(stage_s=st.lists(st.floats(0.01, 1000), min_size=1, max_size=4), num_gpus=st.integers(4, 200))
def test_constant_work_gains_nothing_over_taking_turns(stage_s, num_gpus):
    split = best_split({str(i): scaling_curve(time_s, num_gpus) for i, time_s in enumerate(stage_s)}, num_gpus)
    assert split.period_s >= pipeline.sequential(stage_s, 1) * (1 - 1e-9)


def test_verl_halves_of_constant_work_give_no_gain():
    trainer_s = OLD_LOGPROB_S[128] + UPDATE_S[128]
    halves_s = [scaling_curve(GENERATE_S[128], 128)(64), scaling_curve(trainer_s, 128)(64)]
    assert halves_s == pytest.approx([355.7, 335.5], abs=0.05)
    assert COLOCATED_STEP_S[128] / max(halves_s) == pytest.approx(1.0, abs=0.01)
    curves = {"generate": scaling_curve(GENERATE_S[128], 128), "train": scaling_curve(trainer_s, 128)}
    assert COLOCATED_STEP_S[128] / best_split(curves, 128).period_s == pytest.approx(1.0, abs=0.05)


def test_verl_measured_curves_give_the_published_gain():
    split = best_split({"generate": GENERATE_S, "train": UPDATE_S}, 128)
    assert split.gpus == {"generate": 64, "train": 64}
    assert split.period_s == pytest.approx(ASYNC_STEP_S, rel=0.01)
    assert COLOCATED_STEP_S[128] / split.period_s == pytest.approx(2.37, abs=0.01)
    # With the old log-probs still computed in the trainer's pool, most of it would be gone.
    trainer_s = {gpus: OLD_LOGPROB_S[gpus] + UPDATE_S[gpus] for gpus in UPDATE_S}
    kept = best_split({"generate": GENERATE_S, "train": trainer_s}, 128)
    assert COLOCATED_STEP_S[128] / kept.period_s == pytest.approx(1.75, abs=0.01)


def test_verl_baseline_had_stopped_scaling():
    assert COLOCATED_STEP_S[32] / COLOCATED_STEP_S[64] > 2
    assert COLOCATED_STEP_S[64] / COLOCATED_STEP_S[128] < 1.03
    # So with half of the GPUs in turns the overlapped 128 keep nearly all of the gain.
    split = best_split({"generate": GENERATE_S, "train": UPDATE_S}, 128)
    assert COLOCATED_STEP_S[64] / split.period_s > 2.35


def test_verl_at_64_gpus_gained_more_than_its_curves_say():
    # A curve of whole batches says nothing of what streaming brings: the wait for a batch's slowest rollout is in it.
    split = best_split({"generate": GENERATE_S, "train": UPDATE_S}, 64)
    assert COLOCATED_STEP_S[64] / split.period_s == pytest.approx(1.02, abs=0.01)
    assert COLOCATED_STEP_S[64] / 189.26 > 1.9  # published for 32 and 32


def test_more_gpus_than_help_stay_idle():
    split = best_split({"generate": {8: 40, 16: 30, 32: 45}, "train": {8: 30, 16: 20}}, 64)
    assert split.gpus == {"generate": 16, "train": 8}
    assert split.idle_gpus == 40
    assert split.bottleneck == "generate"


def test_infinity_says_that_a_stage_does_not_fit():
    def train(gpus):
        return math.inf if gpus < 4 else 100 / gpus

    assert best_split({"generate": scaling_curve(10, 1), "train": train}, 5).gpus["train"] == 4
    with pytest.raises(ValueError, match=r"num_gpus=4: no split fits, .*'generate': 1, 'train': 4"):
        best_split({"generate": scaling_curve(10, 1), "train": train}, 4)


@pytest.mark.parametrize(
    ("curves", "num_gpus", "message"),
    [
        ({}, 8, "curves="),
        ([{1: 2}], 8, "curves="),
        ({"train": {}}, 8, "no split fits"),
        ({"train": 30}, 8, r"curves\['train'\]=30"),
        ({"train": {8: -1}}, 8, r"curves\['train'\] at 8 GPUs=-1"),
        ({"train": {8: math.nan}}, 8, r"curves\['train'\] at 8 GPUs=nan"),
        ({"train": {0: 1}}, 8, r"curves\['train'\]: GPUs=0"),
        ({"train": {1.5: 1}}, 8, r"curves\['train'\]: GPUs=1.5"),
        ({"train": lambda gpus: None}, 8, r"curves\['train'\] at 1 GPUs=None"),
        ({"train": {1: 2}}, 0, "num_gpus=0"),
        ({"train": {1: 2}}, 2.5, "num_gpus=2.5"),
        ({"train": lambda gpus: 1.0}, 2**40, "num_gpus=1099511627776"),
    ],
)
def test_bad_curves_are_refused(curves, num_gpus, message):
    with pytest.raises(ValueError, match=message) as refused:
        best_split(curves, num_gpus)
    assert "\n" not in str(refused.value)
