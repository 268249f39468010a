"""The small parts of a learner's state that resumes forget: schedule, reward normaliser, curriculum.

Models: each as a few numbers that JSON holds. Leaves out weights and moments, which everyone remembers to look at.
Use: `Normalizer(**normalizer.to_json())` is the same normaliser.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from rlinfra_utils.policy import Prompt
from rlinfra_utils.recovery.config import RunConfig


def learning_rate(config: RunConfig, num_updates: int) -> float:
    """Rate of the update after `num_updates` of them: rises in equal steps to `lr`, then stays."""
    return config.lr * min(1.0, (num_updates + 1) / config.warmup_updates)


@dataclass
class Normalizer:
    """Mean and variance of all rewards so far (Welford's sums); advantages are divided by `std`."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Take in rewards, shape (rollouts,)."""
        for value in values.tolist():
            self.count += 1
            gap = value - self.mean
            self.mean += gap / self.count
            self.squares += gap * (value - self.mean)

    @property
    def std(self) -> float:
        """Standard deviation (divisor `count`); 1 as long as all rewards were equal."""
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def to_json(self) -> dict[str, float]:
        """The state."""
        return asdict(self)


@dataclass
class Curriculum:
    """Share of prompts that are asked in full; the others lose their tens: "47+25=" becomes "7+5=".

    The share follows the success: half the answers right leaves it as it is.
    """

    share_hard: float = 0.5

    def add(self, correctness: float) -> None:
        """Take in a batch's mean correctness, in [0, 1]."""
        self.share_hard = min(1.0, max(0.0, self.share_hard + 0.1 * (correctness - 0.5)))

    def prompt(self, prompt: Prompt, rank: float) -> Prompt:
        """`prompt`, in full if its `rank`, in [0, 1), lies below the share."""
        if rank < self.share_hard:
            return prompt
        a, b = (int(part) % 10 for part in prompt.text.rstrip("=").split("+"))
        return Prompt(prompt_id=f"add-{a}+{b}", text=f"{a}+{b}=", answer=a + b)

    def to_json(self) -> dict[str, float]:
        """The state."""
        return asdict(self)
