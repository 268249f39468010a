"""Low-rank adapters: the few tensors that travel in place of a model, and the base that they are nothing without.

Models: y = W x + (alpha / rank) B A x on chosen linear layers (LoRA, arXiv 2106.09685), attached to a model or merged
into its weights, saved with the fingerprint of the base. Leaves out dropout, biases, and layers other than linear.
Use: `save_adapter(folder, adapter, fingerprint(base))`, then `merge(base, load_adapter(folder, fingerprint(base)))`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinfra_utils.doors import number, short
from rlinfra_utils.sync.manifest import SyncError
from rlinfra_utils.sync.prints import Fingerprint, fingerprint

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """Torch tensors by the name of the weight they change: `a[name]` (rank, in), `b[name]` (out, rank).

    Raises ValueError for an alpha that is not above 0, and sides whose names or shapes do not go together.
    """

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    alpha: float

    def __post_init__(self):
        number("alpha", self.alpha, above=True)
        if not self.a or self.a.keys() != self.b.keys():
            raise ValueError(f"b={short(sorted(self.b))}: needs the names of a, {short(sorted(self.a))}, at least one")
        for name in self.a:
            if self.a[name].ndim != 2 or self.b[name].ndim != 2 or self.a[name].shape[0] != self.b[name].shape[1]:
                shapes = f"{tuple(self.a[name].shape)} and {tuple(self.b[name].shape)}"
                raise ValueError(f"a[{name!r}], b[{name!r}]: shapes {shapes}; need (rank, in) and (out, rank)")

    @property
    def tensors(self) -> dict[str, Any]:
        """All tensors by the names of a file: the weight's, with lora_A or lora_B in it."""
        return {_file_name(name, part): side[name] for part, side in (("A", self.a), ("B", self.b)) for name in side}

    def delta(self, name: str) -> Any:
        """What the adapter adds to one weight, (out, in)."""
        return (self.alpha / self.a[name].shape[0]) * (self.b[name] @ self.a[name])


def merge(base: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """The base's state dict with the adapter added to its weights; the base stays as it is.

    Raises ValueError for a weight that the base lacks or that has another shape.
    """
    _check_base(base, adapter)
    return {name: tensor + adapter.delta(name) if name in adapter.a else tensor for name, tensor in base.items()}


@contextlib.contextmanager
def attached(model: Any, adapter: Adapter) -> Iterator[None]:
    """Run a torch model with the adapter beside its weights, not in them, while the block runs.

    Raises ValueError as `merge` does.
    """
    _check_base(model.state_dict(), adapter)
    hooks = [
        model.get_submodule(name.removesuffix(".weight")).register_forward_hook(_adding(adapter, name))
        for name in adapter.a
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def save_adapter(folder: str | os.PathLike, adapter: Adapter, base: Fingerprint) -> Fingerprint:
    """Write the adapter, and which base it belongs to; returns the adapter's own fingerprint.

    Raises SyncError where `folder` cannot be written, ValueError for tensors that `fingerprint` refuses.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    prints = fingerprint(adapter.tensors)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    config = {"alpha": adapter.alpha, "base_digest": base.digest, "adapter_digest": prints.digest}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config))
    except OSError as error:
        raise SyncError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return prints


def load_adapter(folder: str | os.PathLike, base: Fingerprint) -> Adapter:
    """The adapter in `folder`, for the base that it was trained on.

    Raises SyncError for another base (an adapter without its own gives neither model), and for damaged files.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text())
        alpha, base_digest, digest = (config[key] for key in ("alpha", "base_digest", "adapter_digest"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SyncError(f"{folder}: holds no whole adapter: {error!r}") from error
    if base_digest != base.digest:
        raise SyncError(f"{folder}: is an adapter of base {str(base_digest)[:12]}, the engine holds {base.digest[:12]}")
    if fingerprint(tensors).digest != digest:
        raise SyncError(f"{folder / WEIGHTS}: its tensors are not the ones in {CONFIG}; it was damaged or edited")
    names = [name.replace(".lora_A.", ".") for name in tensors if ".lora_A." in name]
    sides = ({name: tensors[_file_name(name, part)] for name in names} for part in "AB")
    return Adapter(*sides, alpha=alpha)


def _adding(adapter: Adapter, name: str) -> Any:
    scale = adapter.alpha / adapter.a[name].shape[0]

    def hook(module: Any, inputs: tuple, output: Any) -> Any:
        return output + scale * (inputs[0] @ adapter.a[name].T @ adapter.b[name].T)

    return hook


def _check_base(base: Mapping[str, Any], adapter: Adapter) -> None:
    for name in adapter.a:
        if name not in base:
            raise ValueError(f"adapter: changes {name!r}, which the base lacks")
        needed = (adapter.b[name].shape[0], adapter.a[name].shape[1])
        if tuple(base[name].shape) != needed:
            raise ValueError(f"adapter: {name!r} has shape {tuple(base[name].shape)} in the base, {needed} here")


def _file_name(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.lora_{part}.weight"
