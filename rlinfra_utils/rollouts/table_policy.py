"""The rules of `checks_policy.py` for a batch of rows: provenance, versions, decoding, outcome, times.

Models: the same rules on numpy columns. Leaves out messages, and the token axes (`table_tokens.py`).
Use: `mark_policy(batch, axes, demands, hits)`. `validate_table` is the door.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils.rollouts.checks_policy import LOGPROBS_MODES, REQUIRED_DECODING, REQUIRED_FILLED, REQUIRED_PRESENT
from rlinfra_utils.rollouts.columns import Lists, is_present, numbers, text_bytes
from rlinfra_utils.rollouts.hits import Hits
from rlinfra_utils.rollouts.record import STOP_REASONS
from rlinfra_utils.rollouts.table_tokens import Running, TableAxes, span_columns
from rlinfra_utils.rollouts.verdict import Demands


def mark_policy(batch: pa.RecordBatch, axes: TableAxes, demands: Demands, hits: Hits) -> None:
    """Mark every code on the provenance, policy and outcome of the rows."""
    _absent(batch, axes, hits)
    _versions(batch, demands, hits)
    _decoding(batch.column("decoding"), hits)
    _outcome(batch, hits)
    _times(batch, hits)


def _absent(batch: pa.RecordBatch, axes: TableAxes, hits: Hits) -> None:
    for name in REQUIRED_FILLED:
        hits.mark("missing_field", ~_filled(batch.column(name)))
    for name in REQUIRED_PRESENT:
        hits.mark("missing_field", ~is_present(batch.column(name)))
    has_version = is_present(batch.column("policy_version")) | is_present(batch.column("version_spans"))
    hits.mark("missing_field", ~has_version)
    decoding = batch.column("decoding")
    has_decoding = is_present(decoding)
    for name in REQUIRED_DECODING:
        hits.mark("missing_field", has_decoding & ~_filled(pc.struct_field(decoding, name)))
    has_env = Running(axes.env_mask.values == 1, axes.env_mask.offsets).count() > 0
    hits.mark("missing_field", has_env & ~_filled(batch.column("environment_version")))


def _filled(array: pa.Array) -> np.ndarray:
    """Neither null nor an empty text, list or map."""
    if pa.types.is_string(array.type):
        return text_bytes(array) > 0
    if pa.types.is_list(array.type) or pa.types.is_map(array.type):
        return Lists(array).lengths > 0
    return is_present(array)


def _versions(batch: pa.RecordBatch, demands: Demands, hits: Hits) -> None:
    scalar, has_scalar = numbers(batch.column("policy_version"))
    spans = Lists(batch.column("version_spans"))
    has_spans = spans.lengths > 0
    limits = np.iinfo(np.int64)
    oldest, newest = np.where(has_scalar, scalar, limits.max), np.where(has_scalar, scalar, limits.min)
    if has_spans.any():
        _, _, version = span_columns(spans)
        starts = spans.offsets[:-1][has_spans]
        low, high = np.minimum.reduceat(version, starts), np.maximum.reduceat(version, starts)
        contradicts = has_scalar[has_spans] & ((low != scalar[has_spans]) | (high != scalar[has_spans]))
        hits.mark("scalar_version_on_span", np.flatnonzero(has_spans)[contradicts])
        if not demands.partial_rollouts:
            hits.mark("partial_not_declared", np.flatnonzero(has_spans)[low != high])
        oldest[has_spans] = np.minimum(oldest[has_spans], low)
        newest[has_spans] = np.maximum(newest[has_spans], high)
    rows = has_scalar | has_spans
    hits.mark("version_negative", rows & (oldest < 0))
    if demands.current_version is not None:
        hits.mark("version_in_future", rows & (newest > demands.current_version))
    if demands.max_lag is not None:
        fresh = oldest >= demands.current_version - demands.max_lag
        hits.mark("stale", rows & (oldest >= 0) & ~fresh)
    result, has_result = numbers(batch.column("resulting_policy_version"))
    hits.mark("version_order", rows & has_result & (result <= newest))
    hits.mark("version_order", numbers(batch.column("optimizer_step")).values < 0)


def _decoding(decoding: pa.Array, hits: Hits) -> None:
    number = {
        name: numbers(pc.struct_field(decoding, name))
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    }
    temperature, top_p, top_k, min_p, penalty, most = number.values()
    penalty = np.where(penalty.present, penalty.values, 1.0)  # the default, which filters nothing
    impossible = temperature.present & ~((temperature.values >= 0.0) & (temperature.values < np.inf))
    impossible |= top_p.present & ~((top_p.values > 0.0) & (top_p.values <= 1.0))
    impossible |= top_k.values < -1
    impossible |= ~((min_p.values >= 0.0) & (min_p.values < 1.0))
    impossible |= ~((penalty > 0.0) & (penalty < np.inf))
    impossible |= most.present & (most.values < 1)
    mode = pc.struct_field(decoding, "logprobs_mode")
    known = np.asarray(pc.is_in(mode, value_set=pa.array([None, "", *LOGPROBS_MODES])))
    hits.mark("decoding_out_of_range", impossible | ~known)
    filters = (temperature.values != 1.0) | (top_p.values != 1.0) | (top_k.values > 0) | (min_p.values > 0.0)
    filters |= (penalty != 1.0) | (Lists(pc.struct_field(decoding, "banned_token_ids")).lengths > 0)
    raw = np.asarray(pc.equal(mode, "raw").fill_null(False))
    hits.mark("logprobs_not_behavior", raw & filters & temperature.present & top_p.present)


def _outcome(batch: pa.RecordBatch, hits: Hits) -> None:
    reward = Lists(batch.column("reward"))
    values = numbers(pc.struct_field(reward.flat, "value")).values
    hits.mark("reward_not_finite", reward.rows(~np.isfinite(values)))
    reason = batch.column("stop_reason")
    index = pc.index_in(reason, value_set=pa.array(list(STOP_REASONS))).fill_null(-1).to_numpy()
    hits.mark("stop_reason_unknown", (index < 0) & (text_bytes(reason) > 0))
    endings = list(STOP_REASONS.values())
    unfinished = np.array([ending is None for ending in endings])[index] & (index >= 0)
    hits.mark("not_finished", unfinished)
    truncated = numbers(batch.column("truncated"))
    contradicts = truncated.values != np.array([bool(ending) for ending in endings])[index]
    hits.mark("truncation_contradiction", (index >= 0) & ~unfinished & truncated.present & contradicts)


def _times(batch: pa.RecordBatch, hits: Hits) -> None:
    start, end = numbers(batch.column("started_s")), numbers(batch.column("finished_s"))
    for time in (start, end):
        hits.mark("negative_time", ~((time.values >= 0.0) & (time.values < np.inf)))
    hits.mark("negative_time", start.present & end.present & (end.values < start.values))
    hits.mark("negative_time", numbers(batch.column("num_retries")).values < 0)
