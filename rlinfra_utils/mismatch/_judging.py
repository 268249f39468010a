"""How a residual becomes a status: the one rule by which every recomputation is judged.

Models: a cause is accepted when undoing it takes away most of the difference, and confirmed when what is left is
noise. Leaves out the tests. Use: `judge(case, "shift", residual, "behaviour[t + 1]")`.
"""

from __future__ import annotations

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
#: One free parameter fits a few tokens by chance.
MIN_FIT_TOKENS = 4


def judge(
    case: Case, cause: str, residual: np.ndarray, evidence: str, num_left_out: int = 0, gap: float | None = None
) -> Finding:
    """A finding for `residual` (nats; signed or not, one a token compared) against the difference before."""
    size = np.abs(residual)
    mean, largest = (float(size.mean()), float(size.max())) if size.size else (np.inf, np.inf)
    gap = case.gap if gap is None else gap
    status = "ruled out"
    if mean <= ACCEPT_SHARE * gap:
        is_noise = mean <= max(SAME_MEAN, CONFIRM_SHARE * gap) or mean <= min(NOISE_FACTOR * case.noise, 0.25 * gap)
        status = "confirmed" if is_noise else "suspected"
    return Finding(cause, status, evidence, mean, largest, num_left_out)


def is_exact(finding: Finding) -> bool:
    """Whether nothing but float32 noise is left."""
    return finding.residual_mean <= SAME_MEAN and finding.residual_max <= SAME_MAX
