"""Which metrics each group holds, and from which rows: `data`, `policy`, `system`, `spans`, `reliability`.

Models: the list of lesson step 12.5.2, name by name. Leaves out the rows themselves (`measure.py`) and whose turn it
is (`metrics.py`). Each function puts all its names on the sheet, absent ones with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from rlinfra_utils.timers.tables import summary
from rlinfra_utils.tracing.measure import TRAINER_LOGPROBS
from rlinfra_utils.tracing.sheet import Sheet

_NO_ROLLOUT = "no rollout of this branch is stored"
_NO_BATCH = "no training batch of this branch stands in batches.jsonl"
_NO_EVENT = "events.jsonl holds no event of this branch"
_NO_TRACE = "trace.json is not there or cannot be read"
#: What is compared across a restart.
GAPS = ("mean_reward", "mean_response_tokens", "loss", "kl", "grad_norm")


def data(sheet: Sheet, rollouts: pd.DataFrame, batches: pd.DataFrame) -> None:
    """Lengths, ends, failures, groups without signal, rewards.

    Groups are looked at within a batch, for a group_id may come again with the next pass over the prompts; the share
    is the mean over batches.
    """
    none = _NO_ROLLOUT if rollouts.empty else ""
    sheet.spread("prompt_tokens", rollouts["num_prompt_tokens"], "tokens", none or "no record has prompt_tokens")
    sheet.spread("response_tokens", rollouts["num_response_tokens"], "tokens", none or "no record has response_tokens")
    shares = rollouts["stop_reason"].value_counts(normalize=True)
    if shares.empty:
        sheet.put("stop_reason_share", None, "1", none or "no record has a stop_reason")
    for stop_reason, share in shares.items():
        sheet.put("stop_reason_share", share, "1", "", stop_reason=str(stop_reason))
    sheet.put("truncation_share", rollouts["truncated"].mean(), "1", none or "no record says whether it is truncated")
    failures = rollouts["technical_failure"].mean()
    sheet.put("technical_failure_share", failures, "1", none or "no record has a known stop_reason")
    reason = _NO_BATCH if batches.empty else "no batch has a group of two with rewards; group_id or reward is missing"
    sheet.put("degenerate_group_share", batches["degenerate_group_share"].mean(), "1", reason)
    sheet.spread("reward", rollouts["reward"], "1", none or "no record has a reward")


def policy(sheet: Sheet, batches: pd.DataFrame, rollouts: pd.DataFrame, refused: Mapping[str, str]) -> None:
    """Distance from the base and from the behaviour policy; means over batches, each batch counting once."""
    none = _NO_BATCH if batches.empty else ""
    sheet.put("kl_to_base", batches["kl"].mean(), "nats/token", none or "no batch has stats.kl")
    sheet.put("entropy", batches["entropy"].mean(), "nats/token", none or "no batch has stats.entropy")
    logprobs = [values.astype(float) for values in rollouts["behavior_logprobs"] if values is not None]
    mean = np.concatenate(logprobs).mean() if logprobs else None
    sheet.put("behavior_logprob", mean, "nats/token", _NO_ROLLOUT if rollouts.empty else "no record has log-probs")
    unknown = f"neither records hold per_token[{TRAINER_LOGPROBS!r}] nor batches stats"
    for name, column in (("importance_ratio", "mean_ratio"), ("normalized_ess", "normalized_ess")):
        reason = refused.get(column) or none or f"{unknown}.{column}"
        sheet.put(name, batches[column].mean(), "1", reason)
    reason = none or refused.get("lag_mean") or "no record of a batch has a behaviour version"
    sheet.put("policy_lag_mean", batches["lag_mean"].mean(), "versions", reason)
    sheet.put("policy_lag_max", batches["lag_max"].max(), "versions", reason)


def system(sheet: Sheet, rollouts: pd.DataFrame, batches: pd.DataFrame, events: pd.DataFrame) -> None:
    """Durations, queue, memory and retries, as events and records say them."""
    none = _NO_ROLLOUT if rollouts.empty else "no record has started_s and finished_s"
    sheet.spread("rollout_duration", rollouts["duration_s"], "s", none)
    waited = batches["time_unix_s"] - batches["written_unix_s"]
    reason = _NO_BATCH if batches.empty else "no file of rollouts has its event"
    sheet.spread("stored_to_trained", waited.astype(float), "s", reason)
    sheet.spread("queue_depth", field(events, "queue", "depth_rollouts"), "rollouts", "no event of kind queue")
    sheet.spread("weight_sync", field(events, "weight_sync", "seconds"), "s", "no event of kind weight_sync")
    memory = events[events["kind"] == "memory"]
    if memory.empty:
        sheet.put("peak_memory", None, "bytes", "no event of kind memory")
    else:
        for worker, peak in memory.groupby(memory["worker"].fillna("unnamed"))["peak_bytes"].max().items():
            sheet.put("peak_memory", peak, "bytes", "", worker=str(worker))
    sheet.put("retry_events", count(events, "retry"), "1", _NO_EVENT)
    retries = None if rollouts.empty else rollouts["num_retries"].sum(min_count=1)
    sheet.put("rollout_retries", retries, "1", _NO_ROLLOUT if rollouts.empty else "no record has num_retries")


def spans(sheet: Sheet, table: pd.DataFrame | None) -> None:
    """Rates, waiting and utilisation from the spans; utilisation is working seconds over the trace's makespan."""
    table = None if table is None else table[~table["warmup"]]
    if table is None or table.empty:
        for name, unit in (("throughput", "tokens/s"), ("queue_wait", "s"), ("utilisation", "1")):
            sheet.put(name, None, unit, _NO_TRACE if table is None else "trace.json has no span")
        return
    stages = summary(table)
    rates = stages["tokens_per_s"].astype(float).dropna()
    if rates.empty:
        sheet.put("throughput", None, "tokens/s", "no span states tokens")
    for stage, rate in rates.items():
        sheet.put("throughput", rate, "tokens/s", "", stage=str(stage))
    waits = stages["wait_s"].get("queue_wait")
    sheet.put("queue_wait", waits, "s", "trace.json has no span queue_wait")
    makespan_s = table["end_s"].max() - table["start_s"].min()
    working_s = table["self_s"].where(~table["wait"], 0.0).groupby(table["track"]).sum()
    for track, seconds in working_s.items():
        share = seconds / makespan_s if makespan_s > 0 else None
        sheet.put("utilisation", share, "1", "the trace lasts 0 s", pool=str(track))


