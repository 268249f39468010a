"""The trainer's side of the loop: the queue, the batch it takes, the step, the weights' way to the engines.

Models a trainer whose life is free -> training -> (waits for engines that finish) -> syncing -> checkpointing ->
free. Leaves out more than one trainer. The trap: a batch counts as taken when its step begins, not when it ends.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from rlinfra_utils.simulator.protocol import Group
from rlinfra_utils.simulator.run import Step

if TYPE_CHECKING:
    from rlinfra_utils.simulator.loop import Loop


class Trainer:
    """Takes, trains, publishes. `free` says that it may take; `waits_for_engines` that an update waits for them."""

    def __init__(self, loop: Loop):
        self.loop, self.config, self.rule, self.counts = loop, loop.config, loop.rule, loop.counts
        self.queue: deque[Group] = deque()
        self.stalest: list[tuple[int, int, Group]] = []  # heap of what is queued, and of some that was
        self.free, self.waits_for_engines = True, False
        self.steps: list[Step] = []
        self.marks: list[list[float]] = []  # the engines' token clocks at each update
        self.reread_tokens, self.discarded_at_take, self.lost_at_take = 0.0, 0, 0

    def put(self, group: Group) -> None:
        """A closed group joins the queue."""
        counts = self.counts
        group.outcome = "queued"
        self.queue.append(group)
        counts.queued += self.config.group_size
        counts.queued_tokens += group.tokens
        self.is_batch_ready()
        counts.oldest_queued_s = self.queue[0].ready_s
        heappush(self.stalest, (group.version, group.index, group))
        counts.oldest_queued_version = self.stalest[0][0]

    def take(self) -> None:
        """The trainer takes a batch, if the rule lets it and the queue has one; the rule's drops are discarded."""
        config, counts = self.config, self.counts
        by_rollouts = config.batch_tokens is None
        needed = config.batch_rollouts if by_rollouts else config.batch_tokens
        if not counts.batch_ready or not self.rule.may_take(counts):
            return
        batch, held, dropped, size, queue = [], [], [], 0, self.queue
        while queue and size < needed:
            group = queue.popleft()
            verdict = self.rule.judge(group, counts)
            if verdict == "take":
                batch.append(group)
                size += config.group_size if by_rollouts else group.tokens
            elif verdict in ("hold", "drop"):
                (held if verdict == "hold" else dropped).append(group)
            else:
                raise ValueError(f"controller={type(self.rule).__name__}: judge gave {verdict!r}; take, hold or drop")
        self.discard(dropped)
        if size >= needed:
            self.unqueue(batch)
            self.train(batch)
        else:
            held = sorted(batch + held, key=lambda group: (group.ready_s, group.index))
        queue.extendleft(reversed(held))
        counts.oldest_queued_s = queue[0].ready_s if queue else math.inf
        self.loop.starve(counts.discarded - self.discarded_at_take)

    def unqueue(self, groups: list[Group]) -> None:
        """These have left the queue."""
        counts, stalest = self.counts, self.stalest
        counts.queued -= len(groups) * self.config.group_size
        counts.queued_tokens -= sum(group.tokens for group in groups)
        self.is_batch_ready()
        for group in groups:
            group.taken_s, group.taken_version, group.taken_step = counts.now_s, counts.version, counts.step
            group.outcome = "taken"
        while stalest and stalest[0][2].outcome != "queued":
            heappop(stalest)
        counts.oldest_queued_version = stalest[0][0] if stalest else math.inf

    def is_batch_ready(self) -> None:
        """Count whether the queue has rollouts, or tokens, enough."""
        counts, config = self.counts, self.config
        if config.batch_tokens is None:
            counts.batch_ready = counts.queued >= config.batch_rollouts
        else:
            counts.batch_ready = counts.queued_tokens >= config.batch_tokens

    def discard(self, groups: list[Group]) -> None:
        """Groups that the rule has dropped."""
        self.unqueue(groups)
        for group in groups:
            group.outcome = "dropped"
        self.counts.discarded += len(groups) * self.config.group_size

    def train(self, batch: list[Group]) -> None:
        """One optimizer step on these groups."""
        counts, config = self.counts, self.config
        for group in batch:
            group.outcome = "training"
        tokens = sum(group.tokens for group in batch)
        step = Step(counts.step, counts.version, counts.now_s, len(batch) * config.group_size, tokens)
        self.steps.append(step)
        self.free = False
        self.discarded_at_take, self.lost_at_take = counts.discarded, len(self.loop.lost)
        counts.training = step.rollouts
        prompts = step.rollouts * config.prompt_tokens
        self.loop.after(
            next(self.loop.workload.train_s) + config.train_s_per_token * (tokens + prompts), self.trained, batch
        )

    def trained(self, batch: list[Group]) -> None:
        """The step is done; an update, a checkpoint or the run's end may follow."""
        counts, config, step = self.counts, self.config, self.steps[-1]
        for group in batch:
            group.outcome = "trained"
        step.trained_s = counts.now_s
        counts.trained += counts.training
        counts.training = 0
        counts.step += 1
        if counts.step == config.num_steps:
            self.loop.status = "done"
        elif counts.step % config.sync_interval:
            self.checkpoint()
        elif self.rule.at_update == "finish":
            self.waits_for_engines = True
        else:
            self.update()

    def update(self) -> None:
        """Engines stop and load the weights; the trainer waits."""
        self.waits_for_engines = False
        self.steps[-1].sync_start_s, self.steps[-1].paused_slots = self.counts.now_s, self.loop.engines.num_running()
        self.loop.engines.pause(self.counts.now_s)
        self.loop.after(next(self.loop.workload.sync_s), self.updated)

    def updated(self, _) -> None:
        """The version is out; engines go on."""
        counts, engines = self.counts, self.loop.engines
        self.steps[-1].sync_end_s = counts.now_s
        self.marks.append(engines.clocks(counts.now_s))
        self.reread_tokens += engines.resume(counts.now_s, self.rule.at_update == "abort")
        counts.version += 1
        counts.gone_at_update = counts.gone
        self.checkpoint()

    def checkpoint(self) -> None:
        """The trainer writes one if it is time, and is free after it."""
        every, cost_s = self.config.checkpoint_interval, self.config.checkpoint_s
        if every and self.counts.step % every == 0 and cost_s:
            self.steps[-1].checkpoint_s = cost_s
            self.loop.after(cost_s, self.be_free)
        else:
            self.be_free()

    def be_free(self, _=None) -> None:
        """It may take the next batch."""
        self.free = True
