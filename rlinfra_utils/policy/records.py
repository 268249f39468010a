"""From an engine's answers to rollout records and rewards: what every loop stores.

Models: one answer as a record, each token with its version; a group sampled in one call; the verifier's rewards.
Leaves out which prompt, which names and which seed: the loop's own business.
Use: `records, generation = answer_prompt(engine, tokenizer, text, decoding, sample_ids, seed, group_id=...)`;
`reward_records(records, answer, tokenizer)`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rlinfra_utils.policy.model import chat_template_version, tokenizer_version
from rlinfra_utils.policy.task import VERIFIER_VERSION, Prompt, verify
from rlinfra_utils.rollouts import STOP_REASONS, Decoding, Rollout


def versions_of(tokenizer: Any, engine: str) -> dict[str, Any]:
    """What records depend on beside weights and decoding, as the component "versions" of a checkpoint has it."""
    return {
        "tokenizer": tokenizer_version(tokenizer),
        "chat_template": chat_template_version(tokenizer),
        "verifier": VERIFIER_VERSION,
        "environment": "addition",
        "engine": {"version": engine, "precision": "float32", "quantization": None, "adapters": None},
    }


def answer_prompt(
    engine: Any, tokenizer: Any, text: str, decoding: Decoding, sample_ids: Sequence[str], seed: int, **fields: Any
) -> tuple[list[Rollout], Any]:
    """A record for each of `sample_ids`, without reward, and the engine's `Generation` that they come from.

    `fields` of the record are the same for the whole group: run, branch, prompt and group. Raises as
    `engine.generate` does.
    """
    prompt_tokens, started_s = tokenizer(text).input_ids, time.time()
    generation = engine.generate([prompt_tokens], decoding, n=len(sample_ids), seed=seed)
    shared = fields | {
        "eos_token_id": tokenizer.eos_token_id,
        "decoding": decoding,
        "tokenizer_version": tokenizer_version(tokenizer),
        "chat_template_version": chat_template_version(tokenizer),
        "engine": type(engine).__name__,
        "started_s": started_s,
        "finished_s": time.time(),
    }
    answers = zip(sample_ids, generation.completions)
    return [record_of(one, prompt_tokens, sample_id=name, **shared) for name, one in answers], generation


def record_of(completion: Any, prompt_tokens: list[int], **fields: Any) -> Rollout:
    """One completion of an engine as a record; `prompt_tokens` is what was sent, `fields` what the caller knows."""
    num_tokens = len(completion.tokens)
    spans = completion.version_spans or []
    by_version = {"version_spans": spans} if len(spans) > 1 else {"policy_version": completion.policy_version}
    return Rollout(
        **fields,
        **by_version,
        prompt_tokens=prompt_tokens,
        engine_prompt_tokens=completion.prompt_tokens,
        response_tokens=completion.tokens,
        policy_mask=[0] * len(prompt_tokens) + [1] * num_tokens,
        behavior_logprobs=completion.behavior_logprobs,
        response_length=num_tokens,
        stop_reason=completion.stop_reason,
        truncated=STOP_REASONS[completion.stop_reason],
    )


def answer_text(tokens: list[int], tokenizer: Any) -> str:
    """The answer as the verifier reads it: every sampled token but one end-of-sequence token at the end.

    Special tokens inside stay visible: dropping them would turn "4<pad>2" into a right answer.
    """
    ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
    return tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


def reward_completions(batch: Sequence[Prompt], completions: Sequence[Any], tokenizer: Any) -> list[dict[str, float]]:
    """The verifier's rewards of an engine's completions, in their order; `batch` holds the prompts they answer.

    Whatever did not come to its end counts as truncated, a request that the engine gave up too.
    """
    return [
        verify(
            answer_text(completion.tokens, tokenizer),
            batch[completion.prompt_index].answer,
            truncated=STOP_REASONS[completion.stop_reason] is not False,
        )
        for completion in completions
    ]


def reward_records(records: Iterable[Rollout], answer: int, tokenizer: Any) -> list[Rollout]:
    """The records of one prompt with the verifier's reward and version; `answer` is the right one."""
    rewarded = []
    for record in records:
        text = answer_text(record.response_tokens, tokenizer)
        parts = verify(text, answer, truncated=record.truncated is not False)
        rewarded.append(record.model_copy(update={"reward": parts, "verifier_version": VERIFIER_VERSION}))
    return rewarded
