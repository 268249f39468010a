"""The rollout record: one answer of a policy, with all that a trainer must know to learn from it.

Models: tokens by their author (prompt, policy, environment, padding), the behaviour policy (weights
version or version spans, decoding, its log-probs), the outcome, and the chain of identifiers from the
prompt to the weights that came out. Leaves out: advantages and returns, which the trainer derives.

A record is data as received, so each field may be absent (None); `rollouts.validate` says whether what
is there may be trained on. Axes: a "token" axis runs over prompt + response, a "response" axis over the
response alone, padding included.
"""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA_VERSION = 1

#: How an episode may end, and whether that end is a truncation (bootstrap from the last state) or not.
STOP_REASONS = {
    "eos": False,  # the policy emitted its end-of-sequence token
    "stop": False,  # a stop string or stop token, or an engine that says "stop" for eos as well
    "env_done": False,  # the environment ended the episode
    "length": True,  # token limit
    "max_turns": True,  # turn limit
    "timeout": True,  # time limit
    "abort": None,  # the engine gave the request up: neither an end nor a truncation
    "error": None,
}


def is_truncated(stop_reason: str) -> bool | None:
    """Whether `stop_reason` means "cut off"; None for an answer that never finished.

    Raises KeyError for a reason outside `STOP_REASONS`. The number of tokens says nothing about it.
    """
    return STOP_REASONS[stop_reason]


def _plain(value: Any) -> Any:
    """Numpy arrays and torch tensors become lists, so that records compare and serialise alike."""
    return value.tolist() if hasattr(value, "tolist") else value


def _bits(value: Any) -> Any:
    value = _plain(value)
    return [int(v) if isinstance(v, bool) else v for v in value] if isinstance(value, list) else value


def _columns(value: Any) -> Any:
    """Per-token side data as rows: a scalar for a token becomes a row of one number."""
    if not isinstance(value, dict):
        return value
    rows = {name: _plain(column) for name, column in value.items()}
    return {
        name: [row if isinstance(row, list) else [row] for row in column] if isinstance(column, list) else column
        for name, column in rows.items()
    }


