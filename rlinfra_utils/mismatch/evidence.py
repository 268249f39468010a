"""What a run knows beside the record, for the causes that the record's own numbers cannot settle.

Models: the engine's token ids, fingerprints, the age of the KV cache, the gap from step to step, logits under another
cause. Leaves out how each is obtained. Use: `diagnose(..., evidence=Evidence(fingerprints=("9f3a", "0c11")))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    """

    engine_tokens: Any = None
    fingerprints: tuple[str, str] | None = None
    hidden_kv_lag: int | None = None
    gap_by_step: Sequence[float] = ()
    restarts: Sequence[int] = ()
    logits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gaps = np.asarray(self.gap_by_step, dtype=float)
        if gaps.ndim != 1 or not np.all(np.isfinite(gaps) & (gaps >= 0)):
            raise ValueError(f"evidence.gap_by_step: {self.gap_by_step!r} ; needs mean |delta| by step, each 0 or more")
        for step in self.restarts:
            if not 0 <= step < len(gaps):
                raise ValueError(f"evidence.restarts: {step} is no index into gap_by_step of {len(gaps)} steps")
        if self.fingerprints is not None and len(self.fingerprints) != 2:
            raise ValueError(f"evidence.fingerprints: {self.fingerprints!r} ; needs the pair (trainer, engine)")
        if self.hidden_kv_lag is not None and self.hidden_kv_lag < 0:
            raise ValueError(f"evidence.hidden_kv_lag: {self.hidden_kv_lag} is below 0; pass a count of versions")
        for cause in self.logits:
            if cause not in RECOMPUTABLE:
                raise ValueError(f"evidence.logits: {cause!r} is none of {', '.join(RECOMPUTABLE)}")
