"""What a loop is made of: one frozen, checked description, with units in its names.

Models a run before it starts: pools, laws, batch, sync interval, controller, faults. Leaves out the events.
Use: `LoopConfig(slots_per_replica=64, lengths_tokens=LogNormal(300, 0.9), batch_rollouts=64, num_steps=100)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlinfra_utils.doors import number, short, whole
from rlinfra_utils.simulator.controllers import as_controller
from rlinfra_utils.simulator.laws import Constant, Law, LogNormal, as_law
from rlinfra_utils.simulator.protocol import Controller

DEFAULT_LENGTHS = LogNormal(300, 0.8)


def _set_law(holder: object, name: str, *, above: bool = False) -> None:
    law = as_law(name, getattr(holder, name))
    if above and not law.mean > 0:
        raise ValueError(f"{name}={short(getattr(holder, name))}: needs a mean above 0")
    object.__setattr__(holder, name, law)


@dataclass(frozen=True)
class Tools:
    """Tool turns of a rollout: `calls` (law, rounded down), each `call_s` seconds. The slot is held meanwhile.

    With fixed speed a rollout's tokens spread evenly over decoding and tools; in continuous batching its calls lie
    evenly in its tokens, and during a call it does not slow the others down. Raises ValueError by field.
    """

    calls: Law | float = 0
    call_s: Law | float = 0.0

    def __post_init__(self):
        for name in ("calls", "call_s"):
            _set_law(self, name)


@dataclass(frozen=True)
class Faults:
    """What goes wrong. An attempt at a rollout hangs with `hang_share`, for good unless `timeout_s` ends it.

    `timeout_s` bounds an attempt's time in its slot, pauses not counted; then it is repeated from the start, up to
    `max_retries` times, and after that its whole group is discarded. A replica dies after `mtbf_s` on average
    (exponential), loses its attempts, which are repeated elsewhere, and is back after `restart_s`. Raises ValueError
    by field.
    """

    hang_share: float = 0.0
    timeout_s: float | None = None
    max_retries: int = 2
    mtbf_s: float | None = None
    restart_s: float = 0.0

    def __post_init__(self):
        number("hang_share", self.hang_share, 0, 1)
        whole("max_retries", self.max_retries, 0)
        number("restart_s", self.restart_s)
        for name in ("timeout_s", "mtbf_s"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), above=True)


@dataclass(frozen=True)
class LoopConfig:
    """A loop of generation, verifier, queue, trainer and weight updates. Times in s; a law may be a plain number.

    Generation: a sequence takes `prefill_s_per_token * prompt_tokens`, then `token_s` a token. With
    `token_s_per_active` above 0 decoding is batched continuously: a token takes all n active sequences of a replica
    token_s + token_s_per_active * n. Lengths are rounded down, to at least 1 token, and cut at `max_tokens`.

    Trainer: a batch is `batch_rollouts` (a multiple of `group_size`), or as many groups as reach `batch_tokens`
    (prompts not counted). A step takes `train_s + train_s_per_token * tokens`; after each `sync_interval` of them
    the weights go to the engines, which stand still for `sync_s`; each `checkpoint_interval` steps, `checkpoint_s`.

    The run ends after `num_steps` or at `duration_s`, whichever comes first. `drift_nats` is the standard deviation
    of the log of a synthetic weight for each optimizer step of lag (see `Run.summary`). Raises ValueError by field.
    """

    controller: str | Controller = "bounded_queue"
    num_replicas: int = 1
    slots_per_replica: int = 8
    lengths_tokens: Law | float = DEFAULT_LENGTHS
    max_tokens: int | None = None
    prompt_tokens: int = 100
    token_s: float = 0.02
    token_s_per_active: float = 0.0
    prefill_s_per_token: float = 0.0
    tools: Tools = Tools()
    group_size: int = 1
    num_verifiers: int = 1
    verify_s: Law | float = 0.0
    batch_rollouts: int | None = None
    batch_tokens: int | None = None
    train_s: Law | float = 1.0
    train_s_per_token: float = 0.0
    sync_interval: int = 1
    sync_s: Law | float = 0.0
    checkpoint_interval: int | None = None
    checkpoint_s: float = 0.0
    faults: Faults = Faults()
    drift_nats: float = 0.1
    num_steps: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("num_replicas", "slots_per_replica", "group_size", "num_verifiers", "sync_interval"):
            whole(name, getattr(self, name))
        whole("prompt_tokens", self.prompt_tokens, 0)
        whole("seed", self.seed, 0)
        number("token_s", self.token_s, above=True)
        for name in ("token_s_per_active", "prefill_s_per_token", "train_s_per_token", "checkpoint_s", "drift_nats"):
            number(name, getattr(self, name))
        for name in ("max_tokens", "batch_rollouts", "batch_tokens", "checkpoint_interval", "num_steps"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        _set_law(self, "lengths_tokens", above=True)
        for name in ("verify_s", "train_s", "sync_s"):
            _set_law(self, name)
        for name, kind in (("tools", Tools), ("faults", Faults)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={short(getattr(self, name))}: needs {kind.__name__}(...)")
        object.__setattr__(self, "controller", as_controller(self.controller))
        self._check_batch()
        if self.num_steps is None and self.duration_s is None:
            raise ValueError("num_steps=None, duration_s=None: give one, or the run has no end")
        if self.duration_s is not None:
            number("duration_s", self.duration_s, above=True)

    def _check_batch(self) -> None:
        if (self.batch_rollouts is None) == (self.batch_tokens is None):
            raise ValueError(
                f"batch_rollouts={self.batch_rollouts}, batch_tokens={self.batch_tokens}: give just one of the two"
            )
        if self.batch_rollouts is not None and self.batch_rollouts % self.group_size:
            raise ValueError(f"batch_rollouts={self.batch_rollouts}: needs a multiple of group_size={self.group_size}")
        if self.batch_rollouts is None and self.controller.counts_batches:
            rule = type(self.controller).__name__
            raise ValueError(f"batch_tokens={self.batch_tokens}: {rule} counts batches of rollouts; use batch_rollouts")

    @property
    def num_slots(self) -> int:
        """Slots of all replicas."""
        return self.num_replicas * self.slots_per_replica

    @property
    def mean_batch(self) -> int:
        """Rollouts of a step; of a batch by tokens, a whole number near the mean."""
        if self.batch_rollouts is not None:
            return self.batch_rollouts
        return max(1, math.ceil(self.batch_tokens / max(1.0, self.lengths_tokens.mean)))

    def describe(self) -> dict[str, object]:
        """The fields that differ from their defaults, and the controller: a row's head in `sweep`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        row = {"controller": type(self.controller).__name__ + _settings(self.controller)}
        for field in fields(self):
            if field.name != "controller" and named[field.name] != field.default:
                value = named[field.name]
                if not (isinstance(value, Constant) and value.value == field.default):
                    row[field.name] = value.value if isinstance(value, Constant) else value
        return row


def _settings(controller: Controller) -> str:
    shown = [f"{name}={value}" for name, value in vars(controller).items() if value is not None]
    return f"({', '.join(shown)})"
