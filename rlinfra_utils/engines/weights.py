"""Weights into a model in place: all of them, or none.

Models: a folder of safetensors, or the state of a model of the same architecture, copied over the tensors that
a model already has. Leaves out resharding and name mapping: names and shapes have to agree. Nothing is unpickled.
Use: `copy_into(model, read_safetensors(folder), folder)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file


def read_safetensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of the `.safetensors` files in `folder`, by name.

    Raises ValueError when the folder has none, a file is damaged, or two files hold the same name.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} is not a folder with .safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            part = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
        if twice := sorted(tensors.keys() & part.keys()):
            raise ValueError(f"{file} repeats tensors of another file, first {twice[0]!r}")
        tensors |= part
    return tensors


@torch.no_grad()
def copy_into(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], source: object) -> None:
    """Copy `tensors` over the parameters and persistent buffers of `model`, converted to its dtypes.

    Tied tensors (one parameter under two names) may come under either name, or under both if equal.
    Raises ValueError, with `model` untouched, for a name that is missing or unknown, another shape, values
    that are not finite in the model's dtype, or tied names that differ. `source` is named in the message.
    """
    targets = model.state_dict(keep_vars=True)
    if unknown := sorted(tensors.keys() - targets.keys()):
        raise ValueError(f"{source} has {len(unknown)} tensors that the model lacks, first {unknown[0]!r}")
    names_of: dict[int, list[str]] = {}
    for name, target in targets.items():
        names_of.setdefault(id(target), []).append(name)
    staged = {}
    for names in names_of.values():
        fitted = {name: _fitted(name, tensors[name], targets[name], source) for name in names if name in tensors}
        if not fitted:
            raise ValueError(f"{source} lacks the model's tensor {names[0]!r}")
        first, *others = fitted
        for other in others:
            if not torch.equal(fitted[first], fitted[other]):
                raise ValueError(f"{source}: {first!r} and {other!r} differ, but the model ties them")
        staged[first] = fitted[first]
    for name, tensor in staged.items():
        targets[name].copy_(tensor)


def _fitted(name: str, tensor: torch.Tensor, target: torch.Tensor, source: object) -> torch.Tensor:
    """`tensor` in the dtype of `target`, once it is sure that it can take its place."""
    if tensor.shape != target.shape:
        raise ValueError(f"{source}: {name!r} has shape {tuple(tensor.shape)}, the model's {tuple(target.shape)}")
    if tensor.dtype != target.dtype and not (tensor.is_floating_point() and target.is_floating_point()):
        raise ValueError(f"{source}: {name!r} is {tensor.dtype}, the model's is {target.dtype}")
    tensor = tensor.to(target.dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{source}: {name!r} holds values that are not finite in {target.dtype}")
    return tensor
