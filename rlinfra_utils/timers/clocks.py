"""The three clocks of a trace, by what they measure on a device that works asynchronously.

`wall`: the host; a stage that only launches work looks short, and the wait shows up where the host next
synchronises. `cuda_sync`: the host after the device has drained, at both ends; right, and slower, since
nothing overlaps any more. `cuda_events`: the device, by events on the current stream, read later.
Leaves out: other accelerators, several devices in one trace (events of two devices do not compare).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

MODES = ("wall", "cuda_sync", "cuda_events")
_REANCHOR_MS = 1000.0  # CUDA gives elapsed time as float32 ms: within a second that is 0.06 us


class HostDevice:
    """A machine whose work is done when the call returns."""

    host_ns = staticmethod(time.perf_counter_ns)


class CudaDevice:
    """The current CUDA device through torch; `mode` only names who asks. Raises RuntimeError without one."""

    host_ns = staticmethod(time.perf_counter_ns)

    def __init__(self, mode: str):
        try:
            import torch
        except ImportError:
            raise RuntimeError(f"mode: {mode!r} needs torch, which is not installed; use 'wall'") from None
        if not torch.cuda.is_available():
            raise RuntimeError(f"mode: {mode!r} needs a CUDA device, and torch sees none; use 'wall'")
        self._cuda = torch.cuda

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        self._cuda.synchronize()

    def record(self) -> Any:
        """An event at this place of the current stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def elapsed_ms(first: Any, second: Any) -> float:
        """Device time between two events that have passed."""
        return first.elapsed_time(second)


class HostClock:
    """Reads give nanoseconds at once. `read` is the device's own function: nothing lies between."""

    def __init__(self, read):
        self.read = read

    def resolve(self, marks: list[int]) -> list[int]:
        """The nanoseconds of what `read` gave."""
        return marks


class _Mark:
    __slots__ = ("event", "ns")

    def __init__(self, event: Any):
        self.event, self.ns = event, None


class EventClock:
    """Reads record an event; `resolve` waits for the device and puts events on the host's time axis.

    States of a mark: pending (its event is in the stream) -> resolved (has `ns`, event freed). Marks resolve
    in the order of their records, each against an anchor at most about a second older, whose own time is
    known. Trap: an idle stream stamps an event at once, so host time until the first launch counts as well.
    """

    def __init__(self, device):
        self._device = device
        self._pending: deque[_Mark] = deque()
        self._resolving = threading.Lock()
        device.synchronize()
        self._anchor, self._anchor_ns = device.record(), device.host_ns()

    def read(self) -> _Mark:
        """Record an event now."""
        mark = _Mark(self._device.record())
        self._pending.append(mark)
        return mark

    def resolve(self, marks: list[_Mark | int]) -> list[int]:
        """Wait for the device, then the nanoseconds of each mark; whole numbers pass through."""
        with self._resolving:
            num_pending = len(self._pending)  # marks that other threads add meanwhile wait for the next call
            self._device.synchronize()
            for _ in range(num_pending):
                self._settle(self._pending.popleft())
        return [mark if isinstance(mark, int) else mark.ns for mark in marks]

    def _settle(self, mark: _Mark) -> None:
        elapsed_ms = self._device.elapsed_ms(self._anchor, mark.event)
        mark.ns = self._anchor_ns + round(elapsed_ms * 1e6)
        if elapsed_ms > _REANCHOR_MS:
            self._anchor, self._anchor_ns = mark.event, mark.ns
        mark.event = None


def make_clock(mode: str, device: Any = None) -> HostClock | EventClock:
    """The clock of `mode`; `device` stands in for the machine (tests give a fake with known answers).

    Raises ValueError for an unknown mode, RuntimeError for a CUDA mode without CUDA.
    """
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    if device is None:
        device = HostDevice() if mode == "wall" else CudaDevice(mode)
    if mode == "wall":
        return HostClock(device.host_ns)
    if mode == "cuda_events":
        return EventClock(device)

    def read() -> int:
        device.synchronize()
        return device.host_ns()

    return HostClock(read)
