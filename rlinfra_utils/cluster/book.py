"""The book of a real run: its counts, its queue, what may start and what is taken, by the simulator's own rules.

Models the decisions of `simulator` for groups that real processes answer; the controller sees the same `Counts`. Leaves
out processes, clocks and weights: whoever calls brings the time. Use: `while group := book.dispatch(now_s): ...`.

A group's life: dispatched (waits for a slot) -> started -> decoded (its slot is free) -> queued -> training -> trained;
or dropped (by the rule) or failed (refused by the contract): its prompt is then handed out again, under another name.
Invariant: a prompt number is in one place: trained, or held by one group, or to be handed out. Trap: a group whose
process died goes back to waiting; it was dispatched once, and is counted once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from rlinfra_utils.checkpoint import DataPosition
from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.tasks import Dataset, Task
from rlinfra_utils.simulator import Controller, Counts, Group


class Book:
    """Counts, queue and data position of one branch of a run.

    `step` and `version` are where the weights stand; `queued` are groups of an earlier branch that still wait, as
    (task, version, tokens). Groups are numbered from 0 through the whole run, as if no branch had been.
    """

    def __init__(
        self,
        config: ClusterConfig,
        controller: Controller,
        branch_id: str = "main",
        step: int = 0,
        version: int = 0,
        position: DataPosition | None = None,
        queued: Sequence[tuple[Task, int, int]] = (),
    ) -> None:
        self.config, self.controller, self.branch_id = config, controller, branch_id
        self.dataset, size = Dataset(config), config.group_size
        start = self.dataset.start
        self.position = start if position is None else position.on(start.fingerprint, start.num_prompts)
        self.counts = Counts(config.batch_rollouts, config.batch_rollouts * config.sync_interval, size, 0)
        self.counts.step, self.counts.version = step, version
        self.counts.trained = self.counts.offered = step * config.batch_rollouts
        self.counts.gone_at_update = version * config.sync_interval * config.batch_rollouts
        self.tasks: dict[int, Task] = {}
        self.waiting: deque[Group] = deque()
        self.running: dict[int, Group] = {}
        self.queue: list[Group] = []
        self.training: list[Group] = []
        self._in_flight: dict[int, Group] = {}
        self._attempts: dict[int, int] = {}
        self._num_groups = step * config.prompts_per_step
        for task, its_version, tokens in queued:
            self._restore(task, its_version, tokens)
        self._upcoming = self.position.upcoming(task.index for task in self.tasks.values())
        self._again: list[int] = []

    def _restore(self, task: Task, version: int, tokens: int) -> None:
        group = self._new_group(task, version, 0.0)
        group.tokens = tokens
        self.put(group, 0.0)

    def set_slots(self, num_groups: int) -> None:
        """How many groups the live engines hold together."""
        self.counts.slots = num_groups * self.config.group_size
        self._count_free()

    def _count_free(self) -> None:
        held = len(self.running) + len(self.waiting)
        self.counts.free_slots = self.counts.slots - held * self.config.group_size

    def _new_group(self, task: Task, version: int, now_s: float) -> Group:
        counts, size = self.counts, self.config.group_size
        group = Group(self._num_groups, version, counts.step, now_s, size)
        self._num_groups += 1
        self.tasks[group.index] = task
        self._in_flight[group.index] = group
        counts.offered += size
        counts.in_flight += size
        self._look_at_flight()
        return group

    def _look_at_flight(self) -> None:
        versions = (group.version for group in self._in_flight.values())
        self.counts.oldest_running_version = min(versions, default=math.inf)

    # From dispatch to queue.

    def dispatch(self, now_s: float) -> Group | None:
        """One more group, if the rule lets it start; it waits for a slot."""
        self.counts.now_s = now_s
        if not self.controller.may_start(self.counts):
            return None
        index = self._again.pop(0) if self._again else next(self._upcoming)
        task = self.dataset.task(index, self._attempts.get(index, 0), self.branch_id)
        group = self._new_group(task, self.counts.version, now_s)
        self.waiting.append(group)
        self._count_free()
        return group

    def start(self) -> Group:
        """The group that waits longest is in a slot."""
        group = self.waiting.popleft()
        self.running[group.index] = group
        return group

    def lost(self, group: Group) -> None:
        """Its process is gone: it waits again, before the others."""
        del self.running[group.index]
        self.waiting.appendleft(group)

    def decoded(self, group: Group, tokens: int) -> None:
        """Its slot is free; `tokens` is what its rollouts have together."""
        del self.running[group.index]
        group.tokens = tokens
        self._count_free()

    def put(self, group: Group, now_s: float) -> None:
        """It is verified and joins the queue."""
        counts, size = self.counts, self.config.group_size
        del self._in_flight[group.index]
        counts.in_flight -= size
        group.outcome, group.ready_s = "queued", now_s
        self.queue.append(group)
        self._look_at_flight()
        self._look_at_queue()

    def fail(self, group: Group) -> int:
        """The contract refused it: its prompt is handed out again. Returns how often that happened to the prompt."""
        del self._in_flight[group.index]
        self.counts.in_flight -= self.config.group_size
        group.outcome = "failed"
        self._look_at_flight()
        return self._discard(group)

    def _discard(self, group: Group) -> int:
        index = self.tasks.pop(group.index).index
        self.counts.discarded += self.config.group_size
        self._attempts[index] = self._attempts.get(index, 0) + 1
        self._again.append(index)
        return self._attempts[index]

    # The trainer's side.

    def take(self, now_s: float) -> tuple[list[Group], list[Group]]:
        """The batch to train on, empty if the rule or the queue has none, and what the rule has dropped."""
        counts, needed = self.counts, self.config.prompts_per_step
        counts.now_s = now_s
        if not counts.batch_ready or not self.controller.may_take(counts):
            return [], []
        batch, held, dropped, rest = [], [], [], deque(self.queue)
        while rest and len(batch) < needed:
            group = rest.popleft()
            {"take": batch, "hold": held, "drop": dropped}[self.controller.judge(group, counts)].append(group)
        taken = batch if len(batch) == needed else []
        gone = {group.index for group in [*dropped, *taken]}
        self.queue = [group for group in self.queue if group.index not in gone]
        self._look_at_queue()
        for group in dropped:
            group.outcome = "dropped"
            self._discard(group)
        for group in taken:
            group.outcome, group.taken_s = "training", now_s
            group.taken_step, group.taken_version = counts.step, counts.version
        self.training = taken
        counts.training = len(taken) * self.config.group_size
        return taken, dropped

    def trained(self) -> None:
        """The step is done."""
        counts = self.counts
        self.position = self.position.trained(self.tasks.pop(group.index).index for group in self.training)
        for group in self.training:
            group.outcome = "trained"
        counts.trained += counts.training
        counts.training, self.training = 0, []
        counts.step += 1

    def updated(self) -> None:
        """Every engine holds the next version."""
        self.counts.version += 1
        self.counts.gone_at_update = self.counts.gone

    def _look_at_queue(self) -> None:
        counts, queue = self.counts, self.queue
        counts.queued = len(queue) * self.config.group_size
        counts.queued_tokens = sum(group.tokens for group in queue)
        counts.batch_ready = len(queue) >= self.config.prompts_per_step
        counts.oldest_queued_s = queue[0].ready_s if queue else math.inf
        counts.oldest_queued_version = min((group.version for group in queue), default=math.inf)

    def open_tasks(self) -> Iterable[Task]:
        """Tasks that are handed out and not verified: a resume hands their prompts out again."""
        return [self.tasks[index] for index in self._in_flight]
