"""Record spans: the block that times itself, the trace that collects, and the merge of several processes.

A block's life: made -> entered (its parent is the block open here, in this thread or asyncio task) ->
closed (appended to the trace, also when it failed). Invariant: blocks close innermost first.
Leaves out: spans open while `frame()` is called, and clock offsets between machines.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pandas as pd

from rlinfra_utils.timers import perfetto
from rlinfra_utils.timers.clocks import make_clock
from rlinfra_utils.timers.critical import critical_path
from rlinfra_utils.timers.spans import Source, Span, check_attrs, check_stage, in_order, to_ns
from rlinfra_utils.timers.tables import frame, summary

# The innermost open block. A context variable keeps one for each thread and for each asyncio task.
_innermost: ContextVar[OpenSpan | None] = ContextVar("rlinfra_utils_open_span", default=None)


class OpenSpan:
    """A block being timed; `Trace.span` makes it. `id` names the span for `after=`, in every process."""

    __slots__ = ("_number", "_outer", "_parent_number", "_start", "_thread", "_trace", "attrs", "stage")

    def __init__(self, trace: Trace, stage: str, attrs: dict[str, Any]):
        self._trace, self.stage, self.attrs = trace, stage, attrs
        self._number = None

    @property
    def id(self) -> str:
        """The span's name in every process: pass it along with the data that the span made.

        Raises ValueError before the block is entered.
        """
        if self._number is None:
            raise ValueError(f"stage: {self.stage!r} has no id before it is entered")
        return f"{self._trace._id}-{self._number}"

    def set(self, **attrs: Any) -> None:
        """Add attributes that were not known when the span began, such as `tokens`.

        Raises ValueError for a bad value, and for `track` and `warmup`, which children have taken over.
        """
        check_attrs(attrs)
        for name in ("track", "warmup"):
            if name in attrs:
                raise ValueError(f"{name}: {attrs[name]!r} comes too late; give it to Trace.span")
        self.attrs.update(attrs)

    def __enter__(self) -> OpenSpan:
        if self._number is not None:
            raise ValueError(f"stage: {self.stage!r} was entered before; call Trace.span for each block")
        trace = self._trace
        self._outer = _innermost.get()
        self._thread = threading.current_thread().name
        self._number, self._parent_number = trace._register(self.attrs)
        _innermost.set(self)
        self._start = trace._read()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        trace = self._trace
        end = trace._read()
        if (innermost := _innermost.get()) is not self:
            open_here = "no block" if innermost is None else repr(innermost.stage)
            raise ValueError(f"stage: {self.stage!r} closes out of order: innermost here is {open_here}")
        _innermost.set(self._outer)
        if kind is not None:
            self.attrs["error"] = f"{kind.__name__}: {error}"
        row = (self._number, self._parent_number, self._thread, self.stage, self._start, end, self.attrs)
        trace._closed.append(row)


class Trace:
    """Spans of this process, from any number of threads and asyncio tasks.

    `mode` is what the times mean (see `clocks`): "wall", "cuda_sync" or "cuda_events". `device` stands in
    for the machine's clock and device, for tests. Raises ValueError for an unknown mode and RuntimeError
    for a CUDA mode without CUDA. A forked child starts with an empty trace of its own.
    """

    def __init__(self, mode: str = "wall", device: Any = None):
        self._clock = make_clock(mode, device)
        self._read = self._clock.read
        self.mode = mode
        self._begin()
        _traces.add(self)

    def _begin(self) -> None:
        self._id = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._closed: list[tuple] = []  # list.append is atomic, so threads need no lock
        self._merged: tuple[dict[str, Source], list[Span]] = ({}, [])

    def __reduce__(self):
        raise TypeError("Trace: does not travel between processes; make one in each and Trace.merge their files")

    def span(self, stage: str, **attrs: Any) -> OpenSpan:
        """A context manager that times its block as `stage`. A failed block is kept, with attribute `error`.

        Attributes with a meaning: `track` (the resource that is busy; default process/thread name),
        `wait=True` (waits, does not work), `warmup=True` (left out of the summary and the critical path),
        `tokens` (summed), `after` (span id or ids; see `critical_path`). Children inherit track and warmup.
        Raises ValueError for an empty stage or a bad attribute.
        """
        check_stage(stage)
        check_attrs(attrs)
        return OpenSpan(self, stage, attrs)

    def add(self, stage: str, start_s: float, end_s: float, **attrs: Any) -> str:
        """Add a span measured elsewhere, in seconds of `time.perf_counter()`; returns its id.

        Within an open block it is that block's child. Attributes as for `span`. Raises ValueError for
        times that are negative, not finite, or end before they start.
        """
        check_stage(stage)
        check_attrs(attrs)
        start_ns, end_ns = to_ns("start_s", start_s), to_ns("end_s", end_s)
        if end_ns < start_ns:
            raise ValueError(f"end_s: {end_s!r} lies before start_s {start_s!r}")
        number, parent_number = self._register(attrs)
        self._closed.append((number, parent_number, None, stage, start_ns, end_ns, attrs))
        return f"{self._id}-{number}"

    def frame(self) -> pd.DataFrame:
        """One row a closed span, by start: identity, times in s, `self_s` (without children), mode, attributes."""
        return frame(*self._collect())

    def summary(self) -> pd.DataFrame:
        """One row a stage, warm-up left out: see `tables.summary`. The mode is in `.attrs["mode"]`."""
        return summary(self.frame())

    def critical_path(self, slack_s: float = 1e-3) -> pd.DataFrame:
        """The chain of work that set the makespan, with the gaps in it: see `critical.critical_path`."""
        return critical_path(*self._collect(), slack_ns=to_ns("slack_s", slack_s))

    def to_perfetto(self, path: str | os.PathLike) -> None:
        """Write Chrome/Perfetto JSON for ui.perfetto.dev and `Trace.merge`: see `perfetto.write`."""
        perfetto.write(Path(path), *self._collect())

    @classmethod
    def merge(cls, parts: Iterable[str | os.PathLike | Trace]) -> Trace:
        """One trace from files of `to_perfetto` and from traces, in any order.

        Within one machine the clock is common and times stay as they are. Traces of several machines are
        placed by each machine's wall clock, on the axis of the one that booted first; what those wall
        clocks differ by is not corrected. Raises ValueError for a malformed file or a part given twice,
        and OSError for a file that cannot be read.
        """
        if isinstance(parts, str | os.PathLike | Trace):
            raise ValueError(f"parts: {parts} is a single one; give a list")
        sources: dict[str, Source] = {}
        spans: list[Span] = []
        for part in parts:
            some_sources, some_spans = part._collect() if isinstance(part, Trace) else perfetto.read(Path(part))
            if twice := sources.keys() & some_sources.keys():
                raise ValueError(f"parts: {part} holds trace {min(twice)}, which an earlier part holds already")
            sources |= some_sources
            spans += some_spans
        merged = cls()
        merged._merged = _on_one_clock(sources, spans)
        return merged

    def _register(self, attrs: dict[str, Any]) -> tuple[int, int | None]:
        """Number a span that begins here, and its parent's number; what is inherited goes into `attrs`."""
        parent = _innermost.get()
        while parent is not None and parent._trace is not self:  # blocks of other traces may lie between
            parent = parent._outer
        if parent is None:
            if "track" not in attrs:
                attrs["track"] = f"{multiprocessing.current_process().name}/{threading.current_thread().name}"
            return next(self._numbers), None
        if "track" not in attrs:
            attrs["track"] = parent.attrs["track"]
        if "warmup" in parent.attrs:
            attrs.setdefault("warmup", parent.attrs["warmup"])
        return next(self._numbers), parent._number

    def _collect(self) -> tuple[dict[str, Source], list[Span]]:
        """The sources by id and all closed spans `in_order`; a parent that is still open counts as none."""
        closed = list(self._closed)
        times_ns = self._clock.resolve([mark for row in closed for mark in row[4:6]])
        known = {row[0] for row in closed}
        sources, spans = dict(self._merged[0]), list(self._merged[1])
        if closed or not sources:
            sources[self._id] = _this_source(self._id, self.mode)
        for row, start_ns, end_ns in zip(closed, times_ns[0::2], times_ns[1::2]):
            number, parent, thread, stage, _, _, attrs = row
            if end_ns < start_ns:
                raise ValueError(f"stage: {stage!r} ends {start_ns - end_ns} ns before it starts; use one stream")
            parent = parent if parent in known else None
            spans.append(Span(self._id, number, parent, thread, stage, start_ns, end_ns, attrs))
        return sources, in_order(spans)


