"""What a run did, without the clock, and whether its folder is sound at this moment: `tell`, `broken`.

Models: batches that stand, their rollouts and the weights of each version, as hashes that two runs can be compared by.
Leaves out times, worker names and repeats, in which an interrupted run may differ. Use:
`broken(folder, config, reference=tell(other_folder))` is an empty list, or one sentence for each thing wrong.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinfra_utils import checkpoint
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.recovery.folder import SAMPLES, Handover
from rlinfra_utils.recovery.workers import CHECKPOINTS
from rlinfra_utils.rollouts import RolloutFileError, read
from rlinfra_utils.tracing import RunData, read_run

_CLOCK = ("started_s", "finished_s")


@dataclass(frozen=True)
class Story:
    """What a run did, for comparison.

    `batches`: those that stand, in order, each with its lines' fields and the SHA-256 of its rollouts.
    `weights`: SHA-256 of every published version, by version.
    """

    batches: tuple[dict[str, Any], ...]
    weights: dict[int, str]


def tell(folder: str | Path) -> Story:
    """The story of a run folder. Raises RunFolderError for a folder that is no run."""
    return _story(read_run(folder))[0]


def _story(run: RunData) -> tuple[Story, list[str]]:
    batches = run.batches[~run.batches["rolled_back"].astype(bool)]
    told = [_batch(run, batch) for batch in batches.itertuples()]
    weights: dict[int, str] = {}
    problems = []
    for event in run.events[run.events["kind"] == "published"].itertuples():
        if weights.setdefault(int(event.version), event.weights_sha256) != event.weights_sha256:
            problems.append(f"version {event.version:.0f} was published twice, with different weights")
    return Story(tuple(told), weights), problems


def _batch(run: RunData, batch: Any) -> dict[str, Any]:
    table = run.table.filter([value == batch.training_batch_id for value in run.table["training_batch_id"].to_pylist()])
    rows = table.drop_columns(list(_CLOCK)).to_pylist()
    return {
        "training_batch_id": batch.training_batch_id,
        "optimizer_step": batch.optimizer_step,
        "rollout_ids": list(batch.rollout_ids),
        "trained_policy_version": batch.trained_policy_version,
        "resulting_policy_version": batch.resulting_policy_version,
        "config_hash": batch.config_hash,
        "stats": dict(batch.stats),
        "rollouts_sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }


def broken(folder: str | Path, config: RunConfig, reference: Story, finished: bool = False) -> list[str]:
    """What is wrong in a run folder whose workers are dead or frozen, a sentence each; empty where nothing is.

    Looks for rollouts lost or trained twice, halves of files, other numbers than the uninterrupted run's. `finished`
    asks for the whole story, else for its beginning. Raises RunFolderError for a folder that is no run.
    """
    run = read_run(folder)
    story, problems = _story(run)
    # A line cut by a kill is no loss: what it said is said again after the restart, or was history.
    problems += [problem for problem in run.problems if " is torn: " not in problem]
    for number, batch in enumerate(story.batches):
        expected = reference.batches[number] if number < len(reference.batches) else {}
        problems += [
            f"batch {number}: {name} is not the uninterrupted run's"
            for name, value in batch.items()
            if expected.get(name) != value
        ]
    for version, digest in story.weights.items():
        if reference.weights.get(version) != digest:
            problems.append(f"version {version}: weights are not the uninterrupted run's")
    if finished and len(story.batches) < len(reference.batches):
        problems.append(f"{len(reference.batches) - len(story.batches)} batches of the uninterrupted run are missing")
    if finished and story.weights.keys() != reference.weights.keys():
        problems.append("other versions were published than in the uninterrupted run")
    return problems + _unsound_files(Path(folder), config)


def _unsound_files(folder: Path, config: RunConfig) -> list[str]:
    """Visible files that are no whole batch, group or checkpoint."""
    handover, problems = Handover(folder, config), []
    orders = {order.step: order for version in handover.versions() for order in handover.orders(version)}
    for step in handover.queued():
        try:
            if step in orders:  # else: a resume's leftover that the next save retires
                handover.accept(orders[step], current_version=step)
        except (ValueError, RolloutFileError) as error:
            problems.append(str(error))
    for path in (folder / SAMPLES).glob("*/[!.]*.parquet"):
        try:
            read(path)
        except RolloutFileError as error:
            problems.append(str(error))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", checkpoint.CheckpointWarning)
            checkpoint.latest(folder / CHECKPOINTS)
    except (checkpoint.CheckpointError, checkpoint.CheckpointWarning) as error:
        problems.append(str(error))
    return problems
