"""The trainer's side of the loop: what it takes, the step, the weights' way to the workers, checkpoints: `TrainerSide`.

Models the simulator's trainer over calls to a trainer group. Leaves out the groups' way to the queue (`loop.py`) and
the ranks' work (`learner.py`). Used by `Loop`.

`state`: starting -> to_publish -> publishing -> free -> training -> (waits for running groups) -> to_publish ->
publishing -> (saving) -> free; at the end, ending. Invariant: it is "publishing" until every worker has proven the
version. Trap: a batch counts as taken when its step begins; a death before the next checkpoint undoes it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rlinfra_utils.cluster.config import ClusterError
from rlinfra_utils.cluster.crew import Call
from rlinfra_utils.simulator.loop import STARVED_BATCHES

if TYPE_CHECKING:
    from rlinfra_utils.cluster.loop import Loop

#: What `in_flight` of a vLLM server is called for the simulator's `at_update`.
_IN_FLIGHT = {"finish": "wait", "abort": "abort", "keep": "keep"}


class TrainerSide:
    """Takes, trains, publishes, saves; one step at a time."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.config, self.crew = loop, loop.config, loop.crew
        self.state = "starting"
        self.published_step = 0  # the step whose weights the workers hold
        self.saved_step = -1  # the step of the newest checkpoint
        self.num_failed_syncs = self.discarded_at_take = 0
        self._awake: set[str] = set()
        self.handlers = {
            "slept": self.slept,
            "trained": self.trained,
            "published": self.published,
            "saved": self.saved,
            "rank": lambda call, value: None,
        }

    @property
    def engines_serve(self) -> bool:
        """Whether groups may go to workers."""
        return self.state not in ("starting", "to_publish", "publishing", "ending")

    def begin_at(self, step: int, saved: bool) -> None:
        """Weights of `step` are in the trainers, and are to be published first of all."""
        self.published_step, self.saved_step = step, step if saved else -1
        self.num_failed_syncs, self.discarded_at_take, self.state = 0, 0, "to_publish"

    def settle(self, stopping: str) -> None:
        """What has become possible."""
        book = self.loop.book
        if self.state == "free" and stopping:
            self.save(stopping)
        elif self.state == "free":
            self.take()
        if self.state == "waits" and not book.waiting and not book.running:
            self.state = "to_publish"
        if self.state == "to_publish" and self.crew.everyone_ready():
            self.publish()

    def _ask(self, kind: str, method: str, *arguments: Any) -> None:
        """Ask all ranks; rank 0's answer counts."""
        for rank, member in enumerate(self.crew.trainers):
            kind_of_rank = kind if rank == 0 else "rank"
            self.crew.call(kind_of_rank, member.name, method, *arguments, what=(self.loop.epoch, None))

    def take(self) -> None:
        """Begin a step, if the rule lets it and the queue has a batch."""
        loop = self.loop
        group_ids = {index: task.group_id for index, task in loop.book.tasks.items()}
        batch, dropped = loop.book.take(time.perf_counter())
        for group in dropped:
            del loop.records[group.index]
            loop.log.event("dropped", group_id=group_ids[group.index], version=group.version)
        if batch or dropped:
            loop.log_queue()
        if not batch:
            self._starve()
            return
        self.discarded_at_take = loop.book.counts.discarded
        self.state = "training"
        if self.config.placement == "disaggregated":
            self.train()
            return
        self._awake = {member.name for member in self.crew.workers}
        for name in sorted(self._awake):
            self.crew.call("slept", name, "sleep", what=(loop.epoch, None))

    def _starve(self) -> None:
        """Raise ClusterError where the rule drops whatever comes, as the simulator ends such a loop."""
        counts = self.loop.book.counts
        lost = counts.discarded - self.discarded_at_take
        if lost > STARVED_BATCHES * counts.batch:
            raise ClusterError(f"starved: {lost} rollouts dropped or refused since the last batch, at {counts!r}")

    def slept(self, call: Call, _: None) -> None:
        """A worker has given its memory back; with the last one, the step begins."""
        self._awake.discard(call.member.name)
        if not self._awake:
            self.train()

    def train(self) -> None:
        """One optimizer step on the batch that was taken."""
        loop, book = self.loop, self.loop.book
        batch_id = f"{self.config.run_id}-{loop.branch_id}-b{book.counts.step:05d}"
        records = [loop.records[group.index] for group in book.training]
        self._ask("trained", "update", batch_id, book.counts.version, *records)

    def trained(self, call: Call, trained: Any) -> None:
        """The step is done and logged."""
        loop, book, counts = self.loop, self.loop.book, self.loop.book.counts
        loop.span("train_call", call, tokens=sum(group.tokens for group in book.training), step=counts.step)
        lags = [counts.version - group.version for group in book.training]
        loop.progress.trained(trained, sum(lags) / len(lags), time.perf_counter())
        for group in book.training:
            del loop.records[group.index]
        book.trained()
        if counts.step >= self.config.num_updates:
            self.save("done")
        elif counts.step % self.config.sync_interval and self.config.placement == "disaggregated":
            self._after_sync()
        else:
            self.state = "waits" if self.config.at_update == "finish" else "to_publish"

    def _version_of_weights(self) -> int:
        """The version that these weights are, or will be, published as."""
        counts = self.loop.book.counts
        return counts.version + (counts.step > self.published_step)

    def publish(self) -> None:
        """Send the weights to all workers, who stand still meanwhile."""
        handles = [member.handle for member in self.crew.workers]
        self.state = "publishing"
        self._ask("published", "publish", self._version_of_weights(), handles, _IN_FLIGHT[self.config.at_update])

    def published(self, call: Call, sent: Any) -> None:
        """All workers have proven the version, or, where `sent` is a text, not all."""
        if isinstance(sent, str):
            self._sync_failed(sent)
            return
        loop, counts = self.loop, self.loop.book.counts
        loop.span("sync_call", call, step=counts.step)
        loop.log.event("weight_sync", version=sent.version, seconds=sent.seconds, zero_lag_gap_nats=sent.gaps_nats)
        is_new = sent.version > counts.version
        self.num_failed_syncs, self.published_step = 0, counts.step
        if is_new:
            loop.book.updated()
            self._after_sync()
        else:
            self.state = "free"  # the first publication of a branch

    def _sync_failed(self, reason: str) -> None:
        """A worker did not follow: look who is alive, have the dead started again, and publish once more."""
        self.num_failed_syncs += 1
        self.loop.log.event("retry", "trainer0", reason=reason)
        if self.num_failed_syncs > self.config.max_restarts:
            raise ClusterError(f"weights were not taken {self.num_failed_syncs} times: {reason}")
        self.state = "to_publish"
        for member in self.crew.workers:
            if member.ready:
                member.ready = False
                self.crew.call("alive", member.name, "hello")

    def _after_sync(self) -> None:
        if self.loop.book.counts.step % self.config.save_every == 0:
            self.save()
        else:
            self.state = "free"

    def save(self, ending: str = "") -> None:
        """Save a checkpoint with the queue; with `ending`, the run's last one."""
        loop, book = self.loop, self.loop.book
        self.state = "ending" if ending else "saving"
        loop.stop(ending)
        if ending and book.counts.step == self.saved_step:  # what has come since is asked again
            loop.status = ending
            return
        queued = [
            {"task": book.tasks[group.index].to_json(), "version": group.version, "tokens": group.tokens}
            for group in book.queue
        ]
        episodes = [{"episode_id": task.group_id, "environment_state": task.to_json()} for task in book.open_tasks()]
        state = {"version": self._version_of_weights(), "data_position": book.position.to_component()}
        state |= {"queued": queued, "open": episodes}
        self._ask("saved", "save", state, *(loop.records[group.index] for group in book.queue))

    def saved(self, call: Call, seconds: float) -> None:
        """The checkpoint is whole."""
        loop = self.loop
        self.saved_step = loop.book.counts.step
        loop.span("checkpoint_call", call, step=self.saved_step)
        loop.log.event("checkpoint_saved", "trainer0", step=self.saved_step * self.config.minibatches, seconds=seconds)
        if self.state == "ending":
            loop.status = loop.stopping
        else:
            self.state = "free"
