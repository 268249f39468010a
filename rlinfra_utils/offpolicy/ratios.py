"""Log importance ratios trainer / behaviour: by token, by sequence (sum), by geometric mean; and support.

Models: the difference of two log-probs of the same sampled token, in nats, computed in float64 after the
mask. Leaves out: why they differ (`mismatch`) and what to do about it (`correction.py`).
Use: `d = log_ratio(trainer, behavior, mask)`; `np.exp(sequence_log_ratio(d, mask))`.

The last axis runs over tokens. Two different numbers are called "sequence ratio" in the field:

| here | formula | verl | TRL |
|---|---|---|---|
| `log_ratio` | d_t | `rollout_is="token"` | `vllm_importance_sampling_mode`: `token_*` |
| `sequence_log_ratio` | sum of d_t | `rollout_is="sequence"`, `-seq_sum_k1` | the same option: `sequence_*` |
| `geometric_log_ratio` | mean of d_t | `-seq_mean_k1`, -`log_ppl_diff` | `importance_sampling_level="sequence"` |

The sum is the exact log likelihood ratio of the answer; its variance grows with length. The mean is another
estimator, not a milder form of the sum. Sources: verl `docs/algo/rollout_corr_math.md` (2026-08-22),
TRL 1.10 `grpo_config.py` and `grpo_trainer.py` (2026-07-24).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinfra_utils import doors

_NEVER_SAMPLED = "a sampled token has mass; record the processed log-prob of the token that was sampled"
_LOST_MASS = "the trainer gives a sampled token no mass; renormalise over the kept set of the record, or mask it"
#: A row of log-probabilities may miss a sum of 1 by this much (float16 log-softmax over a large vocabulary).
_MASS_TOLERANCE = 1e-2


def log_ratio(trainer: Any, behavior: Any, mask: Any) -> np.ndarray:
    """Log of trainer / behaviour of each sampled token, 0.0 off the mask; float64 of the inputs' shape.

    `trainer` and `behavior` are log-probs (nats) of the same tokens, shape (..., tokens); `mask` is 1 where
    the policy sampled the token. What stands off the mask is never read. Raises ValueError, naming the
    position, if under the mask a value is missing, above 0, or -inf; and for shapes that differ.
    """
    trainer, behavior, mask = log_prob_pair(trainer, behavior, mask)
    return trainer - behavior


def log_prob_pair(trainer: Any, behavior: Any, mask: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both log-probs, checked as for `log_ratio` and 0 off the mask, and the mask as booleans. Raises as it does."""
    trainer, behavior = doors.floats("trainer", trainer), doors.floats("behavior", behavior)
    if trainer.shape != behavior.shape:
        raise ValueError(f"behavior: shape {behavior.shape} is not the shape {trainer.shape} of trainer")
    mask = doors.boolean_mask(mask, "trainer", trainer.shape)
    trainer = doors.logprobs("trainer", trainer, mask, _LOST_MASS)
    return trainer, doors.logprobs("behavior", behavior, mask, _NEVER_SAMPLED), mask


def sequence_log_ratio(log_ratio: Any, mask: Any) -> np.ndarray:
    """Log of the likelihood ratio of each answer: the sum of its log-ratios. (..., tokens) -> (...).

    NaN for an answer without a token under the mask. Raises ValueError as `log_ratio` does.
    """
    values, mask = doors.log_ratios(log_ratio, mask)
    return np.where(mask.any(axis=-1), values.sum(axis=-1), np.nan)


def geometric_log_ratio(log_ratio: Any, mask: Any) -> np.ndarray:
    """Log of the geometric mean of the token ratios of each answer: their mean. (..., tokens) -> (...).

    NaN for an answer without a token under the mask. Raises ValueError as `log_ratio` does.
    """
    total = sequence_log_ratio(log_ratio, mask)
    return total / np.maximum(np.count_nonzero(mask, axis=-1), 1)


def support_gap(trainer: Any, behavior: Any, mask: Any) -> np.ndarray:
    """Trainer's mass on tokens that the behaviour policy could not have sampled, at each position.

    `trainer` and `behavior` are log-probs over the vocabulary, shape (..., tokens, vocab); `mask` has shape
    (..., tokens). Returns shape (..., tokens), NaN off the mask. Importance sampling is unbiased only where
    the gap is 0; no clipping mends it, and sampled tokens alone cannot show it. The expected token ratio is
    1 - gap: with top-p it is the kept mass. Raises ValueError where a row under the mask is no distribution.
    """
    trainer, behavior = doors.floats("trainer", trainer), doors.floats("behavior", behavior)
    if trainer.ndim < 2 or trainer.shape != behavior.shape:
        raise ValueError(f"behavior: shape {behavior.shape}, trainer {trainer.shape}; both need (..., tokens, vocab)")
    mask = doors.boolean_mask(mask, "positions of trainer", trainer.shape[:-1])
    for name, values in (("trainer", trainer), ("behavior", behavior)):
        with np.errstate(over="ignore"):
            total = np.exp(np.where(mask[..., None], values, -np.inf)).sum(axis=-1)
        wrong = mask & ~(np.abs(total - 1.0) <= _MASS_TOLERANCE)
        doors.refuse(name, total, wrong, "is the mass of the row; needs log-probs over the vocabulary, not logits")
    missed = np.exp(np.where(mask[..., None] & np.isneginf(behavior), trainer, -np.inf)).sum(axis=-1)
    return np.where(mask, missed, np.nan)
