"""What a cluster run is told once: `ClusterConfig`, and the one error that a run ends with, `ClusterError`.

Models: how many of which process, the rule between generation and training, sizes, lengths, seed. Leaves out where it
runs (folder, address of the Ray cluster). Use: `ClusterConfig(controller="one_step_off", num_updates=20)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rlinfra_utils.doors import choice, number, short, whole
from rlinfra_utils.policy import MAX_TOKENS
from rlinfra_utils.rollouts import Decoding
from rlinfra_utils.simulator import CONTROLLERS, Controller
from rlinfra_utils.tracing import config_hash

ENGINES = ("hf", "vllm")
DEVICES = ("cpu", "cuda")
PLACEMENTS = ("disaggregated", "colocated")
#: The policy that the package brings; any other `model` is a folder that transformers loads.
TINY = "tiny"


class ClusterError(Exception):
    """The run cannot begin or go on; one line with the place, the cause and what to do."""


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of one run, all of them plain JSON values. Raises ValueError, in one line, by field.

    `controller` is a name of `simulator.CONTROLLERS`, built with `controller_options`. A step trains on
    `prompts_per_step` groups of `group_size` rollouts; weights go to the engines after each `sync_interval` steps. A
    worker has `groups_at_once` groups in its engine; HFEngine bears one, a vLLM server batches several.

    `forced_tokens`: answers have that many tokens in the median, log-normal with `forced_sigma`, one length a group,
    EOS ignored: a load whose lengths are known, not a policy that learns. None: the policy ends its answers itself.
    `pin_cores`: trainers get a core each, workers share the others; on one machine only. `deadline_s`: how long any
    one call to a process may take; for "colocated" on vLLM that is with the start of a server. `max_restarts`: of each
    process, before the run gives up.
    """

    model: str = TINY
    engine: str = "hf"
    device: str = "cpu"
    placement: str = "disaggregated"
    num_trainers: int = 1
    num_workers: int = 2
    groups_at_once: int = 1
    controller: str = "one_step_off"
    controller_options: Mapping[str, Any] = field(default_factory=dict)
    prompts_per_step: int = 8
    group_size: int = 8
    sync_interval: int = 1
    num_updates: int = 20
    duration_s: float | None = None
    lr: float = 3e-4
    minibatches: int = 1
    digits: int = 2
    num_prompts: int = 1024
    max_new_tokens: int = 5
    forced_tokens: int | None = None
    forced_sigma: float = 0.0
    save_every: int = 10
    keep: int = 2
    deadline_s: float = 120.0
    max_restarts: int = 3
    pin_cores: bool = False
    seed: int = 0
    run_id: str = "run0"

    def __post_init__(self):
        for name, known in (("engine", ENGINES), ("device", DEVICES), ("placement", PLACEMENTS)):
            choice(name, getattr(self, name), known)
        for name in ("num_trainers", "num_workers", "groups_at_once", "prompts_per_step", "sync_interval"):
            whole(name, getattr(self, name))
        for name in ("num_updates", "digits", "num_prompts", "save_every", "keep"):
            whole(name, getattr(self, name))
        whole("group_size", self.group_size, 2)
        whole("minibatches", self.minibatches, 1, self.prompts_per_step * self.group_size)
        for name in ("seed", "max_restarts"):
            whole(name, getattr(self, name), 0)
        for name in ("lr", "deadline_s"):
            number(name, getattr(self, name), above=True)
        number("forced_sigma", self.forced_sigma, 0, 8)
        if self.duration_s is not None:
            number("duration_s", self.duration_s, above=True)
        self._check_lengths()
        self._check_texts()
        self._check_rule()

    def _check_lengths(self) -> None:
        most = MAX_TOKENS - 2 * self.digits - 3 if self.model == TINY else None  # "<bos>", "+" and "=" beside digits
        whole("max_new_tokens", self.max_new_tokens, 1, most or 2**20)
        if self.forced_tokens is not None:
            whole("forced_tokens", self.forced_tokens, 1, self.max_new_tokens)
        if type(self.pin_cores) is not bool:
            raise ValueError(f"pin_cores={short(self.pin_cores)}: needs True or False")

    def _check_texts(self) -> None:
        if not isinstance(self.run_id, str) or not self.run_id.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"run_id={short(self.run_id)}: needs letters, digits, '-' and '_'")
        if not isinstance(self.model, str) or (self.model != TINY and not Path(self.model).is_dir()):
            raise ValueError(f"model={short(self.model)}: needs {TINY!r} or a folder with a model")

    def _check_rule(self) -> None:
        choice("controller", self.controller, CONTROLLERS)
        if not isinstance(self.controller_options, Mapping):
            raise ValueError(f"controller_options={short(self.controller_options)}: needs a mapping of its arguments")
        object.__setattr__(self, "controller_options", dict(self.controller_options))
        self.make_controller()
        if self.placement == "colocated" and self.controller != "synchronous":
            raise ValueError(
                f"controller={short(self.controller)}: with placement='colocated' engines sleep while the trainer "
                "works; use 'synchronous', or placement='disaggregated'"
            )
        if self.engine == "hf" and self.groups_at_once != 1:
            raise ValueError(f"groups_at_once={self.groups_at_once}: HFEngine decodes one group at a time; use 1")

    def make_controller(self) -> Controller:
        """A controller of this run: the same kind of object that `simulator.LoopConfig` takes.

        Raises ValueError for `controller_options` that the controller does not take.
        """
        try:
            return CONTROLLERS[self.controller](**self.controller_options)
        except TypeError as error:
            raise ValueError(f"controller_options={short(self.controller_options)}: {error}") from None

    @property
    def at_update(self) -> str:
        """What weights that come do to running groups; HFEngine cannot swap under one, so it always finishes it."""
        return "finish" if self.engine == "hf" else self.make_controller().at_update

    @property
    def batch_rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts_per_step * self.group_size

    @cached_property
    def decoding(self) -> Decoding:
        """How tokens are drawn: the plain softmax, which the trainer can recompute."""
        return Decoding(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logprobs_mode="processed",
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.forced_tokens is not None,
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON holds them."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ClusterConfig:
        """The configuration that `to_json` gave, as a mapping or a text. Raises ValueError for anything else."""
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"config={short(value)}: is no JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise ValueError(f"config={short(value)}: needs an object with the fields of ClusterConfig")
        unknown = sorted(map(str, value.keys() - {f.name for f in fields(cls)}))
        if unknown:
            raise ValueError(f"config: {short(unknown[0])} is no field of ClusterConfig")
        return cls(**value)

    @property
    def hash(self) -> str:
        """The hash that the run folder writes beside each line."""
        return config_hash(self.to_json())
