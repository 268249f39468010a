"""What a level cell costs: seconds from its start to its `levels.store`, and the memory that the run held until then.

Memory is the largest resident set of this process, plus those of the processes that it started and that still run, or
that of the largest which has ended if it is more; Linux only, None elsewhere. Leaves out the accelerator's memory.
Use: `begin(name)` when the cell starts; `levels.store(name, ...)` takes `spent(name)` along.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_started_s: dict[str, float] = {}


class Cost(NamedTuple):
    """Seconds of one cell, and the peak of memory by its end, in bytes."""

    seconds: float
    peak_memory_bytes: int | None

    def __str__(self) -> str:
        memory = "" if self.peak_memory_bytes is None else f" and {self.peak_memory_bytes / 1e9:.1f} GB of memory"
        return f"{max(self.seconds, 1):.0f} s{memory}"


def begin(name: str) -> None:
    """Start the clock of the cell whose result is `name`; a second start replaces the first."""
    _started_s[name] = time.perf_counter()


def spent(name: str) -> Cost | None:
    """What the cell has cost since `begin(name)`; None where it was not begun."""
    start_s = _started_s.get(name)
    return None if start_s is None else Cost(time.perf_counter() - start_s, _peak_memory_bytes())


def _peak_memory_bytes() -> int | None:
    if sys.platform != "linux":
        return None
    import resource  # not there on Windows

    own, ended = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    alive = sum(_peak_kib(pid) for pid in _descendants(os.getpid()))
    return 1024 * (own + max(ended, alive))  # Linux counts in KiB


def _descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` has started, and those that they have, as far as they are there to be read."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(listed).split()):
            yield child
            yield from _descendants(child)


def _peak_kib(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in _text(Path(f"/proc/{pid}/status")).splitlines())
    return int(fields.get("VmHWM", "0").split()[0])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended in between
        return ""
