"""Who is to answer which prompt with which weights, and the answers: `Order`, `sample`.

Models: an order names each group of a step before anything is sampled, with the seed of its draws, so that a group
that was lost can be made again, byte for byte. Leaves out where orders and answers are kept (`folder.py`).
Use: `records = sample(engine, tokenizer, config, order, task)`; `policy.reward_records` rewards them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlinfra_utils import policy
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.rollouts import Rollout


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
    """The group's answers, without reward. Raises ValueError for an engine of another version than the order names."""
    if engine.version != order.version:
        raise ValueError(f"engine.version={engine.version}: the order of step {order.step} asks for {order.version}")
    seed = sampling_seed(config, task.index, order.version)
    records, _ = policy.answer_prompt(
        engine,
        tokenizer,
        task.text,
        config.decoding,
        task.sample_ids(config.group_size),
        seed,
        run_id=config.run_id,
        branch_id=config.branch_id,
        prompt_id=task.prompt_id,
        group_id=task.group_id,
    )
    return records
