"""Tables of a run, from the times and versions that were written down.

Models which version made which tokens, and the queue's depth over time. Leaves out how the run came about and its
numbers over a window (`summary`). Used by `Run`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from rlinfra_utils.simulator.engines import Piece
from rlinfra_utils.simulator.protocol import Group
from rlinfra_utils.simulator.workload import Rollout
from rlinfra_utils.timers import Trace

#: Columns of `Run.rollouts`: a rollout's own, and those of its group; which of them are whole numbers.
OWN = ("rollout", "tokens", "start_s", "end_s", "verify_start_s", "verified_s")
OWN += ("start_version", "end_version", "attempts")
SHARED = ("group", "version", "dispatched_s", "ready_s", "taken_s", "taken_version", "taken_step")
WHOLE = tuple(name for name in OWN + SHARED if not name.endswith("_s"))
#: Rounding forgiven when a stretch of tokens meets an update: a nanosecond or a billionth of a token.
ROUNDING = 1e-9


def rollouts(offered: list[Rollout], groups: list[Group], end_s: float) -> pd.DataFrame:
    """See `Run.rollouts`."""
    never = (np.nan, np.nan, np.nan)
    own = [
        (
            r.index,
            r.tokens,
            r.start_s if r.start_version >= 0 else np.nan,
            *((r.end_s, r.verify_start_s, r.verified_s) if r.end_version >= 0 else never),
            r.start_version,
            r.end_version,
            r.attempt + 1,
        )
        for r in offered
    ]
    shared = [(g.index, g.version, g.dispatched_s, g.ready_s, g.taken_s, g.taken_version, g.taken_step) for g in groups]
    size = len(offered) // max(1, len(groups))
    columns = dict(zip(OWN, np.array(own, dtype=float).reshape(-1, len(OWN)).T))
    columns |= dict(zip(SHARED, np.repeat(np.array(shared, dtype=float).reshape(-1, len(SHARED)), size, axis=0).T))
    outcome = np.repeat(np.array([group.outcome for group in groups], dtype=object), size)
    columns["ready_s"] = np.where(outcome == "in_flight", np.nan, columns["ready_s"])
    for name in ("verify_start_s", "verified_s"):  # planned when decoding ended, but the run ended first
        columns[name] = np.where(columns[name] > end_s, np.nan, columns[name])
    for name in WHOLE:
        columns[name] = columns[name].astype(np.int64)
    columns["outcome"] = outcome
    return pd.DataFrame(columns, copy=False)


def events(rows: pd.DataFrame, steps: pd.DataFrame, lost: pd.DataFrame, end_s: float) -> pd.DataFrame:
    """See `Run.events`."""
    groups = rows.drop_duplicates("group")
    gone = groups["outcome"].isin(("training", "trained"))
    parts = [
        _part(groups, "dispatched_s", "dispatched", "group"),
        _part(rows, "start_s", "started", "rollout", "group"),
        _part(rows, "end_s", "decoded", "rollout", "group"),
        _part(rows, "verify_start_s", "verifying", "rollout", "group"),
        _part(rows, "verified_s", "verified", "rollout", "group"),
        _part(groups, "ready_s", "closed", "group"),
        _part(groups[groups["outcome"] == "dropped"], "taken_s", "dropped", "group"),
        _part(groups[gone].rename(columns={"taken_step": "step"}), "taken_s", "taken", "group", "step"),
        _part(steps, "trained_s", "trained", "step"),
        _part(steps, "sync_start_s", "sync_started", "step"),
        _part(steps, "sync_end_s", "published", "step"),
        _part(lost, "end_s", "lost", "rollout"),
    ]
    table = pd.concat(parts, ignore_index=True).sort_values("time_s", kind="stable", ignore_index=True)
    return table[table["time_s"] <= end_s].astype(dict.fromkeys(("rollout", "group", "step"), "int64"))


def _part(rows: pd.DataFrame, time: str, event: str, *of: str) -> pd.DataFrame:
    rows = rows[rows[time].notna()]
    part = pd.DataFrame({"time_s": rows[time].astype(float), "event": event})
    for name in ("rollout", "group", "step"):
        part[name] = rows[name] if name in of else -1
    return part


def queue(rows: pd.DataFrame, end_s: float) -> pd.DataFrame:
    """See `Run.queue`."""
    came = rows[rows["outcome"].isin(("queued", "training", "trained", "dropped"))]
    left = came[came["taken_s"].notna()]
    times = np.concatenate([[0.0], came["ready_s"], left["taken_s"]])
    changes = np.concatenate([[0], np.ones(len(came)), -np.ones(len(left))])
    tokens = np.concatenate([[0], came["tokens"], -left["tokens"]])
    order = np.argsort(times, kind="stable")
    times, depth, deep = times[order], np.cumsum(changes[order]), np.cumsum(tokens[order])
    last = np.append(times[1:] != times[:-1], True)  # of those at one time, what holds after
    table = {"time_s": times[last], "rollouts": depth[last].astype(int), "tokens": deep[last].astype(int)}
    return pd.DataFrame(table)


def version_spans(
    offered: list[Rollout], pieces: list[Piece], marks: list[list[float]], num_replicas: int
) -> pd.DataFrame:
    """See `Run.spans`. A stretch of tokens is split where its replica's clock stood at each update."""
    ended = [r for r in offered if r.end_version >= 0]
    attempts = {r.index: r.attempt for r in ended} if pieces else {}
    stretches = [(r.index, r.slot % num_replicas, r.clock, r.end_clock, r.stretch_tokens) for r in ended]
    stretches += [(p.rollout, p.replica, *p[3:]) for p in pieces if attempts.get(p.rollout) == p.attempt]
    rollout, replica, begin, end, tokens = np.array(stretches, dtype=float).reshape(-1, 5).T
    clocks = np.array(marks, dtype=float).reshape(-1, num_replicas)
    first, last = np.zeros(len(rollout), dtype=int), np.zeros(len(rollout), dtype=int)
    for number in range(num_replicas):
        on = replica == number
        first[on] = np.searchsorted(clocks[:, number], begin[on] + ROUNDING, side="right")
        last[on] = np.searchsorted(clocks[:, number], end[on] - ROUNDING, side="left")
    count = np.maximum(last - first, 0) + 1
    which = np.repeat(np.arange(len(rollout)), count)
    version = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    padded = np.vstack([np.full(num_replicas, -np.inf), clocks, np.full(num_replicas, np.inf)])
    column = replica[which].astype(int)
    low, high = np.maximum(padded[version, column], begin[which]), np.minimum(padded[version + 1, column], end[which])
    length = end[which] - begin[which]
    share = np.where(count[which] == 1, 1.0, (high - low) / np.where(length > 0, length, 1.0))
    made = share * tokens[which]
    return pd.DataFrame({"rollout": rollout[which].astype(int), "version": version, "tokens": made})


