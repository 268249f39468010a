"""Run a cluster from beginning to end, or go on with one: `run`.

Models the life of a whole run in the calling process: Ray, the loop, Ctrl-C, the end. Leaves out what the loop
decides. Use: `outcome = run(ClusterConfig(num_updates=20), "out/run")`; later `run(config, "out/run", resume=True)`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinfra_utils.checkpoint import CheckpointError
from rlinfra_utils.cluster.config import ClusterConfig, ClusterError
from rlinfra_utils.cluster.loop import Loop
from rlinfra_utils.cluster.session import Session
from rlinfra_utils.doors import instance
from rlinfra_utils.rollouts.storage import locked
from rlinfra_utils.tracing import RunFolderError
from rlinfra_utils.tracing.folder import DESCRIPTION, describe

#: Held by the process that runs in a folder.
LOCK = ".running"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `status` is "done", "interrupted" or "time is up"; steps and versions since its very beginning.

    `seconds` are those of this call, without Ray's start; `restarts` counts processes that were started again.
    """

    folder: Path
    status: str
    num_updates: int
    version: int
    seconds: float
    restarts: int


def run(
    config: ClusterConfig,
    folder: str | Path,
    resume: bool = False,
    address: str | None = None,
    show: Callable[[str], None] = lambda line: None,
    watch: Callable[[Any], None] | None = None,
) -> Outcome:
    """Run until `num_updates`, `duration_s` or Ctrl-C, and leave a run folder that `tracing.read_run` reads.

    `address`: of a Ray cluster that is there; None starts one on this machine. A Ray that this process has initialised
    already is used as it is. `resume`: go on from the newest checkpoint in `folder`, with another configuration if you
    like (not another model or dataset). `watch(loop)` is called after each turn.

    Raises ValueError for what is no configuration; ClusterError in one line for a folder that holds a run (or none, to
    resume), that cannot be written or that another process runs in, for Ray that is absent, out of reach or too small,
    and for a process that fails or dies too often; all processes are then gone.
    """
    folder = Path(folder)
    config = _checked(config, folder, resume)
    with _alone(folder), Session(config, address) as session:
        loop, start_s = Loop(config, folder, session, show), time.perf_counter()
        with _interrupts(loop):
            try:
                loop.begin()
                while loop.status == "running":
                    loop.turn()
                    if watch is not None:
                        watch(loop)
            except (CheckpointError, RunFolderError, OSError) as error:
                raise ClusterError(str(error)) from error
            loop.end()
            for rendezvous in folder.glob(".rendezvous-*"):
                rendezvous.unlink(missing_ok=True)
        counts = loop.book.counts
        restarts = sum(member.num_starts - 1 for member in loop.crew.members.values())
        return Outcome(folder, loop.status, counts.step, counts.version, time.perf_counter() - start_s, restarts)


def _checked(config: ClusterConfig, folder: Path, resume: bool) -> ClusterConfig:
    instance("config", config, ClusterConfig, "with the settings of the run")
    begun = (folder / DESCRIPTION).exists()
    if begun and not resume:
        raise ClusterError(f"{folder}: holds a run already; resume it (resume=True, --resume), or name another folder")
    if resume and not begun:
        raise ClusterError(f"{folder}: holds no run to resume; name the folder of one, or begin without resume")
    if begun and describe(folder).run_id != config.run_id:
        raise ClusterError(f"run_id={config.run_id!r}: {folder} holds run {describe(folder).run_id!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise ClusterError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return config


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raise ClusterError where another process runs in the folder; its death gives the folder free."""
    try:
        lock = locked(folder / LOCK)
    except BlockingIOError:
        raise ClusterError(f"{folder}: another process runs in it; wait for its end, or end it") from None
    with lock:
        yield


@contextmanager
def _interrupts(loop: Loop) -> Iterator[None]:
    """The first Ctrl-C ends the run with a checkpoint, the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if loop.stopping:
            raise KeyboardInterrupt
        loop.stop("interrupted")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
