"""The peak memory of the processes below this one: a notebook's kernel and whatever it starts.

Sampled every quarter of a second: a shorter peak is missed. Shared pages count once where the system says how they are
shared (Linux's PSS), else in each process. Leaves out this process and GPU memory.
Use: `with Watch() as watch: ...`, then `watch.peak_bytes`.
"""

import contextlib
import threading

import psutil

INTERVAL_S = 0.25


class Watch:
    """A thread that samples until the block ends. Invariant: `peak_bytes` only grows.

    Trap: reading PSS walks a process's pages, which takes longer than the interval for large ones. It is read only
    where the sum of resident sizes, which is cheap and at least as large, is higher than ever.
    """

    def __init__(self) -> None:
        self.peak_bytes = self._highest_resident_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        """Look once."""
        processes = psutil.Process().children(recursive=True)
        resident_bytes = sum(_of(process, lambda process: process.memory_info().rss) for process in processes)
        if resident_bytes > self._highest_resident_bytes:
            self._highest_resident_bytes = resident_bytes
            self.peak_bytes = max(self.peak_bytes, sum(_of(process, _own_bytes) for process in processes))


def _own_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return getattr(full, "pss", full.rss)


def _of(process: psutil.Process, read) -> int:
    with contextlib.suppress(psutil.Error):  # it ended between the list and the look
        return read(process)
    return 0
