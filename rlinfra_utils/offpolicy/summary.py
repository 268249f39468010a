"""The off-policy numbers of one batch, from two log-probs a token: one call, one table, sums that merge.

Models: token, sequence and geometric-mean weights side by side, KL estimates, clip share, log-probs of
exactly 0. Leaves out: the cause (`mismatch`) and the cure (`correction.py`).
Use: `s = summarize(trainer, behavior, mask)`; `s.k3`, `s.token.mean_abs_log`, `s.sequence.normalized_ess`.

Two questions, two calls (verl's decoupled form, 2026-08-22): `summarize(trainer_old, behavior, mask)` is
engine difference plus lag; `summarize(trainer_new, trainer_old, mask)` is what the updates since then did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils.offpolicy.clipping import Outside, bounds, clip_counts
from rlinfra_utils.offpolicy.ratios import geometric_log_ratio, log_prob_pair, sequence_log_ratio
from rlinfra_utils.offpolicy.weights import WeightStats, share

#: Counting needs no more than a finite ratio that lies outside.
_LOG_MAX = 700.0


@dataclass(frozen=True)
class Summary:
    """Sums over a batch; `a + b` is the summary of both batches. Means of nothing are NaN.

    `token`, `sequence`, `geometric`: weights exp(d_t), exp(sum d_t), exp(mean d_t), the first one a token, the
    others one an answer. `num_empty_sequences` answers have no token under the mask and count nowhere else.
    `num_behavior_zero` and `num_trainer_zero` tokens have a log-prob of exactly 0: a nucleus of one token or
    greedy decoding says that, and so does a field that was never filled.
    TRL's `sampling/sampling_logp_difference/mean` and `/max` (1.10, 2026-07-24) are `token.mean_abs_log` and
    `token.max_abs_log`, except that TRL averages the means of its ranks.
    """

    eps: tuple[float, float]
    num_empty_sequences: int
    num_behavior_zero: int
    num_trainer_zero: int
    sum_k3: float
    token: WeightStats
    sequence: WeightStats
    geometric: WeightStats
    clip: Outside

    def __add__(self, other: Summary) -> Summary:
        if self.eps != other.eps:
            raise ValueError(f"eps: {self.eps} and {other.eps} differ; clip shares of two regions do not add up")
        names = [name for name in self.__dataclass_fields__ if name != "eps"]
        return Summary(self.eps, **{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def num_tokens(self) -> int:
        """Tokens under the mask."""
        return self.token.num

    @property
    def num_sequences(self) -> int:
        """Answers with a token under the mask."""
        return self.sequence.num

    @property
    def k1(self) -> float:
        """Mean of -d: KL(behaviour || trainer) in nats a token, unbiased, may be negative. verl's `kl`."""
        return 0.0 - self.token.mean_log

    @property
    def k3(self) -> float:
        """Mean of exp(d) - 1 - d: the same KL, never negative, unbiased where no support is missing.

        Schulman, "Approximating KL divergence" (2020); verl's `k3_kl`. The samples are the behaviour policy's,
        so k1 and k3 estimate this direction of the divergence and not the other.
        """
        return share(self.sum_k3, self.num_tokens)

    @property
    def behavior_zero_share(self) -> float:
        """Share of tokens whose behaviour log-prob is exactly 0; 1.0 is greedy decoding or a placeholder."""
        return share(self.num_behavior_zero, self.num_tokens)

    @property
    def trainer_zero_share(self) -> float:
        """Share of tokens whose trainer log-prob is exactly 0; near 1.0 it was hardly computed from logits."""
        return share(self.num_trainer_zero, self.num_tokens)


def summarize(trainer: Any, behavior: Any, mask: Any, eps: float | tuple[float, float] = 0.2) -> Summary:
    """Summary of a batch of log-probs (nats), shape (tokens,) or (..., tokens), under a mask of that shape.

    `eps` bounds the clip share, |ratio - 1| > eps. A mask that selects nothing gives a summary of counts 0
    and NaN means, which merges without effect. Raises ValueError as `log_ratio` does.
    """
    eps = bounds(eps)
    trainer, behavior, mask = log_prob_pair(trainer, behavior, mask)
    ratios = trainer - behavior
    answers = mask.any(axis=-1)
    with np.errstate(over="ignore"):
        k3 = np.expm1(ratios) - ratios
    return Summary(
        eps=eps,
        num_empty_sequences=int((~answers).sum()),
        num_behavior_zero=int((mask & (behavior == 0.0)).sum()),
        num_trainer_zero=int((mask & (trainer == 0.0)).sum()),
        sum_k3=float(k3.sum()),
        token=WeightStats.of(ratios[mask]),
        sequence=WeightStats.of(sequence_log_ratio(ratios, mask)[answers]),
        geometric=WeightStats.of(geometric_log_ratio(ratios, mask)[answers]),
        clip=clip_counts(np.exp(np.minimum(ratios, _LOG_MAX)), eps, mask),
    )
