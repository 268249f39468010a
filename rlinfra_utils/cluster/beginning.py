"""Where a run begins: fresh, after a pause, or again because its trainers died: `begin`.

Models: trainers at the newest checkpoint, the book as that checkpoint has it, a branch of its own, workers that are
there or are started. Leaves out everything after the first publication. Used by `Loop`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinfra_utils.checkpoint import DataPosition
from rlinfra_utils.cluster.book import Book
from rlinfra_utils.cluster.config import ClusterError
from rlinfra_utils.cluster.crew import Died
from rlinfra_utils.cluster.lineage import next_branch, undo
from rlinfra_utils.cluster.session import VERIFIER, one_line
from rlinfra_utils.cluster.tasks import Task
from rlinfra_utils.rollouts import Rollout, from_json
from rlinfra_utils.tracing import RunLog
from rlinfra_utils.tracing.folder import Branch

if TYPE_CHECKING:
    from rlinfra_utils.cluster.loop import Loop

WAIT_S = 0.2


def begin(loop: Loop, reason: str = "") -> None:
    """Start the trainers and who else is missing, restore, open the book; the trainer is then to publish.

    Raises ClusterError where a process does not start or a checkpoint cannot be restored.
    """
    loop.branch_id, before = next_branch(loop.folder)
    held_before = _group_ids(loop) if hasattr(loop, "book") else set()
    loop.trainer.state = "starting"
    loop.records, loop.to_judge = {}, {}  # before the wait: a verifier that comes back in it would judge what is here
    loop.log = RunLog(loop.folder, loop.config.run_id, loop.branch_id, loop.config.to_json())
    start_s = time.perf_counter()
    loop.crew.start_trainers(loop.branch_id, reason)
    for name in (*(f"worker{i}" for i in range(loop.config.num_workers)), VERIFIER):
        if name not in loop.crew.members:
            loop.crew.start(name)
    _until_trainers_ready(loop)
    components = _restore(loop)
    loop.book = _open_book(loop, components)
    loop.count_slots()
    loop.trainer.begin_at(loop.book.counts.step, saved=bool(components))
    if before is not None:
        _tell_restored(loop, before, components, time.perf_counter() - start_s)
    for name in sorted(held_before - _group_ids(loop)):
        loop.lose(name, "it was not in the last checkpoint")


def _group_ids(loop: Loop) -> set[str]:
    return {task.group_id for task in loop.book.tasks.values()}


def _until_trainers_ready(loop: Loop) -> None:
    """Wait for the group to meet; what else comes back meanwhile is of an earlier epoch, or a death."""
    while not all(member.ready for member in loop.crew.trainers):
        for call, value in loop.crew.arrivals(WAIT_S):
            if isinstance(value, Died) and call.member in loop.crew.trainers:
                raise ClusterError(f"{call.member.name}: does not start: {value.reason}")
            loop.arrived(call, value)


def _restore(loop: Loop) -> dict[str, Any]:
    """The newest checkpoint's components, once every rank has it; nothing where there is none yet."""
    ray, trainers = loop.session.ray, [member.handle for member in loop.crew.trainers]
    try:
        path = ray.get(trainers[0].newest.remote(), timeout=loop.config.deadline_s)
        restored = [handle.restore.remote(path) for handle in trainers]
        return ray.get(restored, timeout=loop.config.deadline_s)[0]
    except Exception as error:
        raise ClusterError(f"{loop.folder}: cannot be resumed: {one_line(error)}") from error


def _open_book(loop: Loop, components: dict[str, Any]) -> Book:
    """The book as the checkpoint has it; the rollouts that waited go to Ray's object store again."""
    if not components:
        return Book(loop.config, loop.controller, loop.branch_id)
    counters, queue = components["counters"], components["queue"]
    by_group: dict[str, list[Rollout]] = {}
    for record in queue["rollouts"]:
        by_group.setdefault(record["group_id"], []).append(from_json(json.dumps(record)))
    waiting = [(Task(**entry["task"]), entry["version"], entry["tokens"]) for entry in queue["tasks"]]
    position = DataPosition.from_component(components["data_position"])
    step, version = counters["global_step"], counters["policy_version"]
    book = Book(loop.config, loop.controller, loop.branch_id, step, version, position, waiting)
    for group in book.queue:
        loop.records[group.index] = loop.session.ray.put(by_group[book.tasks[group.index].group_id])
    return book


def _tell_restored(loop: Loop, before: Branch, components: dict[str, Any], seconds: float) -> None:
    """Say in both branches where the new one begins; in the earlier it marks the batches that were undone."""
    step = components["counters"]["optimizer_step"] if components else 0
    waiting = [record["sample_id"] for record in components["queue"]["rollouts"]] if components else []
    num_undone = undo(loop.folder, before.branch_id, step, waiting)
    earlier = RunLog(Path(loop.folder), loop.config.run_id, before.branch_id, before.config)
    for log in (earlier, loop.log):
        log.event("restored", step=step, seconds=seconds, num_rollouts_undone=num_undone)
