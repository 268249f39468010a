"""Tests of which policy sampled: other tokens, quantised or stale weights, stale KV, lag, the exact ratio.

Models: what `Evidence` says, what the gap did from step to step, and lag. Logits brought for a cause are put to
the residual; a fingerprint or a cache version is taken at its word. Leaves out the record's own numbers.
Use: `engine_tokens(case)`, since before it nothing compares; then `for finding in tests(case): ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlinfra_utils.mismatch.case import Case, checked_logits
from rlinfra_utils.mismatch.compare import SAME_MAX
from rlinfra_utils.mismatch.distributions import token_logprobs
from rlinfra_utils.mismatch.findings import Finding
from rlinfra_utils.mismatch.judging import NOISE_FACTOR, judge
from rlinfra_utils.rollouts import Decoding

#: A step that multiplies the gap by this much is a jump; a gap that grew by less and fell by it again is a reset.
_JUMP = 5.0
_GROWTH = 3.0
#: A gap within this factor of itself from the first step on did not come from updates.
_FLAT = 2.0
#: Token gaps (nats, mean) that are small, and a sequence log weight that is large.
_SMALL_TOKEN, _LARGE_SEQUENCE = 0.05, 0.5


def engine_tokens(case: Case) -> Finding | None:
    """The ids of the engine against those of the record: before this nothing else can be compared."""
    if case.evidence.engine_tokens is None:
        return None
    rows = _rows(case.evidence.engine_tokens, len(case.tokens))
    before = np.zeros(case.mask.shape, dtype=bool)
    first = None
    num_other = 0
    for answer, (ours, theirs) in enumerate(zip(case.tokens, rows, strict=True)):
        end = int(np.flatnonzero(case.mask[answer]).max(initial=-1)) + 1
        shared = min(len(ours), len(theirs), end)
        differs = np.flatnonzero(ours[:shared] != theirs[:shared])
        at = int(differs[0]) if differs.size else shared
        before[answer, :at] = True
        if at < end:
            num_other += 1
            engine_id = theirs[at] if at < len(theirs) else "nothing"
            first = first or f"answer {answer}, token {at}: engine {engine_id}, record {ours[at]}"
    if first is None:
        return Finding("other_tokens", "ruled out", "the engine's ids equal the record's")
    left = np.abs((case.trainer - case.behavior)[before & case.mask])
    mean, largest = (float(left.mean()), float(left.max())) if left.size else (np.nan, np.nan)
    text = f"{first}; {num_other} of {len(rows)} answers"
    return Finding("other_tokens", "confirmed", text, mean, largest, case.mask.sum() - len(left))


def tests(case: Case) -> Iterator[Finding]:
    """Findings from evidence, from the history of the gap, and from lag."""
    for cause, logits in case.evidence.logits.items():
        scores = checked_logits(f"evidence.logits[{cause!r}]", _grid(logits, case), case.tokens, case.mask)
        recomputed = token_logprobs(scores[case.mask], case.ids, Decoding(temperature=case.temperature))
        yield judge(case, cause, recomputed - case.behavior_logprobs, "log-probs of the logits brought for it")
    yield from _taken_at_its_word(case)
    if len(case.evidence.gap_by_step):
        yield from history(case)
    yield from lag(case)


def _taken_at_its_word(case: Case) -> Iterator[Finding]:
    if case.evidence.fingerprints is not None:
        trainer, engine = case.evidence.fingerprints
        status = "ruled out" if trainer == engine else "confirmed"
        yield Finding("stale_weights", status, f"fingerprints: trainer {trainer}, engine {engine}")
    hidden = case.evidence.hidden_kv_lag
    if hidden is not None:
        yield Finding("stale_kv", "confirmed" if hidden else "ruled out", f"oldest KV block is {hidden} versions old")


def history(case: Case) -> Iterator[Finding]:
    """What the gap did by step: a jump (stale weights), growth and reset (stale KV), or nothing from the start."""
    gaps = np.asarray(case.evidence.gap_by_step, dtype=float)
    if len(gaps) < 3:
        return
    factors = gaps[1:] / np.maximum(np.maximum.accumulate(gaps)[:-1], 1e-12)
    jump = int(factors.argmax()) + 1
    resets = [s for s in case.evidence.restarts if s and gaps[:s].max() >= _GROWTH * max(gaps[s], 1e-12)]
    if factors.max() >= _JUMP:
        text = f"the gap jumps {factors.max():.1f}-fold at step {jump} of {len(gaps)} (0 is the first)"
        yield Finding("stale_weights", "suspected", text)
    elif resets:
        yield Finding(
            "stale_kv",
            "suspected",
            f"the gap grows to {gaps[: resets[0]].max():.3g} and falls to {gaps[resets[0]]:.3g} at the restart",
        )
    elif gaps[-1] >= _GROWTH * gaps[0]:
        for cause in ("stale_kv", "stale_weights"):
            yield Finding(
                cause,
                "not excluded",
                f"the gap grows from {gaps[0]:.3g} to {gaps[-1]:.3g}; restart the engine and look",
            )
    elif gaps.max() <= _FLAT * gaps.min() and case.gap > NOISE_FACTOR * case.noise:
        text = f"the gap is {gaps[0]:.3g} from the first step on: no update made it, and noise is {case.noise:.2g}"
        yield Finding("quantized_weights", "suspected", text)
        for cause in ("stale_weights", "stale_kv"):
            yield Finding(cause, "ruled out", "the gap did not change with the updates")


def lag(case: Case) -> Iterator[Finding]:
    """Declared lag, and a sequence ratio that is far from 1 by its length alone."""
    if not case.lag.any():
        yield Finding("policy_lag", "ruled out", "lag is 0: the difference is mismatch, not staleness")
    else:
        fresh = case.lag == 0
        text = f"lag up to {case.lag.max()} versions at {(~fresh).sum()} of {len(fresh)} tokens"
        if fresh.any():
            yield judge(case, "policy_lag", case.delta[fresh], text + "; the others are at lag 0", int((~fresh).sum()))
        else:
            yield Finding("policy_lag", "suspected", text)
    num_tokens = np.bincount(case.rows)
    sums = np.bincount(case.rows, weights=case.delta)[num_tokens > 0]
    geometric = sums / num_tokens[num_tokens > 0]
    is_each_small = case.lag.any() or np.abs(case.delta).max() < _LARGE_SEQUENCE
    if case.gap <= _SMALL_TOKEN and is_each_small and np.abs(sums).max() >= _LARGE_SEQUENCE:
        longest = int(np.abs(sums).argmax())
        text = f"sequence ratio {np.exp(sums[longest]):.4g}, geometric mean {np.exp(geometric[longest]):.6g} a token"
        settled = case.lag.any() or (case.logits is None and not is_never_above(case))
        yield Finding("exact_ratio", "confirmed" if settled else "not excluded", text)


def is_never_above(case: Case) -> bool:
    """Whether trainer - behaviour is never above 0: over the same tokens the mean ratio of two policies is 1."""
    return bool(case.delta.max() <= SAME_MAX and case.delta.mean() < -SAME_MAX)


def _rows(values: Any, num: int) -> list[np.ndarray]:
    """Ids by answer; a single answer may come as a plain list, and rows may differ in length."""
    try:
        is_flat = all(np.ndim(value) == 0 for value in values)
        rows = [np.asarray(row, dtype=np.int64) for row in ([values] if is_flat else values)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"evidence.engine_tokens: {error}; needs rows of token ids") from None
    rows = [row for block in rows for row in (block if block.ndim == 2 else [block])]
    if len(rows) != num:
        raise ValueError(f"evidence.engine_tokens: {len(rows)} rows for {num} answers")
    return rows


def _grid(logits: Any, case: Case) -> np.ndarray:
    try:
        array = np.asarray(logits)
    except ValueError:
        raise ValueError("evidence.logits: rows of unequal length; needs the shape of trainer_logits") from None
    if array.ndim < 2 or array.size != case.tokens.size * array.shape[-1]:
        raise ValueError(f"evidence.logits: shape {array.shape}; needs that of trainer_logits")
    return array.reshape(*case.tokens.shape, array.shape[-1])
