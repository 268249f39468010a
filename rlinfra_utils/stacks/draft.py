"""What an adapter is, and what it makes of one payload before that becomes a rollout: `Adapter`, `Draft`.

Models: fields with their values, what stands in the place of others, and bounds on versions. Leaves out how a stack's
record is read (`adapters.py`) and the checks between payload and caller (`convert.py`).
Use: `draft = Draft({"response_tokens": tokens})`; `draft.found["reward"] = "an advantage"`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlinfra_utils.stacks.reader import Reader


@dataclass
class Draft:
    """What one payload says: fields of a rollout, and what it has in the place of others (`found`, by field).

    `versions`: the first and the last version of its weights; a last one of None leaves only a bound from below.
    `temperature`: that of every sampled token. `extra`: the stack's own values, kept as text.
    """

    fields: dict[str, Any]
    found: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int | None, int | None] = (None, None)
    temperature: float | None = None

    def bounded_below(self, name: str, version: int, when: str) -> None:
        """Take a version that was read before the first token, as `name`: the least that any token can have."""
        self.versions = (version, None)
        self.extra[name] = version
        bound = "a bound from below, later tokens may be of later weights"
        self.found["policy_version"] = f"{name} {version}, {when}: {bound}"


@dataclass(frozen=True)
class Adapter:
    """`record`: the stack's record, and how it becomes a mapping; `read`: the function; `rows`: the column that counts
    the rows, None for a single record; `essential`: fields without which there is no rollout at all."""

    record: str
    read: Callable[[Reader], Draft]
    rows: str | None
    essential: tuple[str, ...]
