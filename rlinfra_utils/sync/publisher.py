"""Publish weights so that every replica has them, whole, before anyone is told: `Publisher`.

Life of a version: staged (written aside, flushed, read back, hashed, renamed to v0000000N) -> loaded and confirmed by
every replica -> announced by one rename of the pointer -> retired. Invariant: readers see announced versions only, and
these only grow. The announcement comes last, so no failure has to take one back.

    publish(sd, 7) -> v00000007 is staged; replicas 0 and 1 load it; both confirm; `current` says 7
    publish(sd, 8) -> v00000008 is staged; replica 1 refuses it; 0 and 1 load v00000007; SyncError; `current` says 7

Trap: between load and announcement replicas already serve the version, so completions carry their own; and the
folder needs a file system with atomic rename and flock. Leaves out sharded weights, and Windows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rlinfra_utils.doors import listed, number, short, whole
from rlinfra_utils.rollouts.storage import exclusive, locked
from rlinfra_utils.sync.control import Control
from rlinfra_utils.sync.manifest import (
    MANIFEST,
    Manifest,
    SyncError,
    read_manifest,
    read_pointer,
    version_folder,
    versions_on_disk,
    write_pointer,
)
from rlinfra_utils.sync.parts import Parts
from rlinfra_utils.sync.prints import Fingerprint, differences
from rlinfra_utils.sync.replicas import Replica, ask
from rlinfra_utils.sync.staging import aside_of, on_disk, stage
from rlinfra_utils.sync.verify import verify
from rlinfra_utils.timers import Trace

_LOCK = ".publisher.lock"


@dataclass(frozen=True)
class Publication:
    """What one `publish` did. `num_changed`: tensors whose bytes differ from the version before; None for the first."""

    version: int
    path: Path
    fingerprint: Fingerprint
    num_changed: int | None
    seconds: dict[str, float]


class Publisher:
    """The one publisher of a folder, until `close` or its process dies.

    `replicas`: engines with `load(path, version)` and `version`; `fingerprint()` is compared where there is one.
    `deadline_s`: how long all of them together may take to load, and again to go back. `keep`: versions that stay
    (a version that a reader holds stays longer). At the start every replica loads the announced version.

    Raises SyncError where the folder has another publisher, cannot be written, or a replica does not follow.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        replicas: Sequence[Any] = (),
        deadline_s: float = 60.0,
        keep: int = 2,
        trace: Trace | None = None,
    ) -> None:
        self.folder, self.keep = Path(folder), whole("keep", keep)
        self.deadline_s, self.trace = number("deadline_s", deadline_s, above=True), trace
        engines = listed("replicas", replicas, "engines")
        with on_disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / _LOCK)
        self._replicas: list[Replica] = []
        try:
            with on_disk(self.folder):
                self._sweep()
            self._replicas = [Replica(_checked_replica(index, engine)) for index, engine in enumerate(engines)]
            self._bring_back()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """The announced version; None before the first."""
        pointer = read_pointer(self.folder)
        return None if pointer is None else pointer.version

    def publish(self, state_dict: Mapping[str, Any], version: int, control: Control | None = None) -> Publication:
        """Stage `state_dict`, have every replica load and confirm it, announce it, and return once that is done.

        With a `control`, a replica confirms by `verify`: its answers, not only its word. Raises ValueError, with
        nothing written, for weights that are not finite, differ in names, shapes or dtypes from the version before,
        or a version that is not above it. Raises SyncError when staging or a replica fails; the replicas are then
        back on the version before, which is untouched, except those that the message names.
        """
        parts = Parts(self.trace)
        before = self._announced()
        version = _checked_version(version, before)
        if control is not None and control.version != version:
            raise ValueError(f"control.version={control.version}: cannot prove version {version}; make a control of it")
        with parts.whole(version=version):
            path, manifest = self.stage(state_dict, version, parts)
            try:
                with parts("load"):
                    self.confirm(path, manifest, control)
                with parts("announce"), on_disk(path):
                    write_pointer(self.folder, version)
            except BaseException as error:
                self._undo(path, version, error)
            self._retire()
        changed = None if before is None else len(differences(before.fingerprint, manifest.fingerprint))
        return Publication(version, path, manifest.fingerprint, changed, parts.seconds)

    def stage(self, state_dict: Mapping[str, Any], version: int, parts: Parts | None = None) -> tuple[Path, Manifest]:
        """Write a version to the disk, proven, and announced to nobody; returns its folder and its manifest.

        Raises as `publish` does of staging.
        """
        return stage(self.folder, state_dict, version, self._announced(), parts or Parts())

    def confirm(self, path: Path, manifest: Manifest, control: Control | None = None) -> None:
        """The barrier: return once every replica serves the staged version, or raise SyncError with all causes."""
        failures = ask(self._replicas, lambda engine: _load(engine, path, manifest, control), self.deadline_s)
        if failures:
            raise SyncError(f"version={manifest.version}: not announced: {_listed(failures)}")

    def take_back(self) -> str:
        """Have all replicas load the announced version, and say how that went, for the end of a message."""
        before = self._announced()
        if before is None:
            return "there is no version before it to go back to"
        path = version_folder(self.folder, before.version)
        if away := ask(self._replicas, lambda engine: _load(engine, path, before, None), self.deadline_s):
            return f"not back on version {before.version}, send it no requests: {_listed(away)}"
        return f"all replicas are back on version {before.version}"

    def close(self) -> None:
        """Let the folder and the replicas go."""
        for replica in self._replicas:
            replica.close()
        self._lock.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announced(self) -> Manifest | None:
        pointer = read_pointer(self.folder)
        if pointer is None:
            return None
        with on_disk(self.folder):
            return read_manifest(version_folder(self.folder, pointer.version), pointer.manifest_sha256)

    def _undo(self, path: Path, version: int, error: BaseException) -> NoReturn:
        """Leave no trace of a version that is not announced, and raise the error that stopped it."""
        if self.version == version:  # the rename was done, what came after it failed
            raise error
        outcome = self.take_back()
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, SyncError):
            raise SyncError(f"{error}; {outcome}") from error
        error.add_note(outcome)
        raise error

    def _bring_back(self) -> None:
        """Have every replica load the announced version: a number that is right already proves no weights."""
        before = self._announced()
        if before is None:
            return
        path = version_folder(self.folder, before.version)
        if failures := ask(self._replicas, lambda engine: _load(engine, path, before, None), self.deadline_s):
            raise SyncError(f"version={before.version}: replicas do not load it: {_listed(failures)}")

    def _sweep(self) -> None:
        """Remove what a killed publisher left: unfinished folders, and versions that were never announced."""
        for debris in self.folder.glob(".*.aside"):
            debris.unlink() if debris.is_file() else shutil.rmtree(debris)
        announced = self.version
        for version in versions_on_disk(self.folder):
            if announced is None or version > announced:
                shutil.rmtree(version_folder(self.folder, version))
        self._retire()

    def _retire(self) -> None:
        for version in versions_on_disk(self.folder)[: -self.keep]:
            path = version_folder(self.folder, version)
            # A version that cannot be removed is one too many on the disk, not a failed sync.
            with contextlib.suppress(OSError), open(path / MANIFEST, "rb") as held:
                exclusive(held)  # raises where a reader holds it
                gone = aside_of(path)
                os.rename(path, gone)
                shutil.rmtree(gone)


