"""Seconds by part of a sync, kept as numbers and, where a trace is given, as spans of one "weight_sync".

Models: parts one after the other. Leaves out overlap, and device time that no call waits for.
Use: `parts = Parts(trace)`, then `with parts("write"): ...`, then `parts.seconds["write"]`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rlinfra_utils.timers import Trace


class Parts:
    """Adds up seconds by name of the part."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._trace = trace

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block as part `name`; a failed block is timed as well."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + end_s - begin_s
            if self._trace is not None:
                self._trace.add(name, begin_s, end_s)

    @contextlib.contextmanager
    def whole(self, **attrs: object) -> Iterator[None]:
        """The block that holds all parts: stage "weight_sync" of the trace."""
        with contextlib.nullcontext() if self._trace is None else self._trace.span("weight_sync", **attrs):
            yield
