"""What a controller is asked, and all that it sees: counts, versions and clocks.

Models the three decisions of an asynchronous loop. Leaves out how they are carried out, so that the same controller
object holds the simulation and a real run. A rule of one's own is a subclass that answers what it cares about:

    class Half(Controller):
        def may_start(self, counts):
            return counts.free_slots > 0 and counts.queued < counts.batch / 2

A rollout's life: offered (dispatched, its group's prompt handed out) -> in flight (waiting for a slot, decoding,
verified, waiting for its group) -> queued -> training -> trained; or discarded. Invariant, at every event:
offered = in_flight + queued + training + trained + discarded. The trap: a limit stops what has not been dispatched;
what has been goes on, so that a queue may pass its limit by all that was in flight.
"""

from __future__ import annotations

import math
from typing import Literal

#: What engines do with requests that run when weights come: "finish" them first, on the old weights, while trainer
#: and free slots wait; "abort" them and read prompt and partial answer again under the new ones; "keep" them and
#: their old KV cache and go on.
AT_UPDATE = ("finish", "abort", "keep")
Verdict = Literal["take", "hold", "drop"]


class Counts:
    """The loop at one moment, counted in rollouts. `batch` is the rollouts of a step, `per_version` of a version.

    `batch_ready` says that the queue holds a whole batch. `version` is what the engines hold, `step` the optimizer
    steps done. `gone_at_update` is taken and discarded as of the last version. Times and versions of the oldest are
    inf where there is none.
    """

    __slots__ = (
        "batch",
        "batch_ready",
        "discarded",
        "free_slots",
        "gone_at_update",
        "group_size",
        "in_flight",
        "now_s",
        "offered",
        "oldest_queued_s",
        "oldest_queued_version",
        "oldest_running_version",
        "per_version",
        "queued",
        "queued_tokens",
        "slots",
        "step",
        "trained",
        "training",
        "version",
    )

    def __init__(self, batch: int, per_version: int, group_size: int, slots: int):
        self.batch, self.per_version, self.group_size, self.slots = batch, per_version, group_size, slots
        self.free_slots = slots  # less the dispatched rollouts that wait for one; negative if there are more of these
        self.batch_ready, self.now_s = False, 0.0
        self.version = self.step = 0
        self.offered = self.in_flight = self.queued = self.training = self.trained = self.discarded = 0
        self.queued_tokens = 0
        self.gone_at_update = 0
        self.oldest_queued_s = self.oldest_queued_version = self.oldest_running_version = math.inf

    @property
    def gone(self) -> int:
        """Taken by the trainer, or discarded."""
        return self.offered - self.in_flight - self.queued

    def __repr__(self):
        names = ("version", "step", "offered", "in_flight", "queued", "training", "trained", "discarded")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class Group:
    """The rollouts of one prompt; it closes with its slowest. `version` and `step` are those of its dispatch.

    `ready_s` is when the last verdict so far is there; once the group is queued, when it came.
    """

    __slots__ = (
        "dispatched_s",
        "failed",
        "index",
        "outcome",
        "ready_s",
        "step",
        "taken_s",
        "taken_step",
        "taken_version",
        "tokens",
        "unfinished",
        "version",
    )

    def __init__(self, index: int, version: int, step: int, now_s: float, size: int):
        self.index, self.version, self.step, self.dispatched_s = index, version, step, now_s
        self.tokens, self.unfinished, self.failed = 0, size, False
        self.outcome, self.ready_s, self.taken_s = "in_flight", now_s, math.nan
        self.taken_step = self.taken_version = -1


class Controller:
    """The rule of a loop; this one starts work whenever a slot is free and takes whatever comes first."""

    at_update: str = "keep"
    counts_batches = False  # True: the rule speaks of batches, so a batch has to be a number of rollouts

    def may_start(self, counts: Counts) -> bool:
        """May one more group be dispatched? Asked again until no; free_slots > 0 lets none wait for a slot."""
        return counts.free_slots > 0

    def may_take(self, counts: Counts) -> bool:
        """May the trainer take a batch at all?"""
        return True

    def judge(self, group: Group, counts: Counts) -> Verdict:
        """A queued group when the trainer wants a batch: "take" it, "hold" it for a later step, "drop" it."""
        return "take"
