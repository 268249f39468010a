"""Starts the workers of a run as processes, and again when they die: `Supervisor`.

Models: a fork server that has torch loaded, so that a worker is back within a fraction of a second; deaths by signal
are restarted, errors stop the run. Leaves out other machines and restart limits (a signal costs a run nothing but
time here). Needs POSIX.

    with Supervisor("out/run", RunConfig()) as run:
        run.kill("trainer")                     # SIGKILL; the process is gone when this returns
        run.wait()                              # restarts what died, until the last update is saved

Life of a worker: started -> turns -> killed -> started ... -> the trainer finishes, and the others are stopped.
Invariant: at most one process a name, and one supervisor a folder. Trap: only `tend` and `wait` restart; between a
`kill` and the next of them the folder is as the dead worker left it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import BinaryIO

from rlinfra_utils.checkpoint import CheckpointError
from rlinfra_utils.doors import choice
from rlinfra_utils.recovery.config import RecoveryError, RunConfig
from rlinfra_utils.recovery.workers import QUEUE_POLICIES, make_worker, worker_names
from rlinfra_utils.rollouts import RolloutFileError
from rlinfra_utils.rollouts.storage import locked
from rlinfra_utils.tracing import RunFolderError, RunLog

_LOCK = ".supervisor.lock"
_IDLE_S = 0.003
_POLL_S = 0.01
#: What a worker says about the world around it, in one line; anything else is a fault of its own.
_SAID = (OSError, CheckpointError, RolloutFileError, RunFolderError, RecoveryError)


class Supervisor:
    """The processes of one run, from entering the context to leaving it.

    Raises ValueError for another queue policy, RecoveryError where the folder has another supervisor, and from `tend`
    and `wait` where a worker stopped with an error, such as a full disk: all workers are stopped then, and another
    Supervisor resumes the run. Names of workers are those of `workers.worker_names`; another one is a KeyError.
    """

    def __init__(self, folder: str | Path, config: RunConfig, queue_policy: str = "restore") -> None:
        self.folder, self.config = Path(folder), config
        self.queue_policy = choice("queue_policy", queue_policy, QUEUE_POLICIES)
        self.num_restarts = 0
        self._workers: dict[str, tuple[ForkServerProcess, Connection]] = {}

    def __enter__(self) -> Supervisor:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder / _LOCK)
        self._log = RunLog(self.folder, self.config.run_id, self.config.branch_id, self.config.to_json())
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._lock.close()

    def start(self) -> None:
        """Start all workers, after a stop too."""
        for name in worker_names(self.config):
            self._start(name)

    def _start(self, name: str) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (name, str(self.folder), self.config, self.queue_policy, theirs)
        process = self._context.Process(target=_run_worker, args=arguments, name=name, daemon=True)
        process.start()
        theirs.close()
        self._workers[name] = process, ours

    @property
    def finished(self) -> bool:
        """Whether the trainer has saved its last update and gone."""
        return self._workers["trainer"][0].exitcode == 0

    def pid(self, name: str) -> int:
        """Process id of a worker."""
        return self._workers[name][0].pid

    def kill(self, name: str) -> bool:
        """Kill a worker by SIGKILL and wait until it is gone; False if it was gone already."""
        process = self._workers[name][0]
        was_alive = process.is_alive()
        process.kill()
        process.join()
        return was_alive and process.exitcode != 0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold all workers still, wherever they are, so that the folder can be looked at."""
        pids = [process.pid for process, _ in self._workers.values() if process.is_alive()]
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def tend(self) -> list[str]:
        """Start again each worker that a signal has killed, and return their names. Raises RecoveryError: see above."""
        dead = [name for name, (process, _) in self._workers.items() if not process.is_alive()]
        if self.finished:
            return []
        for name in dead:
            process, pipe = self._workers[name]
            process.join()
            if process.exitcode >= 0:
                message = _last_words(pipe)
                self.stop()
                raise RecoveryError(f"{name} stopped: {message}")
            self._log.event("worker_died", name, signal=-process.exitcode)
            self._start(name)
        self.num_restarts += len(dead)
        return dead

    def wait(self, timeout_s: float = 120.0) -> None:
        """Tend the run until it is finished.

        Raises TimeoutError, with the workers stopped, when that takes longer; RecoveryError: see above.
        """
        end_s = time.monotonic() + timeout_s
        while not self.finished:
            self.tend()
            if time.monotonic() > end_s:
                self.stop()
                raise TimeoutError(f"{self.folder}: not finished after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop all workers, by SIGKILL: nothing that they leave behind needs their help."""
        for name in self._workers:
            self.kill(name)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it finished since we looked
            os.kill(pid, number)


def _last_words(pipe: Connection) -> str:
    try:
        return pipe.recv() if pipe.poll() else "without a word"
    except EOFError:
        return "without a word"


def _run_worker(name: str, folder: str, config: RunConfig, queue_policy: str, pipe: Connection) -> None:
    """A worker's process: turns until the trainer has finished or the supervisor is gone."""
    import torch

    torch.set_num_threads(1)  # tensors too small to share out, and one order of every sum
    parent = multiprocessing.parent_process()
    try:
        worker = make_worker(name, folder, config, queue_policy)
        while not worker.finished and parent.is_alive():
            if not worker.turn():
                time.sleep(_IDLE_S)
    except _SAID as error:
        pipe.send(str(error))
        raise SystemExit(1) from None
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise


def _locked(path: Path) -> BinaryIO:
    try:
        return locked(path)
    except BlockingIOError:
        raise RecoveryError(f"{path.parent}: has another supervisor; two would train the run twice") from None
