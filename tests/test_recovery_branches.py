"""What a resume from less than everything does: branches, one component left out at a time, explanations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recovery_samples import TINY

from rlinfra_utils import checkpoint, policy
from rlinfra_utils.recovery import MemoryLoop, branches, explain, run_in_turns, tell, without_each
from rlinfra_utils.recovery.parts import Curriculum, Normalizer, learning_rate
from rlinfra_utils.tracing import read_run

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = replace(TINY, num_updates=6, prompts_per_step=4, group_size=4, num_prompts=16, warmup_updates=6)
CUT = 3
STATE = ["optimizer", "scheduler", "counters", "rng", "data_position", "curriculum", "normalizers"]


@pytest.fixture(scope="module")
def components():
    loop = MemoryLoop(CONFIG)
    loop.advance(CUT)
    return loop.components()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return branches(tmp_path_factory.mktemp("branches"), CONFIG, CUT)


def test_full_resume_is_the_continuous_branch_and_weights_only_parts_at_once(found):
    assert found.first_difference("full resume") is None
    assert found.first_difference("weights only") == CUT + 1
    assert found.series.groupby("branch").size().to_dict() == {
        "continuous": CONFIG.num_updates,
        "full resume": CONFIG.num_updates - CUT,
        "weights only": CONFIG.num_updates - CUT,
    }


def test_weights_only_starts_from_the_same_weights_and_says_what_else_is_gone(found):
    assert "policy" not in found.explanation.components
    assert set(STATE) | {"queue", "open_episodes"} == set(found.explanation.components)
    assert "the LR starts again at its first value" in str(found.explanation)


def test_the_loop_in_memory_trains_what_the_loop_over_files_trains(tmp_path):
    run_in_turns(tmp_path, CONFIG)
    rows = MemoryLoop(CONFIG).advance(CONFIG.num_updates)
    assert [{k: row[k] for k in stats} for row, stats in zip(rows, read_run(tmp_path).batches["stats"])] == list(
        read_run(tmp_path).batches["stats"]
    )
    assert len(tell(tmp_path).batches) == CONFIG.num_updates


def test_each_component_left_out_moves_its_own_number(components):
    rows = without_each(components, CONFIG).set_index("without")
    assert rows.loc["scheduler", ["update", "moved", "was", "is"]].tolist() == [
        1,
        "lr",
        learning_rate(CONFIG, CUT),
        learning_rate(CONFIG, 0),
    ]
    assert rows.loc["normalizers", "moved"] == "advantage_scale"
    assert rows.loc["curriculum", "moved"] == "share_hard"
    assert rows.loc["optimizer", "update"] == 1
    assert rows.loc["rng", "update"] == 1
    assert rows.loc["data_position", "moved"] == "prompts"
    assert rows.loc["queue", "moved"] == rows.loc["open_episodes", "moved"] == "mean_lag"
    still = ["versions", "rollout_schema", "decoding", "layout"]
    assert set(rows.loc[still, "moved"]) == {"nothing"}
    assert rows.loc[STATE, "update"].notna().all()


def test_moments_are_torchs_own(components):
    """A resume by hand: torch's optimizer.load_state_dict gives the state that ours gives."""
    loop = MemoryLoop(CONFIG)
    loop.advance(CUT)
    other = MemoryLoop(CONFIG, components)
    for ours, theirs in zip(
        other.learner.trainer.optimizer.state_dict()["state"].values(),
        loop.learner.trainer.optimizer.state_dict()["state"].values(),
    ):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_equal_states_have_no_explanation(components):
    explanation = explain(components, MemoryLoop(CONFIG, components).components())
    assert explanation.components == []
    assert str(explanation) == "no component differs"


@pytest.mark.parametrize("name", [name for name in checkpoint.COMPONENTS if name != "policy"])
def test_a_component_left_out_is_the_one_that_is_explained(components, name):
    assert explain(components, {k: v for k, v in components.items() if k != name}).components == [name]


def test_a_single_changed_number_in_the_moments_is_found(components):
    moments = {k: dict(v) for k, v in components["optimizer"]["moments"].items()}
    first = next(iter(moments))
    moments[first]["exp_avg"] = moments[first]["exp_avg"] + np.float32(1)
    difference = explain(components, components | {"optimizer": {"kind": "AdamW", "moments": moments}}).differences[0]
    assert (difference.component, difference.num_values) == ("optimizer", 1)
    assert difference.first == f"moments.{first}.exp_avg"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: explain(c, {"momentum": {}}), "other: 'momentum' is no component"),
        (lambda c: explain({"x": 1}, c), "full: 'x' is no component"),
        (lambda c: without_each(c, CONFIG, names=["policy"]), "names='policy': needs components"),
        (lambda c: without_each(c, CONFIG, names=["tokens"]), "names='tokens': needs components"),
    ],
)
def test_unknown_names_are_refused(components, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(components)


@pytest.mark.parametrize("cut", [0, CONFIG.num_updates, 1.5])
def test_a_cut_outside_the_run_is_refused(tmp_path, cut):
    with pytest.raises(ValueError, match=f"^cut={cut}"):
        branches(tmp_path, CONFIG, cut)


def test_an_unknown_branch_is_refused(found):
    with pytest.raises(ValueError, match="branch='half': needs one of continuous"):
        found.first_difference("half")


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), min_size=1, max_size=6))
def test_the_normalizer_is_numpys_mean_and_deviation_of_all_it_saw(batches):
    normalizer = Normalizer()
    for batch in batches:
        normalizer.add(np.array(batch))
        normalizer = Normalizer(**normalizer.to_json())
    values = np.concatenate(batches)
    assert math.isclose(normalizer.mean, values.mean(), abs_tol=1e-12)
    if values.std() > 1e-6:
        assert math.isclose(normalizer.std, values.std(), rel_tol=1e-6)


def test_the_learning_rate_rises_in_equal_steps_and_stays():
    rates = [learning_rate(CONFIG, n) for n in range(9)]
    assert rates == pytest.approx([CONFIG.lr * min(n, 6) / 6 for n in range(1, 10)])


@given(st.lists(st.floats(0, 1), max_size=40))
def test_the_curriculum_stays_a_share_and_keeps_its_answers_right(successes):
    curriculum = Curriculum()
    for correctness in successes:
        curriculum.add(correctness)
    assert 0 <= curriculum.share_hard <= 1
    prompt = curriculum.prompt(policy.prompts(1, seed=3)[0], rank=0.7)
    a, b = prompt.text.rstrip("=").split("+")
    assert prompt.answer == int(a) + int(b)
