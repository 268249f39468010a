"""A version on its way to the disk: checked against the one before, written aside, read back, renamed.

Models: after `stage` the folder of the version is there whole, or not at all; nobody is told of it. Leaves out who
loads it (`publisher.py`). Use: `path, manifest = stage(folder, state_dict, 7, None, Parts())`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlinfra_utils.rollouts.storage import flush_folder
from rlinfra_utils.sync.manifest import MANIFEST, WEIGHTS, Manifest, SyncError, version_folder, write_flushed
from rlinfra_utils.sync.parts import Parts
from rlinfra_utils.sync.prints import Fingerprint, differences, print_of
from rlinfra_utils.sync.reading import proven
from rlinfra_utils.sync.tensors import in_host_memory, is_finite


def stage(
    folder: Path, state_dict: Mapping[str, Any], version: int, before: Manifest | None, parts: Parts
) -> tuple[Path, Manifest]:
    """Write one version; returns its folder and manifest. `parts` takes the seconds of each part.

    Raises ValueError, with nothing written, for weights that are not finite or do not fit the version `before`;
    SyncError for a full disk and the like, with nothing left behind.
    """
    with parts("gather"):
        tensors, aliases = in_host_memory(state_dict)
    with parts("hash"):
        prints = print_of(tensors, aliases)
        _check_fit(tensors, prints, before)
    path = version_folder(folder, version)
    if path.exists():
        raise SyncError(f"{path}: stands there already; a version is written once")
    aside = aside_of(path)
    try:
        with on_disk(path):
            aside.mkdir(parents=True)
            with parts("write"):
                manifest = _write(aside, tensors, prints, version)
            with parts("check"):
                # Read back: not torn by a trainer that went on meanwhile, nor by the disk.
                proven(aside, manifest, "torch" if _of_torch(tensors) else "numpy")
                os.rename(aside, path)
                flush_folder(folder)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path, manifest


def aside_of(path: Path) -> Path:
    """A name beside `path` for what is not finished or is on its way out."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.aside")


def _check_fit(tensors: Mapping[str, Any], prints: Fingerprint, before: Manifest | None) -> None:
    """Raise ValueError for weights that no replica could serve in place of the version before."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"state_dict: {name!r} holds NaN or infinity; these weights are not published")
    for found in differences(before.fingerprint, prints) if before else ():
        if found.what != "bytes":
            raise ValueError(f"state_dict: {found.name!r}: {found.what} was {found.in_a}, is {found.in_b}")


def _write(folder: Path, tensors: Mapping[str, Any], prints: Fingerprint, version: int) -> Manifest:
    if _of_torch(tensors):
        from safetensors.torch import save_file
    else:
        from safetensors.numpy import save_file
    save_file(dict(tensors), folder / WEIGHTS)
    with open(folder / WEIGHTS, "rb") as file:
        os.fsync(file.fileno())
    manifest = Manifest(version=version, tensors=prints.tensors, aliases=prints.aliases)
    write_flushed(folder / MANIFEST, manifest.model_dump_json().encode())
    flush_folder(folder)
    return manifest


def _of_torch(tensors: Mapping[str, Any]) -> bool:
    return all(hasattr(tensor, "detach") for tensor in tensors.values())


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Raise errors of the disk inside as SyncError, in one line."""
    try:
        yield
    except OSError as error:
        raise SyncError(f"{path}: cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise SyncError(f"{path}: cannot be written: {error}") from error
