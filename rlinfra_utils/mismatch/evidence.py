"""What a run knows beside the record, for the causes that the record's own numbers cannot settle.

Models: the engine's token ids, fingerprints, the age of the KV cache, the gap from step to step, logits under another
cause. Leaves out how each is obtained. Use: `diagnose(..., evidence=Evidence(fingerprints=("9f3a", "0c11")))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinfra_utils.doors import choice, is_number, numbers, short, whole

#: Causes that need another forward pass: `Evidence.logits` may hold the logits under them.
RECOMPUTABLE = ("quantized_weights", "stale_weights", "stale_kv", "other_tokens")


@dataclass(frozen=True)
class Evidence:
    """What a run knows beside the record; leave out what yours does not.

    engine_tokens: ids that the engine says it read and sampled, in the layout of `tokens` (rows may differ in length).
    fingerprints: (trainer, engine) hashes of the weights. hidden_kv_lag: versions between the weights and the oldest
    block in the KV cache. gap_by_step: mean |delta| by training step, this one last; restarts: indices into it at
    which the engine had just restarted. logits: by cause (quantized_weights, stale_weights, stale_kv, other_tokens),
    logits of the same shape computed under that cause (with the dequantised weights, the old ones, ...).
    Raises ValueError by field.
    """

    engine_tokens: Any = None
    fingerprints: tuple[str, str] | None = None
    hidden_kv_lag: int | None = None
    gap_by_step: Sequence[float] = ()
    restarts: Sequence[int] = ()
    logits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gap_by_step", "restarts"):
            if not isinstance(getattr(self, name), Sequence | np.ndarray):
                raise ValueError(f"evidence.{name}={short(getattr(self, name))}: needs a list")
        num_steps = len(self.gap_by_step)
        if num_steps:
            numbers("evidence.gap_by_step", self.gap_by_step)
        for step in self.restarts:
            if not (is_number(step) and step in range(num_steps)):
                raise ValueError(f"evidence.restarts: {short(step)} is no index into gap_by_step of {num_steps} steps")
        pair = self.fingerprints
        if pair is not None and not (isinstance(pair, tuple | list) and [type(text) for text in pair] == [str, str]):
            raise ValueError(f"evidence.fingerprints={short(pair)}: needs the pair of texts (trainer, engine)")
        if self.hidden_kv_lag is not None:
            whole("evidence.hidden_kv_lag", self.hidden_kv_lag, 0)
        if not isinstance(self.logits, Mapping):
            raise ValueError(f"evidence.logits={short(self.logits)}: needs logits by cause")
        for cause in self.logits:
            choice("evidence.logits", cause, RECOMPUTABLE)
