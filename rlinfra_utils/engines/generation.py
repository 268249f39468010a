"""What an engine hands back: completions with the log-probs of the policy that sampled them.

Models: one batch of requests, `n` completions a prompt, in prompt order. Leaves out text and rewards.
Use: `generation.completions[i * n : (i + 1) * n]` are the completions of prompt `i`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinfra_utils.doors import choice
from rlinfra_utils.rollouts import STOP_REASONS, VersionSpan


@dataclass(frozen=True)
class Completion:
    """One answer. The EOS token it sampled, if any, is its last token: an action like the others.

    `behavior_logprobs`: nats, of the distribution sampled from, after all processing. `raw_logprobs`: nats,
    of the softmax of the untouched logits at temperature 1; None from an engine that reports one kind only.
    `version_spans`: where weights may change under a running request, the versions of the tokens, a span each;
    `policy_version` is then that of the first. None where all tokens are of `policy_version`.
    Raises ValueError for log-probs of another length than the tokens, and an unknown `stop_reason`.
    """

    prompt_index: int
    prompt_tokens: list[int]
    tokens: list[int]
    behavior_logprobs: list[float]
    raw_logprobs: list[float] | None
    stop_reason: str
    policy_version: int
    version_spans: list[VersionSpan] | None = None

    def __post_init__(self):
        for name in ("behavior_logprobs", "raw_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"{name}: has {len(values)} values for {len(self.tokens)} tokens")
        choice("stop_reason", self.stop_reason, STOP_REASONS)


@dataclass(frozen=True)
class Generation:
    """The answers to one call of `generate`, and what they took.

    `prefill_s` reads the prompts, `decode_s` samples every token. `num_prompt_tokens` counts what prefill
    read: a prompt that comes several times was read once.
    """

    completions: list[Completion]
    prefill_s: float
    decode_s: float
    num_prompt_tokens: int
    num_new_tokens: int
