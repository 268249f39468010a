"""The processes of a run and the calls that are out: `Crew` starts them, notices their death, starts them again.

Models: every call to an actor as one entry with the time it was made; what has come back, what failed and how, what
takes too long; a member that raises counts as dead. Leaves out what the answers mean (`loop.py`). Use:
`crew.call("answered", "worker0", "answer", task)`, then `for call, value in crew.arrivals(timeout_s): ...`.

Life of a member: starting -> ready -> (dead: killed, or too slow and then killed by us) -> starting ... at most
`max_restarts` times. Invariant: a call ends once: as a value, or as `Died` of its member. Trap: a call to a member
that is dead already fails only when its answer is looked at, so a group may go to it and come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinfra_utils.cluster.config import ClusterConfig, ClusterError
from rlinfra_utils.cluster.learner import TrainerRank
from rlinfra_utils.cluster.machine import cores, cores_of_this_process
from rlinfra_utils.cluster.session import VERIFIER, Session, one_line
from rlinfra_utils.cluster.workers import RolloutWorker, Verifier

PING_S = 1.0
#: How long a process may take from its start to its first word; a vLLM server takes the most.
START_S = 300.0


@dataclass(frozen=True)
class Died:
    """In place of a value: the member is gone, and why."""

    reason: str


@dataclass
class Member:
    """One process. `ready` once it has said hello; `heard_s` is when its last logged sign of life came."""

    name: str
    handle: Any
    pid: int | None = None
    ready: bool = False
    num_starts: int = 1
    heard_s: float = 0.0


@dataclass(frozen=True)
class Call:
    """A call that is out: `kind` and `what` are the caller's; `extra` are references that its method gave beside."""

    kind: str
    member: Member
    what: Any
    since_s: float
    extra: tuple[Any, ...] = field(default=())


class Crew:
    """All members by name, for one run; the trainers for one branch of it."""

    def __init__(self, session: Session, config: ClusterConfig, folder: Path) -> None:
        self.session, self.config, self.folder, self.ray = session, config, folder, session.ray
        self.members: dict[str, Member] = {}
        self.calls: dict[Any, Call] = {}
        self.rendezvous = self.weights = ""
        trainers, workers = cores(config.num_trainers, config.num_workers, cores_of_this_process())
        pinned = config.pin_cores
        self._cores = {f"trainer{i}": core for i, core in enumerate(trainers) if pinned}
        self._cores |= {f"worker{i}": core for i, core in enumerate(workers) if pinned}

    @property
    def workers(self) -> list[Member]:
        """Rollout workers, by number."""
        return [self.members[f"worker{i}"] for i in range(self.config.num_workers)]

    @property
    def trainers(self) -> list[Member]:
        """Ranks of the trainer, by number."""
        return [self.members[f"trainer{i}"] for i in range(self.config.num_trainers)]

    def start_trainers(self, branch_id: str, reason: str = "") -> None:
        """A fresh group of trainers for a branch; workers that start from here on look for its weights."""
        self.weights = str(self.folder / "weights" / branch_id)
        self.rendezvous = f"file://{self.folder.resolve()}/.rendezvous-{time.time_ns()}"
        for rank in range(self.config.num_trainers):
            self.start(f"trainer{rank}", branch_id, reason)

    def start(self, name: str, branch_id: str = "", reason: str = "") -> None:
        """Start a member, or start it again. Raises ClusterError where it died too often, with the last `reason`."""
        before = self.members.get(name)
        num_starts = 1 if before is None else before.num_starts + 1
        if num_starts > self.config.max_restarts + 1:
            often = f"died {num_starts - 1} times, max_restarts={self.config.max_restarts}"
            raise ClusterError(f"{name}: {often}; the last time: {reason}")
        config, core = self.config, self._cores.get(name)
        if name == VERIFIER:
            handle = self.session.actor(name, Verifier, name, config, str(self.folder / "quarantine"))
        elif name.startswith("trainer"):
            rank = int(name.removeprefix("trainer"))
            arguments = name, rank, config, str(self.folder.resolve()), branch_id, self.rendezvous, core
            handle = self.session.actor(name, TrainerRank, *arguments)
        else:
            at_once = 1 if config.engine == "hf" else config.groups_at_once + 2  # beside groups: load, ping
            handle = self.session.actor(name, RolloutWorker, name, config, self.weights, core, at_once=at_once)
        self.members[name] = Member(name, handle, num_starts=num_starts)
        self.call("hello", name, "hello")

    def call(self, kind: str, name: str, method: str, *arguments: Any, what: Any = None, parts: int = 1) -> None:
        """Call a member's method; with `parts` above 1 it returns a tuple, of which the first is looked at."""
        member = self.members[name]
        refs = getattr(member.handle, method).options(num_returns=parts).remote(*arguments)
        first, *extra = refs if parts > 1 else [refs]
        self.calls[first] = Call(kind, member, what, time.perf_counter(), tuple(extra))

    def arrivals(self, timeout_s: float) -> Iterator[tuple[Call, Any]]:
        """Calls that have come back since, each with its value or `Died`; waits up to `timeout_s` for the first.

        Raises ClusterError for a member that cannot be built.
        """
        ready, _ = self.ray.wait(list(self.calls), num_returns=1, timeout=timeout_s) if self.calls else ([], [])
        for ref in ready:
            if ref in self.calls:  # else it was forgotten while an earlier one was dealt with
                yield self.calls.pop(ref), self._value(ref)
        for ref, call in [*self.calls.items()]:
            limit_s = self._limit_s(call)
            if time.perf_counter() - call.since_s > limit_s and ref in self.calls:
                del self.calls[ref]
                yield call, Died(f"no answer to {call.kind} within {limit_s:g} s")

    def _limit_s(self, call: Call) -> float:
        """A publication loads, proves and may go back, each within the deadline; a start has one of its own."""
        if call.kind == "hello":
            return START_S
        return self.config.deadline_s * (3 if call.kind == "published" else 1)

    def _value(self, ref: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref)
        except errors.ActorDiedError as error:
            if "error raised in its creation task" in str(error):  # it would be raised again
                raise ClusterError(f"a process cannot be built: {one_line(error)}") from error
            return Died(one_line(error))
        except errors.RayError as error:  # its own exceptions too: an engine that is gone, a rank that lost another
            return Died(one_line(error))

    def forget(self, member: Member) -> list[Call]:
        """Drop all calls to a member and return them: it is dead, or its answers are of no use any more."""
        dropped = [(ref, call) for ref, call in self.calls.items() if call.member is member]
        for ref, _ in dropped:
            del self.calls[ref]
        return [call for _, call in dropped]

    def ping(self) -> None:
        """Ask idle members for a sign of life, so that a death is noticed without work for it."""
        busy = {call.member.name for call in self.calls.values()}
        for name, member in self.members.items():
            if member.ready and name not in busy:
                self.call("ping", name, "ping")

    def everyone_ready(self) -> bool:
        """Whether all have said hello."""
        return all(member.ready for member in self.members.values())
