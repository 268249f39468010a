"""A brief and its plan that the tests of `plan` change one thing of."""

from functools import cache

from rlinfra_utils import plan

FIELDS = {
    "model": "Qwen2.5-7B",
    "num_gpus": 32,
    "gpu_gib": 80,
    "group_size": 8,
    "prompts_per_step": 16,
    "prompts_per_gpu": 2,
    "prompt_tokens": 500,
    "max_new_tokens": 4096,
    "lengths": plan.Lengths(median_tokens=900, sigma=0.8),
    "generate": plan.Stage(seconds=180, at_gpus=16, serial_share=0.15),
    "train": plan.Stage(seconds=80, at_gpus=16, serial_share=0.05),
    "sync_s": 5,
    "checkpoint_write_s": 60,
    "mtbf_s": 86_400,
    "target": plan.Target(max_lag_versions=8),
}


def brief(**changes):
    return plan.Brief(**{**FIELDS, **changes})


@cache
def drawn():
    return plan.draw_up(brief())


@cache
def swept():
    """All rules, those that bound nothing too."""
    free = brief(target=plan.Target())
    return plan.sweep_rules(free, plan.splits(free))


def changed(run_plan, section, **changes):
    """The plan with fields of one section set, checked again."""
    data = run_plan.to_mapping()
    data[section] |= changes
    return plan.RunPlan.from_mapping(data)
