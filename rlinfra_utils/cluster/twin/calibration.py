"""From the run folder of a pinned run to its `Twin`: `calibrate`.

Models a straight line for a group's CPU seconds by its steps and one for a training step by its tokens, and the
measured rests. Leaves out what the spans do not show: who else was at work on the machine, beyond `core_share`.
Use: `made = calibrate("out/run")`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.machine import cores, cores_of_this_process
from rlinfra_utils.cluster.twin.figures import WARMUP_UPDATES
from rlinfra_utils.cluster.twin.prediction import Twin
from rlinfra_utils.doors import whole
from rlinfra_utils.tracing import RunData, read_run


def calibrate(folder: str | Path, warmup: int = WARMUP_UPDATES) -> Twin:
    """The twin of the run in `folder`. Raises ValueError for a run without spans, too short, or not pinned."""
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
    prefill_s, step_s = _line(decode["steps"], decode["cpu_s"])
    _, token_s = _line(train["tokens"], train["dur_s"])
    proofs = pd.concat([_spans(run, stage, begin_s) for stage in ("load_weights", "prove_weights")])
    num_cores = _num_cores(config)
    return Twin(
        config=config,
        num_cores=num_cores,
        steps=decode["steps"].to_numpy(),
        tokens_per_step=float(decode["tokens"].sum() / decode["steps"].sum()),
        prefill_s=prefill_s,
        step_s=step_s,
        core_share=_core_share(decode, min(num_cores, config.num_workers)),
        call_s=np.maximum(0.0, (answers["dur_s"] - answers["actor_s"]).to_numpy()),
        verify_s=verify["dur_s"].to_numpy(),
        train_s=np.maximum(0.0, (train["dur_s"] - token_s * train["tokens"]).to_numpy()),
        train_s_per_token=token_s,
        sync_s=sync["dur_s"].to_numpy() if len(sync) else np.zeros(1),
        sync_s_per_worker=float(proofs["cpu_s"].sum() / max(1, len(sync)) / config.num_workers),
        checkpoint_s=float(saves["dur_s"].mean()) if len(saves) else 0.0,
    )


def _spans(run: RunData, stage: str, begin_s: float = 0.0) -> pd.DataFrame:
    spans = run.spans[(run.spans["stage"] == stage) & (run.spans["start_s"] >= begin_s)]
    return spans.sort_values("start_s")


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


def _core_share(decode: pd.DataFrame, num_cores: int) -> float:
    """CPU seconds of the workers over the seconds in which at least one of a core's was at work, at most 1."""
    workers = sorted(decode["track"].unique())
    busy_s = 0.0
    for core in range(num_cores):
        on_core = decode[decode["track"].isin(workers[core::num_cores])].sort_values("start_s")
        reached_s = -np.inf
        for start_s, end_s in zip(on_core["start_s"], on_core["end_s"]):
            busy_s += max(0.0, end_s - max(start_s, reached_s))
            reached_s = max(reached_s, end_s)
    return float(min(1.0, decode["cpu_s"].sum() / busy_s))
