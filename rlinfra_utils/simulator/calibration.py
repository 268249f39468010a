"""From a measured run's spans to a `LoopConfig`: laws of lengths and stage times as they were.

Models stages as independent draws from what was measured. Leaves out contention: times hold for the load at which
they were measured. Use: `replace(calibrate(trace.frame()), sync_interval=4)`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from rlinfra_utils.doors import numbers, whole
from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.laws import Constant, Law, Measured

NEEDED = ("stage", "track", "start_s", "end_s", "dur_s", "warmup", "tokens")
TRAINING = ("logprob_recompute", "forward_backward", "optimizer_step")


def calibrate(trace_frame: pd.DataFrame, group_size: int = 1, batch_rollouts: int | None = None) -> LoopConfig:
    """A loop like the one in `timers.Trace.frame()`, warm-up left out; change the rest with `dataclasses.replace`.

    Slots and verifiers are the tracks of "decode" and "verifier". Rollouts are the decode spans, each with `tokens`;
    a token's time is their total time over their tokens. "prefill" gives seconds a prompt token. A step is an
    "optimizer_step" ("forward_backward" where there is none) with all training since the one before. Without
    `batch_rollouts` it is the rollouts decoded for each step: give it where some were dropped or are still queued.
    Spans "environment" are refused: tools are set by hand. Raises ValueError for a missing column, stage or count.
    """
    missing = [name for name in NEEDED if name not in getattr(trace_frame, "columns", ())]
    if missing:
        raise ValueError(f"trace_frame: has no column {', '.join(missing)}; give Trace.frame()")
    whole("group_size", group_size)
    spans = trace_frame[~trace_frame["warmup"].astype(bool)].sort_values("start_s")
    by_stage = dict(list(spans.groupby("stage")))
    marker = "optimizer_step" if "optimizer_step" in by_stage else "forward_backward"
    for stage in ("decode", marker):
        if stage not in by_stage:
            raise ValueError(f"trace_frame: has no {stage} span after warm-up, of {', '.join(by_stage) or 'none'}")
    if "environment" in by_stage:
        raise ValueError(f"trace_frame: {len(by_stage['environment'])} environment spans; set LoopConfig.tools by hand")
    decode, marks = by_stage["decode"], by_stage[marker]
    tokens = numbers("tokens of decode", decode["tokens"].to_numpy(dtype=float, na_value=np.nan), some_above_zero=True)
    prefill = by_stage.get("prefill")
    if batch_rollouts is None:
        batch_rollouts = max(1, round(len(decode) / len(marks) / group_size)) * group_size
    syncs = by_stage.get("weight_sync")
    checkpoints = by_stage.get("checkpoint")
    prompts = 0.0 if prefill is None else float(prefill["tokens"].fillna(0).mean())
    return LoopConfig(
        slots_per_replica=decode["track"].nunique(),
        lengths_tokens=Measured(tokens),
        prompt_tokens=round(prompts),
        token_s=decode["dur_s"].sum() / tokens.sum(),
        prefill_s_per_token=prefill["dur_s"].sum() / prefill["tokens"].sum() if prompts else 0.0,
        group_size=group_size,
        num_verifiers=by_stage["verifier"]["track"].nunique() if "verifier" in by_stage else 1,
        verify_s=_law(by_stage.get("verifier")),
        batch_rollouts=batch_rollouts,
        train_s=Measured(_step_s(spans, marks)),
        sync_interval=1 if syncs is None else max(1, round(len(marks) / len(syncs))),
        sync_s=_law(syncs),
        checkpoint_interval=None if checkpoints is None else max(1, round(len(marks) / len(checkpoints))),
        checkpoint_s=0.0 if checkpoints is None else checkpoints["dur_s"].mean(),
        num_steps=len(marks),
    )


def _law(rows: pd.DataFrame | None) -> Law:
    return Constant(0.0) if rows is None else Measured(rows["dur_s"].to_numpy())


def _step_s(spans: pd.DataFrame, marks: pd.DataFrame) -> np.ndarray:
    """Seconds of training work in each step: what ended up to each mark, and after the one before."""
    work = spans[spans["stage"].isin(TRAINING)]
    step = np.searchsorted(np.sort(marks["end_s"].to_numpy()), work["end_s"].to_numpy(), side="left")
    return np.bincount(step, work["dur_s"], len(marks))[: len(marks)]
