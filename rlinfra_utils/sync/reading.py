"""Read published weights while they are being replaced: `hold` and `read`.

Life: the pointer is read, that version's manifest locked (shared), its place checked again; the version then stays
on disk until the block ends or the process dies. Invariant: what is read is one version whole, and versions seen by
one reader never fall. Trap: after the block, the folder may go at any time.
Use: `with hold(folder) as held: engine.load(held.path, held.version)`; `read(folder).tensors["model.norm.weight"]`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from rlinfra_utils.doors import choice
from rlinfra_utils.sync.manifest import MANIFEST, WEIGHTS, Manifest, SyncError, read_manifest, read_pointer
from rlinfra_utils.sync.manifest import version_folder as folder_of
from rlinfra_utils.sync.prints import Fingerprint, differences, fingerprint


@dataclass(frozen=True)
class Held:
    """A version that stays on disk: `path` is a folder with `model.safetensors`."""

    version: int
    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Weights:
    """A version in memory, proven by its hashes; tied names are left out (`fingerprint.aliases`)."""

    version: int
    tensors: dict[str, Any]
    fingerprint: Fingerprint


@contextlib.contextmanager
def hold(folder: str | os.PathLike) -> Iterator[Held]:
    """The announced version, kept on disk while the block runs.

    Raises SyncError where nothing is announced yet, or the pointer or the manifest is damaged.
    """
    held, lock = _acquired(Path(folder))
    with lock:
        yield held


def read(folder: str | os.PathLike, framework: str = "numpy") -> Weights:
    """The announced version's tensors, of "numpy" or "torch" (numpy has no bfloat16), checked against its hashes.

    Raises SyncError where nothing is announced, or the bytes are not the ones that were published.
    """
    choice("framework", framework, ("numpy", "torch"))
    with hold(folder) as held:
        return Weights(held.version, *proven(held.path, held.manifest, framework))


def proven(path: Path, manifest: Manifest, framework: str) -> tuple[dict[str, Any], Fingerprint]:
    """The tensors in the folder of a version and their fingerprint; raises SyncError unless it is the manifest's."""
    tensors = _read_tensors(path, framework)
    prints = fingerprint(tensors)
    if found := differences(manifest.fingerprint, prints):
        raise SyncError(f"{path / WEIGHTS}: {len(found)} tensors are not as published, first {found[0]}")
    return tensors, manifest.fingerprint


def _read_tensors(path: Path, framework: str) -> dict[str, Any]:
    """All tensors of a version's file; nothing is unpickled."""
    try:
        with safe_open(path / WEIGHTS, framework=framework) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:
        raise SyncError(f"{path / WEIGHTS}: cannot be read as {framework}: {error}") from error


def _acquired(folder: Path) -> tuple[Held, BinaryIO]:
    """The announced version with a shared lock on its manifest; the next one if it is retired meanwhile."""
    missing = None
    while True:
        pointer = read_pointer(folder)
        if pointer is None:
            raise SyncError(f"{folder}: no version is announced yet")
        path = folder_of(folder, pointer.version)
        lock = _share(path / MANIFEST)
        if lock is not None:
            try:
                return Held(pointer.version, path, read_manifest(path, pointer.manifest_sha256)), lock
            except BaseException:
                lock.close()
                raise
        if pointer == missing:
            raise SyncError(f"{path / MANIFEST}: is missing, though version {pointer.version} is announced")
        missing = pointer


def _share(path: Path) -> BinaryIO | None:
    """The open file under a shared lock, released by closing it; None where it is gone or just going."""
    import fcntl  # POSIX alone has it

    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None
