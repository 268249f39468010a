"""A small complete checkpoint for the tests: every component has something to lose."""

import numpy as np

from rlinfra_utils.checkpoint import DataPosition, rollout_schema


def components(step=80, **changes):
    """All fourteen components at `step`; `changes` replace some, None drops one."""
    rng = np.random.default_rng(step)
    values = {
        "policy": {"embed.weight": rng.normal(size=(8, 4)).astype("f4"), "head.weight": rng.normal(size=(4, 8))},
        "optimizer": {
            "state": {"0": {"step": step, "exp_avg": rng.normal(size=(8, 4)), "exp_avg_sq": rng.random((8, 4))}},
            "param_groups": [{"lr": 1e-4, "betas": [0.9, 0.999], "params": [0]}],
        },
        "scheduler": {"last_epoch": step, "base_lrs": [1e-4]},
        "counters": {"global_step": step, "policy_version": step},
        "rng": {"numpy": rng.bit_generator.state},
        "data_position": DataPosition(1000, "a" * 64, 7, frontier=4 * step).trained([4 * step + 2]).to_component(),
        "curriculum": {"level": 2, "weights": [0.5, 0.5]},
        "normalizers": {"reward": {"mean": 0.25, "var": 0.1, "count": 32.0 * step}},
        "versions": {
            "tokenizer": "t1",
            "chat_template": "c1",
            "verifier": "v1",
            "environment": "e1",
            "engine": {"version": "vllm 0.11", "precision": "bfloat16", "quantization": None, "adapters": None},
        },
        "rollout_schema": rollout_schema(),
        "decoding": {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "logprobs_mode": "processed"},
        "layout": {"world_size": 1},
        "queue": {"rollouts": [{"sample_id": "s1", "policy_version": step - 1}], "lost": []},
        "open_episodes": {"episodes": [], "lost": ["episode-3"]},
    }
    values.update(changes)
    return {name: value for name, value in values.items() if value is not None}


def same(left, right):
    """Equal trees, arrays by type, shape and bits."""
    if isinstance(left, np.ndarray):
        alike = isinstance(right, np.ndarray) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))
