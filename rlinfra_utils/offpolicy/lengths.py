"""What a correction drops, by length of answer: counts in bins that merge over ranks.

Models: answers sorted by tokens under the mask into bins [1, 2), [2, 4), [4, 8), ... Fixed edges, so that
two batches merge. Leaves out: answers without a token. Use: `pandas.DataFrame(correction.stats.lengths)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class LengthBin(NamedTuple):
    """Answers of `min_length` tokens up to, not including, `2 * min_length`.

    Of `num_sequences` answers, `num_sequences_touched` lost some token and `num_sequences_dropped` every one.
    """

    min_length: int
    num_sequences: int
    num_sequences_touched: int
    num_sequences_dropped: int
    num_tokens: int
    num_tokens_dropped: int


def by_length(mask: np.ndarray, keep: np.ndarray) -> tuple[LengthBin, ...]:
    """Bins that are not empty, shortest first; `keep` is the part of `mask` that is left, both (..., tokens)."""
    lengths, kept = mask.sum(axis=-1).ravel(), keep.sum(axis=-1).ravel()
    bins = []
    for exponent in np.unique(np.frexp(lengths[lengths > 0])[1] - 1):
        low = 1 << int(exponent)
        here = (lengths >= low) & (lengths < 2 * low)
        offered, left = lengths[here], kept[here]
        counts = (len(offered), (left < offered).sum(), (left == 0).sum(), offered.sum(), (offered - left).sum())
        bins.append(LengthBin(low, *map(int, counts)))
    return tuple(bins)


def merge_bins(first: Sequence[LengthBin], second: Sequence[LengthBin]) -> tuple[LengthBin, ...]:
    """Bins of both batches together."""
    merged = {b.min_length: b for b in first}
    for b in second:
        old = merged.get(b.min_length)
        merged[b.min_length] = b if old is None else LengthBin(b.min_length, *(np.add(old[1:], b[1:]).tolist()))
    return tuple(merged[length] for length in sorted(merged))
