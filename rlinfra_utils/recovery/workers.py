"""The three kinds of process of a run, each as turns that may be cut off anywhere: `COLLECTOR`, `VERIFIER`, `TRAINER`.

Models: a collector samples groups, the verifier rewards whole batches, the trainer updates, publishes and saves. Each
looks at the folder for its next piece of work and keeps nothing else that matters. Leaves out who starts and restarts
them (`supervisor.py`). Use: `while not trainer.finished: collector.turn() or verifier.turn() or trainer.turn()`.

Life of the trainer: lock on the checkpoints -> newest whole checkpoint, or one of step 0 -> "restored" in the log ->
turns. A turn: train -> rollouts -> line in batches.jsonl -> weights -> checkpoint. Invariant: each of these may be
repeated, and then writes what stands there. Rule: lines of batches after the restored step stay in the log and count
as undone (`tracing` marks them rolled_back); they are trained again, to the same bytes.
"""

from __future__ import annotations

import resource
import time
import warnings
from pathlib import Path

from rlinfra_utils import checkpoint, policy
from rlinfra_utils.checkpoint.reading import step_folders
from rlinfra_utils.doors import choice
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.recovery.config import RecoveryError, RunConfig
from rlinfra_utils.recovery.folder import QUEUE, SAMPLES, WEIGHTS, Handover, read_group
from rlinfra_utils.recovery.learner import Learner
from rlinfra_utils.recovery.orders import Order, sample
from rlinfra_utils.rollouts import Rollout, RolloutFileError, read, write
from rlinfra_utils.tracing import RunLog

CHECKPOINTS = "checkpoints"
#: What becomes of batches that wait at a restart: they are trained, or made again from the same weights.
QUEUE_POLICIES = ("restore", "drop")
HEARTBEAT_S = 1.0


class Worker:
    """What all workers share: the folder, its log, and a sign of life once a second."""

    def __init__(self, name: str, folder: str | Path, config: RunConfig) -> None:
        self.name, self.config = name, config
        self.log = RunLog(folder, config.run_id, config.branch_id, config.to_json())
        self.handover = Handover(folder, config)
        self._beat_s = 0.0
        self.log.event("worker_started", name)

    #: Whether the worker will find no more work; only the trainer knows.
    finished = False

    def turn(self) -> bool:
        """Do the next piece of work; False where there is none yet."""
        if time.monotonic() - self._beat_s > HEARTBEAT_S:
            self.log.event("heartbeat", self.name)
            self._beat_s = time.monotonic()
        return self._work()

    def _work(self) -> bool:
        raise NotImplementedError


class Collector(Worker):
    """Samples the groups whose place is its own, with the weights that their order names."""

    def __init__(self, name: str, folder: str | Path, config: RunConfig, index: int) -> None:
        super().__init__(name, folder, config)
        self._place = f"c{index}"
        self.handover.clear_debris(f"{SAMPLES}/{self._place}")
        model, self._tokenizer = policy.load_warm_start()
        self._engine = HFEngine(model, self._tokenizer)
        self._loaded = False

    def _work(self) -> bool:
        for order in self.handover.open_orders():
            for slot, task in enumerate(order.tasks):
                path = self.handover.samples(order, slot)
                if path.parent.name == self._place and not path.exists():
                    self._load(order.version)
                    write(sample(self._engine, self._tokenizer, self.config, order, task), path)
                    return True
        return False

    def _load(self, version: int) -> None:
        if self._loaded and self._engine.version == version:
            return
        start_s = time.perf_counter()
        self._engine.load(self.handover.weights(version), version)
        self._loaded = True
        self.log.event("weight_sync", self.name, version=version, seconds=time.perf_counter() - start_s)


class Verifier(Worker):
    """Rewards the groups of a step once all are there, and writes them as one batch."""

    def __init__(self, name: str, folder: str | Path, config: RunConfig) -> None:
        super().__init__(name, folder, config)
        self.handover.clear_debris(QUEUE)
        self._tokenizer = policy.make_tokenizer()

    def _work(self) -> bool:
        for order in self.handover.open_orders():
            paths = [self.handover.samples(order, slot) for slot in range(len(order.tasks))]
            if all(path.exists() for path in paths):
                records = self._rewarded(order, paths)
                if records is not None:
                    write(records, self.handover.batch(order.step))
                return True
        return False

    def _rewarded(self, order: Order, paths: list[Path]) -> list[Rollout] | None:
        """The batch, or None where a group was dropped meanwhile, or damaged: quarantined, to be sampled again."""
        batch = []
        for path, task in zip(paths, order.tasks):
            try:
                group = read_group(path, task, self.config.group_size)
                batch += policy.reward_records(group, task.answer, self._tokenizer)
            except (RolloutFileError, ValueError) as error:
                if not path.exists():
                    return None
                self.handover.quarantine(path)
                self.log.event("retry", self.name, group_id=task.group_id, reason=str(error))
                return None
        return batch


