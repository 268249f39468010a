"""Checkpoints of a sharded trainer, written by all its ranks: `save_sharded`.

Life of one save: every rank writes its shards aside through torch DCP; DCP joins them, one tensor at a time, to the
whole policy.safetensors and optimizer.safetensors; `checkpoint.Writer` on rank 0 lists them with sizes and hashes,
marks the folder complete, renames it. Invariant: what is named step_N is a checkpoint like any other: `latest`,
`load` and `audit` read it without torch, and it knows no number of ranks. Trap: the folder must be one that all ranks
see; a rank that dies ends the save with an error on the others, and the checkpoint before stays the latest.

DCP's own format keeps its index in `.metadata`, a pickle, which runs what its author likes as it is read. DCP's
safetensors writer needs none, so it is the one used here. Leaves out types other than float16, float32 and float64,
and asynchronous writing. Cost: the bytes are written three times.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinfra_utils.checkpoint import COMPONENTS, Writer
from rlinfra_utils.checkpoint.coding import encode
from rlinfra_utils.checkpoint.components import check
from rlinfra_utils.doors import short
from rlinfra_utils.sharded.group import Ranks
from rlinfra_utils.sharded.model import named_tensors
from rlinfra_utils.sharded.optimizer import named_state
from rlinfra_utils.sharded.shards import DTYPES, JOINED, SHARDED, in_one_line

_TYPES = " or ".join(str(dtype) for dtype in DTYPES)


class _ShardWriter(Writer):
    """A writer for which the largest files lie on disk already: `shards`, by component and file name."""

    shards: Mapping[str, Mapping[str, Any]] = {}

    def _write(self, step: int, snapshot: Mapping[str, Any]) -> Path:
        return super()._write(step, {**snapshot, **self.shards})


class _Save:
    """Rank 0's part of a save: `begin` locks the folder and makes a place aside, `finish` publishes, `close` clears."""

    def __init__(self, folder: Path, keep: int | None, components: Mapping[str, Any]) -> None:
        self.folder, self.keep, self.components = folder, keep, components
        self.writer: _ShardWriter | None = None
        self.aside: Path | None = None

    def begin(self) -> Path:
        for name, value in self.components.items():
            if name not in COMPONENTS or name in (*SHARDED, "layout"):
                raise ValueError(f"components: {short(name)} is not one of COMPONENTS beside policy, optimizer, layout")
            check(name, value)
        self.writer = _ShardWriter(self.folder, self.keep)
        # Named like what a killed writer leaves, so that the next one clears it away.
        self.aside = Path(tempfile.mkdtemp(prefix=".step_", suffix=".aside", dir=self.folder))
        return self.aside

    def finish(self, step: int, parts: Mapping[str, _Part], layout: Mapping[str, Any]) -> Path:
        self.writer.shards = {name: part.files(self.aside / name / JOINED) for name, part in parts.items()}
        return self.writer.save(step, {**self.components, "layout": layout})

    def close(self) -> None:
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        if self.writer is not None:
            self.writer.close()


class _Part:
    """A sharded component: its JSON, and its tensors under the names by which the JSON refers to them."""

    def __init__(self, name: str, tree: Mapping[str, Any]) -> None:
        self.name = f"{name}.json"
        self.tensors: dict[str, Tensor] = {}
        self.text = encode(name, self._without_tensors(name, tree, ()))[self.name]

    def files(self, joined: Path) -> dict[str, Any]:
        """By name; the tensors' bytes are read from `joined` as they are needed."""
        if not self.tensors:
            return {self.name: self.text}
        with open(joined, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return {self.name: self.text, Path(self.name).with_suffix(".safetensors").name: data}

    def _without_tensors(self, where: str, tree: Any, path: tuple[str, ...]) -> Any:
        """`tree` with an empty array for each tensor, which `encode` names by its path.

        The optimizer's tensors without axes, such as AdamW's step, become numbers, of which torch's optimizers make
        tensors again: DCP of torch 2.13 joins such tensors to 0 (`_write_sub_tensor_to_file_optimized`).
        """
        if isinstance(tree, Mapping):
            return {key: self._without_tensors(f"{where}.{key}", entry, (*path, key)) for key, entry in tree.items()}
        if not isinstance(tree, Tensor):
            return tree
        if tree.dim() == 0 and path[0] == "state":
            return tree.item()
        if tree.dim() == 0 or tree.dtype not in DTYPES:
            raise ValueError(f"{where}: is {tree.dtype} of shape {tuple(tree.shape)}; needs an axis and {_TYPES}")
        self.tensors["/".join(path)] = tree
        return np.empty(0)


def save_sharded(
    folder: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    components: Mapping[str, Any],
    ranks: Ranks,
    keep: int | None = None,
) -> Path:
    """Save FOLDER/step_N and return its path; each rank calls it, with a model of `shard_model` and its optimizer.

    `components` holds the others of `checkpoint.COMPONENTS`, those of rank 0 being stored; the layout is written
    here. `keep` as in `Writer`. Memory: each rank makes a copy of its own shards, one component at a time.
    Raises on every rank, leaving the folder as it was: ValueError for what cannot be stored, CheckpointError for a
    folder that cannot be written or has another writer, RanksError where that happened on another rank.
    """
    parts = {
        "policy": _Part("policy", named_tensors(model)),
        "optimizer": _Part("optimizer", named_state(model, optimizer)),
    }
    layout = {"world_size": ranks.world_size, "strategy": "fsdp2", "device": ranks.device.type}
    save = _Save(Path(folder), keep, components)
    try:
        aside = ranks.together(save.begin, on=0)
        for name, part in parts.items():
            if part.tensors:
                with in_one_line(f"{folder}: step {step} cannot be written"):
                    dcp.save(part.tensors, storage_writer=_joining(aside / name))
        return ranks.together(lambda: save.finish(step, parts, layout), on=0)
    finally:
        save.close()


def _joining(place: Path) -> dcp.HuggingFaceStorageWriter:
    return dcp.HuggingFaceStorageWriter(str(place), save_distributed=True, enable_consolidation=True)
