"""What a folder of versions says of itself: the manifest of a version, and the pointer to the current one.

Models: `current` names a version and the SHA-256 of its manifest, the manifest holds the print of each tensor: from the
pointer down, each link is checked. Leaves out signatures: a hash finds accidents, no author.
Use: `pointer = read_pointer(folder)`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinfra_utils.rollouts.storage import flush, flush_folder
from rlinfra_utils.sync.prints import Fingerprint, TensorPrint

MANIFEST, WEIGHTS, POINTER = "manifest.json", "model.safetensors", "current"
_SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_VERSION = Annotated[int, Field(ge=0)]


class SyncError(Exception):
    """Weights cannot be published, confirmed or read; one line with the place and the cause."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Manifest(_Strict):
    """One version: the print of every tensor in its file, and the names that were left out of it."""

    format: Literal["rlinfra-weights-1"] = "rlinfra-weights-1"
    version: _VERSION
    tensors: Annotated[dict[str, TensorPrint], Field(min_length=1)]
    aliases: dict[str, str]

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the weights that were published."""
        return Fingerprint(self.tensors, self.aliases)


class Pointer(_Strict):
    """The version that is announced, and the hash of its manifest."""

    version: _VERSION
    manifest_sha256: _SHA256


def version_folder(folder: Path, version: int) -> Path:
    """Where a version lies, and has lain from its first instant: no reader meets half of it."""
    return folder / f"v{version:08d}"


def versions_on_disk(folder: Path) -> list[int]:
    """Versions that have a folder, announced or not, in rising order."""
    names = (re.fullmatch(r"v(\d{8,})", path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def read_pointer(folder: Path) -> Pointer | None:
    """The announced version; None where there is none yet. Raises SyncError for a damaged pointer."""
    try:
        return _parsed(Pointer, folder / POINTER, (folder / POINTER).read_bytes())
    except FileNotFoundError:
        return None


def write_pointer(folder: Path, version: int) -> None:
    """Announce a version: one atomic rename. Checks nothing; `Publisher` does that before.

    Raises OSError where the version has no manifest, or the folder cannot be written.
    """
    manifest = (version_folder(folder, version) / MANIFEST).read_bytes()
    pointer = Pointer(version=version, manifest_sha256=hashlib.sha256(manifest).hexdigest())
    aside = folder / f".{POINTER}.aside"
    try:
        write_flushed(aside, pointer.model_dump_json().encode())
        os.replace(aside, folder / POINTER)
    finally:
        aside.unlink(missing_ok=True)
    flush_folder(folder)


def read_manifest(path: Path, expected_sha256: str | None = None) -> Manifest:
    """The manifest in the folder of one version.

    Raises SyncError where it is damaged or of another version, OSError where it cannot be read.
    """
    raw = (path / MANIFEST).read_bytes()
    if expected_sha256 is not None and hashlib.sha256(raw).hexdigest() != expected_sha256:
        raise SyncError(f"{path / MANIFEST}: its SHA-256 differs from the one in {POINTER}; it was damaged or edited")
    manifest = _parsed(Manifest, path / MANIFEST, raw)
    if version_folder(path.parent, manifest.version) != path:
        raise SyncError(f"{path / MANIFEST}: version={manifest.version} lies in the folder of another version")
    return manifest


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and have it on the disk itself."""
    with open(path, "wb") as file:
        file.write(data)
        flush(file)


def _parsed(model: type[_Strict], path: Path, raw: bytes) -> _Strict:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise SyncError(f"{path}: {place}: {first['msg']}; it was damaged or edited") from None
