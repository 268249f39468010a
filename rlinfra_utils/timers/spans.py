"""What a span is: the closed record, the door that checks attributes, and the time a span spent itself.

Models: one interval [start, end) on one track, with the block that it was opened in as its parent.
Times are whole nanoseconds, so that sums are exact and survive a file. Leaves out: where times come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

# Columns of `Trace.frame()` that are no attributes.
_FIXED = frozenset(("span", "parent", "stage", "process", "thread", "start_s", "end_s", "dur_s", "self_s", "mode"))
MAX_S = 9e9  # what nanoseconds in 64 bits hold
MAX_TOKENS = 2**53


class Source(NamedTuple):
    """One `Trace` of one process. `wall_ns` is Unix time at zero of the clock named by `clock`."""

    id: str
    host: str
    pid: int
    process: str
    mode: str
    clock: str
    wall_ns: int


class Span(NamedTuple):
    """A closed span. `parent` is the number of another span of the same source, or None.

    `thread` names the thread that ran the block; None if the span was measured elsewhere and added.
    """

    source: str
    number: int
    parent: int | None
    thread: str | None
    stage: str
    start_ns: int
    end_ns: int
    attrs: dict[str, Any]

    @property
    def id(self) -> str:
        """The name of this span in every process."""
        return f"{self.source}-{self.number}"

    @property
    def waits(self) -> bool:
        """Whether the span waits instead of working."""
        return bool(self.attrs.get("wait", False))

    @property
    def warmup(self) -> bool:
        """Whether the span belongs to a warm-up."""
        return bool(self.attrs.get("warmup", False))


def in_order(spans: Sequence[Span]) -> list[Span]:
    """By start; of those that start together, the longest first. The order of arrival does not matter."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.source, span.number))


def check_stage(stage: Any) -> None:
    """Raise ValueError unless `stage` is a text with something in it."""
    if not isinstance(stage, str) or not stage.strip():
        raise ValueError(f"stage: {stage!r} is no name; give a non-empty text")


def check_attrs(attrs: Mapping[str, Any]) -> None:
    """Raise ValueError for an attribute that takes a column's name, or a reserved one with a wrong value."""
    if not _FIXED.isdisjoint(attrs):
        name = min(_FIXED.intersection(attrs))
        raise ValueError(f"{name}: {attrs[name]!r} would hide the column of that name; call the attribute otherwise")
    if "tokens" in attrs:
        _check_tokens(attrs["tokens"])
    if "track" in attrs and (not isinstance(attrs["track"], str) or not attrs["track"].strip()):
        raise ValueError(f"track: {attrs['track']!r} is no name; give a non-empty text")
    for name in ("wait", "warmup"):
        if name in attrs and not isinstance(attrs[name], bool | np.bool_):
            raise ValueError(f"{name}: {attrs[name]!r} is not True or False")
    if "after" in attrs:
        after_ids(attrs)


def _check_tokens(tokens: Any) -> None:
    if type(tokens) is not int and (isinstance(tokens, bool) or not isinstance(tokens, Integral)):
        raise ValueError(f"tokens: {tokens!r} is not a whole number")
    if not 0 <= tokens < MAX_TOKENS:
        raise ValueError(f"tokens: {tokens} is not in 0 .. 2**53")


def after_ids(attrs: Mapping[str, Any]) -> list[str]:
    """The span ids that `after` names; raises ValueError for anything else than an id or a list of ids."""
    after = attrs.get("after", ())
    ids = [after] if isinstance(after, str) else after
    if not isinstance(ids, list | tuple) or not all(isinstance(item, str) for item in ids):
        raise ValueError(f"after: {after!r} is neither a span id nor a list of them; use span.id")
    return list(ids)


def to_ns(field: str, value_s: Any) -> int:
    """Seconds as whole nanoseconds; raises ValueError unless 0 <= `value_s` < `MAX_S`."""
    if isinstance(value_s, bool) or not isinstance(value_s, Real) or not 0 <= value_s < MAX_S:
        raise ValueError(f"{field}: {value_s!r} is not a number of seconds from 0 to below {MAX_S:.0f}")
    return round(float(value_s) * 1e9)


def self_pieces(spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """For each span, the intervals (start_ns, end_ns) in which it was open and no child of it was.

    `spans` must be `in_order`. Children that overlap one another are taken out once, and only as far as
    they lie within the parent. A span of zero length has one piece, of zero length.
    """
    row = {(span.source, span.number): index for index, span in enumerate(spans)}
    pieces: list[list[tuple[int, int]]] = [[] for _ in spans]
    covered_ns = [span.start_ns for span in spans]
    for child in spans:
        index = row.get((child.source, child.parent))
        if index is None:
            continue
        until_ns = min(child.start_ns, spans[index].end_ns)
        if until_ns > covered_ns[index]:
            pieces[index].append((covered_ns[index], until_ns))
        covered_ns[index] = max(covered_ns[index], child.end_ns)
    for span, own, covered in zip(spans, pieces, covered_ns):
        if covered < span.end_ns or span.start_ns == span.end_ns:
            own.append((covered, span.end_ns))
    return pieces
