"""From the run folders of pinned runs to their `Twin`: `calibrate`.

Models a straight line for a group's seconds of a core by its steps and one for a training step by its tokens, and the
measured rests; each from two kinds of run, one in which trainer and workers are at work at once and one in which they
take turns. What one costs the other (cores shared with the loop and with Ray, caches, memory bandwidth) is the
difference. Leaves out who else was at work on the machine. Use: `made = calibrate(["out/async"], ["out/sync"])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.machine import cores, cores_of_this_process
from rlinfra_utils.cluster.twin.figures import WARMUP_UPDATES
from rlinfra_utils.cluster.twin.overlap import core_seconds, share_beside
from rlinfra_utils.cluster.twin.prediction import Overlap, Times, Twin
from rlinfra_utils.doors import whole
from rlinfra_utils.tracing import RunData, read_run

#: Overlap of the workers' time with the trainer's: at least so much in a run of both at once, at most in one of turns.
_AT_ONCE, _IN_TURNS = 0.2, 0.05


class Measured(NamedTuple):
    """What one run says, and how much its two sides overlapped."""

    config: ClusterConfig
    times: Times
    overlap: Overlap
    steps: np.ndarray
    tokens_per_step: float
    sync_s: np.ndarray
    sync_s_per_worker: float
    checkpoint_s: float


def calibrate(at_once: Sequence[str | Path], in_turns: Sequence[str | Path], warmup: int = WARMUP_UPDATES) -> Twin:
    """The twin of one configuration, from asynchronous runs of it and from the same under `synchronous`.

    Of several runs the medians count. Raises ValueError for a run without spans, too short, not pinned, or whose
    trainer and workers overlap too little (`at_once`) or too much (`in_turns`).
    """
    both = [read_times(folder, warmup) for folder in at_once]
    turns = [read_times(folder, warmup) for folder in in_turns]
    for folder, run in zip(at_once, both):
        _check(folder, run, run.overlap.workers >= _AT_ONCE, "`at_once` needs asynchronous runs")
    for folder, run in zip(in_turns, turns):
        _check(folder, run, run.overlap.workers <= _IN_TURNS, "`in_turns` needs synchronous runs")
    config, every = both[0].config, [*both, *turns]
    return Twin(
        config=config,
        num_cores=_num_cores(config),
        steps=np.concatenate([run.steps for run in every]),
        tokens_per_step=float(np.median([run.tokens_per_step for run in every])),
        sync_s=np.concatenate([run.sync_s for run in every]),
        sync_s_per_worker=float(np.median([run.sync_s_per_worker for run in every])),
        checkpoint_s=float(np.median([run.checkpoint_s for run in every])),
        alone=Times.median([run.times for run in turns]),
        beside=Times.median([run.times for run in both]),
        overlap=Overlap(*np.median([run.overlap for run in both], axis=0).tolist()),
    )


def _check(folder: str | Path, run: Measured, is_right: bool, needed: str) -> None:
    if not is_right:
        share = run.overlap.workers
        raise ValueError(f"{folder}: the trainer is at work in {share:.0%} of the workers' time; {needed}")


def read_times(folder: str | Path, warmup: int = WARMUP_UPDATES) -> Measured:
    """The times of one run, its first `warmup` updates left out. Raises ValueError as `calibrate`."""
    run = read_run(folder)
    config = ClusterConfig.from_json(run.description.config)
    if run.spans is None or "cpu_s" not in run.spans:
        raise ValueError(f"{folder}: has no trace of a cluster run to calibrate from")
    if not config.pin_cores:
        raise ValueError("pin_cores=False: what a worker gets of the cores is then anyone's guess; calibrate pinned")
    train = _spans(run, "train_call")
    if len(train) < whole("warmup", warmup, 1) + 3:
        raise ValueError(f"{folder}: {len(train)} updates; needs at least {warmup + 3}")
    begin_s = train["end_s"].to_numpy()[warmup - 1]
    answers, decode, verify, train, sync, saves = (
        _spans(run, stage, begin_s)
        for stage in ("answer_call", "decode", "verify_call", "train_call", "sync_call", "checkpoint_call")
    )
    prefill_s, step_s = _line(decode["steps"], _core_seconds(decode, config))
    _, token_s = _line(train["tokens"], train["dur_s"])
    proofs = pd.concat([_spans(run, stage, begin_s) for stage in ("load_weights", "prove_weights")])
    work, updates = _intervals(answers), _intervals(train)
    return Measured(
        config=config,
        times=Times(
            prefill_s=prefill_s,
            step_s=step_s,
            call_s=np.maximum(0.0, (answers["dur_s"] - answers["actor_s"]).to_numpy()),
            verify_s=verify["dur_s"].to_numpy(),
            train_s=np.maximum(0.0, (train["dur_s"] - token_s * train["tokens"]).to_numpy()),
            train_s_per_token=token_s,
        ),
        overlap=Overlap(share_beside(work, updates), share_beside(updates, work)),
        steps=decode["steps"].to_numpy(),
        tokens_per_step=float(decode["tokens"].sum() / decode["steps"].sum()),
        sync_s=sync["dur_s"].to_numpy() if len(sync) else np.zeros(1),
        sync_s_per_worker=float(proofs["cpu_s"].sum() / max(1, len(sync)) / config.num_workers),
        checkpoint_s=float(saves["dur_s"].mean()) if len(saves) else 0.0,
    )


def _spans(run: RunData, stage: str, begin_s: float = 0.0) -> pd.DataFrame:
    spans = run.spans[(run.spans["stage"] == stage) & (run.spans["start_s"] >= begin_s)]
    return spans.sort_values("start_s")


def _intervals(spans: pd.DataFrame) -> np.ndarray:
    return spans[["start_s", "end_s"]].to_numpy(dtype=float)


def _line(x: pd.Series, y: np.ndarray | pd.Series) -> tuple[float, float]:
    """Least squares y = a + b x with a and b of at least 0; through the origin where the free line is not."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    through_zero = float(x @ y / (x @ x))
    if np.ptp(x) == 0:
        return 0.0, through_zero
    slope, start = np.polyfit(x, y, 1)
    if start < 0:
        return 0.0, through_zero
    return (float(start), float(slope)) if slope > 0 else (float(y.mean()), 0.0)


def _num_cores(config: ClusterConfig) -> int:
    available = cores_of_this_process()
    return len(set(cores(config.num_trainers, len(available), available)[1]))


def _core_seconds(decode: pd.DataFrame, config: ClusterConfig) -> np.ndarray:
    """What each decode span got of its worker's core, which workers share in turns."""
    num_cores, workers = min(_num_cores(config), config.num_workers), sorted(decode["track"].unique())
    got_s = np.empty(len(decode))
    for core in range(num_cores):
        on_core = decode["track"].isin(workers[core::num_cores]).to_numpy()
        got_s[on_core] = core_seconds(_intervals(decode[on_core]))
    return got_s
