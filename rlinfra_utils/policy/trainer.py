"""The trainer: rollout records in, one published version of the weights out.

Models: log-probs recomputed by the trainer's own forward pass, epochs of minibatches of clipped policy gradient,
AdamW, a version that counts updates. Leaves out: mixed precision, gradient accumulation, learning-rate schedules; how
records are laid out (`batch.py`) and a model is sharded (`sharded`).
Use: `stats = Trainer(model).update(rollouts, advantages)`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlinfra_utils.doors import number, whole
from rlinfra_utils.offpolicy import normalized_ess_from_log
from rlinfra_utils.policy.batch import Batch, batch_logprobs, collate
from rlinfra_utils.policy.grpo import grpo_loss, kl_to_base, token_ratio
from rlinfra_utils.policy.ranks import ONE_RANK, OneRank, has_rows, my_rows, put_together
from rlinfra_utils.rollouts import Rollout
from rlinfra_utils.timers import Trace


@dataclass(frozen=True)
class UpdateStats:
    """What one update did; loss, ratio, clip share, norm and KL are means over its optimizer steps.

    `clip_share` is the share of tokens whose gradient the clip cut off. `gap` is the mean |trainer -
    behaviour| log-prob in nats before the first optimizer step: 0 at zero lag, but for arithmetic; `normalized_ess`
    is that of the sequence ratios then, 1 at zero lag.
    `kl` is to the base model, in nats a token; 0 without one. `logprobs` are the trainer's before that first step,
    shape (rollouts, tokens - 1) as in `collate`.
    """

    version: int
    optimizer_step: int
    num_tokens: int
    gap: float
    normalized_ess: float
    loss: float
    mean_ratio: float
    clip_share: float
    grad_norm: float
    kl: float
    logprobs: np.ndarray = field(repr=False, compare=False)


class Trainer:
    """A model, its optimizer and the version of its weights.

    Life: `update` raises `version` by one and `optimizer_step` by the number of gradient steps that it took.
    Invariant: an update that raises leaves weights, optimizer and both counters as they were. Trap: the
    engine does not see the weights until they are published to it; until then its version is older.

    `ranks` (`sharded.Ranks`) goes with a sharded model. Each rank is given the whole batch, so that all raise the
    same error or none, and trains on its rows of each minibatch. Losses are divided by the tokens of all ranks: the
    result is one process's, up to the order of summation.

    `lr` is AdamW's; `clip_low` and `clip_high` bound the ratio to [1 - low, 1 + high]; `max_grad_norm` may be inf.
    `kl_coef` weighs the KL to `base_model`: above 0 with one, 0 without. Raises ValueError by field.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lr: float = 3e-4,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        max_grad_norm: float = 1.0,
        base_model: PreTrainedModel | None = None,
        kl_coef: float = 0.0,
        version: int = 0,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        for name, value in (("lr", lr), ("clip_low", clip_low), ("clip_high", clip_high)):
            number(name, value, above=True)
        number("max_grad_norm", max_grad_norm, high=math.inf, above=True)
        if not 0 <= kl_coef < float("inf") or (kl_coef > 0) != (base_model is not None):
            raise ValueError(f"kl_coef={kl_coef}: a positive one goes with a base_model, 0 without")
        if base_model is model:
            raise ValueError("base_model is the trained model itself, so that its KL would stay 0: pass a copy")
        self.model, self.base_model, self.kl_coef = model, base_model, kl_coef
        self.clip_low, self.clip_high, self.max_grad_norm = clip_low, clip_high, max_grad_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.version, self.optimizer_step, self.ranks = version, 0, ranks

    def update(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        num_epochs: int = 1,
        minibatches: int = 1,
        trace: Trace | None = None,
        weights: np.ndarray | None = None,
    ) -> UpdateStats:
        """Train on `rollouts`, `num_epochs` times, in `minibatches` optimizer steps an epoch.

        `advantages` has one entry a rollout. Minibatch i takes rollouts i, i + minibatches, ..., so that each
        sees a part of every group. Without `weights` the clipped ratio is to the behaviour policy. With them,
        shape (rollouts, tokens - 1) as in `collate`, it is to the trainer before this update, and each token's
        loss is multiplied by its weight: the decoupled loss of AReaL (arXiv:2505.24298) and verl. A weight of 0
        drops a token from the loss and leaves it in the mean. Raises ValueError at the door for what cannot be
        trained on, and FloatingPointError if a loss or gradient is not finite.
        """
        trace = Trace() if trace is None else trace
        _check_update(len(rollouts), advantages, num_epochs, minibatches)
        with trace.span("logprob_recompute") as span, torch.no_grad():
            batch = self.collate(rollouts)
            logprobs = self.logprobs(batch)
            delta = torch.where(batch.mask, logprobs - batch.behavior, 0.0)
            gap = delta[batch.mask].abs().mean().item()
            ess = normalized_ess_from_log(delta.sum(-1)[batch.mask.any(-1)].cpu().numpy())
            base = None if self.base_model is None else self._all_logprobs(self.base_model, batch)
            span.set(tokens=sum(len(record.policy_mask) for record in rollouts))
        advantage = torch.tensor(np.asarray(advantages), dtype=torch.float32, device=batch.ids.device)[:, None]
        if weights is not None:
            batch, advantage = replace(batch, behavior=logprobs), advantage * _checked_weights(weights, batch.mask)
        parts = [slice(i, None, minibatches) for i in range(minibatches)] * num_epochs
        before = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        try:
            steps = [
                self._step(batch.rows(part), advantage[part], None if base is None else base[part], trace)
                for part in parts
            ]
        except BaseException:  # an interrupt by hand in the middle as well
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            raise
        self.version += 1
        self.optimizer_step += len(steps)
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        counts = (self.version, self.optimizer_step, int(batch.mask.sum()))
        return UpdateStats(*counts, gap, ess, **means, logprobs=logprobs.cpu().numpy())

    def collate(self, rollouts: Sequence[Rollout]) -> Batch:
        """`collate` for this model's vocabulary, on its device; raises ValueError as that does."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        return collate(rollouts, vocab_size, next(self.model.parameters()).device)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """`batch_logprobs` by the weights as they are: of all rollouts on each rank, which computes its own rows."""
        return self._all_logprobs(self.model, batch)

    def _all_logprobs(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        mine = batch_logprobs(model, batch.rows(my_rows(self.ranks, len(batch.ids))))
        return put_together(self.ranks, mine, len(batch.ids))

    def _share(self, batch: Batch, *columns: Tensor | None) -> tuple[Any, ...]:
        """This rank's rows of a minibatch and of `columns`; with no row of its own, one that counts for nothing."""
        rows, mine = my_rows(self.ranks, len(batch.ids)), has_rows(self.ranks, len(batch.ids))
        batch = replace(batch, mask=batch.mask & mine).rows(rows)
        return batch, *(None if column is None else column[rows] for column in columns)

    def _step(self, batch: Batch, advantage: Tensor, base: Tensor | None, trace: Trace) -> dict[str, float]:
        """One optimizer step on one minibatch; returns its statistics."""
        num_tokens = batch.mask.sum()  # of all ranks
        batch, advantage, base = self._share(batch, advantage, base)
        with trace.span("forward_backward", tokens=batch.ids.numel()):
            logprobs = batch_logprobs(self.model, batch)
            ratio = token_ratio(logprobs, batch.behavior, batch.mask)
            loss = grpo_loss(ratio, advantage, batch.mask, self.clip_low, self.clip_high, num_tokens)
            kl = torch.zeros_like(loss) if base is None else kl_to_base(logprobs, base, batch.mask, num_tokens)
            loss = loss + self.kl_coef * kl
            self.optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        is_clipped = torch.where(advantage > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        shares = {
            "loss": loss,
            "mean_ratio": (ratio * batch.mask).sum() / num_tokens,
            "clip_share": (is_clipped & batch.mask & (advantage != 0)).sum() / num_tokens,
            "kl": kl,
        }
        values = dict(zip(shares, self.ranks.sum(torch.stack(list(shares.values())).detach()).tolist()))
        # The norm over a sharded model is a DTensor.
        values["grad_norm"] = getattr(grad_norm, "full_tensor", lambda: grad_norm)().item()
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise FloatingPointError("loss={loss}, grad_norm={grad_norm}: not finite; update undone".format_map(values))
        with trace.span("optimizer_step"):
            self.optimizer.step()
        return values


def _check_update(num_rollouts: int, advantages: Sequence[float], num_epochs: int, minibatches: int) -> None:
    if len(advantages) != num_rollouts:
        raise ValueError(f"advantages has length {len(advantages)}, rollouts {num_rollouts}: one each is needed")
    for index, advantage in enumerate(advantages):
        if not np.isfinite(advantage):
            raise ValueError(f"advantages[{index}]={advantage}: an advantage must be finite")
    whole("num_epochs", num_epochs)
    whole("minibatches", minibatches, 1, max(1, num_rollouts))


def _checked_weights(weights: np.ndarray, mask: Tensor) -> Tensor:
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != tuple(mask.shape):
        raise ValueError(f"weights has shape {weights.shape}: expected {tuple(mask.shape)}, one a predicted token")
    bad = np.argwhere(~((weights >= 0) & (weights < np.inf)))
    if len(bad):
        row, token = bad[0].tolist()
        raise ValueError(f"weights[{row}, {token}]={weights[row, token]}: a weight is finite and at least 0")
    return torch.tensor(weights, dtype=torch.float32, device=mask.device)
