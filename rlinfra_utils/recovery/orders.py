"""Who is to answer which prompt with which weights, and the answers: `Order`, `sample`, `reward`.

Models: an order names each group of a step before anything is sampled, with the seed of its draws, so that a group
that was lost can be made again, byte for byte. Leaves out where orders and answers are kept (`folder.py`).
Use: `records = sample(engine, tokenizer, config, order, task)`; `records = reward(records, task, tokenizer)`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlinfra_utils import policy
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.rollouts import STOP_REASONS, Rollout


@dataclass(frozen=True)
class Task:
    """One group: a prompt to answer `group_size` times. `index` counts prompts through all epochs."""

    index: int
    group_id: str
    prompt_id: str
    text: str
    answer: int

    def sample_ids(self, group_size: int) -> list[str]:
        """Ids of the group's rollouts."""
        return [f"{self.group_id}-g{i:02d}" for i in range(group_size)]


@dataclass(frozen=True)
class Order:
    """The groups of one training step, and the version of the weights that is to answer them."""

    step: int
    version: int
    tasks: tuple[Task, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Order:
        """The order that `to_json` made a dict of."""
        return cls(value["step"], value["version"], tuple(Task(**task) for task in value["tasks"]))

    def to_json(self) -> dict[str, Any]:
        """The order as JSON holds it."""
        return {"step": self.step, "version": self.version, "tasks": [asdict(task) for task in self.tasks]}

    def sample_ids(self, group_size: int) -> list[str]:
        """Ids of all rollouts that the step trains on, in their order."""
        return [name for task in self.tasks for name in task.sample_ids(group_size)]


def sampling_seed(config: RunConfig, index: int, version: int) -> int:
    """Seed of a group's draws: from the run's seed, the prompt's number and the version, and from nothing else."""
    return int(np.random.SeedSequence([config.seed, index, version]).generate_state(1)[0])


def sample(engine: Any, tokenizer: Any, config: RunConfig, order: Order, task: Task) -> list[Rollout]:
    """The group's answers, without reward. `engine` must hold the version that the order names."""
    if engine.version != order.version:
        raise ValueError(f"engine.version={engine.version}: the order of step {order.step} asks for {order.version}")
    prompt_tokens, started_s = tokenizer(task.text).input_ids, time.time()
    seed = sampling_seed(config, task.index, order.version)
    generation = engine.generate([prompt_tokens], config.decoding, n=config.group_size, seed=seed)
    shared = {
        "run_id": config.run_id,
        "branch_id": config.branch_id,
        "prompt_id": task.prompt_id,
        "group_id": task.group_id,
        "prompt_tokens": prompt_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "decoding": config.decoding,
        "tokenizer_version": policy.tokenizer_version(tokenizer),
        "chat_template_version": policy.chat_template_version(tokenizer),
        "engine": type(engine).__name__,
        "started_s": started_s,
        "finished_s": time.time(),
    }
    ids = task.sample_ids(config.group_size)
    return [_record(shared, sample_id, completion) for sample_id, completion in zip(ids, generation.completions)]


def _record(shared: dict[str, Any], sample_id: str, completion: Any) -> Rollout:
    num_tokens = len(completion.tokens)
    return Rollout(
        **shared,
        sample_id=sample_id,
        engine_prompt_tokens=completion.prompt_tokens,
        response_tokens=completion.tokens,
        policy_mask=[0] * len(completion.prompt_tokens) + [1] * num_tokens,
        behavior_logprobs=completion.behavior_logprobs,
        response_length=num_tokens,
        policy_version=completion.policy_version,
        stop_reason=completion.stop_reason,
        truncated=STOP_REASONS[completion.stop_reason],
    )


def reward(records: Iterable[Rollout], task: Task, tokenizer: Any) -> list[Rollout]:
    """The group's records with the verifier's reward and version."""
    rewarded = []
    for record in records:
        text = policy.answer_text(record.response_tokens, tokenizer)
        parts = policy.verify(text, task.answer, truncated=record.truncated is not False)
        rewarded.append(record.model_copy(update={"reward": parts, "verifier_version": policy.VERIFIER_VERSION}))
    return rewarded