class Trainer(Worker):
    """Trains the batches in their order, publishes each version and saves checkpoints.

    Raises ValueError for another queue policy; checkpoint.CheckpointError where another trainer has the folder, or no
    checkpoint can be loaded; RecoveryError where rollouts that the checkpoint waits for can neither be found nor made
    again.
    """

    def __init__(self, name: str, folder: str | Path, config: RunConfig, queue_policy: str = "restore") -> None:
        choice("queue_policy", queue_policy, QUEUE_POLICIES)
        self._checkpoints = Path(folder) / CHECKPOINTS
        self._writer = checkpoint.Writer(self._checkpoints, keep=config.keep)
        super().__init__(name, folder, config)
        self.handover.clear_debris(WEIGHTS)
        self.handover.clear_debris("rollouts")
        self.learner = Learner(config)
        self._refused: set[int] = set()
        self._resume(queue_policy)

    @property
    def finished(self) -> bool:
        """Whether the last update is done and saved."""
        return self.learner.version == self.config.num_updates

    def close(self) -> None:
        """Let the folder go."""
        self._writer.close()

    def _resume(self, queue_policy: str) -> None:
        start_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as passed_over:
            warnings.simplefilter("always", checkpoint.CheckpointWarning)
            path = checkpoint.latest(self._checkpoints)
        for warning in passed_over:
            self.log.event("retry", self.name, reason=str(warning.message))
        if path is None:
            self._save()
        else:
            self.learner.restore(checkpoint.load(path))
            fields = {"queue_policy": queue_policy, **self._restore_queue(queue_policy)}
            seconds = time.perf_counter() - start_s
            self.log.event("restored", self.name, step=self.learner.trainer.optimizer_step, seconds=seconds, **fields)
        self._publish()

    def _restore_queue(self, queue_policy: str) -> dict[str, int]:
        """Have each batch that the checkpoint waits for, or the means to make it again; rollouts kept and dropped."""
        steps, dropped = range(self.learner.version, self.config.num_updates), 0
        queued, versions = self.handover.queued(), self.handover.versions()
        if queue_policy == "drop":
            dropped = self.handover.drop(steps)
            queued = [step for step in queued if step not in steps]  # the verifier may be making one anew already
        for order in self.learner.orders.values():
            if order.step not in queued and order.version not in versions:
                self.log.event("rollout_lost", self.name, step=order.step, num_rollouts=len(order.tasks))
                raise RecoveryError(
                    f"{self.handover.weights(order.version)}: is gone, and so is the batch of step {order.step}: its "
                    "rollouts cannot be sampled again; resume as a branch of its own"
                )
        kept = sum(step in steps for step in queued) * self.config.prompts_per_step * self.config.group_size
        return {"kept_rollouts": kept, "dropped_rollouts": dropped}

    def _work(self) -> bool:
        if self.finished or self.learner.version not in self.handover.queued():
            return False
        records = self._accepted(self.learner.orders[self.learner.version])
        if records is None:
            return True
        before = self.learner.version
        stats = self.learner.train(records)
        batch_id = f"{self.config.run_id}-b{before:04d}"
        step, version = self.learner.trainer.optimizer_step, self.learner.version
        links = {"training_batch_id": batch_id, "optimizer_step": step, "resulting_policy_version": version}
        self.log.rollouts([record.model_copy(update=links) for record in records], name=batch_id)
        ids = [record.sample_id for record in records]
        self.log.batch(batch_id, step, ids, before, version, stats)
        self._publish()
        self._log_queue()
        if version % self.config.save_every == 0 or self.finished:
            self._save()
        return True

    def _accepted(self, order: Order) -> list[Rollout] | None:
        """The batch, or None where it was refused, whole, and the verifier is to make it again."""
        try:
            return self.handover.accept(order, self.learner.version)
        except (RolloutFileError, ValueError) as error:
            place = self.handover.quarantine(self.handover.batch(order.step))
            self.log.event("retry", self.name, step=order.step, reason=str(error))
            if order.step in self._refused:
                raise RecoveryError(f"{place}: refused twice, though made again between: {error}") from error
            self._refused.add(order.step)
            return None

    def _publish(self) -> None:
        start_s, version = time.perf_counter(), self.learner.version
        digest = self.handover.publish(self.learner.trainer.model, version, self.learner.order())
        seconds = time.perf_counter() - start_s
        self.log.event("published", self.name, version=version, weights_sha256=digest, seconds=seconds)

    def _log_queue(self) -> None:
        waiting = [step for step in self.handover.queued() if step >= self.learner.version]
        tables = [read(self.handover.batch(step)) for step in waiting]
        num_tokens = sum(sum(table["response_length"].to_pylist()) for table in tables)
        self.log.event(
            "queue", self.name, depth_rollouts=sum(table.num_rows for table in tables), depth_tokens=num_tokens
        )

    def _save(self) -> None:
        start_s = time.perf_counter()
        self._writer.save(self.learner.version, self.learner.components())
        seconds = time.perf_counter() - start_s
        step = self.learner.trainer.optimizer_step
        self.log.event("checkpoint_saved", self.name, step=step, seconds=seconds)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        self.log.event("memory", self.name, peak_bytes=peak_bytes)
        self.handover.retire(min(kept for kept, _ in step_folders(self._checkpoints)))


def make_worker(name: str, folder: str | Path, config: RunConfig, queue_policy: str = "restore") -> Worker:
    """The worker of a name: "collector0", "collector1", ..., "verifier" or "trainer"; raises as that worker does."""
    if name == "trainer":
        return Trainer(name, folder, config, queue_policy)
    if name == "verifier":
        return Verifier(name, folder, config)
    return Collector(name, folder, config, int(name.removeprefix("collector")))


def worker_names(config: RunConfig) -> list[str]:
    """Names of all workers of a run."""
    return [*(f"collector{i}" for i in range(config.num_collectors)), "verifier", "trainer"]


def run_in_turns(folder: str | Path, config: RunConfig) -> None:
    """The whole run in this process, worker by worker: what the run of many processes must equal.

    To the last bit with one torch thread, as the processes have: `torch.set_num_threads(1)`. Raises RecoveryError where
    no worker finds work, and as they do.
    """
    workers = [make_worker(name, folder, config) for name in worker_names(config)]
    trainer = workers[-1]
    try:
        while not trainer.finished:
            if not any(worker.turn() for worker in workers):
                raise RecoveryError(f"{folder}: no worker finds work at step {trainer.learner.version}")
    finally:
        trainer.close()
