"""Training on stale data, on purpose: each batch was sampled `lag` versions before it is trained on.

Models: a real engine and trainer with a delay queue between them, in one thread so that a seed repeats a run; one
measure against staleness; the clock of the overlapped loop. Leaves out: what `delay` leaves out, and noise of time.
Use: `run = run_with_lag(engine, trainer, tokenizer, 8, measures(8)["cap"], costs)`; `run.curve`, `run.at(...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils import offpolicy
from rlinfra_utils.doors import choice, number, whole
from rlinfra_utils.policy.delay import Clock, DelayQueue, Group, StageCosts
from rlinfra_utils.policy.loop import DECODING, evaluate
from rlinfra_utils.policy.measures import Measure
from rlinfra_utils.policy.trainer import Trainer
from rlinfra_utils.rollouts import Decoding

EVAL_SEED = 2_000_000
#: What a comparison may hold equal, as columns of `LagRun.curve`.
BUDGETS = ("num_updates", "num_rollouts", "time_s")


@dataclass
class LagRun:
    """What a run did. Counters are rollouts by response length in tokens.

    `trained` went into an update; of these, `masked` had a weight of 0 on each token. `discarded` were too old, and
    `num_in_flight` were under way at the end: `num_sampled` is trained + discarded + in flight.
    `updates`, a row an update: version before it, lag, mean training reward; of the data before the first step the
    normalised ESS by token and by sequence, the share of ratios outside the trainer's clip range, the largest
    |log sequence weight| and k3 in nats; clip share and gradient norm of the steps. `curve`, a row an evaluation:
    `BUDGETS` and the parts of the reward.
    """

    num_sampled: int = 0
    num_in_flight: int = 0
    trained: Counter = field(default_factory=Counter)
    masked: Counter = field(default_factory=Counter)
    discarded: Counter = field(default_factory=Counter)
    updates: pd.DataFrame = field(default_factory=pd.DataFrame)
    curve: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def dropped_share(self) -> float:
        """Share of the rollouts that came out of the queue and moved no weight: discarded or masked."""
        num_out = self.trained.total() + self.discarded.total()
        return (self.discarded.total() + self.masked.total()) / num_out

    def at(self, budget: str, value: float, part: str = "correctness") -> float:
        """Reward `part` where `budget`, one of `BUDGETS`, is `value`: between two evaluations on a straight line.

        Raises ValueError for another budget, and for a value that the run did not reach.
        """
        return float(np.interp(value, self._spent(budget, value), self.curve[part]))

    def mean_until(self, budget: str, value: float, part: str = "correctness") -> float:
        """Mean of reward `part` from the start to `value`: the area under the curve, less noisy than its end.

        Raises ValueError as `at` does, and for a value of 0.
        """
        number("value", value, above=True)
        spent, scores = self._spent(budget, value), self.curve[part].to_numpy()
        inside = spent < value
        x, y = np.append(spent[inside], value), np.append(scores[inside], self.at(budget, value, part))
        return float(np.trapezoid(y, x) / value)

    def _spent(self, budget: str, value: float) -> np.ndarray:
        spent = self.curve[choice("budget", budget, BUDGETS)].to_numpy()
        if not spent[0] <= value <= spent[-1]:
            raise ValueError(f"value={value:g} of {budget}: the run was evaluated from {spent[0]:g} to {spent[-1]:g}")
        return spent


def run_with_lag(
    engine: Any,
    trainer: Trainer,
    tokenizer: Any,
    lag: int,
    measure: Measure,
    costs: StageCosts,
    num_updates: int = 40,
    prompts_per_step: int = 16,
    group_size: int = 8,
    num_epochs: int = 2,
    minibatches: int = 2,
    decoding: Decoding = DECODING,
    long_late: bool = False,
    evaluate_every: int = 5,
    num_eval_prompts: int = 500,
    seed: int = 0,
) -> LagRun:
    """Train for `num_updates` on data `lag` versions old, or as old as `measure` lets them become.

    The first lag + 1 batches are of version 0, since a queue has to fill. With `long_late` a group comes back after
    a delay in proportion to its longest answer, `lag` on average, and not in the order in which it was sent.
    `trainer` and `engine` start at version 0 with the same weights; the trainer's learning rate is left as it was.
    Raises ValueError for other versions, and for a lag, seed or size that is out of range.
    """
    lag, num_updates = whole("lag", lag, 0), whole("num_updates", num_updates)
    evaluate_every, seed = whole("evaluate_every", evaluate_every), whole("seed", seed, 0)
    if engine.version or trainer.version:
        raise ValueError(f"engine.version={engine.version}, trainer.version={trainer.version}: both start at 0")
    run, clock = LagRun(), Clock(costs)
    queue = DelayQueue(engine, tokenizer, clock, prompts_per_step, group_size, decoding, seed, long_late)
    rows, curve = [], []
    for version in range(num_updates + 1):
        if version % evaluate_every == 0 or version == num_updates:
            spent = {"num_updates": version, "num_rollouts": queue.num_sampled, "time_s": clock.trainer_s}
            curve.append(spent | evaluate(engine, tokenizer, num_eval_prompts, EVAL_SEED, decoding))
        if version < num_updates:
            rows.append(_update(run, queue, trainer, lag, measure, measure.num_epochs or num_epochs, minibatches))
    run.num_sampled, run.num_in_flight = queue.num_sampled, len(_flat(queue.groups, "records"))
    run.updates, run.curve = pd.DataFrame(rows), pd.DataFrame(curve)
    return run


def _update(
    run: LagRun,
    queue: DelayQueue,
    trainer: Trainer,
    lag: int,
    measure: Measure,
    num_epochs: int,
    minibatches: int,
) -> dict[str, float]:
    """One update on the queue's next batch, published to the engine; its row of `LagRun.updates`."""
    version = trainer.version
    fresh, stale = queue.take(measure.depth(lag, version), version, measure.max_lag)
    row, weights = _look(trainer, fresh, measure)
    with _learning_rate(trainer, row["lr_factor"]):
        records, advantages = _flat(fresh, "records"), _flat(fresh, "advantages")
        stats = trainer.update(records, advantages, num_epochs, minibatches, weights=weights)
    queue.clock.train(max(group.ready_s for group in fresh), num_epochs * minibatches)
    queue.engine.adopt(trainer.model, trainer.version)
    _count(run, fresh, stale, weights)
    return row | {"loss_clip_share": stats.clip_share, "grad_norm": stats.grad_norm}


