"""What a checkpoint of an RL run holds: `COMPONENTS`, and what each must say.

Models: the twelve components of a resumable run, the queue and the open episodes, each with what goes wrong without
it. Leaves out their files (`manifest.py`). Use: `check("counters", {"global_step": 90, "policy_version": 90})`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinfra_utils import rollouts
from rlinfra_utils.checkpoint.position import DataPosition
from rlinfra_utils.doors import complaint, short

Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class _Content(BaseModel):
    """Fields that are asked for; a run may add its own."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _Counters(_Content):
    global_step: Count
    policy_version: Count


class _Engine(_Content):
    """How the trainer's weights become the engine's; the engine keeps no copy of its own."""

    version: Text
    precision: Text
    quantization: Text | None
    adapters: Text | None


class _Versions(_Content):
    tokenizer: Text
    chat_template: Text
    verifier: Text
    environment: Text
    engine: _Engine


class _Schema(_Content):
    schema_version: Count
    columns: dict[str, str]


class _Layout(_Content):
    world_size: Annotated[int, Field(ge=1)]


class _Queue(_Content):
    rollouts: list[dict[str, Any]]
    lost: list[Text | Count]


class _Episode(_Content):
    episode_id: Text
    environment_state: Any


class _Episodes(_Content):
    episodes: list[_Episode]
    lost: list[Text | Count]


def _mapping(value: Any) -> None:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{short(value)} says nothing; where the run has none, say so: {{'kind': 'none'}}")


def _with_tensors(value: Any) -> None:
    if not has_tensors(value):
        raise ValueError(f"{short(value)} holds no array; give the parameters by name")


def _queue(value: Any) -> None:
    for index, record in enumerate(_Queue.model_validate(value).rollouts):
        if record.get("policy_version") is None and not record.get("version_spans"):
            raise ValueError(f"rollouts[{index}] has neither policy_version nor version_spans; declare it lost instead")


def has_tensors(value: Any) -> bool:
    """Whether an array is anywhere in `value`."""
    if isinstance(value, Mapping):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensors, value))
    return isinstance(value, np.ndarray)


@dataclass(frozen=True)
class Component:
    """One part of a checkpoint: what it is, what a resume without it does, and the check of its content."""

    what: str
    without: str
    check: Callable[[Any], Any]


#: By name. The first twelve are those of lesson step 12.5.1, in its order.
COMPONENTS: Mapping[str, Component] = MappingProxyType(
    {
        "policy": Component("parameters of the model and its adapters", "nothing can be resumed", _with_tensors),
        "optimizer": Component(
            "state of the optimizer", "the first updates run on cold moments and jump to about the full LR", _mapping
        ),
        "scheduler": Component("learning-rate schedule", "the LR starts again at its first value", _mapping),
        "counters": Component(
            "global step and policy version",
            "versions count from 0 again, so the lag of every stored rollout is wrong",
            _Counters.model_validate,
        ),
        "rng": Component("states of the random generators", "sampling and dropout repeat or part ways", _mapping),
        "data_position": Component(
            "trained frontier, skip set, seed and dataset fingerprint",
            "prompts that were trained are trained again, from the first on",
            DataPosition.from_component,
        ),
        "curriculum": Component(
            "state of the task scheduler", "tasks come in their first mix and difficulty again", _mapping
        ),
        "normalizers": Component(
            "running statistics of rewards and advantages", "advantages change scale at the first step", _mapping
        ),
        "versions": Component(
            "tokenizer, template, verifier, environment, engine recipe",
            "nobody can tell whether tokens and rewards still mean the same",
            _Versions.model_validate,
        ),
        "rollout_schema": Component(
            "version and columns of the rollout record", "stored rollouts may be misread", _Schema.model_validate
        ),
        "decoding": Component(
            "how tokens are drawn", "the behaviour policy may differ unseen", rollouts.Decoding.model_validate
        ),
        "layout": Component(
            "distributed layout", "shards cannot be matched to ranks of another world size", _Layout.model_validate
        ),
        "queue": Component(
            "rollouts that wait, with behaviour versions, or their declared loss",
            "rollouts vanish without a count, long ones most often",
            _queue,
        ),
        "open_episodes": Component(
            "unfinished episodes with environment state, or their declared loss",
            "episodes vanish without a count",
            _Episodes.model_validate,
        ),
    }
)


def check(name: str, value: Any) -> None:
    """Raise ValueError, in one line, where `value` is no content of component `name`."""
    try:
        COMPONENTS[name].check(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {complaint(error)}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def names_of(require: Any) -> tuple[str, ...]:
    """Component names, each known, in the order of COMPONENTS; ValueError for others."""
    listed = isinstance(require, Iterable) and not isinstance(require, str)
    asked = list(require) if listed else [require]
    if not listed or not asked or any(name not in tuple(COMPONENTS) for name in asked):
        raise ValueError(f"require={short(asked)}: needs a list of names of COMPONENTS: {', '.join(COMPONENTS)}")
    return tuple(name for name in COMPONENTS if name in asked)


def rollout_schema() -> dict[str, Any]:
    """The component "rollout_schema" for the record that this package reads and writes."""
    columns = {column.name: str(column.type) for column in rollouts.SCHEMA}
    return {"schema_version": rollouts.SCHEMA_VERSION, "columns": columns}