def reliability(sheet: Sheet, every_batch: pd.DataFrame, events: pd.DataFrame, now_unix_s: float | None) -> None:
    """Checkpoints, restores, losses, and what changed across the last restart."""
    saved = events[events["kind"] == "checkpoint_saved"]
    age = None if saved.empty or now_unix_s is None else now_unix_s - saved["time_unix_s"].max()
    sheet.put("checkpoint_age", age, "s", "no event of kind checkpoint_saved")
    for name, kind in (("checkpoint_save", "checkpoint_saved"), ("restore", "restored")):
        sheet.spread(name, field(events, kind, "seconds"), "s", f"no event of kind {kind}")
    sheet.put("lost_rollouts", count(events, "rollout_lost"), "rollouts", _NO_EVENT)
    sheet.put("worker_deaths", count(events, "worker_died"), "1", _NO_EVENT)
    pair = restart_pair(every_batch, events)
    gaps = {} if pair is None else {name: pair[1].get(name, np.nan) - pair[0].get(name, np.nan) for name in GAPS}
    gaps = {name: float(gap) for name, gap in gaps.items() if gap == gap}
    if not gaps:
        reason = "no event of kind restored with a batch on both sides"
        sheet.put("restart_gap", None, "as the metric", reason if pair is None else "no figure on both sides")
    for name, gap in gaps.items():
        against = "same step" if pair[0]["optimizer_step"] == pair[1]["optimizer_step"] else "step before"
        sheet.put("restart_gap", gap, "as the metric", "", metric=name, against=against)


def restart_pair(every_batch: pd.DataFrame, events: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """The batch before the last restore and the first one after it; of a step trained twice, the same step.

    Before may be a batch that the restore undid, or one of another branch.
    """
    restored = events[events["kind"] == "restored"]
    if restored.empty:
        return None
    at_unix_s = restored["time_unix_s"].max()
    own = every_batch["branch_id"] == restored["branch_id"].iloc[-1]
    after = every_batch[own & (every_batch["time_unix_s"] > at_unix_s)]
    before = every_batch[every_batch["time_unix_s"] <= at_unix_s]
    if after.empty or before.empty:
        return None
    first = after.iloc[0]
    same = before[before["optimizer_step"] == first["optimizer_step"]]
    return (before if same.empty else same).iloc[-1], first


def field(events: pd.DataFrame, kind: str, name: str) -> pd.Series:
    """A number that events of `kind` carry; empty without such events."""
    rows = events[events["kind"] == kind]
    return rows[name].astype(float) if len(rows) else pd.Series(dtype=float)


def count(events: pd.DataFrame, kind: str) -> int | None:
    """How many events of `kind` there were; None where no event at all was logged, so that nobody counted."""
    return int((events["kind"] == kind).sum()) if len(events) else None
