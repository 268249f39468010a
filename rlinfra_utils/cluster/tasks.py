"""One group of a cluster run: which prompt, which names, which seed; its answers as records.

Models: addition problems numbered through all epochs; a group that was lost is asked again under a name of its own.
Leaves out who answers when (`book.py`). Use: `task = Dataset(config).task(index, attempt, branch)`;
`records, generation = answer(engine, tokenizer, config, task, branch)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinfra_utils import policy
from rlinfra_utils.checkpoint import DataPosition, dataset_fingerprint
from rlinfra_utils.cluster.config import TINY, ClusterConfig
from rlinfra_utils.engines import load_small_model
from rlinfra_utils.rollouts import Rollout

#: Sampled after each control sequence, to prove weights that were loaded through the engine's caches as well.
PROOF_TOKENS = 8
_LENGTHS = 1  # number of the random stream of forced lengths, beside the prompts' seeds


@dataclass(frozen=True)
class Task:
    """A prompt to answer `group_size` times. `index` counts prompts through all epochs, `attempt` from 0."""

    index: int
    attempt: int
    group_id: str
    prompt_id: str
    text: str
    answer: int
    max_new_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The task as JSON holds it; `Task(**task.to_json())` is the same."""
        return asdict(self)


class Dataset:
    """The prompts of a run, in an order of their own in each epoch."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.rows = policy.prompts(config.num_prompts, config.seed, config.digits)
        self.start = DataPosition(config.num_prompts, dataset_fingerprint([row.text for row in self.rows]), config.seed)

    def task(self, index: int, attempt: int, branch_id: str) -> Task:
        """The group of prompt number `index`."""
        epoch, place = divmod(index, self.config.num_prompts)
        row = self.rows[int(self.start.row_order(epoch)[place])]
        group_id = f"{self.config.run_id}-{branch_id}-p{index:06d}-a{attempt}"
        return Task(index, attempt, group_id, row.prompt_id, row.text, row.answer, self._num_tokens(index))

    def _num_tokens(self, index: int) -> int:
        """Limit of the answers, which with forced lengths is their length: the same whoever asks, and when."""
        config = self.config
        if config.forced_tokens is None:
            return config.max_new_tokens
        draw = np.random.default_rng([config.seed, _LENGTHS, index]).standard_normal()
        return int(np.clip(config.forced_tokens * np.exp(config.forced_sigma * draw), 1, config.max_new_tokens))


def longest_tokens(config: ClusterConfig, tokenizer: Any) -> int:
    """Tokens of the longest sequence that an engine is asked for: a prompt and its answer, or a control sequence.

    A control sequence is a prompt with its right answer, after which PROOF_TOKENS are sampled.
    """
    rows = Dataset(config).rows
    asked = max(len(tokenizer(row.text).input_ids) for row in rows) + config.max_new_tokens
    return max(asked, max(len(tokenizer(f"{row.text}{row.answer}").input_ids) for row in rows) + PROOF_TOKENS)


def load_model(model: str) -> tuple[Any, Any]:
    """Model and tokenizer of `ClusterConfig.model`, on the CPU; raises ValueError for a folder that has none."""
    if model == TINY:
        return policy.load_warm_start()
    small = load_small_model(model)
    return small.model, small.tokenizer


def model_folder(model: str) -> Path:
    """The folder that a vLLM server starts from."""
    return policy.WARM_START if model == TINY else Path(model)


def answer(engine: Any, tokenizer: Any, config: ClusterConfig, task: Task, branch_id: str) -> tuple[list[Rollout], Any]:
    """The group's records, without reward, and the engine's `Generation` that they come from."""
    decoding = config.decoding.model_copy(update={"max_new_tokens": task.max_new_tokens})
    seed = int(np.random.SeedSequence([config.seed, task.index, task.attempt]).generate_state(1)[0])
    names = [f"{task.group_id}-g{number:02d}" for number in range(config.group_size)]
    fields = {"run_id": config.run_id, "branch_id": branch_id, "prompt_id": task.prompt_id, "group_id": task.group_id}
    return policy.answer_prompt(engine, tokenizer, task.text, decoding, names, seed, **fields, num_retries=task.attempt)
