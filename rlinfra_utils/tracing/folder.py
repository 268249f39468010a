"""The run folder: what lies where in it, its description `run.json`, and the hash of a configuration.

Models: one run with its branches; a branch is a line of descent of the weights under one configuration. Leaves out
the rows (`lines.py`, `rollouts`) and checkpoints (`checkpoint`).

    run.json        {format, run_id, branches: [...]} and the last branch's fields beside them (see `Description`)
    rollouts/       *.parquet, schema of `rollouts`, one file a batch of rollouts
    batches.jsonl   one line a training batch (`BatchLine`)
    events.jsonl    one line an event (`EventLine`)
    trace.json      spans, from timers.Trace.to_perfetto; checkpoints/ and quarantine/ belong to their own modules
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlinfra_utils.doors import complaint, short
from rlinfra_utils.rollouts.storage import replacing

FORMAT = 1
DESCRIPTION, BATCHES, EVENTS, ROLLOUTS, TRACE = "run.json", "batches.jsonl", "events.jsonl", "rollouts", "trace.json"
_LOCK = ".run.lock"


class RunFolderError(Exception):
    """A run folder cannot be read or written, or is not the run it is taken for; one line, path and cause."""


class Branch(BaseModel):
    """One branch of a run: `config` holds what it was run with, `config_hash` names that."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    branch_id: str
    config: dict[str, Any]
    config_hash: str
    started_unix_s: float


class Description(Branch):
    """What `run.json` says: the run, its last branch (inherited fields), and those before it."""

    format: int
    run_id: str
    earlier: list[Branch] = []

    @property
    def branches(self) -> dict[str, Branch]:
        """All branches by id, oldest first."""
        return {branch.branch_id: branch for branch in (*self.earlier, self)}


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration as JSON with sorted keys: 16 hex digits, the same whatever the order of the keys.

    Raises ValueError for a configuration that is no mapping or that JSON cannot hold.
    """
    return hashlib.sha256(_canonical(config)).hexdigest()[:16]


def _canonical(config: Mapping[str, Any]) -> bytes:
    if not isinstance(config, Mapping) or not all(type(key) is str for key in config):
        raise ValueError(f"config={short(config)}: needs a mapping with texts as keys")
    try:
        return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config={short(config)}: {error}; needs what JSON holds") from None


def describe(folder: Path) -> Description:
    """The content of `run.json`. Raises RunFolderError where there is none, or none that can be read."""
    path = folder / DESCRIPTION
    try:
        description = Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path}: {error.strerror or error}; a run folder is begun by tracing.RunLog") from None
    except ValidationError as error:
        raise RunFolderError(f"{path}: {complaint(error)}; is no run.json") from None
    if description.format != FORMAT:
        raise RunFolderError(f"{path}: format is {description.format}, this package reads {FORMAT}")
    return description


def enter(folder: Path, run_id: str, branch_id: str, config: Mapping[str, Any], started_unix_s: float) -> Description:
    """Begin a run or a branch, or find it begun; `RunLog` has the rules and the errors. Several processes may enter."""
    asked = Branch.model_validate_json(  # through JSON, so that tuples and the like are what a reader will find
        json.dumps(
            {
                "branch_id": branch_id,
                "config": json.loads(_canonical(config)),
                "config_hash": config_hash(config),
                "started_unix_s": started_unix_s,
            }
        )
    )
    (folder / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if not (folder / DESCRIPTION).exists():
            return _describe_as(folder, Description(format=FORMAT, run_id=run_id, **dict(asked)))
        known = describe(folder)
        if known.run_id != run_id:
            raise RunFolderError(f"{folder}: holds run {known.run_id!r}, not {run_id!r}; give each run its own folder")
        branch = known.branches.get(branch_id)
        if branch is None:
            earlier = [*known.earlier, Branch(**{name: getattr(known, name) for name in Branch.model_fields})]
            return _describe_as(folder, Description(format=FORMAT, run_id=run_id, earlier=earlier, **dict(asked)))
    if branch.config_hash != asked.config_hash:
        raise RunFolderError(
            f"{folder}: branch {branch_id!r} ran with config_hash {branch.config_hash}, not {asked.config_hash} "
            f"({_difference(branch.config, asked.config)}); a change of configuration needs a branch_id of its own"
        )
    return known


def _describe_as(folder: Path, description: Description) -> Description:
    with replacing(folder / DESCRIPTION) as file:
        file.write(description.model_dump_json(indent=1).encode())
    return description


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first place where two configurations differ."""
    for name in (*before, *after):
        was, is_ = before.get(name, "absent"), after.get(name, "absent")
        if was != is_:
            return f"{name} was {short(was)}, is {short(is_)}"
    return "the same values in another form"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: `run.json` is read and replaced by one process at a time."""
    import fcntl  # POSIX alone has it, and readers need not

    with open(folder / _LOCK, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, and by the system if we die
        yield
