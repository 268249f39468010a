"""One run, interrupted once, and how it goes on from more or less of its checkpoint: `branches`, `without_each`.

Models: the loop in one process and in memory, so that whatever differs comes from what the resume was given. Leaves
out processes and files other than the checkpoint. Use: `found = branches("out/branches"); found.series`; seconds.

Rollouts that wait are in the checkpoint's "queue"; without it, the weights of today answer their prompts again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rlinfra_utils import checkpoint, policy
from rlinfra_utils.doors import short, whole
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.policy import load_warm_start
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.recovery.explain import Explanation, explain
from rlinfra_utils.recovery.learner import Learner
from rlinfra_utils.recovery.orders import Order, Task, sample
from rlinfra_utils.rollouts import Rollout, from_json

#: Columns of `Branches.series` beside the statistics of an update.
IDENTITY = ("branch", "update", "prompts", "weights_sha256")


class MemoryLoop:
    """The loop without processes: `advance` orders, samples, rewards and trains, update by update.

    Life: fresh, or resumed from components; then updates. Invariant: between updates `queue` holds the rewarded
    rollouts of the steps that were ordered and not trained. Trap: it follows torch's thread count; compare branches
    that ran with the same one. Raises ValueError for components of a run on another dataset.
    """

    def __init__(self, config: RunConfig, components: dict[str, Any] | None = None) -> None:
        self.config, self.learner = config, Learner(config)
        self.engine = HFEngine(load_warm_start()[0], self.learner.tokenizer)
        self.queue: dict[int, list[Rollout]] = {}
        if components is not None:
            self.learner.restore(components)
            self._restore_queue(components)

    def _restore_queue(self, components: dict[str, Any]) -> None:
        waiting = [from_json(json.dumps(record)) for record in components.get("queue", {"rollouts": []})["rollouts"]]
        by_id = {record.sample_id: record for record in waiting}
        for step, order in self.learner.orders.items():
            records = [by_id.get(name) for name in order.sample_ids(self.config.group_size)]
            if None not in records:
                self.queue[step] = records

    def components(self) -> dict[str, Any]:
        """All components of a checkpoint, the waiting rollouts among them."""
        return self.learner.components([record for records in self.queue.values() for record in records])

    def advance(self, num_updates: int) -> list[dict[str, Any]]:
        """Train so many updates; a row for each, with its prompts, statistics and the weights that came out."""
        return [self._update() for _ in range(num_updates)]

    def _update(self) -> dict[str, Any]:
        self.learner.order()
        self.engine.adopt(self.learner.trainer.model, self.learner.version)
        for order in list(self.learner.orders.values()):
            if order.step not in self.queue:
                order = order if order.version == self.learner.version else self.learner.redate(order)
                self.queue[order.step] = [record for task in order.tasks for record in self._group(order, task)]
        order = self.learner.orders[self.learner.version]
        stats = self.learner.train(self.queue.pop(order.step))
        prompts = " ".join(task.text for task in order.tasks)
        return {"prompts": prompts, **stats, "weights_sha256": _sha256(self.learner)}

    def _group(self, order: Order, task: Task) -> list[Rollout]:
        tokenizer = self.learner.tokenizer
        return policy.reward_records(sample(self.engine, tokenizer, self.config, order, task), task.answer, tokenizer)


@dataclass(frozen=True)
class Branches:
    """What became of each branch.

    `series`: a row an update and branch ("continuous", "full resume", "weights only"), columns IDENTITY and the
    statistics. `explanation`: what the state of the weights-only branch lacked at the restart.
    """

    cut: int
    series: pd.DataFrame
    explanation: Explanation

    def first_difference(self, branch: str) -> int | None:
        """The first update whose row is not the continuous branch's; None where all are equal, to the last bit.

        Raises ValueError for a branch that is none of the series.
        """
        of = {name: rows.set_index("update").drop(columns="branch") for name, rows in self.series.groupby("branch")}
        if branch not in of:
            raise ValueError(f"branch={short(branch)}: needs one of {', '.join(of)}")
        ours = of[branch]
        same = (ours == of["continuous"].loc[ours.index]).all(axis=1)
        return None if same.all() else int(same.idxmin())


def branches(folder: str | Path, config: RunConfig | None = None, cut: int = 6) -> Branches:
    """Three branches of one run: continuous; resumed from the whole checkpoint of update `cut`; from its weights.

    `folder` holds the checkpoint. Raises ValueError for a cut outside the run, CheckpointError where the folder holds
    another run's checkpoint of that step.
    """
    config = RunConfig() if config is None else config
    whole("cut", cut, 1, config.num_updates - 1)
    loop = MemoryLoop(config)
    rows = _rows("continuous", 1, loop.advance(cut))
    path = checkpoint.save(folder, cut, loop.components())
    num_left = config.num_updates - cut
    rows += _rows("continuous", cut + 1, loop.advance(num_left))
    full = MemoryLoop(config, checkpoint.load(path))
    weights_only = MemoryLoop(replace(config, branch_id="weights_only"), checkpoint.load(path, require=["policy"]))
    explanation = explain(full.components(), weights_only.components())
    rows += _rows("full resume", cut + 1, full.advance(num_left))
    rows += _rows("weights only", cut + 1, weights_only.advance(num_left))
    return Branches(cut, pd.DataFrame(rows), explanation)


def without_each(
    components: dict[str, Any], config: RunConfig, num_updates: int = 2, names: Collection[str] | None = None
) -> pd.DataFrame:
    """Resume without one component at a time: a row each with the first number that moved, and from what to what.

    `components` are a whole checkpoint's; `names` those to leave out, all but the policy if not given. Numbers are
    compared in the order of the columns of `Branches.series`. A component that moves nothing is there to be compared
    with today's software (`checkpoint.audit`), not to be computed with. Raises ValueError for the policy, and for what
    the checkpoint has not.
    """
    names = [name for name in checkpoint.COMPONENTS if name != "policy"] if names is None else list(names)
    reference = MemoryLoop(config, components).advance(num_updates)
    found = []
    for name in names:
        if name not in components or name == "policy":
            raise ValueError(f"names={short(name)}: needs components that the checkpoint has, other than the policy")
        left = {key: value for key, value in components.items() if key != name}
        rows = MemoryLoop(config, left).advance(num_updates)
        moved = [
            (number, key, old[key], new[key])
            for number, (old, new) in enumerate(zip(reference, rows), start=1)
            for key in old
            if old[key] != new[key]
        ]
        first = moved[0] if moved else (None, "nothing", None, None)
        also = sorted({key for number, key, *_ in moved if number == first[0]} - {first[1], "weights_sha256"})
        found.append(dict(zip(("without", "update", "moved", "was", "is"), (name, *first))) | {"also": ", ".join(also)})
    return pd.DataFrame(found)


def _rows(branch: str, first: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"branch": branch, "update": number, **row} for number, row in enumerate(rows, start=first)]


def _sha256(learner: Learner) -> str:
    digest = hashlib.sha256()
    for name, value in learner.trainer.model.named_parameters():
        digest.update(name.encode() + value.detach().numpy().tobytes())
    return digest.hexdigest()
