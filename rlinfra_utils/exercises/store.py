"""Answers and results in one local JSON file, so that a learner can stop and go on.

Models: `rlinfra_answers.json` in the working directory, or the path in the environment variable RLINFRA_ANSWERS.
It is written aside and renamed, so it is never half a file; one that makes no sense is set aside, never overwritten.
Where no file can be used, the answers live as long as the process. Leaves out: several people sharing a file.
Use: `state, note = load()`; `note = save(state)`; a note is a sentence for the learner, or "".
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

VARIABLE = "RLINFRA_ANSWERS"
DEFAULT_NAME = "rlinfra_answers.json"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Entry(_Model):
    """One problem: the latest answers as text, how often it was attempted, the first and the latest status."""

    answers: dict[str, str] = {}
    attempts: int = 0
    first: str | None = None
    latest: str | None = None


class State(_Model):
    """All problems by id."""

    problems: dict[str, Entry] = {}

    def attempted(self, problem_id: str) -> bool:
        """Whether there is more than a draft."""
        return problem_id in self.problems and self.problems[problem_id].attempts > 0


def path() -> Path:
    """Where the answers are kept."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_NAME)


_memory: dict[Path, State] = {}  # by file: what could not be written


def load() -> tuple[State, str]:
    """The state, empty where there is no file yet; a file that cannot be understood is renamed first."""
    file = path()
    try:
        return State.model_validate_json(file.read_bytes()), ""
    except FileNotFoundError:
        return _memory.get(file, State()), ""
    except ValidationError:
        return _set_aside(file)
    except OSError as error:
        note = f"{file}: cannot be read ({error.strerror}); set {VARIABLE} to another path"
        return _memory.setdefault(file, State()), note


def _set_aside(file: Path) -> tuple[State, str]:
    aside = next(p for n in count(1) if not (p := file.with_name(f"{file.stem}.unreadable-{n}.json")).exists())
    try:
        file.rename(aside)
    except OSError as error:
        note = f"{file}: holds no answers that can be read, and cannot be renamed ({error.strerror})"
        return _memory.setdefault(file, State()), note
    return State(), f"{file}: held no answers that can be read; it is kept as {aside.name}, and the score starts anew"


def save(state: State) -> str:
    """Write the state; where that fails, keep it in memory and say so."""
    file = path()
    if file.exists() and state is _memory.get(file):  # `load` could not read that file: leave it as it is
        return ""
    aside = None
    try:
        handle, aside = tempfile.mkstemp(prefix=file.name, suffix=".part", dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(state.model_dump_json(indent=1) + "\n")
        os.replace(aside, file)
    except OSError as error:
        if aside:
            with contextlib.suppress(OSError):
                os.unlink(aside)
        _memory[file] = state
        return (
            f"{file}: the answer is not kept on disk ({error.strerror}); set {VARIABLE} to a path that can be written"
        )
    _memory.pop(file, None)
    return ""
