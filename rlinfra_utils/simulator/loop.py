"""The event loop: whatever is due next happens, then the trainer takes and free slots start what they may.

Models one event for the end of each stage. Leaves out how decoding advances (`engines`) and what is counted after
the run (`run`). Use: `simulate(config)`, or `simulate(config, watch=f)`: f sees `Counts` after every event.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from rlinfra_utils.doors import short
from rlinfra_utils.simulator.batching import Batched
from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.engines import Slots
from rlinfra_utils.simulator.protocol import Counts, Group
from rlinfra_utils.simulator.run import Lost, Run
from rlinfra_utils.simulator.trainer import Trainer
from rlinfra_utils.simulator.workload import Rollout, Workload

#: Batches' worth of rollouts discarded in a row, none trained between: the run ends as "starved".
STARVED_BATCHES = 100
#: Rollouts that may wait for a slot; a controller that dispatches more without end is at fault.
MOST_WAITING = 1_000_000


def simulate(config: LoopConfig, watch: Callable[[Counts], None] | None = None) -> Run:
    """Run the loop to its end, or to where it can go no further (`Run.status`, `Run.reason`).

    Raises ValueError if `config` is no LoopConfig, and for a controller that answers something unknown or
    dispatches without end.
    """
    if not isinstance(config, LoopConfig):
        raise ValueError(f"config={short(config)}: needs a LoopConfig")
    return Loop(config, watch).run()


class Loop:
    """The rollouts' side of the loop, from dispatch to the queue; the trainer's is in `trainer`."""

    def __init__(self, config: LoopConfig, watch: Callable[[Counts], None] | None):
        self.config, self.rule, self.watch = config, config.controller, watch
        self.workload = Workload(config)
        self.engines = Batched(config) if config.token_s_per_active else Slots(config)
        batch = config.mean_batch
        self.counts = Counts(batch, batch * config.sync_interval, config.group_size, config.num_slots)
        self.events: list[tuple] = []  # (time, number, what to do, with what): a heap
        self.num_events, self.faulty = 0, config.faults.hang_share > 0
        self.groups: list[Group] = []
        self.rollouts: list[Rollout] = []
        self.oldest = 0  # index of the first group in flight
        self.waiting: deque[Rollout] = deque()  # for a slot
        self.verifiers_free_s = [0.0] * config.num_verifiers
        self.lost: list[Lost] = []
        self.status, self.reason = "running", ""
        self.trainer = Trainer(self)
        for replica, times_s in enumerate(self.workload.deaths):
            self.after(next(times_s), self.die, replica)

    def run(self) -> Run:
        """The event loop, without the garbage collector: it would go through a growing heap and find nothing."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self.go_on()
        finally:
            if collects:
                gc.enable()
        run = Run(self)
        self.events, self.trainer = [], None  # both hold the loop: without them its memory goes back at once
        return run

    def go_on(self) -> None:
        """Event by event, until the end or until nothing can happen any more."""
        engines, events, counts, end_s = self.engines, self.events, self.counts, self.config.duration_s or math.inf
        decoded, pop, settle, watch = self.decoded, self.engines.pop, self.settle, self.watch
        settle()
        while self.status == "running":
            decoded_s, event_s = engines.next_s, events[0][0] if events else math.inf
            now_s = decoded_s if decoded_s <= event_s else event_s
            if decoded_s == math.inf and self.stuck():
                self.status, self.reason = "blocked", self.what_is_missing()
                break
            if now_s > end_s:
                self.status, counts.now_s = "done", end_s
                break
            counts.now_s = now_s
            if decoded_s <= event_s:
                decoded(pop(now_s))
            else:
                _, _, act, what = heappop(events)
                act(what)
            settle()
            if watch:
                watch(counts)

    def after(self, delay_s: float, act: Callable, what: object = None) -> None:
        """Let `act(what)` happen `delay_s` from now."""
        self.num_events += 1
        heappush(self.events, (self.counts.now_s + delay_s, self.num_events, act, what))

    def settle(self) -> None:
        """What the last event has made possible: a batch is taken, groups are dispatched, slots are filled."""
        counts, engines, trainer = self.counts, self.engines, self.trainer
        if trainer.free and trainer.queue:
            trainer.take()
        if engines.paused_s is not None:
            return
        while not trainer.waits_for_engines and self.rule.may_start(counts):
            self.dispatch()
        waiting = self.waiting
        while waiting and counts.free_slots + len(waiting) > 0:
            rollout = waiting.popleft()
            rollout.start_s, rollout.start_version = counts.now_s, counts.version
            if self.faulty:
                rollout.hangs = self.workload.hangs(rollout)
            engines.start(rollout, counts.now_s)
        if trainer.waits_for_engines and not self.waiting and not engines.num_running():
            trainer.update()

    def dispatch(self) -> None:
        """One more group is offered."""
        counts, size = self.counts, self.config.group_size
        group = Group(len(self.groups), counts.version, counts.step, counts.now_s, size)
        if not counts.in_flight:
            self.oldest, counts.oldest_running_version = group.index, group.version
        self.groups.append(group)
        rollouts = self.workload.rollouts(group, size)
        self.rollouts += rollouts
        self.waiting += rollouts
        counts.offered += size
        counts.in_flight += size
        counts.free_slots -= size
        if counts.free_slots < -MOST_WAITING:
            raise ValueError(f"controller={type(self.rule).__name__}: dispatches without end; look at free_slots")

    def decoded(self, rollout: Rollout | None) -> None:
        """A slot is free. The rollout goes to the verifier free first, or, cut off, to another attempt."""
        if rollout is None:
            return
        counts = self.counts
        counts.free_slots += 1
        if rollout.fails:
            self.retry(rollout, "timeout")
            return
        rollout.end_s = now_s = counts.now_s
        rollout.end_version = counts.version
        verifiers, group = self.verifiers_free_s, rollout.group
        begin_s = verifiers[0] if verifiers[0] > now_s else now_s
        rollout.verify_start_s = begin_s
        rollout.verified_s = done_s = begin_s + rollout.verify_s
        heapreplace(verifiers, done_s)
        group.tokens += rollout.tokens
        if done_s > group.ready_s:
            group.ready_s = done_s
        group.unfinished -= 1
        if not group.unfinished:
            self.all_ended(group)

    def all_ended(self, group: Group) -> None:
        """No rollout of the group is in a slot any more; it closes when the last verdict is there."""
        if group.ready_s <= self.counts.now_s:
            self.close(group)
        else:
            self.num_events += 1
            heappush(self.events, (group.ready_s, self.num_events, self.close, group))

    def close(self, group: Group) -> None:
        """All rollouts of the group are verified: into the queue, or out if one of them failed for good."""
        counts, size = self.counts, self.config.group_size
        counts.in_flight -= size
        group.ready_s = counts.now_s
        if group.failed:
            group.outcome = "failed"
            counts.discarded += size
        else:
            self.trainer.put(group)
        if group.index == self.oldest:
            self.oldest_running()

    def oldest_running(self) -> None:
        """Look for the first group in flight behind the one that closed."""
        while self.oldest < len(self.groups) and self.groups[self.oldest].outcome != "in_flight":
            self.oldest += 1
        running = self.oldest < len(self.groups)
        self.counts.oldest_running_version = self.groups[self.oldest].version if running else math.inf

    def starve(self, lost: int) -> None:
        """End the run if so many rollouts or attempts were lost since the trainer last took a batch."""
        if lost > STARVED_BATCHES * max(self.counts.batch, self.config.num_slots):
            self.status = "starved"
            self.reason = f"{lost} rollouts or attempts lost since the last batch of {self.config.controller!r}"

    def retry(self, rollout: Rollout, why: str) -> None:
        """An attempt was lost. It is repeated first of all; after the last one the group has failed."""
        now_s, made_tokens = self.counts.now_s, rollout.tokens - rollout.left_tokens
        replica = rollout.slot % self.config.num_replicas
        self.lost.append(Lost(rollout.index, rollout.attempt, replica, rollout.start_s, now_s, made_tokens, why))
        rollout.start_version = -1  # it is in no slot
        self.starve(len(self.lost) - self.trainer.lost_at_take)
        if why == "timeout" and rollout.attempt >= self.config.faults.max_retries:
            rollout.group.failed = True
            rollout.group.unfinished -= 1
            if not rollout.group.unfinished:
                self.all_ended(rollout.group)
            return
        rollout.reset()
        self.waiting.appendleft(rollout)
        self.counts.free_slots -= 1

    def die(self, replica: int) -> None:
        """A replica is lost with its attempts; it is back after a while."""
        lost = self.engines.kill(replica, self.counts.now_s)
        self.counts.free_slots -= self.config.slots_per_replica - len(lost)
        for rollout in reversed(lost):
            self.retry(rollout, "died")
        self.after(self.config.faults.restart_s, self.revive, replica)

    def revive(self, replica: int) -> None:
        """The replica starts empty, and dies again some day."""
        self.engines.revive(replica)
        self.counts.free_slots += self.config.slots_per_replica
        self.after(next(self.workload.deaths[replica]), self.die, replica)

    def stuck(self) -> bool:
        """Nothing is due but deaths, and these would free no one."""
        only_deaths = all(act == self.die for _, _, act, _ in self.events)
        return only_deaths and not (self.events and self.engines.num_running())

    def what_is_missing(self) -> str:
        """Why nothing can happen any more, in one line."""
        counts, config, hung = self.counts, self.config, self.engines.num_running()
        needed = f"{config.batch_rollouts} rollouts" if config.batch_tokens is None else f"{config.batch_tokens} tokens"
        held = counts.queued if config.batch_tokens is None else counts.queued_tokens
        parts = []
        if self.trainer.waits_for_engines:
            parts.append(f"the weight update waits for {hung + len(self.waiting)} rollouts in flight")
        elif self.trainer.free:
            parts.append(f"the trainer waits for {needed} that the rule lets it take, the queue holds {held}")
        if hung:
            parts.append(f"{hung} of {config.num_slots} slots hang and Faults.timeout_s is None")
        if not self.trainer.waits_for_engines and not self.rule.may_start(counts):
            parts.append(f"{type(self.rule).__name__} starts nothing at {counts!r}")
        return "; ".join(parts)