class TokenLags(NamedTuple):
    """Of each span that was trained on: lag in `versions` when taken, lag in optimizer `steps`, `tokens`."""

    versions: np.ndarray
    steps: np.ndarray
    tokens: np.ndarray


def token_lags(spans: pd.DataFrame, rows: pd.DataFrame, sync_interval: int, after_s: float = 0.0) -> TokenLags:
    """The lags of the spans of rollouts taken at `after_s` or later; a version comes each `sync_interval` steps."""
    used = (rows["outcome"].isin(("trained", "training")) & (rows["taken_s"] >= after_s)).to_numpy()
    which = spans["rollout"].to_numpy()
    kept = used[which]
    which, version = which[kept], spans["version"].to_numpy()[kept]
    versions = rows["taken_version"].to_numpy()[which] - version
    return TokenLags(
        versions, rows["taken_step"].to_numpy()[which] - sync_interval * version, spans["tokens"].to_numpy()[kept]
    )


def lag(spans: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """See `Run.lag`."""
    lags = token_lags(spans, rows, sync_interval=1)
    total = np.bincount(lags.versions, lags.tokens) if len(lags.tokens) else np.zeros(0)
    share = total / total.sum() if len(total) else total
    return pd.DataFrame({"lag": np.arange(len(total)), "tokens": total, "share": share})


def length_bias(rows: pd.DataFrame) -> pd.DataFrame:
    """Bins between the deciles of the lengths offered, with the shares of rollouts offered and trained on.

    A ratio below 1 says that rollouts of these lengths are lost. Equal lengths share a bin.
    """
    settled = rows[rows["outcome"].isin(("trained", "dropped", "failed"))]
    offered = settled["tokens"].to_numpy()
    trained = settled.loc[settled["outcome"] == "trained", "tokens"].to_numpy()
    if not len(offered):
        return pd.DataFrame(columns=["from_tokens", "to_tokens", "offered", "trained", "ratio"])
    edges = np.unique(np.quantile(offered, np.arange(1, 11) / 10, method="higher"))
    shares = [
        np.bincount(np.searchsorted(edges, lengths), minlength=len(edges)) / max(1, len(lengths))
        for lengths in (offered, trained)
    ]
    table = {"from_tokens": np.append(offered.min(), edges[:-1] + 1), "to_tokens": edges}
    return pd.DataFrame(table | {"offered": shares[0], "trained": shares[1], "ratio": shares[1] / shares[0]})


def trace(rows: pd.DataFrame, steps: pd.DataFrame, lost: pd.DataFrame, num_replicas: int) -> Trace:
    """Spans "decode", "verifier", "queue_wait" (trainer idle), "forward_backward", "weight_sync", "checkpoint"."""
    spans, verified = Trace(), {}
    for row in rows[rows["end_version"] >= 0].itertuples():
        about = {"rollout": int(row.rollout), "version": int(row.start_version)}
        decode = spans.add("decode", row.start_s, row.end_s, track="generation", tokens=int(row.tokens), **about)
        if row.verified_s == row.verified_s:
            check = spans.add("verifier", row.verify_start_s, row.verified_s, track="verifier", after=decode, **about)
            verified.setdefault(row.taken_step if row.outcome in ("trained", "training") else -1, []).append(check)
    for row in lost.itertuples():
        about = {"rollout": int(row.rollout), "error": row.why}
        spans.add("decode", row.start_s, row.end_s, track="generation", **about)
    free_s = 0.0
    for row in steps[steps["trained_s"].notna()].itertuples():
        if row.taken_s > free_s:
            spans.add("queue_wait", free_s, row.taken_s, track="trainer", wait=True)
        about = {"track": "trainer", "step": int(row.step)}
        after = verified.get(row.step, [])
        spans.add("forward_backward", row.taken_s, row.trained_s, tokens=int(row.tokens), after=after, **about)
        free_s = row.trained_s
        if row.sync_end_s == row.sync_end_s:
            spans.add("weight_sync", row.sync_start_s, row.sync_end_s, **about)
            free_s = row.sync_end_s
        if row.checkpoint_s:
            spans.add("checkpoint", free_s, free_s + row.checkpoint_s, **about)
            free_s += row.checkpoint_s
    return spans
