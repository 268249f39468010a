"""How the processes of a run hand work to one another: files that are there whole or not at all, `Handover`.

Models: durable hand-over through one folder; each place has one writer, so nothing is locked. Leaves out the log of
the run (`tracing.RunLog`) and its checkpoints (`checkpoint`), which lie in the same folder.

    weights/v0003/        model.safetensors of version 3, and orders.json: what it is to answer      (trainer)
    samples/c0/G.parquet  the answers of group G, no reward yet                                      (collector 0)
    queue/s0004.parquet   the rewarded batch of step 4, whole                                        (verifier)
    quarantine/           what was unreadable or not the batch that was ordered

Life of a file: written under a hidden name, flushed, renamed, folder flushed; read; retired once no kept checkpoint
needs it. Invariant: a visible name is a whole file, whoever was killed when. Trap: what is retired must lie before the
oldest checkpoint that a resume may fall back to, not before the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from rlinfra_utils import policy
from rlinfra_utils.recovery.config import RecoveryError, RunConfig
from rlinfra_utils.recovery.orders import Order, Task
from rlinfra_utils.rollouts import Rollout, from_table, read, validate_table
from rlinfra_utils.rollouts.storage import flush_folder
from rlinfra_utils.sync.manifest import write_flushed
from rlinfra_utils.sync.staging import aside_of

WEIGHTS, SAMPLES, QUEUE, QUARANTINE = "weights", "samples", "queue", "quarantine"
_VERSION = re.compile(r"v([0-9]{4,})")
_BATCH = re.compile(r"s([0-9]{4,})\.parquet")


class Handover:
    """The places of a run folder that work passes through."""

    def __init__(self, folder: str | Path, config: RunConfig) -> None:
        self.folder, self.config = Path(folder), config
        self._orders: dict[int, list[Order]] = {}
        places = [WEIGHTS, QUEUE, QUARANTINE, *(f"{SAMPLES}/c{i}" for i in range(config.num_collectors))]
        for place in places:
            (self.folder / place).mkdir(parents=True, exist_ok=True)

    def clear_debris(self, place: str) -> int:
        """Remove what a killed writer of `place` left half-written; returns how many. Only for its one writer."""
        debris = list((self.folder / place).glob(".*.aside"))
        for path in debris:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return len(debris)

    # Weights and orders: trainer -> collectors, verifier.

    def publish(self, model: torch.nn.Module, version: int, orders: Sequence[Order]) -> str:
        """Publish weights and what they are to answer; returns the SHA-256 of the weights' file.

        A version that stands there already must be the same, byte for byte: collectors may have sampled from it.
        Raises RecoveryError where it is not.
        """
        path = self.weights(version)
        aside = aside_of(path)
        try:
            aside.mkdir()
            tensors = {name: value.detach() for name, value in model.named_parameters()}
            write_flushed(aside / "model.safetensors", save(tensors))
            write_flushed(aside / "orders.json", json.dumps([order.to_json() for order in orders]).encode())
            digest = weights_sha256(aside)
            if not path.exists():
                flush_folder(aside)
                os.rename(aside, path)
                flush_folder(path.parent)
            elif weights_sha256(path) != digest or self.orders(version) != list(orders):
                raise RecoveryError(f"{path}: stands there with other content; this is another branch of the run")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return digest

    def weights(self, version: int) -> Path:
        """Folder of a published version."""
        return self.folder / WEIGHTS / f"v{version:04d}"

    def versions(self) -> list[int]:
        """Published versions, oldest first."""
        return _numbers(self.folder / WEIGHTS, _VERSION)

    def orders(self, version: int) -> list[Order]:
        """What a published version is to answer. Raises FileNotFoundError for one that is not there."""
        if version not in self._orders:
            text = (self.weights(version) / "orders.json").read_text()
            self._orders[version] = [Order.from_json(order) for order in json.loads(text)]
        return self._orders[version]

    def open_orders(self) -> list[Order]:
        """Orders whose batch is not in the queue, the earliest step first."""
        waiting = set(self.queued())
        found = []
        for version in self.versions():
            try:
                found += [order for order in self.orders(version) if order.step not in waiting]
            except FileNotFoundError:  # retired since it was listed
                continue
        return sorted(found, key=lambda order: order.step)

    # Samples: collectors -> verifier.

    def samples(self, order: Order, slot: int) -> Path:
        """File of a group; its place says which collector makes it."""
        collector = (order.step * self.config.prompts_per_step + slot) % self.config.num_collectors
        return self.folder / SAMPLES / f"c{collector}" / f"{order.tasks[slot].group_id}.parquet"

    # Batches: verifier -> trainer.

    def batch(self, step: int) -> Path:
        """File of a step's rewarded batch."""
        return self.folder / QUEUE / f"s{step:04d}.parquet"

    def queued(self) -> list[int]:
        """Steps whose batch is in the queue."""
        return _numbers(self.folder / QUEUE, _BATCH)

    def accept(self, order: Order, current_version: int) -> list[Rollout]:
        """The batch of an order, whole.

        Raises ValueError for one that is not what was ordered, wholly and soundly, RolloutFileError for a file that
        cannot be read.
        """
        table = read(self.batch(order.step))
        if table["sample_id"].to_pylist() != order.sample_ids(self.config.group_size):
            raise ValueError(f"sample_id: the batch of step {order.step} has not the {len(table)} rollouts ordered")
        verifiers = set(table["verifier_version"].to_pylist())
        if verifiers != {policy.VERIFIER_VERSION}:
            raise ValueError(f"verifier_version={sorted(map(str, verifiers))}: needs {policy.VERIFIER_VERSION} alone")
        if set(table["policy_version"].to_pylist()) != {order.version}:
            raise ValueError(f"policy_version: the batch of step {order.step} is not all of version {order.version}")
        verdicts = validate_table(table, current_version=current_version, max_lag=self.config.lag)
        refused = [codes for codes in verdicts["codes"].to_pylist() if codes]
        if refused:
            raise ValueError(f"codes={refused[0]}: the contract refuses {len(refused)} of {len(table)} rollouts")
        return from_table(table)

    def quarantine(self, path: Path) -> Path:
        """Move a file out of the way, under a name that nobody has."""
        place = self.folder / QUARANTINE / f"{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}"
        os.rename(path, place)
        return place

    def retire(self, frontier: int) -> None:
        """Remove what only steps before `frontier` needed, which no kept checkpoint leads back to."""
        visible: set[int] = set()
        for version in self.versions():
            steps = {order.step for order in self.orders(version)}
            if version < frontier and all(step < frontier for step in steps):
                _remove_folder(self.weights(version))
            else:
                visible |= steps
        # A batch goes after its order, and only with it: a collector would take an order without a batch for open.
        self.drop(step for step in range(frontier) if step not in visible)

    def drop(self, steps: Iterable[int]) -> int:
        """Remove samples and batches of `steps`; returns how many rollouts lay there in batches."""
        steps = set(steps)
        batches = [self.batch(step) for step in self.queued() if step in steps]
        samples = [path for path in (self.folder / SAMPLES).glob("*/[!.]*.parquet") if _step(path) in steps]
        for path in batches + samples:
            path.unlink(missing_ok=True)
        return len(batches) * self.config.prompts_per_step * self.config.group_size


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the weights' file of a published version."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def read_group(path: Path, task: Task, group_size: int) -> list[Rollout]:
    """The group of a task. Raises RolloutFileError for a damaged file, ValueError for one of another group."""
    records = from_table(read(path))
    if [record.sample_id for record in records] != task.sample_ids(group_size):
        raise ValueError(f"{path}: sample_id: has not the {group_size} rollouts of {task.group_id}")
    return records


def _numbers(folder: Path, pattern: re.Pattern) -> list[int]:
    matches = (pattern.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match)


def _step(path: Path) -> int:
    return int(path.stem.rsplit("-s", 1)[1].split("-")[0])


def _remove_folder(path: Path) -> None:
    aside = aside_of(path)
    os.rename(path, aside)  # first, so that no reader meets half of it
    shutil.rmtree(aside)
