"""Answers in one local file, one line of JSON an attempt, so that a learner can stop and go on.

Models: `rlinfra_answers.jsonl` in the working directory, or the path in the environment variable RLINFRA_ANSWERS.
Lines are only ever added, each in a single write, so notebooks that run at once share the file and lose nothing. A
line that cannot be read is skipped and mentioned. A file without any line of ours is somebody else's and stays as it
is; then, and where nothing can be written, answers live as long as the process.
Leaves out: several people sharing a file. Use: `entries, note = load()`; `note = add(line)`; a note is a sentence
for the learner, or "".
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

VARIABLE = "RLINFRA_ANSWERS"
DEFAULT_NAME = "rlinfra_answers.jsonl"
DRAFT = "draft"


class Line(BaseModel):
    """One attempt or draft: the problem, the answers as typed, and what came of it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    problem: str
    answers: dict[str, str]
    status: Literal["right", "wrong", "compare with the solution", "draft"]


@dataclass
class Entry:
    """What the lines of one problem add up to: the latest answers, attempts, the first and the latest status."""

    answers: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    first: str | None = None
    latest: str | None = None

    def take(self, line: Line) -> None:
        """Add one line; a draft changes the answers only."""
        if line.status == DRAFT:
            self.answers = self.answers | line.answers
            return
        self.answers, self.latest = line.answers, line.status
        self.attempts += 1
        self.first = self.first or line.status


def path() -> Path:
    """Where the answers are kept."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_NAME).absolute()


_waiting: dict[Path, list[Line]] = {}  # by file: lines that could not be written yet


def load() -> tuple[dict[str, Entry], str]:
    """Entries by problem, none where there is no file yet, and a note about what could not be read."""
    file = path()
    lines, note = _read(file)
    entries: dict[str, Entry] = {}
    for line in (*lines, *_waiting.get(file, ())):
        entries.setdefault(line.problem, Entry()).take(line)
    return entries, note


def _read(file: Path) -> tuple[list[Line], str]:
    try:
        raw_lines = [raw for raw in file.read_bytes().split(b"\n") if raw.strip()]
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{file}: cannot be read ({error.strerror}); set {VARIABLE} to another path"
    lines = []
    for raw in raw_lines:
        try:
            lines.append(Line.model_validate_json(raw))
        except ValidationError:
            continue
    if raw_lines and not lines:
        return [], f"{file}: holds no answers that can be read, so it is left alone; set {VARIABLE} to another path"
    skipped = len(raw_lines) - len(lines)
    return lines, f"{file}: {skipped} of {len(raw_lines)} lines cannot be read and do not count" if skipped else ""


def add(line: Line) -> str:
    """Append a line; where that fails, keep it in memory and say so."""
    file = path()
    waiting = [*_waiting.get(file, []), line]
    lines, note = _read(file)
    if not note or lines:
        # A newline before and after, as in RFC 7464: a line torn by a full disk spoils only itself.
        data = "".join(f"\n{each.model_dump_json()}\n" for each in waiting).encode()
        try:
            with open(file, "ab") as stream:
                stream.write(data)
            _waiting.pop(file, None)
            return note
        except OSError as error:
            note = f"{file}: the answer is not kept on disk ({error.strerror}); set {VARIABLE} to another path"
    _waiting[file] = waiting
    return note
