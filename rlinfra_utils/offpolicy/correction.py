"""What to do about off-policy data: truncate or drop by token, by sequence or by geometric mean; and the cost.

Models: importance weights in one of five modes, with statistics before and after, and what was dropped, by
length. Leaves out: the loss and its normalisation. Use: `c = correct(d, mask, "sequence_mask", high=3.0)`,
then weight each token's loss by `c.weights`.

| mode | weight of a kept token | dropped |
|---|---|---|
| `token_truncate` | exp(d_t), clipped to [low, high] | nothing |
| `token_mask` | exp(d_t) | tokens with exp(d_t) outside [low, high] |
| `sequence_truncate` | exp(sum d_t), clipped | nothing |
| `sequence_mask` | exp(sum d_t) | answers with exp(sum d_t) outside |
| `geometric_mask` | 1 | answers with exp(mean d_t) outside |

TRL 1.10 (2026-07-24): the first four are `vllm_importance_sampling_mode`; `low` and `high` are
`vllm_importance_sampling_clip_min` and `_clip_max` (defaults: none and 3.0). It keeps dropped tokens in the
loss's denominator, and logs `sampling/importance_sampling_ratio/*` of the corrected weights (`stats.after`).
verl (2026-08-22): `rollout_is="token"` and `"sequence"` truncate above `rollout_is_threshold`; a threshold
"low_high" masks weights (IcePop). `rollout_rs` takes what it rejects out of `response_mask`, as `keep` does:
`token_k1`, `seq_sum_k1` and `seq_mean_k1` are the three masks. Its bounds hold -d: "a_b" keeps ratios from
1/b to 1/a, and a lone b means 1/b to b, where a bound left out here is no bound. verl clamps d to 20 in size.
Modes combine: `correct(d, correct(d, mask, "geometric_mask", 0.99, 1.01).keep, "token_truncate", high=2.0)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils import doors
from rlinfra_utils.offpolicy.clipping import Outside
from rlinfra_utils.offpolicy.lengths import LengthBin, by_length, merge_bins
from rlinfra_utils.offpolicy.ratios import geometric_log_ratio, sequence_log_ratio
from rlinfra_utils.offpolicy.weights import WeightStats, share

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")
#: Log weights of a level, NaN where undefined: (..., tokens), or (..., 1) for one an answer.
_LEVELS = {
    "token": lambda values, mask: np.where(mask, values, np.nan),
    "sequence": lambda values, mask: sequence_log_ratio(values, mask)[..., None],
    "geometric": lambda values, mask: geometric_log_ratio(values, mask)[..., None],
}


@dataclass(frozen=True)
class CorrectionStats:
    """Counts and sums of one correction; `a + b` is both batches together. Shares of nothing are NaN.

    `before`: weights before any bound acted, one a token or one an answer, as the mode has it. `after`: weights
    that are applied, of what was kept. `outside`: how many lay below `low` and above `high`.
    """

    mode: str
    low: float | None
    high: float | None
    before: WeightStats
    after: WeightStats
    outside: Outside
    lengths: tuple[LengthBin, ...]

    def __add__(self, other: CorrectionStats) -> CorrectionStats:
        mine, theirs = (self.mode, self.low, self.high), (other.mode, other.low, other.high)
        if mine != theirs:
            raise ValueError(f"mode, low, high: {mine} and {theirs} differ; only equal corrections add up")
        return CorrectionStats(
            *mine,
            before=self.before + other.before,
            after=self.after + other.after,
            outside=self.outside + other.outside,
            lengths=merge_bins(self.lengths, other.lengths),
        )

    def total(self, count: str) -> int:
        """Sum of one count of `LengthBin` over all lengths: `total("num_tokens_dropped")`."""
        return sum(getattr(b, count) for b in self.lengths)

    @property
    def dropped_token_share(self) -> float:
        """Share of tokens dropped. verl's `rollout_rs_masked_fraction`."""
        return share(self.total("num_tokens_dropped"), self.total("num_tokens"))

    @property
    def dropped_sequence_share(self) -> float:
        """Share of answers of which no token is left."""
        return share(self.total("num_sequences_dropped"), self.total("num_sequences"))

    @property
    def touched_sequence_share(self) -> float:
        """Share of answers of which a token is gone. verl's `rollout_rs_seq_masked_fraction`."""
        return share(self.total("num_sequences_touched"), self.total("num_sequences"))

    @property
    def effective_share(self) -> float:
        """ESS of what is left, over the number offered: what dropping and concentration cost together.

        By token this is verl's `rollout_is_eff_sample_size`; by sequence verl counts an answer once a token.
        """
        return share(self.after.ess if self.after.num else 0.0, self.before.num)


