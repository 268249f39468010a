"""Write checkpoints that are there whole or not at all: `Writer`, `save`.

Life of one save: snapshot in memory; written aside, flushed, marked COMPLETE; renamed to its final name; older ones
retired. Invariant: whatever is named step_N was finished. Trap: the rename needs a file system where it is atomic
(a local disk, not an object store), and the lock one that knows flock.

    writer.save_async(10, c) -> the loop goes on; a thread writes .step_00000010.x.aside
                                the thread renames it to step_00000010
    writer.save_async(20, c) -> waits for the thread, raises its error if it had one, and starts the next

Leaves out sharded writing, and Windows for writing (reading works).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import safetensors

from rlinfra_utils import __version__
from rlinfra_utils.checkpoint.coding import encode
from rlinfra_utils.checkpoint.components import COMPONENTS, check
from rlinfra_utils.checkpoint.manifest import COMPLETE, FORMAT, MANIFEST, CheckpointError, File, Manifest
from rlinfra_utils.checkpoint.reading import load, open_manifest, step_folders
from rlinfra_utils.doors import short, whole
from rlinfra_utils.rollouts.storage import flush, flush_folder, locked

_LOCK = ".writer.lock"
_LARGEST_STEP = 10**18 - 1
#: Component -> file name -> bytes.
Snapshot = dict[str, dict[str, bytes]]


def save(folder: str | os.PathLike, step: int, components: Mapping[str, Any], keep: int | None = None) -> Path:
    """Save one checkpoint as FOLDER/step_N and return its path; arguments and errors as in `Writer` and its `save`."""
    with Writer(folder, keep) as writer:
        return writer.save(step, components)


class Writer:
    """The one writer of a folder of checkpoints, until `close`.

    `keep`: how many checkpoints stay, counted among those that hold what the last one holds; None keeps all. An older
    one goes only if it holds no more than the last one, and only after `keep` whole ones are proven by their hashes.
    A snapshot takes as much memory as the checkpoint. A forked child shares the lock until it ends.

    Raises CheckpointError where the folder has another writer or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, keep: int | None = None) -> None:
        self.folder = Path(folder)
        self.keep = None if keep is None else whole("keep", keep)
        self._pending: Future[Path] | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / _LOCK)
            for debris in self.folder.glob(".step_*.aside"):  # of a writer that was killed: we hold the lock
                shutil.rmtree(debris)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be written: {error.strerror or error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, components: Mapping[str, Any]) -> Path:
        """Write a checkpoint and return its path, once it is on disk under its final name.

        `components` holds values by names of COMPONENTS: all of them for a run that can be resumed. Raises
        ValueError for what cannot be stored, before anything is written; CheckpointError for a full disk and the
        like, and where a whole checkpoint of this step with other content stands there.
        """
        self.save_async(step, components)
        return self.wait()

    def save_async(self, step: int, components: Mapping[str, Any]) -> None:
        """Take a snapshot and write it in a thread; `components` may change as soon as this returns.

        Waits for the save before. If that one failed, its error is raised here and nothing is started. Raises
        ValueError for what cannot be stored; what fails on the disk is raised by the next call or by `wait`.
        """
        self.wait()
        snapshot = _snapshot(whole("step", step, 0, _LARGEST_STEP), components)
        self._pending = self._thread.submit(self._write, step, snapshot)

    def wait(self) -> Path | None:
        """Wait for the save in progress and return its path; raises its error, once."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def close(self) -> None:
        """Finish the save in progress and let the folder go; raises that save's error."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._lock.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"and a checkpoint was not written: {own}")

    def _write(self, step: int, snapshot: Snapshot) -> Path:
        path = self.folder / f"step_{step:08d}"
        aside = self._aside(path)
        try:
            aside.mkdir()
            manifest = _write_files(aside, step, snapshot)
            self._publish(aside, path, manifest)
            flush_folder(self.folder)
            if self.keep is not None:
                self._retire(step, set(snapshot), self.keep)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return path

    def _aside(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{uuid.uuid4().hex}.aside")

    def _publish(self, aside: Path, path: Path, manifest: Manifest) -> None:
        """Give the finished folder its name. What is damaged gives way; what is whole does not."""
        if os.path.lexists(path):
            try:
                standing = open_manifest(path)
                load(path, standing.components)
            except (CheckpointError, ValueError):
                damaged = self._aside(path)
                os.rename(path, damaged)
                _remove(damaged)
            else:
                if standing.components == manifest.components:
                    return
                raise CheckpointError(
                    f"{path}: stands there whole with other content; a second branch of a run needs its own folder"
                )
        os.rename(aside, path)

    def _retire(self, step: int, held: set[str], keep: int) -> None:
        kept = 1
        for older, path in step_folders(self.folder):
            try:
                if older >= step or not set(open_manifest(path).components) <= held:
                    continue
                if kept < keep:
                    load(path, open_manifest(path).components)
                    kept += 1
                    continue
            except (CheckpointError, ValueError):
                continue  # damaged: neither counted nor removed
            aside = self._aside(path)
            os.rename(path, aside)  # first, so that no reader meets half of it
            shutil.rmtree(aside)


def _locked(path: Path) -> BinaryIO:
    """`locked`, with our process id in the file."""
    try:
        file = locked(path)
    except BlockingIOError:
        owner = path.read_bytes()[:20].decode("ascii", "replace")
        raise CheckpointError(f"{path.parent}: has another writer, process {owner}; two would mix two runs") from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _snapshot(step: int, components: Mapping[str, Any]) -> Snapshot:
    """All files as bytes, checked at the door."""
    if not isinstance(components, Mapping) or not components:
        raise ValueError(f"components={short(components)}: needs values by names of COMPONENTS")
    unknown = [name for name in components if name not in COMPONENTS]
    if unknown:
        raise ValueError(f"components: {short(unknown[0])} is no component; the names are {', '.join(COMPONENTS)}")
    for name, value in components.items():
        check(name, value)
    counted = components.get("counters", {"global_step": step})["global_step"]
    if counted != step:
        raise ValueError(f"step={step}: counters.global_step is {counted}; they must be the same")
    return {name: encode(name, value) for name, value in components.items()}


def _write_files(folder: Path, step: int, snapshot: Snapshot) -> Manifest:
    """Write and flush each file, then the manifest, then the marker."""
    listed = {
        name: [
            File(name=file_name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for file_name, data in files.items()
        ]
        for name, files in snapshot.items()
    }
    versions = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "rlinfra_utils": __version__,
    }
    manifest = Manifest(format=FORMAT, step=step, versions=versions, components=listed)
    for files in snapshot.values():
        for file_name, data in files.items():
            _write_file(folder / file_name, data)
    text = manifest.model_dump_json(indent=1).encode()
    _write_file(folder / MANIFEST, text)
    _write_file(folder / COMPLETE, hashlib.sha256(text).hexdigest().encode())
    flush_folder(folder)
    return manifest


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        flush(file)
