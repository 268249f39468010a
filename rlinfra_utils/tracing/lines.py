"""One line of `batches.jsonl` or `events.jsonl`: its fields, how it is appended and how it is found again.

Models: JSON lines from several processes in one file; a line cut short by a kill costs itself and no other. Leaves
out what the lines add up to (`reading.py`). Use: `append(path, line, durable=True)`; `lines, problems = parse(...)`.

Life of a line: encoded -> one os.write on a descriptor with O_APPEND -> (durable) fsync. Invariant: on a local file
system the kernel moves to the end and writes under the inode's lock, so lines of several processes do not mix,
whatever their size. Trap: a pipe or FIFO keeps that promise up to PIPE_BUF bytes only (4,096 on Linux), and a network
file system (NFS) not at all: give each machine a folder of its own there. SIGKILL may cut a line at a page edge; the
next line then follows on the same row, and `parse` finds it by its first key.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlinfra_utils.doors import LARGEST, complaint, is_number, number, short
from rlinfra_utils.tracing.folder import RunFolderError

#: Each line begins so; inside a JSON text the quotes would be escaped.
_HEAD = b'{"time_unix_s":'

#: Event kind -> the fields that it must carry, and their type. Other kinds carry what they like.
REQUIRED: dict[str, dict[str, type]] = {
    "queue": {"depth_rollouts": float, "depth_tokens": float},
    "weight_sync": {"version": int, "seconds": float},
    "checkpoint_saved": {"step": int, "seconds": float},
    "restored": {"step": int, "seconds": float},
    "memory": {"peak_bytes": float},
    "rollouts": {"file": str, "num_rollouts": int},
    **{kind: {} for kind in ("worker_started", "worker_died", "heartbeat", "retry", "rollout_lost")},
}
_NEEDS = {float: "a number of at least 0", int: "a whole number of at least 0", str: "a text"}
#: Kinds that must survive a power cut; the others survive the death of their process.
DURABLE = frozenset({"rollouts", "rollout_lost", "checkpoint_saved", "restored", "worker_died"})


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")
    time_unix_s: float = Field(allow_inf_nan=False)
    branch_id: str
    config_hash: str


class BatchLine(_Line):
    """A training batch: which rollouts moved the weights from which version to which, at which optimizer step.

    `optimizer_step` counts from the start of the branch's weights and is the last one of the batch where it had
    several. `stats`: numbers of the update by name; NaN is kept.
    """

    model_config = ConfigDict(extra="forbid")
    training_batch_id: str
    optimizer_step: int = Field(ge=0, le=LARGEST)
    rollout_ids: list[str] = Field(min_length=1)
    trained_policy_version: int = Field(ge=0, le=LARGEST)
    resulting_policy_version: int = Field(ge=0, le=LARGEST)
    stats: dict[str, float] = {}


class EventLine(_Line):
    """Something that happened to `worker`; fields by kind in `REQUIRED`, others as they come.

    `step` of checkpoint_saved and restored is the last optimizer_step that these weights have seen. A rollout_lost
    or retry names its `rollout_id` where it has one. A heartbeat may say `within_s`: by when the next one is due.
    """

    model_config = ConfigDict(extra="allow")
    kind: str = Field(min_length=1)
    worker: str | None = None

    @model_validator(mode="after")
    def _carries_what_its_kind_needs(self) -> EventLine:
        for name, kind in REQUIRED.get(self.kind, {}).items():
            value = getattr(self, name, None)
            good = isinstance(value, str) if kind is str else is_number(value) and value >= 0
            if not good or (kind is int and not (value <= LARGEST and value == int(value))):
                raise ValueError(f"{name}={short(value)}: an event of kind {self.kind!r} needs {_NEEDS[kind]}")
        within_s = getattr(self, "within_s", None)
        if within_s is not None:
            number("within_s", within_s)
        return self


Line = TypeVar("Line", bound=_Line)


def append(path: Path, line: _Line, durable: bool) -> None:
    """Append one line; `durable` returns only once it is on the disk itself.

    Raises ValueError for what JSON cannot hold, RunFolderError where the file cannot be written to its end.
    """
    fields = line.model_dump()
    try:
        text = json.dumps(fields, separators=(",", ":"), default=_plain, ensure_ascii=False)
        data = text.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {short(fields)}: {error}; needs what JSON holds") from None
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, data)
            if written < len(data):
                raise RunFolderError(f"{path}: took {written} of {len(data)} bytes of a line; is the disk full?")
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror or error}") from error


def _plain(value: Any) -> Any:
    """NumPy numbers and arrays as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{short(value)} is a {type(value).__name__}")


def parse(path: Path, kind: type[Line]) -> tuple[list[Line], list[str]]:
    """The lines of a file, and what is wrong with it; a missing file has none of either."""
    lines: list[Line] = []
    problems: list[str] = []
    if not path.exists():
        return lines, problems
    try:
        rows = path.read_bytes().split(b"\n")
    except OSError as error:
        return lines, [f"{path.name}: cannot be read: {error.strerror or error}"]
    for place, row in enumerate(rows, start=1):
        if not row:
            continue
        line, problem = _parsed(row, kind)
        if line is not None:
            lines.append(line)
        if problem:
            last = " (the last line: its writer was killed, or is still writing)" if place == len(rows) else ""
            problems.append(f"{path.name}:{place}: {problem}{last}")
    return lines, problems


def _parsed(row: bytes, kind: type[Line]) -> tuple[Line | None, str | None]:
    """The line in a row, behind a torn one too, and the problem of the row."""
    try:
        fields = json.loads(row)
        if b"\\ud" in row.lower():
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, f"holds half a surrogate pair, which is no text, in {short(row)}; the line is left out"
    except (ValueError, RecursionError):
        start = row.rfind(_HEAD, 1)
        behind = _parsed(row[start:], kind)[0] if start > 0 else None
        found = "; the whole line behind it is kept" if behind is not None else ""
        return behind, f"is torn: no whole JSON, begins {short(row)}{found}"
    try:
        return kind.model_validate(fields), None
    except ValidationError as error:
        return None, f"{complaint(error)}; the line is left out"
