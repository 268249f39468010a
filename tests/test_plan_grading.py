"""A rubric that can fail: each line is failed by one change, and passes by the change that it asks for."""

import pytest
from plan_samples import brief, changed

from rlinfra_utils import plan
from rlinfra_utils.plan.runplan import PREFLIGHT

FACTS = dict.fromkeys(plan.FACTS, "trace of 2026-11-29")

FAILS = {
    "memory fits with a margin": lambda p: changed(p, "brief", prompts_per_gpu=60),
    "split near the crossing": lambda p: changed(p, "pools", generate_gpus=8, train_gpus=24),
    "staleness bounded, with its unit": lambda p: changed(
        p, "queue", controller="bounded_queue", options={"max_rollouts": 64}, bound_versions=None, bound_of="nothing"
    ),
    "target met": lambda p: changed(p, "brief", target={"updates_per_day": 1e6}),
    "bias of lengths declared": lambda p: changed(p, "predicted", trained_length_ratio=0.9),
    "contract names versions and log-probs": lambda p: changed(
        p, "contract", required_fields=[name for name in p.contract.required_fields if name != "verifier_version"]
    ),
    "updates verified, lag 0 checked": lambda p: changed(p, "sync", verify_each_update=False),
    "checkpoints near Young's interval": lambda p: changed(p, "recovery", interval_s=0.4 * p.recovery.young_s),
    "restart declared": lambda p: changed(p, "recovery", save_data_position=False),
    "alerts in keeping with the plan": lambda p: changed(
        p, "alerts", checkpoint_age={"value": 1, "unit": "s", "because": "a guess"}
    ),
    "numbers measured": lambda p: changed(p, "brief", measured={}),
}


@pytest.fixture(scope="module")
def complete():
    """A plan that passes each line."""
    p = plan.draw_up(brief(measured=FACTS, zero_lag_nats=0.01))
    for step in PREFLIGHT:
        p = p.with_evidence(step, "as it has to be", ok=True)
    return p


def test_a_complete_plan_has_no_open_line(complete):
    assert plan.grade(complete).open == []


@pytest.mark.parametrize("name", FAILS)
def test_each_line_can_fail(complete, name):
    rubric = plan.grade(FAILS[name](complete))
    assert not rubric[name].passed
    assert rubric[name].todo
    assert [line.name for line in rubric.open if line.name != name] == []


@pytest.mark.parametrize("step", PREFLIGHT)
def test_each_preflight_step_is_open_until_it_is_done_and_good(complete, step):
    title = PREFLIGHT[step][0]
    without = complete.to_mapping()
    del without["evidence"][step]
    assert not plan.grade(plan.RunPlan.from_mapping(without))[title].passed
    assert not plan.grade(complete.with_evidence(step, "it broke", ok=False))[title].passed


@pytest.mark.parametrize(
    ("mode", "name"),
    [("raw", "contract names versions and log-probs"), (None, "contract names versions and log-probs")],
)
def test_log_probs_of_another_distribution_are_no_contract(complete, mode, name):
    decoding = {**complete.contract.decoding, "logprobs_mode": mode}
    assert not plan.grade(changed(complete, "contract", decoding=decoding))[name].passed


def test_a_bound_of_the_mean_is_not_one_of_each_rollout(complete):
    options = {"max_lag": 2, "concurrency": 64}
    p = changed(complete, "queue", controller="areal", options=options, bound_of="the mean", over_age="train")
    assert not plan.grade(p)["staleness bounded, with its unit"].passed


def test_a_lower_bound_of_memory_does_not_pass():
    p = plan.draw_up(brief(model="gpt-oss-20b", num_gpus=32, prompts_per_gpu=1, max_new_tokens=1024))
    line = plan.grade(p)["memory fits with a margin"]
    assert not line.passed
    assert "lower bound" in line.reason


def test_there_is_no_total(complete):
    rubric = plan.grade(complete)
    assert not any(hasattr(rubric, name) for name in ("score", "total", "points"))
    assert list(rubric.frame()["name"])[-8:] == [title for title, _ in PREFLIGHT.values()]


def test_text_in_a_plan_is_escaped(complete):
    p = complete.with_evidence("memory", "<script>alert(1)</script>", ok=True)
    assert "<script>" not in plan.grade(p)._repr_html_()
