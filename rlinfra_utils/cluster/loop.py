"""The asynchronous loop over real processes: whatever comes back is booked, then the rule decides again: `Loop`.

Models the simulator's loop with actors in place of its clock: the same `Counts`, the same controller object, the same
order of decisions. Leaves out the trainer's steps (`trainer_side.py`), where a run begins (`beginning.py`), and how a
death is noticed (`crew.py`). Use: through `cluster.run`.

A group's way: dispatched by the book -> answered by a worker -> judged by the verifier -> queued. Invariant: a group is
trained in one batch of the lineage of the weights. Trap: a trainer that died leads back to its last checkpoint; what
was trained, queued or running since then, and is not in it, is declared lost and its prompts are asked again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinfra_utils.cluster.beginning import begin
from rlinfra_utils.cluster.book import Book
from rlinfra_utils.cluster.config import ClusterConfig, ClusterError
from rlinfra_utils.cluster.crew import PING_S, Call, Crew, Died, Member
from rlinfra_utils.cluster.progress import Progress
from rlinfra_utils.cluster.session import VERIFIER, Session
from rlinfra_utils.cluster.trainer_side import TrainerSide
from rlinfra_utils.simulator import Group
from rlinfra_utils.timers import Trace
from rlinfra_utils.tracing import RunLog
from rlinfra_utils.tracing.folder import TRACE

TICK_S = 0.2
#: A prompt that the contract refuses so often has a fault that asking again does not mend.
MOST_REFUSALS = 3
#: Seconds in which processes hand over their traces and stop what they started.
GOODBYE_S = 20.0


class Loop:
    """One run, from `begin` to `end`; `turn` does what has become possible and waits a moment for more.

    `status` is "running", then "done", or what `stop` was given.
    """

    log: RunLog
    book: Book
    branch_id: str

    def __init__(self, config: ClusterConfig, folder: Path, session: Session, show: Callable[[str], None]) -> None:
        self.config, self.folder, self.session = config, folder, session
        self.controller = config.make_controller()
        self.crew, self.trace, self.progress = Crew(session, config, folder), Trace(), Progress(show)
        self.status, self.stopping = "running", ""
        self._said = ""  # of the stop, to whoever looks on
        self.epoch = 0  # of the trainers; answers to calls of an earlier one are of no use
        self.records: dict[int, Any] = {}  # by group: a reference to its records, answered or rewarded
        self.to_judge: dict[int, Group] = {}
        self.trainer = TrainerSide(self)
        self._handlers = {"hello": self._hello, "alive": self._hello, "ping": lambda call, value: None}
        self._handlers |= {"answered": self._answered, "judged": self._judged, **self.trainer.handlers}
        self._pinged_s = self._started_s = time.perf_counter()

    def begin(self, reason: str = "") -> None:
        """Start, or go on from the newest checkpoint; `reason` is why the trainers died."""
        begin(self, reason)

    def turn(self) -> None:
        """What has come back is booked, and decided upon."""
        if self.stopping != self._said:
            self._said = self.stopping
            self.progress.say(f"{self.stopping}: begins no more work, then saves; Ctrl-C now ends at once")
        self.settle()
        self._look_for_work()
        for call, value in self.crew.arrivals(TICK_S):
            self.arrived(call, value)
            self.settle()
        now_s = time.perf_counter()
        if now_s - self._pinged_s > PING_S:
            self._pinged_s = now_s
            self.crew.ping()
            self.progress.line(self.book, now_s)
        if self.config.duration_s is not None and now_s - self._started_s > self.config.duration_s:
            self.stop("time is up")

    def stop(self, why: str) -> None:
        """Begin no more work; once the trainer is free, save and end as `why`."""
        self.stopping = self.stopping or why

    def settle(self) -> None:
        """The decisions, in the simulator's order: the trainer, then new groups, then an update."""
        trainer = self.trainer
        if trainer.state == "free":
            trainer.settle(self.stopping)
        if trainer.engines_serve:
            while trainer.state != "waits" and not self.stopping and self.book.dispatch(time.perf_counter()):
                pass
            self._assign()
        trainer.settle(self.stopping)

    def _look_for_work(self) -> None:
        """Raise ClusterError where nothing is out and nothing can begin."""
        at_work = any(call.kind != "ping" for call in self.crew.calls.values())
        if self.status == "running" and not at_work and self.crew.everyone_ready():
            rule, state = type(self.controller).__name__, self.trainer.state
            raise ClusterError(f"blocked: {rule} starts nothing, the trainer is {state}, at {self.book.counts!r}")

    def arrived(self, call: Call, value: Any) -> None:
        """One call has come back: a sign of life, whatever it says."""
        if isinstance(value, Died):
            self._died(call, value)
            return
        if not (isinstance(call.what, tuple) and call.what[0] != self.epoch):
            self._handlers[call.kind](call, value)
        self._heard(call.member)

    def _heard(self, member: Member) -> None:
        """Log a heartbeat, once in a while; a member at work is next heard when its call is done, or is dead."""
        now_s = time.perf_counter()
        if now_s - member.heard_s > PING_S:
            member.heard_s = now_s
            self.log.event("heartbeat", member.name, within_s=self.config.deadline_s)

    def _hello(self, call: Call, pid: int) -> None:
        member = call.member
        if member.pid is None:
            self.log.event("worker_started", member.name, pid=pid)
        member.pid, member.ready = pid, True
        self.count_slots()
        if member.name == VERIFIER:
            for group in self.to_judge.values():
                self._judge(group)

    def count_slots(self) -> None:
        """Tell the book how many groups the live workers hold."""
        if hasattr(self, "book"):
            live = sum(member.ready for name, member in self.crew.members.items() if name.startswith("worker"))
            self.book.set_slots(self.config.groups_at_once * live)

    # A group's way.

    def _assign(self) -> None:
        """Waiting groups go to workers with a free place, the least busy first."""
        out = [call.member.name for call in self.crew.calls.values() if call.kind == "answered"]
        places = [
            (out.count(member.name) + place, member.name)
            for member in self.crew.workers
            for place in range(self.config.groups_at_once - out.count(member.name))
            if member.ready
        ]
        for _, name in sorted(places):
            if not self.book.waiting:
                return
            group = self.book.start()
            task = self.book.tasks[group.index]
            self.crew.call("answered", name, "answer", task, self.branch_id, what=(self.epoch, group), parts=2)

    def _answered(self, call: Call, answered: Any) -> None:
        group = call.what[1]
        self.span("answer_call", call, actor_s=answered.actor_s, tokens=answered.num_tokens)
        self.book.decoded(group, answered.num_tokens)
        self.records[group.index] = call.extra[0]
        self.to_judge[group.index] = group
        if self.crew.members[VERIFIER].ready:
            self._judge(group)

    def _judge(self, group: Group) -> None:
        task, version = self.book.tasks[group.index], self.book.counts.version
        arguments = self.records[group.index], task, version
        self.crew.call("judged", VERIFIER, "judge", *arguments, what=(self.epoch, group), parts=2)

    def _judged(self, call: Call, finding: str) -> None:
        group = call.what[1]
        self.span("verify_call", call)
        del self.to_judge[group.index]
        if finding:
            self._refused(group, finding)
            return
        self.records[group.index] = call.extra[0]
        self.book.put(group, time.perf_counter())
        self.log_queue()

    def _refused(self, group: Group, finding: str) -> None:
        task = self.book.tasks[group.index]
        del self.records[group.index]
        self.lose(task.group_id, f"the contract refused it: {finding}")
        if self.book.fail(group) >= MOST_REFUSALS:
            raise ClusterError(f"{task.prompt_id}: refused {MOST_REFUSALS} times, last: {finding}")

    def lose(self, group_id: str, reason: str) -> None:
        """Declare the rollouts of a group lost; their prompt is asked again."""
        self.log.event("rollout_lost", group_id=group_id, num_rollouts=self.config.group_size, reason=reason)

    def log_queue(self) -> None:
        """Log how deep the queue is."""
        counts = self.book.counts
        self.log.event("queue", depth_rollouts=counts.queued, depth_tokens=counts.queued_tokens)

    # Deaths.

    def _died(self, call: Call, died: Died) -> None:
        """Whatever was asked of a dead process is asked again; dead trainers lead back to the last checkpoint."""
        member = call.member
        asked = [call, *self.crew.forget(member)]
        if self.crew.members.get(member.name) is not member:
            return
        self.log.event("worker_died", member.name, reason=died.reason, pid=member.pid)
        member.ready = False
        self.session.kill(member.handle)  # it may only have raised, or be silent
        self.count_slots()
        if member.name.startswith("trainer"):
            self.epoch += 1
            for rank in self.crew.trainers:
                self.crew.forget(rank)
                self.session.kill(rank.handle)
            self.begin(f"{member.name}: {died.reason}")
            return
        asked = [one for one in asked if isinstance(one.what, tuple) and one.what[0] == self.epoch]
        for one in asked:
            if one.kind == "answered":
                self.book.lost(one.what[1])
                group_id = self.book.tasks[one.what[1].index].group_id
                self.log.event("retry", member.name, group_id=group_id, reason=died.reason)
        self.crew.start(member.name, reason=died.reason)
        if any(one.kind == "slept" for one in asked):
            self.trainer.slept(call, None)

    def span(self, stage: str, call: Call, **attrs: Any) -> None:
        """A span from when a call was made until this moment."""
        self.trace.add(stage, call.since_s, time.perf_counter(), track=f"loop/{call.member.name}", **attrs)

    def end(self) -> None:
        """Collect the traces of all that live, merge them with those of earlier branches, and let everyone go."""
        folder, ray = self.folder / "traces", self.session.ray
        folder.mkdir(exist_ok=True)
        self.trace.to_perfetto(folder / f"loop-{time.time_ns()}.json")
        members = [member for member in self.crew.members.values() if member.ready]
        asked = {member.handle.farewell.remote(str(folder.resolve())): member for member in members}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=GOODBYE_S)
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # it died at the very end
                self.log.event("memory", asked[ref].name, peak_bytes=ray.get(ref))
                self.log.event("worker_stopped", asked[ref].name)
        Trace.merge(sorted(folder.glob("*.json"))).to_perfetto(self.folder / TRACE)
        refs = [member.handle.close.remote() for member in members]
        ray.wait(refs, num_returns=len(refs), timeout=GOODBYE_S)
