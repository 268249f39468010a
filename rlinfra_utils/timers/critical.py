"""The critical path: the chain of work that decided when the last work ended, and the gaps in it.

Models: finished spans on tracks, cut where children begin and end; walks back from the last end.
Leaves out: what would have happened had a stage been faster (the chain may then pass elsewhere).

What came before a piece of work, by rule:
1. `after=` on its span: the last to end of the spans named and of its own earlier work (same thread or track).
2. Otherwise its own earlier work, if that ended within `slack_ns` of the last end anywhere before this start:
   a gap that short is bookkeeping, not a cause.
3. Otherwise the work that ended last before this start, anywhere: it is taken for what woke this one.
Rule 3 is a guess. Where tracks overlap in many short spans, give `after`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import NamedTuple

import pandas as pd

from rlinfra_utils.timers.spans import Source, Span, after_ids, self_pieces
from rlinfra_utils.timers.tables import mode_of

COLUMNS = ["stage", "track", "start_s", "end_s", "dur_s", "wait", "span"]
_NONE = -1  # lower than every position


class _Piece(NamedTuple):
    """Part of a working span in which none of its children was open. Sorts by end."""

    end_ns: int
    start_ns: int
    row: int


def critical_path(sources: dict[str, Source], spans: list[Span], slack_ns: int) -> pd.DataFrame:
    """Rows in order of time that together cover the makespan, each working or (`wait`) a gap.

    `spans` must be `in_order`. A gap has stage "wait" and the track of the work that came after it. `.attrs`:
    mode, makespan_s (first start to last end of work, warm-up left out) = work_s + wait_s.
    Raises ValueError where `after` names a span that is missing or that ended too late, or stands on a wait.
    """
    schedule = _Schedule(spans, slack_ns)
    steps: list[tuple[str, Span, int, int]] = []  # kind, span, start_ns, end_ns; backwards
    position = len(schedule.pieces) - 1 if schedule.pieces else None
    while position is not None:
        piece = schedule.pieces[position]
        steps.append(("work", spans[piece.row], piece.start_ns, piece.end_ns))
        position = schedule.before(position)
        begin_ns = schedule.first_ns if position is None else schedule.pieces[position].end_ns
        if begin_ns < piece.start_ns:
            steps.append(("wait", spans[piece.row], begin_ns, piece.start_ns))
    rows, total_ns = [], {"work": 0, "wait": 0}
    for kind, span, start_ns, end_ns in reversed(steps):
        total_ns[kind] += end_ns - start_ns
        stage, name = (span.stage, span.id) if kind == "work" else ("wait", None)
        times_s = (start_ns / 1e9, end_ns / 1e9, (end_ns - start_ns) / 1e9)
        rows.append((stage, span.attrs["track"], *times_s, kind == "wait", name))
    table = pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(COLUMNS[2:5], float) | {"wait": bool})
    table.attrs = {"mode": mode_of(sources), "makespan_s": sum(total_ns.values()) / 1e9}
    table.attrs |= {f"{kind}_s": total / 1e9 for kind, total in total_ns.items()}
    return table


class _Schedule:
    """The pieces of work in order of their end. What comes before a piece always has a lower position."""

    def __init__(self, spans: list[Span], slack_ns: int):
        self._spans, self._slack_ns = spans, slack_ns
        self._row = {span.id: row for row, span in enumerate(spans)}
        self.pieces = sorted(
            _Piece(end_ns, start_ns, row)
            for row, (span, own) in enumerate(zip(spans, self_pieces(spans)))
            if not span.waits and not span.warmup
            for start_ns, end_ns in own
        )
        self.first_ns = min((piece.start_ns for piece in self.pieces), default=0)
        self._ends_ns = [piece.end_ns for piece in self.pieces]
        self._own: dict[tuple, list[int]] = defaultdict(list)
        for position, piece in enumerate(self.pieces):
            for key in self._owners(piece):
                self._own[key].append(position)
        self._check_after()
        self._last_of = self._last_positions()

    def _owners(self, piece: _Piece) -> list[tuple]:
        """The track, and the thread if it is known: whose earlier work is a piece's own."""
        span = self._spans[piece.row]
        track, thread = (span.source, "track", span.attrs["track"]), (span.source, "thread", span.thread)
        return [track] if span.thread is None else [track, thread]

    def _parent(self, span: Span) -> Span | None:
        return None if span.parent is None else self._spans[self._row[f"{span.source}-{span.parent}"]]

    def _check_after(self) -> None:
        for span in self._spans:
            for name in after_ids(span.attrs):
                if span.waits:
                    raise ValueError(f"after: {name!r} stands on the wait {span.stage!r}; put it on the work behind it")
                if name not in self._row:
                    raise ValueError(f"after: {name!r}, named by {span.stage!r} {span.id}, is not in the trace")
                named = self._spans[self._row[name]]
                if named.end_ns > span.start_ns:
                    late_s = (named.end_ns - span.start_ns) / 1e9
                    raise ValueError(f"after: {name!r} ends {late_s:g} s after the start of {span.stage!r} {span.id}")

    def _last_positions(self) -> dict[str, int]:
        """By span id: the last piece of the span and of what it holds."""
        last: dict[str, int] = {}
        for position, piece in enumerate(self.pieces):
            span = self._spans[piece.row]
            while span is not None:
                if piece.end_ns <= span.end_ns:
                    last[span.id] = position
                span = self._parent(span)
        return last

    def before(self, position: int) -> int | None:
        """The position of what came before; None where the chain begins."""
        piece = self.pieces[position]
        num_earlier = min(position, bisect_right(self._ends_ns, piece.start_ns))
        if num_earlier == 0:
            return None
        own = self._own_earlier(piece, num_earlier)
        if named := self._named(piece):
            ended = [self._last_of[name] for name in named if name in self._last_of]
            latest = max([own, *(other for other in ended if other < num_earlier)])
            return None if latest == _NONE else latest
        if own != _NONE and self._ends_ns[num_earlier - 1] - self._ends_ns[own] <= self._slack_ns:
            return own
        return num_earlier - 1

    def _own_earlier(self, piece: _Piece, num_earlier: int) -> int:
        """The last of the first `num_earlier` pieces that shares the piece's thread or track, or `_NONE`."""
        latest = _NONE
        for positions in (self._own[key] for key in self._owners(piece)):
            index = bisect_left(positions, num_earlier)
            latest = max(latest, positions[index - 1] if index else _NONE)
        return latest

    def _named(self, piece: _Piece) -> list[str]:
        """What `after` names, on the piece's span or on a span that begins with it."""
        named: list[str] = []
        span = self._spans[piece.row]
        while span is not None and span.start_ns == piece.start_ns:
            named += after_ids(span.attrs)
            span = self._parent(span)
        return named
