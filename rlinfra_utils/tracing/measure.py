"""Numbers of one rollout and of one training batch, from a run's rows: `per_rollout`, `per_batch`.

Models: lengths, ends, rewards, versions and log-probs as columns; a value that the files do not hold is NaN, never 0.
Leaves out what is too much or too little (`rules.py`) and the summary over a run (`metrics.py`).
Use: `per_batch(run)[["optimizer_step", "lag_max", "normalized_ess"]]`.

The trainer's own log-probs are read from `per_token["trainer_logprobs"]` (token axis, width 1). What an update says of
itself is read from the batch's `stats`, by the names of `STATS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils import offpolicy
from rlinfra_utils.rollouts import STOP_REASONS
from rlinfra_utils.tracing.reading import RunData, require_run

TRAINER_LOGPROBS = "trainer_logprobs"
#: Names in a batch's `stats` that figures are read from, with their meaning.
STATS = {
    "kl": "KL to the base model, nats a token; left out of the stats where there is no base",
    "entropy": "entropy of the policy, nats a token",
    "mean_ratio": "mean importance ratio of the tokens; used where no trainer log-probs are stored",
    "normalized_ess": "ESS / n of the tokens; used where no trainer log-probs are stored",
}
LAGS, WEIGHTS = ("lag_mean", "lag_max"), ("mean_ratio", "normalized_ess")


def per_rollout(run: RunData) -> pd.DataFrame:
    """One row a rollout, in the order of `run.rollouts`: what metrics need of it.

    `technical_failure`: the engine gave it up or an error ended it. `reward`: sum of the record's parts. `versions`,
    `trainer_logprobs`, `behavior_logprobs`: arrays over its policy tokens (trainer's: None where not stored).
    `written_unix_s`: when its file was whole.
    """
    branches = require_run(run).description.branches
    only = next(iter(branches)) if len(branches) == 1 else None
    frame = run.rollouts
    out = frame[["rollout_id", "group_id", "stop_reason", "num_retries"]].copy()
    out["branch_id"] = frame["branch_id"].where(frame["branch_id"].notna(), only)
    written_unix_s = _written(run.events)
    for name, source, number in (
        ("num_prompt_tokens", "prompt_tokens", _length),
        ("num_response_tokens", "response_tokens", _length),
        ("truncated", "truncated", lambda value: np.nan if value is None else float(value)),
        ("technical_failure", "stop_reason", _failed),
        ("reward", "reward", lambda parts: float(sum(parts.values())) if parts else np.nan),
        ("written_unix_s", "file", lambda file: written_unix_s.get(file, np.nan)),
    ):
        out[name] = pd.Series([number(value) for value in frame[source]], index=out.index, dtype=float)
    out["duration_s"] = (frame["finished_s"] - frame["started_s"]).astype(float)
    tokens = [_policy_tokens(row) for row in frame.itertuples()]
    for name in ("versions", "behavior_logprobs", "trainer_logprobs"):
        out[name] = pd.Series([row[name] for row in tokens], index=out.index, dtype=object)
    return out


def _length(tokens: Any) -> float:
    return np.nan if tokens is None else float(len(tokens))


def _failed(stop_reason: Any) -> float:
    return float(STOP_REASONS[stop_reason] is None) if stop_reason in STOP_REASONS else np.nan


def _written(events: pd.DataFrame) -> dict[str, float]:
    """When each file of rollouts was whole."""
    rows = events[events["kind"] == "rollouts"]
    return dict(zip(rows["file"], rows["time_unix_s"])) if len(rows) else {}


def _policy_tokens(row: Any) -> dict[str, np.ndarray | None]:
    """Versions and log-probs of the tokens that the policy sampled; None for what is absent or of another length."""
    empty = dict.fromkeys(("versions", "behavior_logprobs", "trainer_logprobs"))
    if row.response_tokens is None or row.prompt_tokens is None or row.policy_mask is None:
        return empty
    num_prompt, num_response = len(row.prompt_tokens), len(row.response_tokens)
    mask = np.asarray(row.policy_mask)[num_prompt:] == 1
    if len(mask) != num_response or not mask.any():
        return empty
    side = (row.per_token or {}).get(TRAINER_LOGPROBS)
    narrow = side is not None and all(len(value) == 1 for value in side)
    trainer = np.array([value[0] for value in side], float)[num_prompt:] if narrow else None
    columns = {"versions": _versions(row), "behavior_logprobs": row.behavior_logprobs, "trainer_logprobs": trainer}
    return {
        name: np.asarray(column)[mask] if column is not None and len(column) == num_response else None
        for name, column in columns.items()
    }


def _versions(row: Any) -> np.ndarray | None:
    if row.version_spans is not None and len(row.version_spans):
        lengths = [max(span["end"] - span["start"], 0) for span in row.version_spans]
        return np.repeat([span["version"] for span in row.version_spans], lengths)
    return None if row.policy_version is None else np.full(len(row.response_tokens), int(row.policy_version))


def per_batch(run: RunData, rollouts: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a training batch, in order of writing: identity, means over its stored rollouts, and its `stats`.

    `lag_mean`, `lag_max`: trained version minus the version of each token, by `offpolicy.lag`. `normalized_ess` and
    `mean_ratio`: token weights trainer / behaviour, by `offpolicy.summarize`. Other stats keep their names. A column
    is NaN where its batch does not hold it, and where what it holds makes no sense: `.attrs["refused"]` then has the
    first such sentence by column. `rollouts`: the result of `per_rollout`, if it is at hand.
    """
    rollouts = per_rollout(run) if rollouts is None else rollouts
    by_id = rollouts.drop_duplicates("rollout_id").set_index("rollout_id")
    identity = ["time_unix_s", "branch_id", "config_hash", "training_batch_id", "optimizer_step", "rolled_back"]
    rows, refused = [], {}
    for batch in run.batches.itertuples():
        members = by_id.loc[[rollout_id for rollout_id in batch.rollout_ids if rollout_id in by_id.index]]
        measured = _means(members)
        for figures, names in ((_lags, LAGS), (_weights, WEIGHTS)):
            try:
                measured |= figures(members, batch)
            except ValueError as error:
                measured |= dict.fromkeys(names, np.nan)
                refused |= {name: f"{batch.training_batch_id}: {error}" for name in names if name not in refused}
        said = {name: value for name, value in batch.stats.items() if np.isnan(measured.get(name, np.nan))}
        rows.append({name: getattr(batch, name) for name in identity} | measured | said)
    columns = [*identity, *_means(by_id[:0]), *LAGS, *WEIGHTS, *STATS]
    others = dict.fromkeys(name for row in rows for name in row)
    table = pd.DataFrame(rows, columns=list(dict.fromkeys([*columns, *others])))
    table.attrs["refused"] = refused
    return table


def _means(members: pd.DataFrame) -> dict[str, float]:
    logprobs = [values for values in members["behavior_logprobs"] if values is not None]
    waits = members["written_unix_s"]
    return {
        "num_rollouts": len(members),
        "mean_prompt_tokens": members["num_prompt_tokens"].mean(),
        "mean_response_tokens": members["num_response_tokens"].mean(),
        "truncation_share": members["truncated"].mean(),
        "technical_failure_share": members["technical_failure"].mean(),
        "degenerate_group_share": degenerate_share(members),
        "mean_reward": members["reward"].mean(),
        "mean_behavior_logprob": float(np.concatenate(logprobs).astype(float).mean()) if logprobs else np.nan,
        "written_unix_s": waits.mean(),
    }


def degenerate_share(rollouts: pd.DataFrame) -> float:
    """Share of the groups of two or more whose rewards are all equal; NaN without such a group."""
    known = rollouts[rollouts["reward"].notna() & rollouts["group_id"].notna()]
    groups = known.groupby("group_id")["reward"].agg(["size", "min", "max"])
    groups = groups[groups["size"] >= 2]
    return float((groups["min"] == groups["max"]).mean()) if len(groups) else np.nan


def _lags(members: pd.DataFrame, batch: Any) -> dict[str, float]:
    versions = [values for values in members["versions"] if values is not None]
    if not versions:
        return dict.fromkeys(LAGS, np.nan)
    lags = offpolicy.lag(int(batch.trained_policy_version), np.concatenate(versions))
    return {"lag_mean": float(lags.mean()), "lag_max": float(lags.max())}


def _weights(members: pd.DataFrame, batch: Any) -> dict[str, float]:
    pairs = [
        (trainer.astype(float), behavior.astype(float))
        for trainer, behavior in zip(members["trainer_logprobs"], members["behavior_logprobs"])
        if trainer is not None and behavior is not None
    ]
    if not pairs:
        return dict.fromkeys(WEIGHTS, np.nan)
    trainer, behavior = (np.concatenate(side) for side in zip(*pairs))
    weights = offpolicy.summarize(trainer, behavior, np.ones(len(trainer))).token
    return {"mean_ratio": weights.mean, "normalized_ess": weights.normalized_ess}
