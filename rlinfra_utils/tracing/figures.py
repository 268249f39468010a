"""What alert rules look at: figures over time, each row with its moment, its subject and its configuration hash.

Models: one row a training batch, a span between two checkpoints, a silence of a worker, a window of queue readings.
Leaves out what is too much (`rules.py`). Each figure is a frame `COLUMNS`; an empty one says why in `.attrs["reason"]`.
Use: `FIGURES["lag_max"](run, standing(run), now_unix_s)`.

A batch that a restore undid is left out. A jump between two batches is judged by order alone: it needs all of the five
batches from here on to lie beyond all five before, and its size is the ratio of the two medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from rlinfra_utils.tracing.measure import per_batch
from rlinfra_utils.tracing.reading import RunData

COLUMNS = ("time_unix_s", "value", "subject", "branch_id", "config_hash")
JUMP_BATCHES = 5
#: Readings of the queue: the last ones, those passed over before them, and how many there must be before that.
QUEUE_LAST, QUEUE_BETWEEN, QUEUE_BEFORE = 24, 24, 48
_ALIVE = ("worker_started", "heartbeat")
#: Intervals from which a median says what is usual; the first ones after a start are of any length.
FEWEST_BEATS = 5


def _figure(rows: list[tuple], reason: str) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.attrs["reason"] = reason if table.empty else ""
    return table


def standing(run: RunData) -> pd.DataFrame:
    """`per_batch` without the batches that a restore undid."""
    batches = per_batch(run)
    return batches[~batches["rolled_back"].astype(bool)]


def of_batches(column: str, run: RunData, batches: pd.DataFrame, now_unix_s: float) -> pd.DataFrame:
    """A column of `per_batch`, batch by batch."""
    rows = [
        (batch.time_unix_s, float(value), f"step {batch.optimizer_step}", batch.branch_id, batch.config_hash)
        for batch, value in zip(batches.itertuples(), batches[column])
        if value == value
    ]
    return _figure(rows, f"no batch holds {column}; see metrics(run)")


def jump(column: str, run: RunData, batches: pd.DataFrame, now_unix_s: float) -> pd.DataFrame:
    """How many times the medians of the five batches before and the five from here on differ; 1 where they overlap."""
    levels = of_batches(column, run, batches, now_unix_s)
    rows = []
    for at in range(JUMP_BATCHES, len(levels) - JUMP_BATCHES + 1):
        before, after = (levels["value"].iloc[max(at + d, 0) : at + d + JUMP_BATCHES] for d in (-JUMP_BATCHES, 0))
        apart = after.min() > before.max() or after.max() < before.min()
        rows.append((levels["time_unix_s"].iloc[at], _times(before, after) if apart else 1.0, *levels.iloc[at, 2:]))
    return _figure(rows, levels.attrs["reason"] or f"fewer than {2 * JUMP_BATCHES} batches")


def _times(before: pd.Series, after: pd.Series) -> float:
    low, high = sorted((abs(before.median()), abs(after.median())))
    return high / low if low > 0 else math.inf


def checkpoint_gap(run: RunData, batches: pd.DataFrame, now_unix_s: float) -> pd.DataFrame:
    """Seconds without a saved checkpoint: between one and the next, and up to now; what a crash then costs."""
    saved = run.events[run.events["kind"] == "checkpoint_saved"]
    stamps = [*run.batches["time_unix_s"], *run.events["time_unix_s"]]
    if not stamps:
        return _figure([], "the files hold no stamp")
    last = run.description
    ends = [(s.time_unix_s, s.branch_id, s.config_hash) for s in saved.itertuples()]
    ends.append((max(now_unix_s, *stamps), last.branch_id, last.config_hash))
    starts = [min(stamps), *(end[0] for end in ends[:-1])]
    rows = [(end, end - start, "trainer", *of) for start, (end, *of) in zip(starts, ends)]
    return _figure(rows, "")


def silence(run: RunData, batches: pd.DataFrame, now_unix_s: float) -> pd.DataFrame:
    """Silences of each worker, in its heartbeat intervals, at the moment at which they began.

    A worker that was seen to die and did not come back is silent for ever; one with an event worker_stopped has
    nothing to say until it starts again.
    """
    events = run.events[run.events["worker"].notna()]
    rows = []
    for worker, signs in events[events["kind"].isin(_ALIVE)].groupby("worker"):
        own = events[events["worker"] == worker]
        stamps, interval_s = sorted(signs["time_unix_s"]), _interval_s(signs)
        of = (f"worker {worker}", signs["branch_id"].iloc[-1], signs["config_hash"].iloc[-1])
        stops = own.loc[own["kind"] == "worker_stopped", "time_unix_s"]
        died = ((own["kind"] == "worker_died") & (own["time_unix_s"] >= stamps[-1])).any()
        silences = [(a, b) for a, b in pairwise([*stamps, now_unix_s]) if not stops.between(a, b).any()]
        rows += [(a, (b - a) / interval_s, *of) for a, b in silences if interval_s > 0]
        if died:
            rows.append((stamps[-1], math.inf, *of))
    return _figure(rows, f"no worker declares its heartbeat interval or has {FEWEST_BEATS} of them")


def _interval_s(signs: pd.DataFrame) -> float:
    """The longest that the heartbeats declare as `within_s`, else their median; 0 where they are too few for one.

    A worker that is heard only between two pieces of work has to declare it: its usual interval is that of its idle
    time, and a long piece of work would look like death.
    """
    declared = signs["within_s"].dropna() if "within_s" in signs else signs["time_unix_s"].iloc[:0]
    gaps_s = np.diff(np.sort(signs["time_unix_s"]))
    if len(declared):
        return float(declared.max())
    return float(np.median(gaps_s)) if len(gaps_s) >= FEWEST_BEATS else 0.0


def queue_growth(run: RunData, batches: pd.DataFrame, now_unix_s: float) -> pd.DataFrame:
    """Lowest depth of the last 24 readings over the highest ever, 24 readings before them: above 1 it only grew.

    The readings between let growth show through noise; the record over all that went before keeps a queue that
    merely drifts up and down from counting as one that grows.
    """
    readings = run.events[run.events["kind"] == "queue"]
    depth = readings["depth_rollouts"].to_numpy(float) if len(readings) else np.zeros(0)
    if len(depth) < QUEUE_BEFORE + QUEUE_BETWEEN + QUEUE_LAST:
        return _figure([], f"fewer than {QUEUE_BEFORE + QUEUE_BETWEEN + QUEUE_LAST} events of kind queue")
    lowest = np.lib.stride_tricks.sliding_window_view(depth, QUEUE_LAST).min(axis=1)[QUEUE_BEFORE + QUEUE_BETWEEN :]
    highest = np.maximum.accumulate(depth)[QUEUE_BEFORE - 1 :][: len(lowest)]
    rows = []
    for low, high, last in zip(lowest, highest, readings[-len(lowest) :].itertuples()):
        growth = low / high if high > 0 else (math.inf if low > 0 else 1.0)
        rows.append((last.time_unix_s, growth, "queue", last.branch_id, last.config_hash))
    return _figure(rows, "")


_BY_BATCH = ("lag_max", "normalized_ess", "degenerate_group_share", "truncation_share")
FIGURES: dict[str, Callable[[RunData, pd.DataFrame, float], pd.DataFrame]] = {
    **{column: partial(of_batches, column) for column in _BY_BATCH},
    "silence_intervals": silence,
    "queue_growth": queue_growth,
    "checkpoint_gap_s": checkpoint_gap,
    "response_length_jump": partial(jump, "mean_response_tokens"),
}