Tokens = Annotated[list[int], BeforeValidator(_plain)]
Mask = Annotated[list[int], BeforeValidator(_bits)]
LogProbs = Annotated[list[float | None], BeforeValidator(_plain)]
PerToken = Annotated[dict[str, list[list[float]]], BeforeValidator(_columns)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")


class Decoding(_Model):
    """How tokens were drawn from the logits: part of the behaviour policy, like its weights.

    Filters act in this order: temperature, min_p, top_k, top_p (vLLM's order). An optional field left
    out means that the engine was not asked for it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 keeps every token")
    logprobs_mode: str | None = Field(
        None, description="'processed': of the distribution sampled from; 'raw': of the unfiltered softmax"
    )
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    banned_token_ids: Tokens = []
    stop: list[str] = []

    @property
    def filters(self) -> bool:
        """Whether the distribution sampled from differs from the softmax of the raw logits."""
        return (
            self.temperature != 1.0
            or self.top_p != 1.0
            or (self.top_k or 0) > 0
            or self.min_p > 0.0
            or self.repetition_penalty != 1.0
            or bool(self.banned_token_ids)
        )


class VersionSpan(_Model):
    """Response tokens [start, end) were sampled by weights `version`."""

    start: int
    end: int
    version: int


class Rollout(_Model):
    """One rollout; field by field as it is stored. Unknown fields are refused: use `extra`."""

    schema_version: int = SCHEMA_VERSION
    # Who: a version number means something only within one branch of one run.
    run_id: str | None = None
    branch_id: str | None = None
    prompt_id: str | None = None
    group_id: str | None = None
    sample_id: str | None = None
    # Tokens. 1 in policy_mask: sampled by the policy, trained on. 1 in env_mask: written by the
    # environment, context only. 0 in both, within the response: padding.
    prompt_tokens: Tokens | None = None
    response_tokens: Tokens | None = None
    policy_mask: Mask | None = Field(None, description="token axis")
    env_mask: Mask | None = Field(None, description="token axis; needed once a response has context or padding")
    behavior_logprobs: LogProbs | None = Field(None, description="response axis, nats; null off the policy mask")
    response_length: int | None = Field(None, description="tokens before padding, as the engine counted them")
    eos_token_id: int | None = None
    # What the engine itself says that it read and sampled, to catch a second tokenisation.
    engine_prompt_tokens: Tokens | None = None
    sampled_tokens: Tokens | None = None
    per_token: PerToken = Field({}, description="side data by name: token axis x any width")
    # Behaviour policy.
    policy_version: int | None = None
    version_spans: list[VersionSpan] | None = Field(None, description="response axis; in place of policy_version")
    decoding: Decoding | None = None
    tokenizer_version: str | None = None
    chat_template_version: str | None = None
    engine: str | None = None
    # Outcome.
    reward: dict[str, float] | None = None
    verifier_version: str | None = None
    environment_version: str | None = None
    stop_reason: str | None = None
    truncated: bool | None = Field(None, description="of the whole episode; must agree with stop_reason")
    num_retries: int = Field(0, description="technical repeats, which are no actions of the policy")
    started_s: float | None = None
    finished_s: float | None = None
    # Filled in when the record is trained on.
    training_batch_id: str | None = None
    optimizer_step: int | None = None
    resulting_policy_version: int | None = None
    extra: dict[str, str] = Field({}, description="a stack's own fields, kept and not interpreted")

    def versions(self) -> list[int]:
        """Behaviour version of each response token, shape (response,); empty when none is recorded."""
        num_tokens = len(self.response_tokens or [])
        if self.version_spans:
            by_token = [s.version for s in self.version_spans for _ in range(s.end - s.start)]
            return by_token[:num_tokens]
        return [] if self.policy_version is None else [self.policy_version] * num_tokens


_tokens, _mask = pa.list_(pa.int64()), pa.list_(pa.int8())
_decoding = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("logprobs_mode", pa.string()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("max_new_tokens", pa.int64()),
        ("ignore_eos", pa.bool_()),
        ("banned_token_ids", _tokens),
        ("stop", pa.list_(pa.string())),
    ]
)
_types = {
    "schema_version": pa.int64(),
    **dict.fromkeys(("run_id", "branch_id", "prompt_id", "group_id", "sample_id"), pa.string()),
    **dict.fromkeys(("prompt_tokens", "response_tokens"), _tokens),
    **dict.fromkeys(("policy_mask", "env_mask"), _mask),
    "behavior_logprobs": pa.list_(pa.float64()),
    **dict.fromkeys(("response_length", "eos_token_id"), pa.int64()),
    **dict.fromkeys(("engine_prompt_tokens", "sampled_tokens"), _tokens),
    "per_token": pa.map_(pa.string(), pa.list_(pa.list_(pa.float64()))),
    "policy_version": pa.int64(),
    "version_spans": pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64()), ("version", pa.int64())])),
    "decoding": _decoding,
    **dict.fromkeys(("tokenizer_version", "chat_template_version", "engine"), pa.string()),
    "reward": pa.map_(pa.string(), pa.float64()),
    **dict.fromkeys(("verifier_version", "environment_version", "stop_reason"), pa.string()),
    "truncated": pa.bool_(),
    "num_retries": pa.int64(),
    **dict.fromkeys(("started_s", "finished_s"), pa.float64()),
    "training_batch_id": pa.string(),
    **dict.fromkeys(("optimizer_step", "resulting_policy_version"), pa.int64()),
    "extra": pa.map_(pa.string(), pa.string()),
}
#: The record as an Arrow schema, one column a field, in the record's own order.
SCHEMA = pa.schema([(name, _types[name]) for name in Rollout.model_fields])
