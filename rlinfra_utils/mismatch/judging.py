"""How a residual becomes a status: the one rule by which every recomputation is judged.

Models: a cause is accepted when undoing it takes away most of the difference, and confirmed when what is left is
noise. Leaves out the tests. Use: `judge(case, "shift", residual, "behaviour[t + 1]")`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlinfra_utils.mismatch.case import Case
from rlinfra_utils.mismatch.compare import SAME_MAX, SAME_MEAN
from rlinfra_utils.mismatch.findings import Finding

#: A cause that leaves more than this share of the difference is not one of this record.
ACCEPT_SHARE = 0.5
#: A cause that leaves this share or less is confirmed, whatever the noise.
CONFIRM_SHARE = 0.05
#: A residual up to this many times what rounding the logits to bfloat16 brings is noise: hidden layers add theirs.
NOISE_FACTOR = 4.0
#: A fitted parameter takes away a part of any difference, so what it leaves has to be near the noise: a bfloat16 engine
#: of the tiny policy leaves up to 11 times the rounding of its logits, one GRPO update 16 times (measured 2026-11-29).
NEAR_NOISE_FACTOR = 12.0
#: One free parameter fits a few tokens by chance.
MIN_FIT_TOKENS = 4


def judge(
    case: Case,
    cause: str,
    residual: np.ndarray,
    evidence: str,
    num_left_out: int = 0,
    gap: float | None = None,
    reaches_noise: bool = False,
) -> Finding:
    """A finding for `residual` (nats; signed or not, one a token compared) against the difference before.

    gap: that difference, mean |delta|; left out, it is the record's. reaches_noise: accept it only if what is left is
    near the noise (without logits: small), for a test that takes away a part of any difference.
    """
    size = np.abs(residual)
    mean, largest = (float(size.mean()), float(size.max())) if size.size else (np.inf, np.inf)
    gap = case.gap if gap is None else gap
    status = "ruled out"
    is_left_small = mean <= max(SAME_MEAN, CONFIRM_SHARE * gap)
    is_near_noise = case.logits is not None and mean <= NEAR_NOISE_FACTOR * case.noise
    is_poor = reaches_noise and not (is_left_small or is_near_noise)
    if mean <= ACCEPT_SHARE * gap and not is_poor:
        is_noise = is_left_small or mean <= min(NOISE_FACTOR * case.noise, 0.25 * gap)
        status = "confirmed" if is_noise else "suspected"
    return Finding(cause, status, evidence, mean, largest, num_left_out)


def judge_fit(
    case: Case, cause: str, residual: np.ndarray, evidence: str, num_left_out: int = 0, before: np.ndarray | None = None
) -> Finding:
    """A finding for the `residual` of a fitted parameter against `before` (nats, the same tokens; else the record's).

    It has to come near the noise, and to hold for more than the few tokens that one parameter can fit by chance.
    """
    size, before = np.abs(residual), np.abs(case.delta if before is None else before)
    finding = judge(case, cause, residual, evidence, num_left_out, float(before.mean()), reaches_noise=True)
    rest = np.argsort(before)[: 1 - MIN_FIT_TOKENS]
    if finding.status != "ruled out" and size[rest].sum() > ACCEPT_SHARE * before[rest].sum():
        text = f"{evidence}; fits the {MIN_FIT_TOKENS - 1} largest differences alone"
        return replace(finding, status="not excluded", evidence=text)
    return finding


def is_exact(finding: Finding) -> bool:
    """Whether nothing but float32 noise is left."""
    return finding.residual_mean <= SAME_MEAN and finding.residual_max <= SAME_MAX
