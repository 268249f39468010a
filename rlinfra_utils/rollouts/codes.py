"""The closed list of finding codes: what each one means, the status it carries, a record that has it.

What a log of its time could supply quarantines; contradiction, ill type and impossibility reject; the rest is accepted.
Leaves out how a code is found: `validate.py` has the rules for one record, `table.py` for a table.
Use: `CODES["stale"].meaning`; `record, keywords = example("stale")`; `validate(record, **keywords)`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

#: From best to worst; the status of a record is that of its worst finding.
STATUSES = ("accept", "quarantine", "reject")
_NAN = float("nan")


@dataclass(frozen=True)
class Code:
    """One finding code. `changes` to the good record yield it, under these `keywords` of `validate`."""

    status: str
    meaning: str
    changes: Any
    keywords: dict[str, Any] = field(default_factory=dict)


_GOOD: dict[str, Any] = {
    "run_id": "run42",
    "branch_id": "main",
    "prompt_id": "p008",
    "group_id": "run42-p008",
    "sample_id": "run42-p008-g03",
    "prompt_tokens": [101, 42, 17],
    "response_tokens": [314, 159, 2],
    "policy_mask": [0, 0, 0, 1, 1, 1],
    "behavior_logprobs": [-0.31, -1.07, -0.22],
    "response_length": 3,
    "eos_token_id": 2,
    "policy_version": 127,
    "decoding": {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed"},
    "tokenizer_version": "bpe-v2",
    "chat_template_version": "chat-v1",
    "reward": {"correctness": 1.0, "format": 0.0},
    "verifier_version": "arith-v4",
    "stop_reason": "eos",
    "truncated": False,
}
_TWO_SPANS = [{"start": 0, "end": 2, "version": 7}, {"start": 2, "end": 3, "version": 8}]
_EIGHT_ZEROS = {
    "response_tokens": [5] * 8,
    "policy_mask": [0] * 3 + [1] * 8,
    "behavior_logprobs": [0.0] * 8,
    "response_length": 8,
}


def _decoding(**changes: Any) -> dict[str, Any]:
    return {"decoding": {**_GOOD["decoding"], **changes}}


_REJECT = {
    # The record as a whole.
    "not_a_record": ("It is neither a mapping nor a Rollout.", "a line of text"),
    "too_large": (
        "An identifier exceeds 1,024 bytes, a text 64 KiB, or a list 10 million entries.",
        {"sample_id": "x" * 1025},
    ),
    "wrong_type": ("A field holds another type than the schema's.", {"prompt_tokens": [101, None, 17]}),
    "schema_version": ("The record follows another version of the schema.", {"schema_version": 2}),
    "duplicate_id": ("An earlier record of the same table or call has this sample_id.", {}),
    # Tokens and masks.
    "no_policy_tokens": ("The policy sampled no token of it: there is nothing to learn.", {"policy_mask": [0] * 6}),
    "token_out_of_range": ("A token id is negative.", {"response_tokens": [314, -159, 2]}),
    "length_mismatch": ("Fields of one axis differ in length.", {"behavior_logprobs": [-0.31, -1.07]}),
    "mask_not_binary": ("A mask holds something else than 0 and 1.", {"policy_mask": [0, 0, 0, 1, 2, 1]}),
    "mask_on_prompt": ("policy_mask claims a prompt token.", {"policy_mask": [0, 0, 1, 1, 1, 1]}),
    "mask_overlap": (
        "A token is claimed by the policy and by the environment.",
        {"env_mask": [0, 0, 0, 0, 1, 0], "environment_version": "shell-v1"},
    ),
    "mask_past_length": ("A mask claims padding past response_length.", {"response_length": 2}),
    "mask_drops_token": ("A token before the padding is on neither mask.", {"policy_mask": [0, 0, 0, 1, 1, 0]}),
    "eos_outside_mask": (
        "The end-of-sequence token that the policy sampled is off its mask.",
        {"policy_mask": [0, 0, 0, 1, 1, 0], "response_length": None},
    ),
    "prompt_mismatch": ("The engine read another prompt than the record's.", {"engine_prompt_tokens": [101, 43, 17]}),
    # Log-probs.
    "logprob_positive": ("A log-prob under the mask is above 0.", {"behavior_logprobs": [-0.7, 123.7357, -27.1481]}),
    "logprob_not_finite": (
        "A log-prob under the mask is NaN or infinite.",
        {"behavior_logprobs": [-0.31, _NAN, -0.22]},
    ),
    "logprob_missing": ("Some tokens under the mask have no log-prob.", {"behavior_logprobs": [-0.31, None, -0.22]}),
    "logprob_sentinel": (
        "A log-prob under the mask is at most -9999, an engine's stand-in for probability 0.",
        {"behavior_logprobs": [-0.31, -9999.0, -0.22]},
    ),
    # Versions.
    "version_negative": ("A behaviour version is negative.", {"policy_version": -1}),
    "version_in_future": ("A behaviour version is above the trainer's.", {}, {"current_version": 126}),
    "bad_spans": (
        "Version spans do not run from response token 0 over all policy tokens in order, without gap or overlap.",
        {"policy_version": None, "version_spans": [{"start": 0, "end": 2, "version": 7}]},
    ),
    "scalar_version_on_span": (
        "policy_version contradicts version_spans.",
        {"policy_version": 8, "version_spans": _TWO_SPANS},
        {"partial_rollouts": True},
    ),
    "partial_not_declared": (
        "Several versions sampled it, and partial rollouts were not declared.",
        {"policy_version": None, "version_spans": _TWO_SPANS},
    ),
    "stale": ("Its oldest token lags more than max_lag versions.", {}, {"current_version": 130, "max_lag": 2}),
    "version_order": ("It claims to have trained weights no newer than its own.", {"resulting_policy_version": 127}),
    # Decoding, outcome, time.
    "decoding_out_of_range": ("A decoding parameter is impossible.", _decoding(top_p=1.5)),
    "reward_not_finite": ("A reward is NaN or infinite.", {"reward": {"correctness": _NAN}}),
    "stop_reason_unknown": ("stop_reason is outside the vocabulary.", {"stop_reason": "finished"}),
    "truncation_contradiction": ("truncated contradicts stop_reason.", {"truncated": True}),
    "not_finished": ("The engine gave the request up.", {"stop_reason": "abort", "truncated": None}),
    "negative_time": ("A time or a count of retries runs backwards.", {"started_s": 9.0, "finished_s": 8.5}),
}
_QUARANTINE = {
    "missing_field": ("A field that says where the data comes from is absent.", {"verifier_version": None}),
    "unknown_field": ("A field has no column and would be lost on disk.", {"advantage": 0.5}),
    "retokenised": ("The recorded ids are not those that the engine sampled.", {"sampled_tokens": [314, 15, 9, 2]}),
    "logprobs_not_behavior": (
        "Raw log-probs of tokens drawn from a filtered distribution are not the behaviour policy's.",
        _decoding(logprobs_mode="raw"),
    ),
    "mask_zero_ambiguous": (
        "Response tokens off policy_mask could be environment or padding: neither env_mask nor response_length tells.",
        {"policy_mask": [0, 0, 0, 1, 0, 1], "response_length": None},
    ),
    "logprob_all_zero": ("All log-probs are exactly 0, a filler rather than a measurement.", _EIGHT_ZEROS),
}
#: code -> Code, in the order in which findings are reported.
CODES: dict[str, Code] = {
    **{name: Code("reject", *entry) for name, entry in _REJECT.items()},
    **{name: Code("quarantine", *entry) for name, entry in _QUARANTINE.items()},
}


def example(code: str | None = None) -> tuple[Any, dict[str, Any]]:
    """A record that has `code`, and the keywords of `validate` under which it does: (record, keywords).

    Without a code: a record that is accepted. The record of "duplicate_id" has it when it comes twice.
    Raises ValueError for a code outside `CODES`.
    """
    if code is None:
        return copy.deepcopy(_GOOD), {}
    if code not in CODES:
        raise ValueError(f"code: {code!r} is not a finding code; rollouts.CODES lists them")
    changes = copy.deepcopy(CODES[code].changes)
    record = {**copy.deepcopy(_GOOD), **changes} if isinstance(changes, dict) else changes
    return record, dict(CODES[code].keywords)
