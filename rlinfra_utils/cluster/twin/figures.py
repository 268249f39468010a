"""What a predicted run and a real one are compared in: `Figures`, taken from both by the same arithmetic.

Models throughput, lag by tokens and the queue's depth over time, once the run has warmed up. Leaves out learning.
Use: `compare(made.figures(run), measure("out/run"))`; `median([measure(path) for path in paths])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.tracing import read_run

#: Updates at a run's beginning that no figure is taken from.
WARMUP_UPDATES = 3
#: How far a prediction may be off: tokens/s by ratio, the others by difference.
BARS = {"tokens_per_s": 0.10, "lag_mean": 0.25, "lag_variation": 0.15, "queue_p95_batches": 1.0}


@dataclass(frozen=True)
class Figures:
    """What is compared. `lag_shares`: share of trained tokens by lag in versions, from 0."""

    tokens_per_s: float
    lag_mean: float
    lag_shares: tuple[float, ...]
    queue_p95_batches: float


def measure(folder: str | Path, warmup: int = WARMUP_UPDATES) -> Figures:
    """The figures of a real run. Raises ValueError for a run of fewer than `warmup` + 2 updates."""
    run = read_run(folder)
    config = ClusterConfig.from_json(run.description.config)
    batches = run.batches[~run.batches["rolled_back"]]
    if len(batches) < warmup + 2:
        raise ValueError(f"{folder}: {len(batches)} updates; needs at least {warmup + 2}")
    by_id = run.rollouts.set_index("rollout_id")
    members = [by_id.loc[ids] for ids in batches["rollout_ids"]]
    tokens = np.array([rows["response_length"].sum() for rows in members])
    lags = [version - rows["policy_version"] for version, rows in zip(batches["trained_policy_version"], members)]
    late = slice(warmup, None)
    queue = run.events[run.events["kind"] == "queue"]
    return figures(
        batches["time_unix_s"].to_numpy(),
        tokens,
        pd.concat(lags[late]),
        pd.concat([rows["response_length"] for rows in members[late]]),
        queue["time_unix_s"],
        queue["depth_rollouts"].to_numpy() / config.batch_rollouts,
        warmup,
    )


def figures(ends_s: Any, tokens: Any, lags: Any, weights: Any, queue_s: Any, depth: Any, warmup: int) -> Figures:
    """From the end of update `warmup` to that of the last one; the queue's p95 is over time."""
    ends_s, queue_s = np.asarray(ends_s, dtype=float), np.asarray(queue_s, dtype=float)
    begin_s, end_s = ends_s[warmup - 1], ends_s[-1]
    lags, weights = np.asarray(lags, dtype=int), np.asarray(weights, dtype=float)
    shares = np.bincount(lags, weights) / weights.sum()
    held_s = np.diff(np.clip(np.append(queue_s, np.inf), begin_s, end_s))
    order = np.argsort(depth, kind="stable")
    covered = np.cumsum(held_s[order])
    p95 = float(np.asarray(depth)[order][np.searchsorted(covered, 0.95 * covered[-1])])
    rate = float(np.asarray(tokens)[warmup:].sum() / (end_s - begin_s))
    return Figures(rate, float(lags @ weights / weights.sum()), tuple(shares.tolist()), p95)


def compare(predicted: Figures, measured: Figures) -> dict[str, float | bool]:
    """Predicted over measured tokens/s, the other differences as they are, and whether all keep to `BARS`."""
    size = max(len(predicted.lag_shares), len(measured.lag_shares))
    a, b = (np.pad(figures.lag_shares, (0, size - len(figures.lag_shares))) for figures in (predicted, measured))
    found = {
        "tokens_per_s": predicted.tokens_per_s / measured.tokens_per_s,
        "lag_mean": predicted.lag_mean - measured.lag_mean,
        "lag_variation": float(np.abs(a - b).sum() / 2),
        "queue_p95_batches": predicted.queue_p95_batches - measured.queue_p95_batches,
    }
    missed = [name for name, value in found.items() if abs(value - (name == "tokens_per_s")) > BARS[name]]
    return found | {"missed": ", ".join(missed)}


def median(figures: list[Figures]) -> Figures:
    """The median of each figure over several runs; lag shares by lag, brought back to a sum of 1."""
    size = max(len(one.lag_shares) for one in figures)
    shares = np.median([np.pad(one.lag_shares, (0, size - len(one.lag_shares))) for one in figures], axis=0)
    numbers = [
        float(np.median([getattr(one, name) for one in figures]))
        for name in ("tokens_per_s", "lag_mean", "queue_p95_batches")
    ]
    return Figures(numbers[0], numbers[1], tuple((shares / shares.sum()).tolist()), numbers[2])
