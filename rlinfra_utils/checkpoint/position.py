"""Where in the data a run stands: what was trained, not what was handed out.

Models prompts numbered through all epochs in the order of their dispatch, trained in any order. Leaves out the
prompts themselves. Use: `position = position.trained([7, 5])`; after a restart, `position.upcoming(held=in_queue)`.

The frontier is the first number that is not trained yet; the skip set holds the numbers beyond it that are. An
asynchronous loop dispatches far ahead of what it trains, so a saved dispatch counter loses all that was queued or in
flight, and long rollouts most of all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils.doors import listed, short, whole


@dataclass(frozen=True)
class DataPosition:
    """The trained part of the data: numbers below `frontier`, and those in `skip`.

    Number i is row `row_order(i // num_prompts)[i % num_prompts]` of the dataset that `fingerprint` names. `seed`
    shuffles it anew in each epoch. Raises ValueError for numbers that contradict one another.
    """

    num_prompts: int
    fingerprint: str
    seed: int = 0
    frontier: int = 0
    skip: frozenset[int] = frozenset()

    def __post_init__(self):
        whole("num_prompts", self.num_prompts)
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ValueError(f"fingerprint={short(self.fingerprint)}: needs a text, as dataset_fingerprint makes it")
        whole("seed", self.seed, 0)
        whole("frontier", self.frontier, 0)
        if not isinstance(self.skip, frozenset):
            raise ValueError(f"skip={short(self.skip)}: needs a frozenset of numbers beyond the frontier")
        for index in self.skip:
            if whole("skip", index, 0) <= self.frontier:
                raise ValueError(f"skip={index}: needs numbers beyond the frontier, {self.frontier}")

    @property
    def epoch(self) -> int:
        """The epoch of the frontier, from 0."""
        return self.frontier // self.num_prompts

    @property
    def num_trained(self) -> int:
        """Prompts trained in all."""
        return self.frontier + len(self.skip)

    def row_order(self, epoch: int) -> np.ndarray:
        """Rows of the dataset in the order of an epoch, shape (num_prompts,). Raises ValueError for a negative epoch.

        NumPy keeps this stream within a version; manifest.json names the version that drew it.
        """
        return np.random.default_rng([self.seed, whole("epoch", epoch, 0)]).permutation(self.num_prompts)

    def trained(self, indices: Iterable[int]) -> DataPosition:
        """The position once `indices` are trained too. Raises ValueError for one that was trained before."""
        skip, frontier = set(self.skip), self.frontier
        for index in listed("indices", indices, "numbers of prompts"):
            if whole("indices", index, 0) < self.frontier or index in skip:
                raise ValueError(f"indices: prompt {index} is trained already; a second time would count it twice")
            skip.add(index)
        while frontier in skip:
            skip.remove(frontier)
            frontier += 1
        return DataPosition(self.num_prompts, self.fingerprint, self.seed, frontier, frozenset(skip))

    def upcoming(self, held: Iterable[int] = ()) -> Iterator[int]:
        """Numbers to dispatch after a restart, without end: neither trained nor `held` in a restored queue."""
        done = self.skip | set(listed("held", held, "numbers of prompts"))
        return (index for index in itertools.count(self.frontier) if index not in done)

    def regenerate(self, dispatched: int, held: Iterable[int] = ()) -> list[int]:
        """Numbers below the dispatch counter that a restart must generate again: neither trained nor held.

        They are what a resume from the dispatch counter would skip. Raises ValueError where the counter lies
        behind what was trained.
        """
        reached = max(self.skip, default=self.frontier - 1) + 1
        if whole("dispatched", dispatched, 0) < reached:
            raise ValueError(f"dispatched={dispatched}: {reached} were handed out at least, as so many are trained")
        return list(itertools.takewhile(lambda index: index < dispatched, self.upcoming(held)))

    def on(self, fingerprint: str, num_prompts: int) -> DataPosition:
        """This position, if the dataset is the one that it counts. Raises ValueError for another one."""
        if (fingerprint, num_prompts) == (self.fingerprint, self.num_prompts):
            return self
        ends = self.num_trained >= whole("num_prompts", num_prompts)
        effect = f"end at once after {num_prompts:,}" if ends else f"skip {self.num_trained:,} of {num_prompts:,} rows"
        raise ValueError(
            f"fingerprint={short(fingerprint)}: the position counts dataset {short(self.fingerprint)} of "
            f"{self.num_prompts:,} rows and would {effect}; give that dataset, or start a DataPosition at 0"
        )

    def to_component(self) -> dict[str, Any]:
        """The component "data_position"."""
        return {
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "frontier": self.frontier,
            "skip": sorted(self.skip),
            "epoch": self.epoch,
        }

    @classmethod
    def from_component(cls, value: Mapping[str, Any]) -> DataPosition:
        """The position that `to_component` stored. Raises ValueError for anything else."""
        names = ("num_prompts", "fingerprint", "seed", "frontier", "skip", "epoch")
        if not isinstance(value, Mapping) or set(value) != set(names):
            raise ValueError(f"data_position={short(value)}: needs {', '.join(names)}; use DataPosition.to_component")
        if not isinstance(value["skip"], list):
            raise ValueError(f"skip={short(value['skip'])}: needs a list of numbers")
        skip = frozenset(whole("skip", index, 0) for index in value["skip"])
        position = cls(value["num_prompts"], value["fingerprint"], value["seed"], value["frontier"], skip)
        if whole("epoch", value["epoch"], 0) != position.epoch:
            raise ValueError(f"epoch={value['epoch']}: frontier {position.frontier} lies in epoch {position.epoch}")
        return position


def dataset_fingerprint(rows: Iterable[Any]) -> str:
    """SHA-256 over the rows in their order, each as JSON text: another row, order or number gives another one.

    Raises TypeError for a row that JSON cannot hold.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
