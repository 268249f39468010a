"""The likeliest cause of a difference between trainer and behaviour log-probs, with the residual of each test.

Models: the order of P11: tokens and masks first, then log-probs at zero lag, place by place and as a
distribution, then weights, then lag. Leaves out two causes at once: each test undoes one.
Use: `findings = diagnose(logits, tokens, behavior, mask, decoding)`; `findings[0].cause`; `print(findings)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlinfra_utils.mismatch import origin, positions, processing
from rlinfra_utils.mismatch.case import TYPICAL_LARGEST, Case
from rlinfra_utils.mismatch.compare import SAME_MEAN
from rlinfra_utils.mismatch.evidence import Evidence
from rlinfra_utils.mismatch.findings import CAUSES, STATUSES, Diagnosis, Finding
from rlinfra_utils.mismatch.judging import MIN_FIT_TOKENS, NOISE_FACTOR, is_exact, judge
from rlinfra_utils.rollouts import Decoding

_ACCEPTED = STATUSES[:2]
#: Two residuals within this factor are equal; then the cause that stands earlier in `CAUSES` goes first.
_EQUAL_FACTOR = 2.0


def diagnose(
    trainer_logits: Any,
    tokens: Any,
    behavior: Any,
    mask: Any,
    decoding: Decoding | None = None,
    lag: Any = 0,
    kept_ids: Any = None,
    *,
    trainer_logprobs: Any = None,
    evidence: Evidence | None = None,
) -> list[Finding]:
    """Ranked findings on why trainer and behaviour log-probs differ; the first is the answer.

    trainer_logits: (..., tokens, vocab), row t being the one that predicts `tokens[t]`; None where only log-probs
    were kept. tokens, behavior (nats), mask: (..., tokens). decoding: how the engine sampled. lag: versions, a number
    or one a token. kept_ids: for each token, nested as `tokens`, the ids the engine kept. trainer_logprobs: what the
    trainer used, (..., tokens); left out, it is the softmax of the logits over the recorded temperature.

    A cause is "confirmed" when undoing it leaves noise, "suspected" when it takes away half of the difference or
    fits without a recomputation. "undetermined" comes first when nothing does. Raises ValueError in one line, naming
    argument and value, for shapes that differ, a mask that selects nothing, values that are missing or above 0.
    """
    case = Case.of(trainer_logits, tokens, behavior, mask, decoding, lag, kept_ids, trainer_logprobs, evidence)
    ids = origin.engine_tokens(case)
    if ids is not None and ids.status == "confirmed":
        return Diagnosis([ids])
    zeros = positions.filled_with_zeros(case)
    if zeros is not None:
        return Diagnosis([zeros])
    if case.is_same:
        return Diagnosis(_agreement(case))
    found = [*([ids] if ids else []), *positions.tests(case), *origin.tests(case)]
    found += processing.tests(case) if case.logits is not None else _without_logits(case)
    return Diagnosis(_rank(case, _settle(case, found)))


def _agreement(case: Case) -> Iterator[Finding]:
    raw = processing.raw_instead_of_processed(case)
    if raw is not None and raw.status == "confirmed":
        yield raw
    yield from (f for f in origin.tests(case) if f.status == "confirmed" and f.cause in ("stale_weights", "stale_kv"))
    largest = float(np.abs(case.delta).max())
    yield Finding("none", "confirmed", f"{len(case.delta)} tokens agree as two float32 passes do", case.gap, largest)


def _without_logits(case: Case) -> Iterator[Finding]:
    """What signs and sizes alone can say of the causes whose test needs logits."""
    delta, decoding = case.delta, case.decoding
    trainer, behavior = case.trainer[case.mask], case.behavior_logprobs
    used = (behavior < 0) & (trainer < 0)
    if len(np.unique(behavior[used])) >= MIN_FIT_TOKENS:
        value = processing.fitted_divisor(trainer[used], behavior[used])
        scaled = judge(case, "temperature_after_softmax", trainer / value - behavior, f"trainer log-prob / {value:.4g}")
        if is_exact(scaled):
            yield scaled
            return
    is_hot = decoding is not None and (decoding.temperature or 1.0) > 1.0
    cuts = decoding is not None and processing.cuts(decoding)
    if origin.is_never_above(case):
        text = "trainer - behaviour is never above 0: a kept set, or log-probs divided by a temperature above 1"
        yield Finding("truncation", "suspected" if cuts and not is_hot else "not excluded", text)
        knows = decoding is not None and decoding.temperature is not None and not cuts
        yield Finding("temperature_after_softmax", "suspected" if is_hot and knows else "not excluded", text)
    elif decoding is None or decoding.temperature != 1.0:
        yield Finding("temperature", "not excluded", "a temperature on one side is tested on logits")
    times = max(case.gap / case.noise, float(np.abs(delta).max()) / TYPICAL_LARGEST)
    is_biased = abs(delta.mean()) > 0.5 * case.gap
    status = "ruled out" if is_biased else "suspected" if times <= NOISE_FACTOR else "not excluded"
    text = f"mean or largest |delta| is {times:.2g} times that of a bfloat16 engine, mean {delta.mean():+.2g}"
    yield Finding("precision", status, text, case.gap, float(np.abs(delta).max()))


def _settle(case: Case, found: Iterable[Finding]) -> list[Finding]:
    """One finding a cause, the best; precision by its size alone gives way to what is declared or shown."""
    best: dict[str, Finding] = {}
    for finding in found:
        old = best.get(finding.cause)
        if old is None or STATUSES.index(finding.status) < STATUSES.index(old.status):
            best[finding.cause] = finding
    precision = best.get("precision")
    if precision is not None and precision.status == "suspected" and case.lag.any():
        best["precision"] = replace(precision, status="not excluded")
    for cause in ("quantized_weights", "stale_weights", "stale_kv", "other_tokens"):
        best.setdefault(cause, Finding(cause, "not excluded", "no evidence on it: " + CAUSES[cause].record))
    return list(best.values())


def _rank(case: Case, found: list[Finding]) -> list[Finding]:
    accepted = [f for f in found if f.status in _ACCEPTED]
    if not accepted:
        open_causes = ", ".join(f.cause for f in found if f.status == "not excluded")
        text = f"mean |delta| {case.gap:.3g} at {len(case.delta)} tokens; not excluded: {open_causes}"
        penalty = 1.0 if case.decoding is None else case.decoding.repetition_penalty
        if penalty != 1.0:
            text += f"; repetition_penalty {penalty:g} acts by the tokens before and is not recomputed"
        found = [*found, Finding("undetermined", "cannot be told", text)]
    residuals = [f.residual_mean for f in found if f.status == "confirmed" and f.residual_mean == f.residual_mean]
    equal = max(_EQUAL_FACTOR * min(residuals, default=0.0), SAME_MEAN)
    order = list(CAUSES)

    def key(finding: Finding) -> tuple[float, ...]:
        residual = finding.residual_mean if finding.residual_mean == finding.residual_mean else np.inf
        is_told = finding.cause in ("stale_weights", "stale_kv") and finding.status == "confirmed"
        is_equal = residual <= equal or is_told
        return STATUSES.index(finding.status), 0.0 if is_equal else residual, _tier(finding), order.index(finding.cause)

    return sorted(found, key=key)


def _tier(finding: Finding) -> int:
    """Of equal residuals: one over all tokens, then evidence at its word, then one that sets tokens aside."""
    if finding.cause == "wrong_entry":
        return 3
    if finding.residual_mean != finding.residual_mean:
        return 1
    return 2 if finding.num_left_out else 0
