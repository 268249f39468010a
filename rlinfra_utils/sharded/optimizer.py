"""The state of an optimizer by the names of its parameters, so that it fits any number of ranks.

Models: what `optimizer.state_dict()` holds, with names in place of numbers. Leaves out storage (`saving.py`), and
torch's `get_optimizer_state_dict`, which makes a fresh optimizer take a step (its count is then 1, not 0).
Use: `tree = named_state(model, optimizer)`; `set_state(model, optimizer, tree)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rlinfra_utils.checkpoint import CheckpointError
from rlinfra_utils.doors import short
from rlinfra_utils.sharded.model import named_tensors


def parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters that `optimizer` steps, by name, in its own order.

    Raises ValueError for one that is not the model's: `shard_model` makes others, so that it has to come first.
    """
    name_of = {id(tensor): name for name, tensor in named_tensors(model).items()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [index for index, parameter in enumerate(held) if id(parameter) not in name_of]
    if strange:
        raise ValueError(f"optimizer: parameter {strange[0]} is not the model's; build the optimizer after shard_model")
    return {name_of[id(parameter)]: parameter for parameter in held}


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """{"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": ..., "params": [name, ...]}]}.

    Raises ValueError for a state that is not cut over the ranks as its parameter is, such as Adafactor's.
    """
    held, packed = parameters(model, optimizer), optimizer.state_dict()
    names = list(held)
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
    state = {names[index]: entry for index, entry in packed["state"].items()}
    for name, entry in state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != held[name].shape:
                raise ValueError(
                    f"optimizer: {key} of {name} has shape {tuple(value.shape)}; "
                    f"needs its parameter's, {tuple(held[name].shape)}, or none"
                )
    return {"state": state, "param_groups": groups}


def set_state(model: nn.Module, optimizer: Optimizer, tree: Mapping[str, Any]) -> None:
    """Give `optimizer` a state that `named_state` returned and `check_groups` passed."""
    index = {name: number for number, name in enumerate(parameters(model, optimizer))}
    groups = []
    for live, stored in zip(optimizer.param_groups, tree["param_groups"]):
        # JSON has no tuple; AdamW's betas are one.
        values = {key: tuple(v) if isinstance(live[key], tuple) else v for key, v in stored.items() if key != "params"}
        groups.append({**values, "params": [index[name] for name in stored["params"]]})
    state = {index[name]: entry for name, entry in tree["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_groups(model: nn.Module, optimizer: Optimizer, tree: Any) -> None:
    """Raise CheckpointError, in one line, where a stored state is another optimizer's or another model's."""
    live = named_state(model, optimizer)["param_groups"]
    try:
        stored = [(list(group["params"]), sorted(group)) for group in tree["param_groups"]]
        named = {name for name, entry in tree["state"].items() if entry.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"optimizer={short(tree)}: has no state and param_groups by name: {error!r}") from error
    if len(stored) != len(live):
        raise CheckpointError(f"optimizer: {len(stored)} groups are stored, the optimizer has {len(live)}")
    for number, (group, (names, keys)) in enumerate(zip(live, stored)):
        for what, mine, theirs in (("parameters", group["params"], names), ("settings", sorted(group), keys)):
            if mine != theirs:
                odd = [entry for entry in (*mine, *theirs) if (entry in mine) != (entry in theirs)] or ["their order"]
                raise CheckpointError(f"optimizer: param_groups[{number}] has other {what}: {short(odd[0])} differs")
        for key, value in group.items():
            given = tree["param_groups"][number][key]
            if isinstance(value, tuple) and not (isinstance(given, list) and len(given) == len(value)):
                raise CheckpointError(
                    f"optimizer: param_groups[{number}].{key}={short(given)}: needs {len(value)} values"
                )
    unknown = named - {name for group in live for name in group["params"]}
    if unknown:
        raise CheckpointError(f"optimizer: state of {short(min(unknown))}, which the optimizer does not step")
