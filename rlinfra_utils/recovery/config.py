"""What a recoverable run is told once and never changes: `RunConfig`.

Models: sizes, lag, schedule and seed of a tiny run whose every event follows from them. Leaves out the machine: how
many processes run, and when they die, changes nothing that the run learns. Use: `RunConfig(num_updates=12, lag=1)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlinfra_utils.doors import number, whole
from rlinfra_utils.policy import MAX_TOKENS
from rlinfra_utils.rollouts import Decoding


class RecoveryError(Exception):
    """A run cannot go on without becoming another run; one line with the place and the cause."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of one run. Raises ValueError, in one line, for a value that makes no sense.

    Rollouts of step k are sampled from version max(0, k - `lag`). A checkpoint is saved every `save_every` updates and
    `keep` of them stay. The learning rate rises to `lr` over `warmup_updates`. `num_prompts` is the size of the
    dataset, read in a new order each epoch.
    """

    num_updates: int = 12
    prompts_per_step: int = 4
    group_size: int = 4
    lag: int = 1
    save_every: int = 2
    keep: int = 2
    lr: float = 3e-4
    warmup_updates: int = 6
    minibatches: int = 2
    num_prompts: int = 32
    max_new_tokens: int = 5
    num_collectors: int = 2
    seed: int = 0
    run_id: str = "run0"
    branch_id: str = "main"

    def __post_init__(self):
        for name in ("num_updates", "prompts_per_step", "save_every", "keep", "warmup_updates", "num_collectors"):
            whole(name, getattr(self, name))
        whole("group_size", self.group_size, 2)
        whole("lag", self.lag, 0)
        whole("seed", self.seed, 0)
        whole("minibatches", self.minibatches, 1, self.prompts_per_step * self.group_size)
        whole("num_prompts", self.num_prompts, self.prompts_per_step * (self.lag + 1))
        whole("max_new_tokens", self.max_new_tokens, 1, MAX_TOKENS // 2)
        number("lr", self.lr, above=True)
        for name in ("run_id", "branch_id"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.replace("_", "").isalnum():
                raise ValueError(f"{name}={value!r}: needs letters, digits and '_'; it becomes part of file names")

    @property
    def decoding(self) -> Decoding:
        """How tokens are drawn: the plain softmax, which the trainer can recompute."""
        return Decoding(
            temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=self.max_new_tokens
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON holds them; `RunConfig(**config.to_json())` is the same."""
        return asdict(self)
