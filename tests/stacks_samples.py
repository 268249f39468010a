"""Rollouts written in each stack's own form, for tests of the adapters: the way back, written by hand.

`Written` is what was sampled; `FORMS[kind](written, index)` is a payload and the row in which it lies. Batches hold a
second, longer row, so that padding appears on the side where the stack has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAD = 0
OTHER_PROMPT, OTHER_RESPONSE = [9] * 12, [8] * 14


@dataclass
class Written:
    prompt: list[int]
    response: list[int]
    policy: list[int]  # 1 where the policy wrote, over the response; the first entry is 1
    logprobs: list[float]
    reward: float

    @property
    def tokens(self):
        return self.prompt + self.response

    @property
    def mask(self):
        return [0] * len(self.prompt) + self.policy

    @property
    def filled(self):
        """Log-probs over the response, 0.0 where the policy wrote nothing."""
        return [x if bit else 0.0 for x, bit in zip(self.logprobs, self.policy)]


def left(values, size, fill=PAD):
    return [fill] * (size - len(values)) + list(values)


def right(values, size, fill=PAD):
    return list(values) + [fill] * (size - len(values))


def rows(mine, other):
    return [mine, other]


def trl_sync(w: Written):
    p, c = len(OTHER_PROMPT), len(OTHER_RESPONSE)
    ones = [1] * c
    return {
        "prompt_ids": np.array(rows(left(w.prompt, p), OTHER_PROMPT)),
        "prompt_mask": np.array(rows(left([1] * len(w.prompt), p), [1] * p)),
        "completion_ids": np.array(rows(right(w.response, c), OTHER_RESPONSE)),
        "completion_mask": np.array(rows(right([1] * len(w.response), c), ones)),
        "tool_mask": np.array(rows(right(w.policy, c), ones)),
        "sampling_per_token_logps": np.array(rows(right(w.filled, c, 0.0), [-1.0] * c)),
        "old_per_token_logps": np.array(rows(right([-7.0] * len(w.response), c, 0.0), [-7.0] * c)),
        "advantages": np.array([0.5, -0.5]),
        "num_items_in_batch": np.array(3),
    }


def trl_async(w: Written):
    return {
        "input_ids": np.array(w.tokens),
        "completion_mask": np.array(w.mask),
        "old_log_probs": np.array([0.0] * len(w.prompt) + w.filled),
        "advantage": 0.5,
        "model_version": 7,
        "group_id": 3,
        "metrics": {"reward": w.reward, "reward_std": 0.1},
    }


def verl(w: Written):
    p, c = len(OTHER_PROMPT), len(OTHER_RESPONSE)
    attended = left([1] * len(w.prompt), p) + right([1] * len(w.response), c)
    scores = [0.0] * (len(w.response) - 1) + [w.reward]
    return {
        "batch": {
            "prompts": np.array(rows(left(w.prompt, p), OTHER_PROMPT)),
            "responses": np.array(rows(right(w.response, c), OTHER_RESPONSE)),
            "response_mask": np.array(rows(right(w.policy, c), [1] * c)),
            "attention_mask": np.array(rows(attended, [1] * (p + c))),
            "rollout_log_probs": np.array(rows(right(w.filled, c, 0.0), [-1.0] * c)),
            "rm_scores": np.array(rows(right(scores, c, 0.0), [0.0] * c)),
        },
        "non_tensor_batch": {
            "uid": np.array(["u0", "u1"], dtype=object),
            "min_global_steps": np.array([7, None], dtype=object),
            "max_global_steps": np.array([7, None], dtype=object),
        },
    }


def openrlhf(w: Written):
    size = max(len(w.tokens), 20)
    return {
        "sequences": np.array(rows(right(w.tokens, size), [8] * size)),
        "attention_mask": np.array(rows(right([1] * len(w.tokens), size), [1] * size)),
        "action_mask": np.array(rows(right(w.mask[1:], size - 1), [1] * (size - 1))),
        "rollout_log_probs": np.array(
            rows(right(([0.0] * len(w.prompt) + w.filled)[1:], size - 1, 0.0), [-1.0] * (size - 1))
        ),
        "action_log_probs": np.array(rows([-7.0] * (size - 1), [-7.0] * (size - 1))),
        "rewards": np.array([w.reward, 0.0]),
        "scores": np.array([w.reward, 0.0]),
        "truncated": np.array([True, False]),
    }


def nemo_rl(w: Written):
    size = max(len(w.tokens), 20)
    return {
        "sample_ids": ["a_g0", "a_g1"],
        "fields": {
            "input_ids": np.array(rows(right(w.tokens, size), [8] * size)),
            "input_lengths": np.array([len(w.tokens), size]),
            "token_mask": np.array(rows(right(w.mask, size), [1] * size)),
            "generation_logprobs": np.array(rows(right([0.0] * len(w.prompt) + w.filled, size, 0.0), [-1.0] * size)),
            "total_reward": np.array([w.reward, 0.0]),
        },
        "tags": [{"weight_version": 7}, {"weight_version": 7}],
    }


def prime_rl(w: Written):
    return {
        "token_ids": w.tokens,
        "mask": [bool(bit) for bit in w.mask],
        "logprobs": [0.0] * len(w.prompt) + w.filled,
        "temperatures": [0.7] * len(w.tokens),
        "env_name": "add",
        "advantages": [0.5] * len(w.tokens),
    }


def skyrl(w: Written):
    return {
        "generator_output": {
            "prompt_token_ids": rows(w.prompt, OTHER_PROMPT),
            "response_ids": rows(w.response, OTHER_RESPONSE),
            "loss_masks": rows(w.policy, [1] * len(OTHER_RESPONSE)),
            "rollout_logprobs": rows(w.filled, [-1.0] * len(OTHER_RESPONSE)),
            "rewards": [w.reward, 0.0],
            "stop_reasons": ["stop", "length"],
            "trajectory_ids": [{"instance_id": "q0", "repetition_id": i} for i in range(2)],
        },
        "uid": "q0",
        "global_step_when_scheduled": 7,
    }


def areal(w: Written):
    size = max(len(w.tokens), 20)
    versions = [7 if bit else -1 for bit in w.mask]
    return {
        "input_ids": np.array(rows(right(w.tokens, size), [8] * size), dtype=np.int32),
        "attention_mask": np.array(rows(right([1] * len(w.tokens), size), [1] * size), dtype=bool),
        "loss_mask": np.array(rows(right(w.mask, size), [1] * size), dtype=np.int32),
        "logprobs": np.array(rows(right([0.0] * len(w.prompt) + w.filled, size, 0.0), [-1.0] * size)),
        "versions": np.array(rows(right(versions, size, -1), [7] * size), dtype=np.int32),
        "rewards": np.array([w.reward, 0.0]),
    }


FORMS = {
    "TRL sync": trl_sync,
    "TRL async": trl_async,
    "verl": verl,
    "OpenRLHF": openrlhf,
    "NeMo RL": nemo_rl,
    "PRIME-RL": prime_rl,
    "SkyRL": skyrl,
    "AReaL": areal,
}
#: Kinds whose mask says who wrote a token; the others' says what is trained on.
BY_AUTHOR = ("TRL sync", "verl", "OpenRLHF", "NeMo RL")


def leaves(value, path=()):
    """(path, value) of every entry of nested mappings; a list is one value."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from leaves(entry, (*path, name))
    else:
        yield path, value


def without(value, path):
    """A copy of nested mappings without the entry at `path`."""
    copy = dict(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def replaced(value, path, entry):
    """A copy of nested mappings with another entry at `path`."""
    copy = dict(value)
    copy[path[0]] = entry if len(path) == 1 else replaced(value[path[0]], path[1:], entry)
    return copy