def _load(engine: Any, path: Path, manifest: Manifest, control: Control | None) -> None:
    """Have one engine load a version and confirm it by all that it can show."""
    engine.load(path, manifest.version)
    if engine.version != manifest.version:
        raise SyncError(f"says version {engine.version!r} after loading {manifest.version}")
    if hasattr(engine, "fingerprint") and (found := differences(manifest.fingerprint, engine.fingerprint())):
        raise SyncError(f"says version {manifest.version}, but {len(found)} tensors differ, first {found[0]}")
    if control is not None and (proof := verify(engine, manifest.version, control)).verdict != "proven":
        raise SyncError(f"{proof.verdict}: {proof.sentence}")


def _checked_version(version: Any, before: Manifest | None) -> int:
    version = whole("version", version, 0)
    if before is not None and version <= before.version:
        raise ValueError(f"version={version}: is not above {before.version}, which is announced; versions only grow")
    return version


def _checked_replica(index: int, engine: Any) -> Any:
    for needed in ("load", "version"):
        if not hasattr(engine, needed):
            raise ValueError(f"replicas[{index}]={short(engine)}: has no {needed}; needs load(path, version), version")
    return engine


def _listed(failures: Mapping[int, str]) -> str:
    return "; ".join(f"replica {index}: {cause}" for index, cause in failures.items())


def _locked(path: Path) -> BinaryIO:
    try:
        return locked(path)
    except BlockingIOError:
        raise SyncError(f"{path.parent}: has another publisher; one folder, one publisher") from None
