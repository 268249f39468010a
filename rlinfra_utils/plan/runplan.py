"""A run plan as data: `RunPlan`, its sections, and the pre-flight steps that its evidence is filed under.

Models: what will be run and what was predicted of it, each with its unit in the name. Leaves out how it came about
(`drawing.draw_up`) and whether it is any good (`grading.grade`). A plan may be edited by hand: reading checks it again.
Use: `RunPlan.from_yaml(path.read_text())`; `run_plan.with_evidence("forced_failure", "drill: ...", ok=True)`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlinfra_utils.doors import choice
from rlinfra_utils.plan.base import Checked
from rlinfra_utils.plan.brief import Brief, Count
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.simulator import CONTROLLERS, Controller
from rlinfra_utils.tracing import RULES

#: The steps before a large run, in the order of course step 12.5.5, and how each is done with this package.
PREFLIGHT: Mapping[str, tuple[str, str]] = {
    "sequential_reference": ("sequential reference on one process", "policy.SequentialLoop"),
    "contract_zero_lag": ("rollout contract, and zero lag", "rollouts.validate, sync.verify"),
    "memory": ("memory by component and phase", "memory.fit, then a step of the real job"),
    "critical_path": ("critical path and tails", "timers.Trace.critical_path, pipeline.tail"),
    "overlap": ("overlap, and only then asynchrony", "simulator.calibrate, cluster.twin"),
    "lag_mismatch_ess": ("lag, mismatch, ESS and clip share recorded", "tracing.metrics"),
    "forced_failure": ("recovery by a forced failure", "recovery.drill"),
    "same_task": ("stacks on the same task", "plan.keys"),
}
Amount = Annotated[float, Field(ge=0, le=1e18)]
Share = Annotated[float, Field(ge=0, le=1)]


class Memory(Checked):
    """GiB of one GPU by phase, against what is usable; `is_lower_bound`: "fits" means "may fit"."""

    phases_gib: dict[str, Amount] = Field(min_length=1)
    usable_gib: Annotated[float, Field(gt=0, le=1e6)]
    is_lower_bound: bool
    verdict: str

    @property
    def peak_phase(self) -> str:
        """The fullest phase."""
        return max(self.phases_gib, key=self.phases_gib.get)

    @property
    def margin_share(self) -> float:
        """Share of the usable memory that the fullest phase leaves free; negative where it does not fit."""
        return 1 - self.phases_gib[self.peak_phase] / self.usable_gib


class Pools(Checked):
    """GPUs of each stage and its seconds of a batch there; colocated stages have the same GPUs, in turns."""

    generate_gpus: Count
    train_gpus: Count
    idle_gpus: Annotated[int, Field(ge=0)]
    generate_s: Amount
    train_s: Amount


class Queue(Checked):
    """The rule between generation and training: a name of `simulator.CONTROLLERS` with its arguments.

    `bound_versions`: the lag, in versions of the weights since dispatch, that a rollout may have when it is taken;
    `bound_of` says whether that holds for each rollout or for their mean, and `over_age` what happens beyond.
    """

    controller: Literal[tuple(CONTROLLERS)]
    options: dict[str, int | float | str | bool | None]
    sync_interval: Count
    bound_versions: Annotated[int, Field(ge=0, le=10_000)] | None
    bound_of: Literal["each rollout", "the mean", "nothing"]
    over_age: Literal["drop", "wait", "train"]

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        self.make_controller()
        if (self.bound_versions is None) != (self.bound_of == "nothing"):
            raise ValueError(f"bound_versions={self.bound_versions}: contradicts bound_of={self.bound_of!r}")
        return self

    def make_controller(self) -> Controller:
        """The rule as the simulator and the cluster take it. Raises ValueError for options that it does not take."""
        try:
            return CONTROLLERS[self.controller](**self.options)
        except TypeError as error:
            raise ValueError(f"options={self.options}: {error}") from None


class Predicted(Checked):
    """What the simulator says of the plan, at 1 / `scale` of its batch and slots, and the front it was chosen from.

    Lags are means over trained tokens. `trained_length_ratio`: mean length trained on over that offered.
    """

    updates_per_day: Amount
    tokens_per_s: Amount
    mean_lag_steps: Amount
    max_lag_versions: Amount
    normalized_ess: Share
    generation_utilization: Amount
    trainer_utilization: Amount
    trained_length_ratio: Amount
    mean_queue_rollouts: Amount
    scale: Count
    num_simulated: Count
    num_on_front: Count
    met_target: bool


class Contract(Checked):
    """What each rollout must say, how it was sampled, and what is done about off-policy tokens."""

    required_fields: list[str] = Field(min_length=1)
    decoding: dict[str, Any]
    max_lag_versions: Annotated[int, Field(ge=0)] | None
    partial_rollouts: bool
    correction: Literal["token_truncate", "none"]
    correction_high: Annotated[float, Field(ge=1, le=1000)]
    report_lengths: bool

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.required_fields:
            choice("required_fields", name, Rollout.model_fields)
        Decoding.model_validate(self.decoding)
        return self


class Sync(Checked):
    """Each update of the engines: proven or not, and the mismatch on equal weights that is looked for beside it."""

    verify_each_update: bool
    zero_lag_each_update: bool
    zero_lag_limit_nats: Amount | None


class Recovery(Checked):
    """Checkpoints and what happens to data at a restart. `interval_steps` in optimizer steps."""

    interval_steps: Count
    interval_s: Amount
    young_s: Amount
    overhead_share: Share
    queue_at_restart: Literal["restore", "drop"]
    save_data_position: bool


class Threshold(Checked):
    """Beyond `value` a rule of `tracing` speaks; `because` says where the number comes from."""

    value: Annotated[float, Field(ge=-1e18, le=1e18)]
    unit: str
    because: str


class Evidence(Checked):
    """What was found in a pre-flight step, and whether that was as it has to be."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    found: Annotated[str, Field(min_length=1, max_length=2000)]
    ok: bool


class RunPlan(Checked):
    """A brief and what follows from it. Raises ValueError by field, in one line."""

    brief: Brief
    memory: Memory
    pools: Pools
    queue: Queue
    predicted: Predicted
    contract: Contract
    sync: Sync
    recovery: Recovery
    alerts: dict[Literal[tuple(rule.name for rule in RULES)], Threshold]
    evidence: dict[Literal[tuple(PREFLIGHT)], Evidence] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        used = self.pools.generate_gpus + self.pools.train_gpus + self.pools.idle_gpus
        if self.brief.placement == "disaggregated" and used != self.brief.num_gpus:
            raise ValueError(f"pools: their {used} GPUs are not the brief's num_gpus={self.brief.num_gpus}")
        return self

    def with_evidence(self, step: str, found: str, ok: bool) -> Self:
        """The plan with what was found in a step of `PREFLIGHT`, of today (UTC); raises ValueError for another step."""
        choice("step", step, PREFLIGHT)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        evidence = {**self.evidence, step: Evidence(date=today, found=found, ok=ok)}
        return self.model_copy(update={"evidence": evidence})
