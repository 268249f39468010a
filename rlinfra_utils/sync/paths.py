"""The paths that weights take from a trainer to an engine, each timed by its parts and weighed in bytes.

Models: a snapshot through a folder (on disk, or in shared memory), an adapter alone, a copy in memory, a change of
pointers in memory. Leaves out collective transfer between GPUs, and several replicas (`Publisher`).
Use: `table([through_folder(state_dict, engine, 1, folder), in_memory_copy(model, engine, 2)])`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rlinfra_utils.doors import whole
from rlinfra_utils.rollouts import Decoding
from rlinfra_utils.sync.adapters import Adapter, load_adapter, merge, save_adapter
from rlinfra_utils.sync.manifest import SyncError
from rlinfra_utils.sync.parts import Parts
from rlinfra_utils.sync.prints import fingerprint
from rlinfra_utils.sync.staging import stage
from rlinfra_utils.sync.tensors import in_host_memory
from rlinfra_utils.timers import Trace

#: Where Linux keeps files in memory.
SHARED_MEMORY = Path("/dev/shm")
#: In their order; "reset" is the engine's prefix cache.
PARTS = ("gather", "hash", "write", "check", "load", "reset")


@dataclass(frozen=True)
class Transfer:
    """One sync. `num_bytes` moved; `seconds` by those of `PARTS` that the path has.

    `cache_loss_s`: how much longer the engine read the same prompts after the sync than before it, which is what the
    lost prefix cache costs; None where no prompts were given.
    """

    path: str
    version: int
    num_bytes: int
    seconds: dict[str, float]
    cache_loss_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds of all parts; the cache loss comes later, with the first requests."""
        return sum(self.seconds.values())


def through_folder(
    state_dict: Mapping[str, Any],
    engine: Any,
    version: int,
    folder: str | Path,
    prompts: Sequence[list[int]] = (),
    trace: Trace | None = None,
) -> Transfer:
    """A full snapshot, written to `folder` and loaded by `engine.load(path, version)`. Raises as `Publisher.stage`.

    As for every path: `prompts` are read before and after, for what the lost cache costs; `trace` takes the parts as
    spans; ValueError for a version that is no whole number from 0.
    """

    def move(parts: Parts) -> int:
        path, manifest = stage(Path(folder), state_dict, version, None, parts)
        with parts("load"):
            engine.load(path, version)
        return manifest.fingerprint.num_bytes

    return _timed("snapshot, folder", move, engine, version, prompts, trace)


def through_shared_memory(
    state_dict: Mapping[str, Any],
    engine: Any,
    version: int,
    prompts: Sequence[list[int]] = (),
    trace: Trace | None = None,
) -> Transfer:
    """The same through a folder in memory: the engine reads it as it reads a disk. Raises SyncError without one."""
    if not SHARED_MEMORY.is_dir():
        raise SyncError(f"{SHARED_MEMORY}: is no folder here; shared memory as files needs Linux")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="weights-") as folder:
        transfer = through_folder(state_dict, engine, version, folder, prompts, trace)
    return replace(transfer, path="snapshot, shared memory")


def adapter_only(
    adapter: Adapter,
    base: Mapping[str, Any],
    engine: Any,
    version: int,
    folder: str | Path,
    prompts: Sequence[list[int]] = (),
    trace: Trace | None = None,
) -> Transfer:
    """An adapter through `folder`; the engine's side merges it into the `base` that it has kept.

    `engine.model` receives the sum. The base's fingerprint is not timed: an engine makes it once. Raises as
    `save_adapter`, `load_adapter` and `merge`.
    """
    base_print = fingerprint(base)

    def move(parts: Parts) -> int:
        with parts("write"):
            prints = save_adapter(folder, adapter, base_print)
        with parts("load"):
            engine.model.load_state_dict(merge(base, load_adapter(folder, base_print)))
            engine.version = version
        return prints.num_bytes

    return _timed("adapter only", move, engine, version, prompts, trace)


def in_memory_copy(
    model: Any, engine: Any, version: int, prompts: Sequence[list[int]] = (), trace: Trace | None = None
) -> Transfer:
    """Trainer and engine in one process, a model each: `engine.adopt(model, version)` copies."""

    def move(parts: Parts) -> int:
        with parts("load"):
            engine.adopt(model, version)
        return sum(tensor.nbytes for tensor in in_host_memory(model.state_dict())[0].values())

    return _timed("memory, copy", move, engine, version, prompts, trace)


def in_memory_pointers(
    model: Any, engine: Any, version: int, prompts: Sequence[list[int]] = (), trace: Trace | None = None
) -> Transfer:
    """One process, one set of weights: the engine's model is given the trainer's tensors themselves.

    Moves no bytes. Trap: the next optimizer step changes the engine's weights under its version number.
    """

    def move(parts: Parts) -> int:
        with parts("load"):
            engine.model.load_state_dict(model.state_dict(keep_vars=True), assign=True)
            engine.version = version
        return 0

    return _timed("memory, pointers", move, engine, version, prompts, trace)


def table(transfers: Sequence[Transfer]) -> pd.DataFrame:
    """One row a transfer: bytes, seconds by part (NaN: the path has no such part), total, cache loss."""
    rows = [
        {"bytes": transfer.num_bytes}
        | {f"{part}_s": value for part, value in transfer.seconds.items()}
        | {"total_s": transfer.total_s, "cache_loss_s": transfer.cache_loss_s}
        for transfer in transfers
    ]
    columns = ["bytes", *(f"{part}_s" for part in PARTS), "total_s", "cache_loss_s"]
    index = pd.Index([transfer.path for transfer in transfers], name="path")
    return pd.DataFrame(rows, index, columns).astype(dict.fromkeys(columns[1:], float))


def _timed(
    path: str,
    move: Callable[[Parts], int],
    engine: Any,
    version: int,
    prompts: Sequence[list[int]],
    trace: Trace | None,
) -> Transfer:
    """Time `move`, which returns its bytes, and the reset of the engine's cache; read the prompts before and after."""
    parts, version = Parts(trace), whole("version", version, 0)
    if prompts:
        _reading_s(engine, prompts)  # now the engine's cache holds them
        before_s = _reading_s(engine, prompts)
    with parts.whole(version=version):
        num_bytes = move(parts)
        if hasattr(engine, "reset_prefix_cache"):
            with parts("reset"):
                engine.reset_prefix_cache()
    loss_s = _reading_s(engine, prompts) - before_s if prompts else None
    return Transfer(path, version, num_bytes, parts.seconds, loss_s)


def _reading_s(engine: Any, prompts: Sequence[list[int]]) -> float:
    """Seconds that the engine reads `prompts` for."""
    one = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=1)
    return engine.generate(list(prompts), one, n=1, seed=0).prefill_s
