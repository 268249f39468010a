"""Group relative policy optimisation: the advantages, the ratio and the loss, as formulas.

Models: GRPO of DeepSeekMath (Shao et al. 2024, arXiv:2402.03300): advantages relative to the prompt's group,
the clipped ratio of PPO, a KL penalty to a base model if wanted. One part differs: the loss is the mean over
all trained tokens of a minibatch (as in DAPO, arXiv:2503.14476), not the mean of each answer's mean, so
that a token counts alike in short and long answers. Leaves out: sequence-level ratios, value models.
Use: `advantages, _ = group_advantages(rewards, 8)`; `trainer.Trainer` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinfra_utils.doors import floats, whole

#: Rewards of a group that differ by no more than this are equal: float noise must not become a signal.
REWARD_TOLERANCE = 1e-6


class GroupAdvantages(NamedTuple):
    """Advantage of each rollout, shape (rollouts,), and how many groups carry no signal."""

    values: np.ndarray
    num_degenerate: int


def group_advantages(rewards: Sequence[float], group_size: int, divide_by_std: bool = True) -> GroupAdvantages:
    """Advantage of each rollout relative to its group: (reward - group mean) / group standard deviation.

    `rewards`, shape (rollouts,), is group-major: rollouts of group i are [i * group_size : (i + 1) * group_size].
    The deviation is the population's (divisor `group_size`). `divide_by_std=False` keeps the centred reward
    (Dr. GRPO, arXiv:2503.20783), so that groups of easy and hard prompts keep their own scale. A degenerate
    group, in which all rewards are equal, gets 0. Raises ValueError if a reward is not finite or the
    number of rewards is not a multiple of `group_size` >= 2.
    """
    rewards = floats("rewards", rewards, kinds="fiub")
    group_size = whole("group_size", group_size, 2)  # fewer have nothing to compare
    if rewards.ndim != 1 or rewards.size % group_size:
        raise ValueError(f"rewards has shape {rewards.shape}: expected a positive multiple of group_size={group_size}")
    if not np.isfinite(rewards).all():
        index = int(np.argmin(np.isfinite(rewards)))
        raise ValueError(f"rewards[{index}]={rewards[index]}: a reward must be finite")
    groups = rewards.reshape(-1, group_size)
    degenerate = np.ptp(groups, axis=1, keepdims=True) <= REWARD_TOLERANCE
    centred = groups - groups.mean(axis=1, keepdims=True)
    scale = groups.std(axis=1, keepdims=True) if divide_by_std else 1.0
    values = np.divide(centred, scale, out=np.zeros_like(groups), where=~degenerate)
    return GroupAdvantages(values.reshape(-1), int(degenerate.sum()))


def token_ratio(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Ratio exp(trainer - behaviour) of each token, 1 off the mask; all of shape (rollouts, tokens).

    The mask acts before exp: whatever stands at a token that is not the policy's never reaches the ratio
    or its gradient.
    """
    return torch.where(mask, logprobs - behavior_logprobs, 0.0).exp()


def grpo_loss(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Clipped policy loss, a mean over the tokens of `mask`: -mean min(r A, clip(r, 1 - low, 1 + high) A).

    `ratio` and boolean `mask` have shape (rollouts, tokens), `advantages` (rollouts, 1). Where these rollouts are one
    rank's share, `num_tokens` is the divisor: the tokens of all ranks, so that their losses add up to the batch's.
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -(gain * mask).sum() / (mask.sum() if num_tokens is None else num_tokens)


def kl_to_base(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor, num_tokens: Tensor | None = None) -> Tensor:
    """KL(policy || base) in nats a token, estimated on the sampled tokens: mean of exp(d) - d - 1, d = base - policy.

    The "k3" estimator that GRPO uses (Schulman, "Approximating KL divergence", 2020): never negative.
    `num_tokens` as in `grpo_loss`.
    """
    gap = torch.where(mask, base_logprobs - logprobs, 0.0)
    return (torch.expm1(gap) - gap).sum() / (mask.sum() if num_tokens is None else num_tokens)
