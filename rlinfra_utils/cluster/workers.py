"""The processes on the way from a prompt to the queue: `RolloutWorker`, one engine each, and `Verifier`.

Models: a worker answers whole groups, loads weights, proves them; the verifier rewards a group and holds it to the
contract. Leaves out who asks (`loop.py`); both are plain classes until Ray makes actors of them. Records go from
process to process through Ray's object store; the loop sees counts only.

Life of a worker: built with the announced weights, if there are any -> answer, load, answer, ... -> sleep (its engine
is gone, the memory free) -> wake or load. Trap: it may be killed anywhere; nothing that it holds is needed again.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlinfra_utils import policy, rollouts, sync
from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.machine import Place
from rlinfra_utils.cluster.tasks import Task, answer, load_model, longest_tokens, model_folder
from rlinfra_utils.engines import HFEngine, VLLMServer
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.sync.manifest import read_pointer


class Answered(NamedTuple):
    """What the loop must know of a group's answers; `actor_s` is what they took in the worker itself."""

    num_tokens: int
    actor_s: float


class RolloutWorker:
    """One engine in one process."""

    def __init__(self, name: str, config: ClusterConfig, weights: str, core: int | None) -> None:
        self.config = config
        self.place = Place(name, core, config.device)
        self.engine: Any = None
        self.weights = Path(weights)
        self.wake()

    def wake(self) -> int:
        """Build the engine, with the announced weights where there are any; returns its version."""
        if self.engine is None:
            self.engine, self.tokenizer = self._make_engine()
            if read_pointer(self.weights) is not None:
                with sync.hold(self.weights) as held:
                    self.engine.load(held.path, held.version)
        return self.engine.version

    def _make_engine(self) -> tuple[Any, Any]:
        model, tokenizer = load_model(self.config.model)
        longest, limit = longest_tokens(self.config, tokenizer), model.config.max_position_embeddings
        if longest > limit:
            asked = f"max_new_tokens={self.config.max_new_tokens}, digits={self.config.digits}"
            raise ValueError(f"{asked}: the longest sequence has {longest} tokens, the model holds {limit}")
        if self.config.engine == "vllm":
            slots = self.config.groups_at_once * self.config.group_size
            folder, limit_s = model_folder(self.config.model), self.config.deadline_s
            options = {"max_model_len": longest, "max_num_seqs": slots, "request_s": limit_s}
            return VLLMServer(folder, dtype="float32", **options), tokenizer
        return HFEngine(model.to(self.place.device), tokenizer), tokenizer

    def sleep(self) -> None:
        """Give the engine's memory back: the engine goes, and with it a vLLM server and all that it started.

        The server is started again by the next load: half a minute and more. vLLM's own sleep mode would keep the
        process and give back the weights and the KV pool, on CUDA alone.
        """
        self.close()
        self.engine = None
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    def hello(self) -> int:
        """Process id, once the engine is there. Raises EngineError where a server has ended."""
        self.ping()
        return os.getpid()

    def ping(self) -> None:
        """Answer, unless the engine is a server that has ended: the worker is of no use without it."""
        if self.engine is not None and self.config.engine == "vllm":
            self.engine.require_alive()

    def answer(self, task: Task, branch_id: str) -> tuple[Answered, list[Rollout]]:
        """The group's records, and what the loop must know of them."""
        start_s = time.perf_counter()
        with self.place.span("decode", group=task.group_id) as span:
            records, generation = answer(self.engine, self.tokenizer, self.config, task, branch_id)
            steps = max(len(record.response_tokens) for record in records)
            span.set(tokens=generation.num_new_tokens, steps=steps, prefill_s=generation.prefill_s)
        return Answered(generation.num_new_tokens, time.perf_counter() - start_s), records

    def load(self, path: str, version: int, in_flight: str) -> None:
        """Load a published version; `in_flight` is what becomes of running requests in a server."""
        with self.place.span("load_weights", version=version):
            self.wake()
            options = {"in_flight": in_flight} if self.config.engine == "vllm" else {}
            self.engine.load(path, version, **options)

    def version(self) -> int:
        """The engine's own."""
        return self.engine.version

    def control_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The engine's own."""
        with self.place.span("prove_weights"):
            return self.engine.control_logprobs(sequences)

    def generate(self, prompt_ids: list[list[int]], decoding: Decoding, n: int, seed: int | None) -> Any:
        """The engine's own."""
        with self.place.span("prove_weights"):
            return self.engine.generate(prompt_ids, decoding, n=n, seed=seed)

    def farewell(self, folder: str) -> int:
        """See `Place.farewell`."""
        return self.place.farewell(folder)

    def close(self) -> None:
        """Stop what the engine started."""
        if hasattr(self.engine, "close"):
            self.engine.close()


class Verifier:
    """Rewards groups, holds them to the contract, and keeps on disk what it refuses."""

    def __init__(self, name: str, config: ClusterConfig, quarantine: str) -> None:
        self.place = Place(name, None, "cpu")
        self.tokenizer = load_model(config.model)[1]
        self.quarantine = Path(quarantine)

    def hello(self) -> int:
        """Process id."""
        return os.getpid()

    def ping(self) -> None:
        """Answer."""

    def judge(self, records: list[Rollout], task: Task, current_version: int) -> tuple[str, list[Rollout]]:
        """The contract's first finding, empty where it accepts all, and the rewarded group, empty where it does not."""
        with self.place.span("verifier", group=task.group_id):
            records = policy.reward_records(records, task.answer, self.tokenizer)
            demands = {"current_version": current_version, "partial_rollouts": True}
            verdicts = [rollouts.validate(record, **demands) for record in records]
            refused = [verdict for verdict in verdicts if verdict.status != "accept"]
            if refused:
                rollouts.triage(records, self.quarantine, **demands)
                return refused[0].findings[0].message, []
            return "", records

    def farewell(self, folder: str) -> int:
        """See `Place.farewell`."""
        return self.place.farewell(folder)

    def close(self) -> None:
        """Nothing to let go."""