def _this_source(source_id: str, mode: str) -> Source:
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # Linux: processes of one boot share one monotonic clock
    host = socket.gethostname()
    clock = boot_id.read_text().strip() if boot_id.exists() else host
    wall_ns = time.time_ns() - time.perf_counter_ns()
    return Source(source_id, host, os.getpid(), multiprocessing.current_process().name, mode, clock, wall_ns)


def _on_one_clock(sources: dict[str, Source], spans: list[Span]) -> tuple[dict[str, Source], list[Span]]:
    booted_ns: dict[str, int] = {}
    for source in sources.values():
        booted_ns[source.clock] = min(source.wall_ns, booted_ns.get(source.clock, source.wall_ns))
    if len(booted_ns) < 2:
        return sources, spans
    first = min(booted_ns, key=lambda clock: (booted_ns[clock], clock))
    shift_ns = {name: booted_ns[source.clock] - booted_ns[first] for name, source in sources.items()}
    return (
        {name: s._replace(clock=first, wall_ns=s.wall_ns - shift_ns[name]) for name, s in sources.items()},
        [s._replace(start_ns=s.start_ns + shift_ns[s.source], end_ns=s.end_ns + shift_ns[s.source]) for s in spans],
    )


_traces: weakref.WeakSet[Trace] = weakref.WeakSet()


def _after_fork() -> None:
    """The child's copies of the parent's spans would come twice into a merge."""
    _innermost.set(None)
    for trace in list(_traces):
        trace._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
