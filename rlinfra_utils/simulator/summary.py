"""The numbers of a run over a window of its time: `summary`.

Models the clipping of intervals to the window, means over what happened in it. Leaves out the tables that these are
taken from (`views`), and confidence intervals. Used by `Run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from rlinfra_utils.simulator.views import token_lags

if TYPE_CHECKING:
    from rlinfra_utils.simulator.run import Run


class _Window(NamedTuple):
    """A run from `after_s` on, which is `length_s`; the rollouts taken in it and trained, and those lost in it."""

    run: Run
    after_s: float
    length_s: float
    trained: pd.DataFrame
    gone: pd.DataFrame

    def seconds(self, start_s, end_s) -> np.ndarray:
        """Of each interval, what lies in the window; one without an end goes on, one without a start is 0."""
        low_s, high_s = self.after_s, self.run.end_s
        start_s, end_s = np.asarray(start_s, dtype=float), np.asarray(end_s, dtype=float)
        end_s = np.where(np.isnan(end_s), high_s, end_s)
        return np.nan_to_num(np.maximum(np.clip(end_s, low_s, high_s) - np.clip(start_s, low_s, high_s), 0.0))


def summary(run: Run, after_s: float) -> dict[str, float | str]:
    """The run from `after_s` to its end.

    tokens_per_s: trained tokens; decoded_tokens_per_s: of rollouts decoded, lost attempts not among them.
    *_utilization: working share of slots (pauses apart), verifiers and trainer (a step, without sync and checkpoint).
    *_wait_s: mean wait for a slot, a verifier, the group's slowest, the trainer, each of those that had it.
    lag_*: of trained tokens, in versions. rollout_lag_mean: of their first tokens. step_lag_mean: in optimizer steps,
    of which a version has sync_interval. normalized_ess: of synthetic weights whose log is normal with variance
    drift_nats^2 an optimizer step of lag and mean weight 1: 1 / mean exp(drift^2 * step lag).
    wasted_tokens: of dropped and failed groups and of lost attempts; reread_tokens: prompts and partial answers
    read again after aborts (whole run). trained_length_ratio: mean length trained on over that offered.
    """
    rows = run.rollouts
    window = _Window(
        run=run,
        after_s=after_s,
        length_s=max(run.end_s - after_s, 1e-300),
        trained=rows[(rows["outcome"] == "trained") & (rows["taken_s"] >= after_s)],
        gone=rows[rows["outcome"].isin(("dropped", "failed")) & (rows["ready_s"] >= after_s)],
    )
    numbers = {"elapsed_s": run.end_s}
    for part in (_throughput, _shares, _waits, _depths, _lags, _losses):
        numbers |= part(window)
    whole = {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}
    return {"status": run.status, **whole}


def _throughput(window: _Window) -> dict[str, float]:
    rows, steps, after_s, trained = window.run.rollouts, window.run.steps, window.after_s, window.trained
    decoded = rows.loc[(rows["end_s"] >= after_s) & (rows["end_version"] >= 0), "tokens"].sum()
    return {
        "steps": int((steps["trained_s"] >= after_s).sum()),
        "trained_rollouts": len(trained),
        "rollouts_per_s": len(trained) / window.length_s,
        "tokens_per_s": trained["tokens"].sum() / window.length_s,
        "decoded_tokens_per_s": decoded / window.length_s,
    }


def _shares(window: _Window) -> dict[str, float]:
    run, config, seconds = window.run, window.run.config, window.seconds
    rows, steps, lost = run.rollouts, run.steps, run.lost
    slot_s = seconds(rows["start_s"], rows["end_s"]).sum() + seconds(lost["start_s"], lost["end_s"]).sum()
    paused_s = seconds(steps["sync_start_s"], steps["sync_end_s"])
    slot_s -= paused_s @ steps["paused_slots"].to_numpy()
    verifier_s = seconds(rows["verify_start_s"], rows["verified_s"]).sum()
    return {
        "generation_utilization": slot_s / (config.num_slots * window.length_s),
        "verifier_utilization": verifier_s / (config.num_verifiers * window.length_s),
        "trainer_utilization": seconds(steps["taken_s"], steps["trained_s"]).sum() / window.length_s,
        "sync_share": paused_s.sum() / window.length_s,
    }


def _waits(window: _Window) -> dict[str, float]:
    rows = window.run.rollouts
    waits = {
        "slot_wait_s": rows["start_s"] - rows["dispatched_s"],
        "verifier_wait_s": rows["verify_start_s"] - rows["end_s"],
        "group_wait_s": (rows["ready_s"] - rows["verified_s"]).where(rows["outcome"] != "failed"),
        "queue_wait_s": rows["taken_s"] - rows["ready_s"],
    }
    late = (rows["dispatched_s"] >= window.after_s).to_numpy()
    return {name: _mean(wait.to_numpy()[late]) for name, wait in waits.items()}


def _depths(window: _Window) -> dict[str, float]:
    times_s, depth = (window.run.queue[name].to_numpy() for name in ("time_s", "rollouts"))
    held_s = window.seconds(times_s, np.append(times_s[1:], window.run.end_s))
    return {
        "queue_mean": float(depth @ held_s / window.length_s),
        "queue_max": int(depth[held_s > 0].max(initial=0)),
    }


def _lags(window: _Window) -> dict[str, float]:
    run, config, trained = window.run, window.run.config, window.trained
    stale = token_lags(run.spans, run.rollouts, config.sync_interval, window.after_s)
    lags, tokens = stale.versions.astype(float), stale.tokens.astype(float)
    return {
        "lag_mean": _mean(lags, tokens),
        "lag_p95": _weighted_quantile(lags, tokens, 0.95),
        "lag_max": lags.max(initial=0.0),
        "rollout_lag_mean": _mean((trained["taken_version"] - trained["start_version"]).to_numpy()),
        "step_lag_mean": _mean(stale.steps, tokens),
        "normalized_ess": 1 / _mean(np.exp(config.drift_nats**2 * stale.steps), tokens),
    }


def _losses(window: _Window) -> dict[str, float]:
    run, trained, gone = window.run, window.trained, window.gone
    lost = run.lost[run.lost["end_s"] >= window.after_s]
    settled = pd.concat([trained["tokens"], gone["tokens"]])
    return {
        "discarded_rollouts": len(gone),
        "lost_attempts": len(lost),
        "wasted_tokens": gone["tokens"].sum() + lost["tokens"].sum(),
        "reread_tokens": run.reread_tokens,
        "trained_length_ratio": _mean(trained["tokens"].to_numpy()) / _mean(settled.to_numpy()),
    }


def _mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    values = np.asarray(values, dtype=float)
    if weights is None:
        weights = np.ones(len(values))
    there = ~np.isnan(values)
    total = weights[there].sum()
    return float(values[there] @ weights[there] / total) if total else float("nan")


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """The smallest value that at least this share of the weight does not exceed."""
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(reached, share * reached[-1]), len(values) - 1)])
