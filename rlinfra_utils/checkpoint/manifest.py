"""The list of what a checkpoint folder holds, with sizes and hashes, and whether the folder keeps to it.

Models: manifest.json names each file of each component with its bytes and SHA-256; COMPLETE, written last, holds the
manifest's own hash. Leaves out the content of the files. Use: `manifest = read_manifest(path)`.

A hash finds accidents. Whoever can write the folder can write the hashes too: it proves no author.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinfra_utils.checkpoint.components import COMPONENTS
from rlinfra_utils.doors import complaint, short

MANIFEST = "manifest.json"
#: Marker of a folder that was written to its end.
COMPLETE = "COMPLETE"
FORMAT = "rlinfra-checkpoint-1"
SUFFIXES = (".json", ".safetensors")
_MAX_MANIFEST_BYTES = 2**20
#: How files begin that only unpickling could read: a bare pickle, and the zip archive of torch.save.
_PICKLES = (b"\x80", b"PK\x03\x04")


class CheckpointError(Exception):
    """A checkpoint cannot be written, found or read; one line with the path and the cause."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class File(_Strict):
    """One file of a checkpoint."""

    name: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(_Strict):
    """Files by component, and the versions of the software that wrote them."""

    format: Literal["rlinfra-checkpoint-1"]
    step: Annotated[int, Field(ge=0)]
    versions: dict[str, str]
    components: dict[str, list[File]]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError where the folder is none, or was not finished."""
    if path.is_symlink() or not path.is_dir():
        cause = "is a symbolic link; name the folder itself" if path.is_symlink() else "is no folder"
        raise CheckpointError(f"{path}: {cause}")
    raw = _small_file(path / MANIFEST, "the save never came to its end, or this is no checkpoint of ours")
    marker = _small_file(path / COMPLETE, "the save was interrupted")
    if marker.decode("ascii", "replace").strip() != hashlib.sha256(raw).hexdigest():
        raise CheckpointError(f"{path / MANIFEST}: differs from the hash in {COMPLETE}; it was damaged or edited")
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(f"{path / MANIFEST}: {complaint(error)}") from error
    for component, files in manifest.components.items():
        _check_names(path, component, files)
    return manifest


def _small_file(path: Path, if_absent: str) -> bytes:
    """A file's bytes, refused where absent, empty, huge or no regular file."""
    size_bytes = _regular_size(path, if_absent)
    if not 0 < size_bytes <= _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: has {size_bytes} bytes; a whole one has 1 to {_MAX_MANIFEST_BYTES}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _regular_size(path: Path, if_absent: str) -> int:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing: {if_absent}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise CheckpointError(f"{path}: is {kind}; a checkpoint holds its own bytes")
    return status.st_size


def _check_names(path: Path, component: str, files: list[File]) -> None:
    """Each file is the component's own: no name leads elsewhere, and none is listed twice."""
    if component not in COMPONENTS:
        raise CheckpointError(f"{path / MANIFEST}: components has {short(component)}, which is no component")
    allowed = {component + suffix for suffix in SUFFIXES}
    for file in files:
        if Path(file.name).name != file.name or "\\" in file.name or file.name in (".", ".."):
            raise CheckpointError(f"{path / MANIFEST}: name {short(file.name)} leads out of the checkpoint; refused")
        if file.name not in allowed:
            needed = " or ".join(sorted(allowed))
            raise CheckpointError(f"{path / MANIFEST}: name {short(file.name)} of {component}: needs {needed}, once")
        allowed.remove(file.name)


def check_file(path: Path, file: File) -> None:
    """Raise CheckpointError where a listed file of folder `path` is not the one that was written."""
    place = path / file.name
    size_bytes = _regular_size(place, "the manifest lists it")
    try:
        with open(place, "rb") as opened:
            start = opened.read(4)
            opened.seek(0)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error.strerror or error}") from error
    if size_bytes != file.size_bytes:
        cut = "is empty" if not size_bytes else "is truncated" if size_bytes < file.size_bytes else "is too long"
        raise CheckpointError(
            f"{place}: {cut}: {size_bytes} bytes, the manifest has {file.size_bytes}{_pickled(start)}"
        )
    if digest != file.sha256:
        raise CheckpointError(f"{place}: its SHA-256 differs from the manifest's; its bytes changed{_pickled(start)}")
    if start.startswith(_PICKLES):
        raise CheckpointError(f"{place}: its bytes are as listed{_pickled(start)}")


def _pickled(start: bytes) -> str:
    return "; it begins like a pickle, which is never loaded" if start.startswith(_PICKLES) else ""
