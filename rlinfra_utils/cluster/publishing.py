"""The trainer's weights on their way to the workers: `Sender`, on rank 0.

Models: publish through `sync.Publisher`, whose barrier is every worker's proof; each worker's mismatch at zero lag,
measured at each sync. Leaves out collective transfer between GPUs: weights go through a folder that all see.
Use: `sender = Sender(config, folder, mirror, trace)`; `sent = sender.send(tensors, 3, handles, "wait")`.

Life: made for one branch of a run -> send, send, ... -> close. Invariant: what `send` returned from is loaded and
proven on every worker. Trap: a worker that died makes it raise SyncError; give it the new handles, the same version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.replicas import RemoteEngine
from rlinfra_utils.cluster.session import import_ray
from rlinfra_utils.cluster.tasks import PROOF_TOKENS, Dataset
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.engines.weights import copy_into
from rlinfra_utils.sync import Publisher, control
from rlinfra_utils.sync.control import mean_gap
from rlinfra_utils.timers import Trace

_NUM_SEQUENCES = 4
#: bfloat16 engines differ by about 0.03 nats in the mean; those here are float32, on a GPU in another order of sums.
_TOLERANCE_NATS = {"cpu": 1e-4, "cuda": 1e-3}


class Sent(NamedTuple):
    """`gaps_nats`: mean |worker - trainer| log-prob of the held sequences, by worker, at zero lag."""

    version: int
    seconds: float
    gaps_nats: list[float]


class Sender:
    """The publisher of one branch. `mirror` is an unsharded copy of the model: what the trainer would answer."""

    def __init__(self, config: ClusterConfig, folder: Path, mirror: HFEngine, trace: Trace) -> None:
        self.config, self.folder, self.mirror, self.trace = config, folder, mirror, trace
        rows = Dataset(config).rows[:_NUM_SEQUENCES]
        self.sequences = [mirror.tokenizer(f"{row.text}{row.answer}").input_ids for row in rows]
        self.held: dict[str, list[list[float]]] = {}
        self.publisher: Publisher | None = None

    def send(self, tensors: Mapping[str, Tensor], version: int, handles: Sequence[Any], in_flight: str) -> Sent:
        """Have every worker load and prove `tensors` as `version`. Raises sync.SyncError with the causes by worker."""
        start_s = time.perf_counter()
        copy_into(self.mirror.model, tensors, "the trainer")
        if self.publisher is None:
            self._begin(handles)
        for engine, handle in zip(self.engines, handles):
            engine.handle, engine.in_flight = handle, in_flight
        tolerance = _TOLERANCE_NATS[self.config.device]
        held = self.mirror.control_logprobs, self.sequences, version
        options = {"tolerance_nats": tolerance, "max_new_tokens": PROOF_TOKENS}
        proof = control(*held, **options)
        references = {name: rows for name, rows in self.held.items() if mean_gap(rows, proof.logprobs) > tolerance}
        proof = control(*held, references=references, **options)
        self.publisher.publish(tensors, version, proof)
        self.held = {f"version {version}": proof.logprobs}
        gaps = [mean_gap(engine.last_logprobs, proof.logprobs) for engine in self.engines]
        return Sent(version, time.perf_counter() - start_s, gaps)

    def _begin(self, handles: Sequence[Any]) -> None:
        ray, limit_s = import_ray(), self.config.deadline_s
        self.engines = [RemoteEngine(ray, handle, limit_s) for handle in handles]
        self.publisher = Publisher(self.folder, self.engines, deadline_s=limit_s, trace=self.trace)

    def close(self) -> None:
        """Let the folder go."""
        if self.publisher is not None:
            self.publisher.close()