def _look(trainer: Trainer, groups: Sequence[Group], measure: Measure) -> tuple[dict[str, float], np.ndarray | None]:
    """How far a batch is from the trainer before the update, and the weights that the measure gives its tokens."""
    records = _flat(groups, "records")
    batch = trainer.collate(records)
    logprobs = trainer.logprobs(batch).cpu().numpy()
    behavior, mask = batch.behavior.cpu().numpy(), batch.mask.cpu().numpy()
    apart = offpolicy.summarize(logprobs, behavior, mask, (trainer.clip_low, trainer.clip_high))
    lags = offpolicy.lag(trainer.version, [record.policy_version for record in records])
    row = {
        "version": trainer.version,
        "mean_lag": float(lags.mean()),
        "max_lag": int(lags.max()),
        "reward": float(np.mean(_flat(groups, "rewards"))),
        "token_ess": apart.token.normalized_ess,
        "sequence_ess": apart.sequence.normalized_ess,
        "clip_share": apart.clip.fraction,
        "max_abs_log": apart.sequence.max_abs_log,
        "k3": apart.k3,
        "lr_factor": apart.sequence.normalized_ess if measure.lr_by_ess else 1.0,
    }
    return row, measure.weights(offpolicy.log_ratio(logprobs, behavior, mask), mask)


def _count(run: LagRun, fresh: Sequence[Group], stale: Sequence[Group], weights: np.ndarray | None) -> None:
    lengths = [len(record.response_tokens) for record in _flat(fresh, "records")]
    run.trained.update(lengths)
    run.discarded.update(len(record.response_tokens) for record in _flat(stale, "records"))
    if weights is not None:
        run.masked.update(length for length, row in zip(lengths, weights, strict=True) if not row.any())


def _flat(groups: Sequence[Group], name: str) -> list[Any]:
    return [value for group in groups for value in getattr(group, name)]


@contextmanager
def _learning_rate(trainer: Trainer, factor: float) -> Iterator[None]:
    """Multiply the learning rate for one update."""
    before = [group["lr"] for group in trainer.optimizer.param_groups]
    for group, lr in zip(trainer.optimizer.param_groups, before, strict=True):
        group["lr"] = lr * factor
    try:
        yield
    finally:
        for group, lr in zip(trainer.optimizer.param_groups, before, strict=True):
            group["lr"] = lr
