"""A worker's engine as the publisher and `sync.verify` want one: `RemoteEngine`.

Models the engine's duck type over calls to an actor; a dead or silent one raises SyncError. Leaves out what is done
about that (`loop.py`). Use: `Publisher(folder, replicas=[RemoteEngine(ray, handle, timeout_s)])`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinfra_utils.rollouts import Decoding
from rlinfra_utils.sync import SyncError


class RemoteEngine:
    """The engine in a rollout worker. `handle` and `in_flight` may be set anew between two publications.

    `last_logprobs` are its last answer to `control_logprobs`: what the mismatch at zero lag is measured from.
    """

    def __init__(self, ray: Any, handle: Any, timeout_s: float) -> None:
        self._ray, self.handle, self._timeout_s = ray, handle, timeout_s
        self.in_flight = "wait"
        self.last_logprobs: list[list[float]] = []

    def _get(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=self._timeout_s)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            raise SyncError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    @property
    def version(self) -> int:
        """What the engine says. Like each call, raises SyncError for a worker that is dead or silent."""
        return self._get(self.handle.version.remote())

    def load(self, path: str | Path, version: int) -> None:
        """Have it load a published version."""
        self._get(self.handle.load.remote(str(path), version, self.in_flight))

    def control_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens 1..n-1 of each sequence, nats."""
        self.last_logprobs = self._get(self.handle.control_logprobs.remote(sequences))
        return self.last_logprobs

    def generate(self, prompt_ids: list[list[int]], decoding: Decoding, n: int = 1, seed: int | None = None) -> Any:
        """What it samples."""
        return self._get(self.handle.generate.remote(prompt_ids, decoding, n, seed))
