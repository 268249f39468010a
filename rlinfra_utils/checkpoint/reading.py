"""Find the newest whole checkpoint and load it: `latest`, `load`.

Models: markers and hashes decide, not the highest number; what is passed over is said aloud. Leaves out repair.
Use: `components = load(latest(folder))`; only weights: `load(path, require=("policy",))`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlinfra_utils.checkpoint.coding import decode
from rlinfra_utils.checkpoint.components import COMPONENTS, check, names_of
from rlinfra_utils.checkpoint.manifest import CheckpointError, Manifest, check_file, read_manifest

_STEP_NAME = re.compile(r"step_([0-9]{1,18})")


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over; the message says why."""


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of all that is named like a checkpoint, whole or not, the highest step first.

    None where the folder is not there; raises CheckpointError where it cannot be listed.
    """
    if not folder.exists():
        return []
    try:
        found = [(_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def latest(folder: str | os.PathLike, require: Iterable[str] = tuple(COMPONENTS)) -> Path | None:
    """Path of the newest checkpoint in `folder` that `load(path, require)` accepts; None where none was finished.

    Warns with CheckpointWarning for each one passed over. Raises CheckpointError where there are some and none can
    be loaded: a run that then began anew would hide the loss; ValueError for an unknown name.
    """
    names, folder, refused = names_of(require), Path(folder), []
    for _, path in step_folders(folder):
        try:
            load(path, names)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            for message in refused:
                warnings.warn(f"passed over for {path.name}: {message}", CheckpointWarning, stacklevel=2)
            return path
    if refused:
        raise CheckpointError(f"{folder}: none of {len(refused)} checkpoints can be loaded; the newest: {refused[0]}")
    return None


def load(path: str | os.PathLike, require: Iterable[str] = tuple(COMPONENTS)) -> dict[str, Any]:
    """Components by name: those that `require` names, each of which must be there and whole.

    Raises CheckpointError that names the first fault, ValueError for an unknown name. A resume from the weights
    alone has to be asked for, by `require=("policy",)`.
    """
    names, path = names_of(require), Path(path)
    manifest = open_manifest(path)
    missing = [name for name in names if name not in manifest.components]
    if missing:
        effect = COMPONENTS[missing[0]].without
        raise CheckpointError(f"{path}: is incomplete, lacks {', '.join(missing)}: without {missing[0]}, {effect}")
    return {name: load_component(path, manifest, name) for name in names}


def open_manifest(path: Path) -> Manifest:
    """The manifest, of the step that the folder's name says. Raises CheckpointError where it is another or none."""
    manifest = read_manifest(path)
    match = _STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path}: is named for step {int(match[1])}, its manifest says {manifest.step}")
    return manifest


def load_component(path: Path, manifest: Manifest, name: str) -> Any:
    """One component, its files proven by their hashes. Raises CheckpointError for the first fault."""
    for file in manifest.components[name]:
        check_file(path, file)
    try:
        value = decode(name, [path / file.name for file in manifest.components[name]])
        check(name, value)
        if name == "counters" and value["global_step"] != manifest.step:
            raise ValueError(f"counters: global_step={value['global_step']}: the manifest is of step {manifest.step}")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return value
