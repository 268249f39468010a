"""Checkpoints of a sharded trainer, read by any number of ranks: `load_sharded`.

Models: rank 0 proves all files before any is opened; then each rank reads its own part of each tensor through torch
DCP. Leaves out DCP's own format, whose index is a pickle: a `.distcp` folder is refused, and `audit` judges it from
outside. Leaves out resuming without the optimizer (`checkpoint.load(path, require=("policy",))`).
Use: `components = load_sharded(latest(folder), model, optimizer, ranks)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinfra_utils.checkpoint import COMPONENTS, CheckpointError, load
from rlinfra_utils.checkpoint.manifest import Manifest, check_file
from rlinfra_utils.checkpoint.reading import open_manifest
from rlinfra_utils.sharded.group import Ranks, first_line
from rlinfra_utils.sharded.model import named_tensors
from rlinfra_utils.sharded.optimizer import check_groups, parameters, set_state
from rlinfra_utils.sharded.shards import DTYPES, SHARDED, FileReader, in_one_line

#: Shape and type, as safetensors names it, of each tensor of a file.
Header = dict[str, tuple[tuple[int, ...], str]]
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def load_sharded(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    require: Iterable[str] = tuple(COMPONENTS),
) -> dict[str, Any]:
    """Load policy and optimizer into a sharded model, on any number of ranks; return the other components by name.

    Rank 0 proves every file by the manifest's hashes before any is opened, and that names, shapes and types are the
    model's; then each rank reads its part alone. A hash proves no author: nothing here is unpickled, whoever wrote
    it. Raises on every rank, with model and optimizer untouched: CheckpointError for what is missing, damaged, of
    another model or optimizer, or no checkpoint of ours; RanksError where rank 0 found that.
    """
    path, require = Path(path), tuple(require)
    others, tree, header = ranks.together(lambda: _proven(path, model, optimizer, require), on=0)
    held = parameters(model, optimizer)
    state = {name: dict(entry) for name, entry in tree["state"].items()}
    moments: dict[str, Tensor] = {}
    for key, (_, dtype) in header.items():
        name, what = _place(key)
        moments[key] = state[name][what] = torch.zeros_like(held[name].detach(), dtype=_TORCH[dtype])
    for name, targets in (("policy", named_tensors(model)), ("optimizer", moments)):
        if targets:
            with in_one_line(f"{path}: {name} cannot be read"):
                dcp.load(targets, storage_reader=FileReader(path / f"{name}.safetensors"))
    set_state(model, optimizer, {**tree, "state": state})
    return others


def _proven(path: Path, model: nn.Module, optimizer: Optimizer, require: tuple[str, ...]) -> tuple[Any, ...]:
    """The other components, the optimizer's JSON and its tensors' shapes and types; CheckpointError for a fault."""
    manifest = open_manifest(path)
    for name in SHARDED:
        if name not in manifest.components:
            raise CheckpointError(f"{path}: is incomplete, lacks {name}: without it, {COMPONENTS[name].without}")
        for file in manifest.components[name]:
            check_file(path, file)
    try:
        held = {name: _kind(tensor) for name, tensor in named_tensors(model).items()}
        _check_policy(_header(path, manifest, "policy"), held)
        tree = json.loads((path / "optimizer.json").read_bytes())
        check_groups(model, optimizer, tree)
        header = _header(path, manifest, "optimizer")
        _check_moments(header, tree["state"], held)
    except (CheckpointError, SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from error
    wanted = [name for name in require if name not in SHARDED]
    return load(path, wanted) if wanted else {}, tree, header


def _header(path: Path, manifest: Manifest, component: str) -> Header:
    """The tensors of a component; nothing for one without a file of them."""
    name = f"{component}.safetensors"
    if name not in [file.name for file in manifest.components[component]]:
        return {}
    with safe_open(path / name, framework="pt") as file:
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in parts.items()}


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype))


def _place(key: str) -> tuple[str, str]:
    """Parameter and entry of "state/PARAMETER/ENTRY", as `encode` joins them."""
    _, name, what = key.split("/")
    return name, what


def _check_policy(stored: Header, held: Header) -> None:
    odd = sorted(stored.keys() ^ held.keys())
    if odd:
        raise CheckpointError(f"policy: {'the model' if odd[0] in stored else 'it'} lacks {odd[0]!r}")
    for name, mine in held.items():
        if stored[name] != mine:
            raise CheckpointError(f"policy: {name!r} is {stored[name]}, the model's is {mine}")


def _check_moments(header: Header, state: Mapping[str, Any], held: Header) -> None:
    """What optimizer.json refers to is what optimizer.safetensors has, each like its parameter."""
    entries = [(name, what, value) for name, entry in state.items() for what, value in entry.items()]
    named = {f"state/{name}/{what}" for name, what, value in entries if isinstance(value, dict)}
    odd = sorted(named ^ header.keys())
    if odd:
        raise CheckpointError(f"optimizer: {odd[0]!r} is in one of optimizer.json and optimizer.safetensors alone")
    for key, (shape, dtype) in header.items():
        wanted, _ = held[_place(key)[0]]
        if shape != wanted or dtype not in _TORCH:
            raise CheckpointError(f"optimizer: {key!r} is {(shape, dtype)}, its parameter has shape {wanted}")
