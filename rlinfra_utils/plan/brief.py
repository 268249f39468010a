"""What a reader brings to a plan: `Brief`, the run that is wanted and what is known about its parts.

Models: a model, GPUs, a batch, lengths, the time of each stage at one known size, failures, a target. Leaves out names
of machines and data. Times in seconds, memory in GiB, lengths in tokens. A number counts as assumed until `measured`
says where it comes from. Use: `Brief(model="Qwen2.5-7B", num_gpus=32, ..., measured={"train": "trace of 2026-11-29"})`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rlinfra_utils.doors import numbers
from rlinfra_utils.memory import GIB, RECIPES, ModelSpec, known_models
from rlinfra_utils.memory.fit import STRATEGIES
from rlinfra_utils.pipeline import scaling_curve
from rlinfra_utils.plan.base import Checked
from rlinfra_utils.simulator import LogNormal

#: Numbers of a brief that are facts about the world: each is measured, or it is an assumption.
FACTS = (
    "lengths",
    "generate",
    "train",
    "verify_s",
    "sync_s",
    "checkpoint_write_s",
    "mtbf_s",
    "drift_nats",
    "zero_lag_nats",
)
RULES = ("fastest_within_lag", "freshest_at_rate", "most_useful_tokens")
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=2**24)]


class Lengths(Checked):
    """Answers are log-normal: `median_tokens`, and `sigma`, the standard deviation of the log."""

    median_tokens: Annotated[float, Field(gt=0, le=1e8)]
    sigma: Annotated[float, Field(ge=0, le=4)]

    @classmethod
    def fitted(cls, lengths_tokens: Sequence[int]) -> Self:
        """The law of measured lengths, in tokens: median and sigma of their logs.

        Raises ValueError for a row that is empty or holds what is no number, and for a length below 1.
        """
        logs = np.log(np.maximum(numbers("lengths_tokens", lengths_tokens, some_above_zero=True), 0.5))
        if (logs < 0).any():
            raise ValueError("lengths_tokens: holds a length below 1; leave out what has no token")
        return cls(median_tokens=float(np.exp(logs.mean())), sigma=float(logs.std()))

    @property
    def law(self) -> LogNormal:
        """For the simulator."""
        return LogNormal(self.median_tokens, self.sigma)

    def mean_cut_at(self, max_tokens: int) -> float:
        """E[min(L, max_tokens)]: the mean length that is really generated."""
        if self.sigma == 0:
            return min(self.median_tokens, max_tokens)
        z = (math.log(max_tokens) - math.log(self.median_tokens)) / self.sigma
        return self.law.mean * _normal(z - self.sigma) + max_tokens * (1 - _normal(z))

    def share_cut_at(self, max_tokens: int) -> float:
        """P(L > max_tokens): the share of answers that the limit cuts."""
        if self.sigma == 0:
            return float(self.median_tokens > max_tokens)
        return 1 - _normal((math.log(max_tokens) - math.log(self.median_tokens)) / self.sigma)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


class Stage(Checked):
    """A stage's seconds of a batch at one number of GPUs; `serial_share` of them does not shrink with more."""

    seconds: Seconds
    at_gpus: Count
    serial_share: Annotated[float, Field(ge=0, le=1)] = 0.0

    def at(self, gpus: int) -> float:
        """Seconds of a batch on `gpus`, as `pipeline.scaling_curve` has it."""
        return scaling_curve(self.seconds, self.at_gpus, self.serial_share)(gpus)


class Target(Checked):
    """How one point of the front is chosen.

    "fastest_within_lag": most updates with a mean lag of at most `mean_lag_steps` optimizer steps.
    "freshest_at_rate": least lag with at least `updates_per_day`. "most_useful_tokens": tokens/s x normalised ESS.
    The other number, where given, is checked by `grade` and does not choose. `max_lag_versions` leaves only the rules
    that keep each rollout within it.
    """

    rule: Literal["fastest_within_lag", "freshest_at_rate", "most_useful_tokens"] = "most_useful_tokens"
    mean_lag_steps: Annotated[float, Field(ge=0, le=1e6)] | None = None
    updates_per_day: Annotated[float, Field(gt=0, le=1e8)] | None = None
    max_lag_versions: Annotated[int, Field(ge=0, le=10_000)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {"fastest_within_lag": "mean_lag_steps", "freshest_at_rate": "updates_per_day"}.get(self.rule)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"{needed}=None: the rule {self.rule!r} needs it")
        return self


class Brief(Checked):
    """The run that is wanted. Raises ValueError by field.

    `config` is the model's config.json where `model` is no name that `memory.known_models` has. `usable_share` of each
    GPU's `gpu_gib` is for the lines that the ledger counts. `prompts_per_gpu`: prompts whose groups are alive at once
    on a GPU that generates. `generate` and `train`: of a whole batch with its cut lengths, engines kept full.
    `mtbf_s`: of the whole job. `drift_nats`: see `simulator.LoopConfig`. `zero_lag_nats`: mean |difference| of trainer
    and engine log-probs on the same weights, None until known. `measured`: where a number of `FACTS` comes from.
    """

    model: Annotated[str, Field(min_length=1, max_length=100)]
    config: dict[str, Any] | None = None
    num_gpus: Count
    gpu_gib: Annotated[float, Field(gt=0, le=10_000)]
    usable_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    recipe: Literal[tuple(RECIPES)] = "bf16_master_bf16_grad"
    strategy: Literal[STRATEGIES] = "fsdp"
    lora_rank: Count | None = None
    micro_batch: Count = 1
    group_size: Annotated[int, Field(ge=2, le=4096)]
    prompts_per_step: Count
    prompts_per_gpu: Count
    prompt_tokens: Count
    max_new_tokens: Count
    lengths: Lengths
    generate: Stage
    train: Stage
    verify_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    sync_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    checkpoint_write_s: Seconds
    mtbf_s: Seconds
    drift_nats: Annotated[float, Field(ge=0, le=10)] = 0.2
    zero_lag_nats: Annotated[float, Field(ge=0, le=100)] | None = None
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    queue_at_restart: Literal["restore", "drop"] = "restore"
    target: Target = Target()
    measured: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.config is None and self.model not in known_models():
            raise ValueError(f"model={self.model!r}: is not known here; give its config.json as `config`")
        unknown = [name for name in self.measured if name not in FACTS]
        if unknown:
            raise ValueError(f"measured.{unknown[0]}: is no fact of a brief; they are {', '.join(FACTS)}")
        if self.placement == "disaggregated" and self.num_gpus < 2:
            raise ValueError(f"num_gpus={self.num_gpus}: two pools need at least 2; use placement='colocated'")
        if 2 * self.checkpoint_write_s >= self.mtbf_s:
            raise ValueError(f"mtbf_s={self.mtbf_s:g}: no interval helps below 2 x checkpoint_write_s")
        self.spec  # noqa: B018 - a config that cannot be read is refused here
        return self

    @property
    def spec(self) -> ModelSpec:
        """The model in numbers."""
        return ModelSpec.named(self.model) if self.config is None else ModelSpec.from_config(self.config)

    @property
    def usable_bytes(self) -> float:
        """Of one GPU, for the lines of the ledger."""
        return self.usable_share * self.gpu_gib * GIB

    @property
    def batch_rollouts(self) -> int:
        """Rollouts of an optimizer step."""
        return self.prompts_per_step * self.group_size

    @property
    def slots_per_gpu(self) -> int:
        """Rollouts that one generating GPU keeps alive."""
        return self.prompts_per_gpu * self.group_size
