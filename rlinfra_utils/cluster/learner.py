"""One rank of the trainer group: `TrainerRank`; all ranks are asked the same, in the same order.

Models: updates through `policy.Trainer` (sharded by FSDP2 where there are several ranks), the log of what was
trained, publication (`publishing.py`), checkpoints that any number of ranks resumes (`sharded`). Leaves out what is
trained when. A plain class until Ray makes an actor of it.

Life: built -> restore -> publish -> update, publish, save, ... Invariant: rollouts are on disk before the line of the
batch that trained on them. Trap: a rank that dies leaves the others waiting in a collective call: end all of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlinfra_utils import policy, sync
from rlinfra_utils.checkpoint import latest, rollout_schema
from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.machine import Place
from rlinfra_utils.cluster.publishing import Sender, Sent
from rlinfra_utils.cluster.tasks import load_model
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.rollouts import Rollout
from rlinfra_utils.sharded import gather_full, init_group, load_sharded, save_sharded, shard_model
from rlinfra_utils.tracing import RunLog
from rlinfra_utils.tracing.measure import TRAINER_LOGPROBS


class Trained(NamedTuple):
    """What the loop must know of an update."""

    num_tokens: int
    mean_reward: float


class TrainerRank:
    """One rank, in one process; rank 0 writes what is written."""

    def __init__(
        self,
        name: str,
        rank: int,
        config: ClusterConfig,
        folder: str,
        branch_id: str,
        rendezvous: str,
        core: int | None,
    ) -> None:
        self.config, self.folder, self.branch_id = config, Path(folder), branch_id
        self.place = Place(name, core, config.device)
        self.ranks = init_group(rank, config.num_trainers, rendezvous, config.device, config.deadline_s)
        model, self.tokenizer = load_model(config.model)
        model = shard_model(model, self.ranks) if config.num_trainers > 1 else model.to(self.place.device)
        self.trainer = policy.Trainer(model, lr=config.lr, ranks=self.ranks)
        self.log = RunLog(folder, config.run_id, branch_id, config.to_json()) if rank == 0 else None
        self.sender: Sender | None = None

    def hello(self) -> int:
        """Process id, once the group has met."""
        return os.getpid()

    def ping(self) -> None:
        """Answer."""

    def restore(self, path: str | None) -> dict[str, Any]:
        """Take over the checkpoint at `path`, if there is one; returns its other components.

        Raises as `sharded.load_sharded` does.
        """
        if path is None:
            return {}
        components = load_sharded(path, self.trainer.model, self.trainer.optimizer, self.ranks)
        self.trainer.version = components["counters"]["global_step"]
        self.trainer.optimizer_step = components["counters"]["optimizer_step"]
        return components

    def update(self, batch_id: str, version: int, *groups: list[Rollout]) -> Trained:
        """Train on the groups, which engines of version `version` stand beside; the log has it when this returns.

        Raises as `policy.Trainer.update` does.
        """
        records = [record for group in groups for record in group]
        width = max(len(record.policy_mask) for record in records)
        with self.place.span("train", step=self.trainer.version, padded_tokens=len(records) * width):
            totals = [policy.total_reward(record.reward) for record in records]
            advantages = policy.group_advantages(totals, self.config.group_size).values
            stats = self.trainer.update(
                records, advantages, minibatches=self.config.minibatches, trace=self.place.trace
            )
        if self.log is not None:
            self._write(batch_id, version, records, stats, totals)
        return Trained(stats.num_tokens, float(np.mean(totals)))

    def _write(
        self, batch_id: str, version: int, records: list[Rollout], stats: policy.UpdateStats, totals: list[float]
    ) -> None:
        step, resulting = stats.optimizer_step, version + 1
        links = {"training_batch_id": batch_id, "optimizer_step": step, "resulting_policy_version": resulting}
        linked = []
        for record, row in zip(records, stats.logprobs, strict=True):
            values = [[0.0], *([value] for value in row[: len(record.policy_mask) - 1].tolist())]
            per_token = record.per_token | {TRAINER_LOGPROBS: values}
            linked.append(record.model_copy(update={**links, "per_token": per_token}))
        self.log.rollouts(linked, name=batch_id)
        names = ("gap", "loss", "mean_ratio", "clip_share", "grad_norm", "num_tokens")
        logged = {name: getattr(stats, name) for name in names} | {"reward": float(np.mean(totals))}
        ids = [record.sample_id for record in records]
        self.log.batch(batch_id, step, ids, version, resulting, logged)

    def publish(self, version: int, handles: list[Any], in_flight: str) -> Sent | str:
        """Have all workers hold and prove the weights as `version`; a text says which of them did not, and why."""
        with self.place.span("weight_sync", version=version):
            full = gather_full(self.trainer.model, self.ranks)
            if self.ranks.rank:
                return Sent(version, full.seconds, [])
            if self.sender is None:
                model, tokenizer = load_model(self.config.model)
                weights = self.folder / "weights" / self.branch_id
                weights.mkdir(parents=True, exist_ok=True)
                self.sender = Sender(self.config, weights, HFEngine(model, tokenizer), self.place.trace)
            try:
                return self.sender.send(full.tensors, version, handles, in_flight)
            except sync.SyncError as error:
                return str(error)

    def save(self, state: dict[str, Any], *queued: list[Rollout]) -> float:
        """Save all that a resume needs: `state` from the loop, the queue's records beside it. Returns seconds.

        Raises as `sharded.save_sharded` does.
        """
        start_s = time.perf_counter()
        with self.place.span("checkpoint", step=self.trainer.version):
            components = self._components(state, [record for group in queued for record in group])
            trainer, folder = self.trainer, self.folder / "checkpoints"
            save_sharded(
                folder, trainer.version, trainer.model, trainer.optimizer, components, self.ranks, self.config.keep
            )
        return time.perf_counter() - start_s

    def _components(self, state: dict[str, Any], queued: list[Rollout]) -> dict[str, Any]:
        step = self.trainer.version
        return {
            "scheduler": {"kind": "constant", "lr": self.config.lr},
            "counters": {
                "global_step": step,
                "policy_version": state["version"],
                "optimizer_step": self.trainer.optimizer_step,
            },
            "rng": {"kind": "seeds by prompt and attempt", "seed": self.config.seed},
            "data_position": state["data_position"],
            "curriculum": {"kind": "none"},
            "normalizers": {"kind": "none"},
            "versions": policy.versions_of(self.tokenizer, self.config.engine),
            "rollout_schema": rollout_schema(),
            "decoding": self.config.decoding.model_dump(),
            "queue": {"rollouts": [r.model_dump(mode="json") for r in queued], "lost": [], "tasks": state["queued"]},
            "open_episodes": {"episodes": state["open"], "lost": []},
        }

    def newest(self) -> str | None:
        """Path of the newest whole checkpoint of the run."""
        path = latest(self.folder / "checkpoints")
        return None if path is None else str(path)

    def farewell(self, folder: str) -> int:
        """See `Place.farewell`."""
        return self.place.farewell(folder)

    def close(self) -> None:
        """Leave the group and let the weights' folder go."""
        if self.sender is not None:
            self.sender.close()
        self.ranks.close()
