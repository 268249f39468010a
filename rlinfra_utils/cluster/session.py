"""Ray for one run: started here or joined by address, room reserved for every process, all of it given back.

Models: a local Ray with as many logical CPUs as the run has processes; on a cluster, a placement group that waits for
real ones. Leaves out starting a cluster on several machines (`ray start`; all must see the run folder). Use:
`with Session(config, address=None) as session: handle = session.actor("worker0", RolloutWorker, ...)`.

Life: entered (Ray there, room reserved) -> actors -> left (actors killed, room freed, a Ray of our own stopped).
Invariant: no process that the run started outlives it. Trap: a Ray that was running before stays as it was found.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinfra_utils.cluster.config import ClusterConfig, ClusterError
from rlinfra_utils.cluster.tasks import model_folder
from rlinfra_utils.levels import detect

#: In the environment of every process of a run; its value is the run's id.
MARKER = "RLINFRA_CLUSTER_RUN"
ROOM_S = 30.0
#: Bytes of Ray's object store of our own: a batch of records is far below it.
STORE_BYTES = 200 * 2**20
VERIFIER = "verifier"
#: Of one process with torch and transformers loaded, measured in 2026-11: 0.55 GB resident, a part of it shared.
PROCESS_BYTES = 450 * 10**6
REACH_S = 5.0
#: RFC 9113, sections 3.4 and 6.5: what a client says first, and the type of the frame that a server says first.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_HEADER_BYTES, _HTTP2_SETTINGS = 9, b"\x04"
#: linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_REAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


def import_ray() -> Any:
    """The module. Raises ClusterError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ClusterError("ray is not installed: pip install 'ray>=2.50'") from None
    return ray


class Session:
    """Ray, and the run's room in it."""

    def __init__(self, config: ClusterConfig, address: str | None = None) -> None:
        self.config, self.address, self.ray = config, address, import_ray()
        self._actors: list[Any] = []
        self._ours = False

    def __enter__(self) -> Session:
        if not self.ray.is_initialized():
            self._connect()
        try:
            self._reserve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self.address}
        if self.address is not None:
            reach(self.address)
        else:
            self._check_memory()
            gpus = {} if self.config.device == "cuda" else {"num_gpus": 0}
            options = {"num_cpus": len(self.bundles()) + 1, "object_store_memory": STORE_BYTES, **gpus}
            options |= {"address": "local", "include_dashboard": False}
        try:
            with _reaping():
                self.ray.init(log_to_driver=False, logging_level="error", **options)
        except Exception as error:
            where = "on this machine" if self.address is None else f"at {self.address}"
            raise ClusterError(f"Ray does not start {where}: {one_line(error)}") from error
        self._ours = True

    def _check_memory(self) -> None:
        """Raise ClusterError where the processes would not fit into what this machine has left."""
        config = self.config
        num_processes = config.num_trainers + config.num_workers + 1
        weights_bytes = sum(path.stat().st_size for path in model_folder(config.model).glob("*.safetensors"))
        # Each worker's, the publisher's copy, and the trainer's weights, gradients and two moments.
        copies = config.num_workers + 1 + 4
        needed_bytes = num_processes * PROCESS_BYTES + copies * weights_bytes + STORE_BYTES
        free_bytes = available_bytes()
        if needed_bytes > free_bytes:
            raise ClusterError(
                f"too little memory: {num_processes} processes need about {needed_bytes / 1e9:.1f} GB, "
                f"{free_bytes / 1e9:.1f} GB are free; take fewer workers or a smaller model"
            )

    def bundles(self) -> list[dict[str, float]]:
        """What each place of the run needs; colocated, trainer i and worker i share place i. The verifier is last."""
        config = self.config
        gpu = {"GPU": 1.0} if config.device == "cuda" else {}
        if config.placement == "colocated":
            num = max(config.num_trainers, config.num_workers)
        else:
            num = config.num_trainers + config.num_workers
        return [{"CPU": 1.0, **gpu} for _ in range(num)] + [{"CPU": 1.0}]

    def _reserve(self) -> None:
        from ray.util import placement_group

        self._group = placement_group(self.bundles(), strategy="PACK")
        try:
            self.ray.get(self._group.ready(), timeout=ROOM_S)
        except self.ray.exceptions.GetTimeoutError:
            have = {name: self.ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            needed = {name: sum(bundle.get(name, 0) for bundle in self.bundles()) for name in have}
            raise ClusterError(
                f"no room within {ROOM_S:g} s: the run needs {needed}, the cluster has {have}, some of it in use"
            ) from None

    def _bundle(self, name: str) -> int:
        kind, number = name.rstrip("0123456789"), int(name[len(name.rstrip("0123456789")) :] or 0)
        if kind == VERIFIER:
            return len(self.bundles()) - 1
        return (
            number if kind == "trainer" or self.config.placement == "colocated" else self.config.num_trainers + number
        )

    def actor(self, name: str, kind: type, *arguments: Any, at_once: int = 1) -> Any:
        """Start an actor in its place; calls to it wait until it is built."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = 0.5 if self.config.placement == "colocated" else 1.0
        on_gpu = self.config.device == "cuda" and name != VERIFIER
        handle = (
            self.ray.remote(kind)
            .options(
                num_cpus=share,
                num_gpus=share if on_gpu else 0,
                max_concurrency=at_once,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._bundle(name)),
                runtime_env={"env_vars": {MARKER: self.config.run_id, "OMP_WAIT_POLICY": "PASSIVE"}},
            )
            .remote(*arguments)
        )
        self._actors.append(handle)
        return handle

    def kill(self, handle: Any) -> None:
        """End an actor at once."""
        self.ray.kill(handle, no_restart=True)

    def __exit__(self, *_: object) -> None:
        for handle in self._actors:
            with contextlib.suppress(Exception):  # one that is dead already, or a Ray that is
                self.kill(handle)
        if hasattr(self, "_group"):
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        if self._ours:
            self.ray.shutdown()
            _disown_orphans()


@contextlib.contextmanager
def _reaping() -> Iterator[None]:
    """A Ray begun inside ends what a killed worker leaves behind, such as its vLLM server.

    For that it has this process ignore SIGCHLD, and `subprocess` would then take every exit code for 0: undone here.
    """
    os.environ[_REAPER] = "true"
    try:
        yield
    finally:
        del os.environ[_REAPER]
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL)


def _disown_orphans() -> None:
    """Ray makes this process the parent of orphans and leaves it so; nobody here would ever collect them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def available_bytes() -> float:
    """Memory that is free, or can be made so, on this machine and for this process; inf where nobody says."""
    limit = detect().memory_bytes or math.inf
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return limit
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min(limit, 1024.0 * int(lines["MemAvailable"].split()[0]))


def reach(address: str) -> None:
    """Raise ClusterError unless `address` is "auto" or a HOST:PORT where something speaks HTTP/2, as Ray's gRPC does.

    Ray itself would wait a minute where nothing listens, and for ever where something else does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ClusterError(f"address={address!r}: needs auto, or HOST:PORT of a cluster that `ray start --head` began")
    try:
        with socket.create_connection((host, int(port)), REACH_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            answer = connection.recv(_HTTP2_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        raise ClusterError(f"address={address!r}: no Ray cluster answers there: {error.strerror or error}") from None
    if answer[3:4] != _HTTP2_SETTINGS:
        raise ClusterError(f"address={address!r}: what answers there is no Ray cluster; give the port of `ray start`")


def one_line(error: BaseException) -> str:
    """The last thing that an error says, which for Ray's is the cause, without its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {(lines or ['without a word'])[-1][:300]}"