@dataclass(frozen=True)
class Correction:
    """`weights` (float64) and `keep` (bool) of each token, shape (..., tokens), and `stats`.

    A weight is 0.0 off the mask and where dropped. `log_weights` are the logs before any bound acted, in the
    mode's own shape: (..., tokens) or (...), NaN where nothing is under the mask.
    """

    weights: np.ndarray
    keep: np.ndarray
    stats: CorrectionStats
    log_weights: np.ndarray


def correct(log_ratio: Any, mask: Any, mode: str, low: float | None = None, high: float | None = None) -> Correction:
    """Importance weights of `log_ratio`, shape (..., tokens), under `mask`, bounded as `mode` says.

    `low` and `high` bound the ratio, not its log, and are allowed values themselves; at least one is needed, and
    one left out is no bound. An answer without a token under the mask is neither kept nor dropped; a mask that
    selects nothing gives statistics of counts 0 and NaN means, which merge without effect.

    Raises ValueError for an unknown mode, for bounds that are missing, not above 0, not finite or crossed, for
    a log-ratio that is not finite under the mask, and for a weight beyond float64 that no `high` bounds.
    """
    doors.choice("mode", mode, MODES)
    low, high = _bounds(mode, low, high)
    values, mask = doors.log_ratios(log_ratio, mask)
    level, action = mode.split("_")
    log_weights = _LEVELS[level](values, mask)
    defined = ~np.isnan(log_weights)
    log_low, log_high = -np.inf if low is None else np.log(low), np.inf if high is None else np.log(high)
    below, above = log_weights < log_low, log_weights > log_high
    kept = defined if action == "truncate" else defined & ~below & ~above
    if level == "geometric":
        applied, weights = np.zeros_like(log_weights), np.ones_like(log_weights)
    else:
        applied, weights = np.clip(log_weights, log_low, log_high), _exp(log_weights, kept, low, high)
    keep = mask & kept
    stats = CorrectionStats(
        mode,
        low,
        high,
        before=WeightStats.of(log_weights[defined]),
        after=WeightStats.of(applied[kept]),
        outside=Outside(int(defined.sum()), int(below.sum()), int(above.sum())),
        lengths=by_length(mask, keep),
    )
    shaped = log_weights if level == "token" else log_weights[..., 0]
    return Correction(np.where(keep, weights, 0.0), keep, stats, shaped)


def _bounds(mode: str, low: float | None, high: float | None) -> tuple[float | None, float | None]:
    if low is None and high is None:
        raise ValueError(f"low=None, high=None: {mode} needs a bound on the ratio; TRL's default is high=3.0")
    for name, bound in (("low", low), ("high", high)):
        if bound is not None and not (doors.is_number(bound) and 0 < bound < np.inf):
            raise ValueError(f"{name}={bound!r}: needs a finite ratio above 0, or None for no bound")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low={low}: is above high={high}; no ratio lies between them")
    return low if low is None else float(low), high if high is None else float(high)


def _exp(logs: np.ndarray, kept: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    """Weights within the bounds, to the last bit; where not kept they mean nothing."""
    with np.errstate(over="ignore"):
        weights = np.clip(np.exp(logs), low, high)
    doors.refuse("log_weights", logs, kept & np.isposinf(weights), "its weight is beyond float64; give high")
    return weights
