"""The trainer's whole state, one update of it, and the state as components of a checkpoint: `Learner`.

Models: weights, moments, learning-rate schedule, order of data, curriculum, reward normaliser, random generator: each
moves a number of its own when a resume forgets it. Leaves out processes and files (`workers.py`, `folder.py`).
Use: `stats = learner.train(records)`; `learner.restore(checkpoint.load(path))`.

Life: made fresh or restored -> order, train, order, train. Invariant: the orders of steps `version` and on are all
that has been handed out and not trained. Trap: an order that is not in the checkpoint is made again, from the
curriculum and the version of today.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinfra_utils import policy
from rlinfra_utils.checkpoint import DataPosition, dataset_fingerprint, rollout_schema
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.recovery.orders import Order, Task
from rlinfra_utils.recovery.parts import Curriculum, Normalizer, learning_rate
from rlinfra_utils.rollouts import Rollout


class Learner:
    """Everything that an update reads and changes, from the warm start on or from a checkpoint's components."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        model, self.tokenizer = policy.load_warm_start()
        self.trainer = policy.Trainer(model, lr=config.lr)
        self.rows = policy.prompts(config.num_prompts, config.seed)
        fingerprint = dataset_fingerprint([row.text for row in self.rows])
        self.position = DataPosition(config.num_prompts, fingerprint, config.seed)
        self.normalizer, self.curriculum = Normalizer(), Curriculum()
        self.rng = np.random.default_rng(config.seed)
        self.scheduled_updates = 0
        #: Ordered and not trained, by step.
        self.orders: dict[int, Order] = {}

    @property
    def version(self) -> int:
        """Version of the weights, which is the number of updates and the next step to train."""
        return self.trainer.version

    def order(self) -> list[Order]:
        """Hand out steps up to `version + lag`; returns the orders that this version of the weights is to answer."""
        last = min(self.version + self.config.lag, self.config.num_updates - 1)
        for step in range(self.version, last + 1):
            if step in self.orders:
                continue
            held = [task.index for order in self.orders.values() for task in order.tasks]
            numbers = self.position.upcoming(held)
            tasks = [self._task(step, slot, next(numbers)) for slot in range(self.config.prompts_per_step)]
            self.orders[step] = Order(step, self.version, tuple(tasks))
        return [order for order in self.orders.values() if order.version == self.version]

    def _task(self, step: int, slot: int, index: int) -> Task:
        epoch, place = divmod(index, self.config.num_prompts)
        row = int(self.position.row_order(epoch)[place])
        prompt = self.curriculum.prompt(self.rows[row], row / self.config.num_prompts)
        group_id = f"{self.config.run_id}-s{step:04d}-p{slot:02d}"
        return Task(index, group_id, prompt.prompt_id, prompt.text, prompt.answer)

    def redate(self, order: Order) -> Order:
        """The same prompts for the weights of today, where those that the order names are gone."""
        self.orders[order.step] = replace(order, version=self.version)
        return self.orders[order.step]

    def train(self, records: Sequence[Rollout]) -> dict[str, float]:
        """One update on the batch of step `version`; returns its statistics.

        Raises ValueError, with nothing changed, unless the records are those of the step's order; then as
        `policy.Trainer.update`.
        """
        order, size = self.orders[self.version], self.config.group_size
        if [record.sample_id for record in records] != order.sample_ids(size):
            raise ValueError(f"records: are not those that step {order.step} ordered; refuse the batch")
        totals = np.array([policy.total_reward(record.reward) for record in records])
        lr = learning_rate(self.config, self.scheduled_updates)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = lr
        self.normalizer.add(totals)
        advantages = policy.group_advantages(totals, size, divide_by_std=False).values / self.normalizer.std
        shuffled = self.rng.permutation(len(records))  # which rollouts share a minibatch
        update = self.trainer.update(
            [records[i] for i in shuffled], advantages[shuffled], minibatches=self.config.minibatches
        )
        correctness = float(np.mean([record.reward["correctness"] for record in records]))
        self.curriculum.add(correctness)
        self.position = self.position.trained(task.index for task in order.tasks)
        self.scheduled_updates += 1
        del self.orders[order.step]
        return {
            "lr": lr,
            "mean_lag": float(np.mean([order.step - record.policy_version for record in records])),
            "advantage_scale": 1 / self.normalizer.std,
            "reward": float(totals.mean()),
            "correctness": correctness,
            "num_tokens": update.num_tokens,
            "gap": update.gap,
            "normalized_ess": update.normalized_ess,
            "clip_share": update.clip_share,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "mean_ratio": update.mean_ratio,
            "share_hard": self.curriculum.share_hard,
        }

    def components(self, waiting: Sequence[Rollout] = ()) -> dict[str, Any]:
        """The state by names of `checkpoint.COMPONENTS`; `waiting` are rollouts that wait in memory to be trained.

        Rollouts that wait in files of their own stay there: the open episodes name them, sampled or not.
        """
        episodes = [
            {"episode_id": f"step-{order.step}", "environment_state": order.to_json()} for order in self.orders.values()
        ]
        return {
            "policy": {name: _array(value) for name, value in self.trainer.model.named_parameters()},
            "optimizer": {"kind": "AdamW", "moments": self._moments()},
            "scheduler": {"kind": "linear warm-up", "updates": self.scheduled_updates},
            "counters": {
                "global_step": self.version,
                "policy_version": self.version,
                "optimizer_step": self.trainer.optimizer_step,
            },
            "rng": self.rng.bit_generator.state,
            "data_position": self.position.to_component(),
            "curriculum": self.curriculum.to_json(),
            "normalizers": self.normalizer.to_json(),
            "versions": policy.versions_of(self.tokenizer, "HFEngine"),
            "rollout_schema": rollout_schema(),
            "decoding": self.config.decoding.model_dump(),
            "layout": {"world_size": 1},
            "queue": {"rollouts": [record.model_dump(mode="json") for record in waiting], "lost": []},
            "open_episodes": {"episodes": episodes, "lost": []},
        }

    def restore(self, components: Mapping[str, Any]) -> None:
        """Take over the components that are given; what is not given stays as in a fresh run.

        Raises ValueError for a position on another dataset.
        """
        parameters = dict(self.trainer.model.named_parameters())
        with torch.no_grad():
            for name, value in components.get("policy", {}).items():
                parameters[name].copy_(torch.from_numpy(value))
        for name, state in components.get("optimizer", {}).get("moments", {}).items():
            moments = {key: torch.from_numpy(np.array(value)) for key, value in state.items()}
            self.trainer.optimizer.state[parameters[name]] = moments
        self.scheduled_updates = components.get("scheduler", {"updates": 0})["updates"]
        counters = components.get("counters", {"policy_version": 0, "optimizer_step": 0})
        self.trainer.version, self.trainer.optimizer_step = counters["policy_version"], counters["optimizer_step"]
        if "rng" in components:
            self.rng.bit_generator.state = components["rng"]
        if "data_position" in components:
            stored = DataPosition.from_component(components["data_position"])
            self.position = stored.on(self.position.fingerprint, self.position.num_prompts)
        self.curriculum = Curriculum(**components.get("curriculum", {}))
        self.normalizer = Normalizer(**components.get("normalizers", {}))
        episodes = components.get("open_episodes", {"episodes": []})["episodes"]
        orders = [Order.from_json(episode["environment_state"]) for episode in episodes]
        self.orders = {order.step: order for order in orders}

    def _moments(self) -> dict[str, dict[str, np.ndarray]]:
        state = self.trainer.optimizer.state
        named = self.trainer.model.named_parameters()
        return {name: {key: _array(v) for key, v in sorted(state[p].items())} for name, p in named if p in state}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()
