"""From the run folders of pinned runs to their `Twin`: `calibrate`.

Models a straight line for a group's seconds of a core by its steps, an update's time by its rollouts and its tokens
with their padding, and the measured rests; each from two kinds of run, one in which trainer and workers are at work at
once and one in which they take turns. What one costs the other (cores shared with the loop and with Ray, caches, memory
bandwidth) is the difference. Leaves out who else was at work on the machine.
Use: `made = calibrate(["out/async"], ["out/sync"])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.machine import cores, cores_of_this_process
from rlinfra_utils.cluster.twin.figures import WARMUP_UPDATES
from rlinfra_utils.cluster.twin.overlap import share_beside, time_open
from rlinfra_utils.cluster.twin.prediction import Common, Overlap, Times, Twin, pooled
from rlinfra_utils.doors import whole
from rlinfra_utils.tracing import RunData, read_run

#: Overlap of the workers' time with the trainer's: at least so much in a run of both at once, at most in one of turns.
_AT_ONCE, _IN_TURNS = 0.2, 0.05


@dataclass(frozen=True)
class Measured(Common):
    """What one run says, and how much its two sides overlapped."""

    config: ClusterConfig
    times: Times
    overlap: Overlap


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
    config = both[0].config
    return Twin(
        **pooled(Common, [*both, *turns]),
        config=config,
        num_cores=_num_cores(config),
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
    proofs = pd.concat([_spans(run, stage, begin_s) for stage in ("load_weights", "prove_weights")])
    work, updates = _intervals(answers), _intervals(train)
    return Measured(
        config=config,
        times=Times(
            **_answer_times(answers, decode, config),
            verify_s=verify["dur_s"].to_numpy(),
            **_train_times(run, train, config),
        ),
        overlap=Overlap(share_beside(work, updates), share_beside(updates, work)),
        steps=decode["steps"].to_numpy(),
        tokens_per_step=float(decode["tokens"].sum() / decode["steps"].sum()),
        prompt_tokens=float(run.rollouts["prompt_tokens"].map(len).mean()),
        sync_s=sync["dur_s"].to_numpy() if len(sync) else np.zeros(1),
        sync_s_per_worker=float(proofs["cpu_s"].sum() / max(1, len(sync)) / config.num_workers),
        checkpoint_s=float(saves["dur_s"].mean()) if len(saves) else 0.0,
    )


def _answer_times(answers: pd.DataFrame, decode: pd.DataFrame, config: ClusterConfig) -> dict[str, Any]:
    """CPU seconds of the work and of the calls, times what the core gave more slowly than it was asked."""
    cores = min(_num_cores(config), config.num_workers)
    call_cpu_s = float(decode["before_cpu_s"].mean())
    # On a shared core the others' calls run beside a worker's decoding.
    asked_s = decode["cpu_s"].sum() + (len(decode) * call_cpu_s if config.num_workers > cores else 0.0)
    slower = max(1.0, _busy_s(decode, cores) / asked_s)
    prefill_s, step_s = _line(decode["steps"], slower * decode["cpu_s"])
    call_s = np.maximum(0.0, (answers["dur_s"] - answers["actor_s"]).to_numpy())
    return {"prefill_s": prefill_s, "step_s": step_s, "call_core_s": slower * call_cpu_s, "call_s": call_s}


def _train_times(run: RunData, train: pd.DataFrame, config: ClusterConfig) -> dict[str, Any]:
    """The model's passes go by padded tokens, the optimizer's step by nothing, all else by rollouts."""
    # By their middles: the trainer's clock may be a little before or behind the loop's.
    middle_s = run.spans["start_s"] + run.spans["dur_s"] / 2
    inside = run.spans["track"].eq("trainer0") & middle_s.between(train["start_s"].min(), train["end_s"].max())
    took_s = run.spans[inside].groupby("stage")["dur_s"].sum()
    padded = run.spans.loc[inside & run.spans["stage"].eq("train"), "padded_tokens"].to_numpy(dtype=float)
    passes_s, step_s = took_s["forward_backward"] + took_s["logprob_recompute"], took_s["optimizer_step"]
    token_s, num_rollouts = passes_s / padded.sum(), config.batch_rollouts
    rollout_s = max(0.0, train["dur_s"].sum() - passes_s - step_s) / (len(train) * num_rollouts)
    rest_s = train["dur_s"].to_numpy() - token_s * padded - rollout_s * num_rollouts
    return {"train_s": rest_s, "train_s_per_rollout": rollout_s, "train_s_per_padded_token": float(token_s)}


def _spans(run: RunData, stage: str, begin_s: float = 0.0) -> pd.DataFrame:
    spans = run.spans[(run.spans["stage"] == stage) & (run.spans["start_s"] >= begin_s)]
    return spans.sort_values("start_s")


def _intervals(spans: pd.DataFrame) -> np.ndarray:
    return spans[["start_s", "end_s"]].to_numpy(dtype=float)


def _line(x: pd.Series, y: pd.Series) -> tuple[float, float]:
    """Least squares y = a + b x with a and b of at least 0; through the origin where the free line is not."""
    x, y = x.to_numpy(dtype=float), y.to_numpy(dtype=float)
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


def _busy_s(decode: pd.DataFrame, num_cores: int) -> float:
    """Seconds of the workers' cores, which they share in turns, in which one of a core's decoded."""
    workers = sorted(decode["track"].unique())
    on_core = [decode[decode["track"].isin(workers[core::num_cores])] for core in range(num_cores)]
    return sum(time_open(_intervals(spans)) for spans in on_core)
