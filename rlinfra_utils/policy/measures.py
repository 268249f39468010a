"""What to do about stale data: the measures of lesson step 12.4.4 as values that `run_with_lag` obeys.

Models: a limit on the lag by waiting, a limit by discarding, importance weights, fewer steps a rollout, a smaller
learning rate, a queue that is kept short, phases without any lag. Leaves out: measures combined, and their tuning.
Use: `run_with_lag(..., lag=8, measure=measures(8)["discard"], ...)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinfra_utils.doors import choice, whole
from rlinfra_utils.offpolicy import MODES, correct

#: The mode that takes stale data for fresh; the others are `offpolicy.correct`'s.
IGNORE = "ignore"


@dataclass(frozen=True)
class Measure:
    """One measure; each field left at its default changes nothing. Raises ValueError for a field out of range.

    - `max_depth`: generation waits rather than have more than this many batches under way.
    - `shrink_every`: each so many updates the queue loses a batch, down to one under way.
    - `sync_every`, `num_sync`: for the last `num_sync` of each `sync_every` updates nothing is sampled ahead; what is
      under way is trained first, and what is left of the phase is strictly synchronous.
    - `max_lag`: a group sampled more versions ago than this is discarded.
    - `correction`: mode, low and high of `offpolicy.correct`; with the mode "ignore" each weight is 1.
    - `num_epochs`: epochs over a batch, in place of the run's.
    - `lr_by_ess`: the learning rate is multiplied by the normalised ESS of the batch's sequence weights.
    """

    max_depth: int | None = None
    shrink_every: int | None = None
    sync_every: int | None = None
    num_sync: int = 0
    max_lag: int | None = None
    correction: tuple[str, float | None, float | None] | None = None
    num_epochs: int | None = None
    lr_by_ess: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_depth", 0), ("shrink_every", 1), ("sync_every", 2), ("max_lag", 0), ("num_epochs", 1)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), low)
        whole("num_sync", self.num_sync, *((0, 0) if self.sync_every is None else (1, self.sync_every - 1)))
        if self.correction is not None:
            self.weights(np.zeros(1), np.ones(1))

    def depth(self, lag: int, version: int) -> int:
        """Batches under way behind the one that is trained next, in a loop built for `lag`."""
        depth = lag if self.max_depth is None else min(lag, self.max_depth)
        if self.shrink_every is not None:
            depth = max(min(depth, 1), depth - version // self.shrink_every)
        if self.sync_every is not None and version % self.sync_every >= self.sync_every - self.num_sync:
            depth = 0
        return depth

    def weights(self, log_ratio: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
        """The weight of each token, shape (..., tokens), 0 off the mask; None where the measure sets none.

        Raises ValueError for an unknown mode, and as `offpolicy.correct` does.
        """
        if self.correction is None:
            return None
        mode, low, high = self.correction
        choice("correction's mode", mode, (IGNORE, *MODES))
        return np.asarray(mask, dtype=float) if mode == IGNORE else correct(log_ratio, mask, mode, low, high).weights


def measures(lag: int, num_epochs: int = 2) -> dict[str, Measure]:
    """The measures as the experiment compares them at `lag`: cap and discard share one limit, half of the lag.

    - "none" is the trainer as it is: its clipped ratio is already to the behaviour policy.
    - "ignore" takes stale data for fresh, as a loop does that recomputes the old log-probs with the trainer and
      stops there.
    - "fewer steps" halves the run's `num_epochs`.
    - "balance" is the effect of pools in balance, not the pools: the queue shrinks by a batch every two updates
      until one is under way.
    - "sync phases" lets the queue run dry and then has four updates at lag 0.
    """
    return {
        "none": Measure(),
        "ignore": Measure(correction=(IGNORE, None, None)),
        "cap": Measure(max_depth=lag // 2),
        "discard": Measure(max_lag=lag // 2),
        "token truncate": Measure(correction=("token_truncate", None, 2.0)),
        "sequence mask": Measure(correction=("sequence_mask", None, 2.0)),
        "fewer steps": Measure(num_epochs=max(1, num_epochs // 2)),
        "lr by ESS": Measure(lr_by_ess=True),
        "balance": Measure(shrink_every=2),
        "sync phases": Measure(sync_every=2 * lag + 8, num_sync=lag + 4),
    }
