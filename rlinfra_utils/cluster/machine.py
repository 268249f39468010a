"""What an actor does to its process first: one torch thread, a core of its own, a trace that can be fetched.

Models Linux processes on the CPU, and CUDA by the GPU that Ray has set. Leaves out Ray itself: these are plain classes.
Use: `place = Place("worker0", core=1, device="cpu")`; `with place.trace.span(...)`; `place.farewell(folder)`.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlinfra_utils.timers import Trace


def cores(num_trainers: int, num_workers: int, available: list[int]) -> tuple[list[int], list[int]]:
    """A core for each trainer and each worker: trainers have one each, workers share what is left, in turns.

    With fewer cores than trainers and one more, all of them share what there is.
    """
    own = available[:num_trainers] if len(available) > num_trainers else available
    left = available[num_trainers:] or available
    return [own[i % len(own)] for i in range(num_trainers)], [left[i % len(left)] for i in range(num_workers)]


def cores_of_this_process() -> list[int]:
    """Cores that this process may use, as the system numbers them."""
    return sorted(os.sched_getaffinity(0))


class Place:
    """The process of one actor."""

    def __init__(self, name: str, core: int | None, device: str) -> None:
        self.name, self.device = name, torch.device(device)
        if core is not None:
            os.sched_setaffinity(0, {core})
        if device == "cpu":
            torch.set_num_threads(1)
        self.trace = Trace()
        self._told_cpu_s = time.process_time()

    @contextmanager
    def span(self, stage: str, **attrs: Any) -> Iterator[Any]:
        """A span on this actor's track, with the process's CPU seconds: what it would take with a core of its own.

        `before_cpu_s`: what the process took since its last span, for the call itself, its arguments and its answer.
        """
        with self.trace.span(stage, track=self.name, **attrs) as span:
            start_s = time.process_time()
            yield span
            end_s = time.process_time()
            span.set(cpu_s=end_s - start_s, before_cpu_s=start_s - self._told_cpu_s)
            self._told_cpu_s = end_s

    def farewell(self, folder: str) -> int:
        """Write the spans so far as FOLDER/NAME-PID.json; returns the most memory that the process ever held, bytes."""
        path = Path(folder) / f"{self.name}-{os.getpid()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.trace.to_perfetto(path)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts it in KiB
