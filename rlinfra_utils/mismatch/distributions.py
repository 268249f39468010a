"""What a token's log-prob would be under given decoding parameters or a narrower number format, in numpy.

Models: banned tokens, temperature, min_p, top_k, top_p in vLLM's order, greedy decoding, and rounding to
bfloat16 or float16. Leaves out penalties, which need the tokens before. Works through blocks of rows, so that
memory stays small beside the logits. Use: `token_logprobs(logits, tokens, Decoding(temperature=0.7, top_p=0.9))`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinfra_utils.rollouts import Decoding

#: Logits worked on at a time (float64: 32 MiB).
_BLOCK = 1 << 22
FULL_SOFTMAX = Decoding(temperature=1.0)


def token_logprobs(
    logits: np.ndarray, tokens: np.ndarray, decoding: Decoding = FULL_SOFTMAX, dtype: str | None = None
) -> np.ndarray:
    """Log-probs (nats, float64, shape (n,)) of `tokens` (n,) after processing `logits` (n, vocab) as `decoding` says.

    -inf for a token outside the kept set. A temperature of 0 is greedy: 0.0 on the likeliest token (the lowest id
    of several), -inf elsewhere; a temperature of None counts as 1. With `dtype` the logits are rounded first, and
    another one than `round_to` knows raises ValueError. Source of the order of filters: vLLM's sampler.
    """
    rows = max(1, _BLOCK // logits.shape[-1])
    blocks = [slice(start, start + rows) for start in range(0, len(tokens), rows)]
    scores = ((logits[b] if dtype is None else round_to(logits[b], dtype), tokens[b]) for b in blocks)
    return np.concatenate([_block(z, ids, decoding) for z, ids in scores] or [np.empty(0)])


def _block(logits: np.ndarray, tokens: np.ndarray, decoding: Decoding) -> np.ndarray:
    z = np.asarray(logits, dtype=np.float64)
    at = np.arange(len(tokens))
    if decoding.banned_token_ids:
        z = z.copy()
        z[:, decoding.banned_token_ids] = -np.inf
    if decoding.temperature == 0:
        return np.where(z.argmax(-1) == tokens, 0.0, -np.inf)
    z = z / (decoding.temperature or 1.0)
    z = z - z.max(-1, keepdims=True)
    if decoding.min_p > 0:
        z = np.where(z < np.log(decoding.min_p), -np.inf, z)
    if 0 < (decoding.top_k or 0) < z.shape[-1]:
        z = np.where(z < -np.partition(-z, decoding.top_k - 1, axis=-1)[:, decoding.top_k - 1, None], -np.inf, z)
    if decoding.top_p is not None and decoding.top_p < 1:
        z = _keep_nucleus(z, decoding.top_p)
    return z[at, tokens] - np.log(np.exp(z).sum(-1))


def _keep_nucleus(z: np.ndarray, top_p: float) -> np.ndarray:
    order, probs = descending(z)
    is_kept = np.empty(z.shape, dtype=bool)
    np.put_along_axis(is_kept, order, probs.cumsum(-1) - probs < top_p, axis=-1)
    return np.where(is_kept, z, -np.inf)


def descending(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids from the likeliest down and their probabilities, each (n, vocab); of equal ones the lower id is first."""
    order = np.argsort(-z, axis=-1, kind="stable")
    weights = np.exp(np.take_along_axis(z, order, axis=-1) - z.max(-1, keepdims=True))
    return order, weights / weights.sum(-1, keepdims=True)


def renormalized(logits: np.ndarray, tokens: np.ndarray, kept: Sequence[np.ndarray], temperature: float) -> np.ndarray:
    """Log-probs (nats, shape (n,)) of `tokens` (n,) over the recorded set of ids `kept[i]` at each position i.

    `logits` (n, vocab) are divided by `temperature` first.
    """
    answer = np.empty(len(tokens))
    for i, ids in enumerate(kept):
        z = np.asarray(logits[i], dtype=np.float64)[ids] / temperature
        answer[i] = float(logits[i][tokens[i]]) / temperature - z.max() - np.log(np.exp(z - z.max()).sum())
    return answer


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to the nearest "bfloat16" or "float16" (ties to even), as float32 of the same shape.

    Raises ValueError for another dtype.
    """
    single = np.asarray(values, dtype=np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        raise ValueError(f"dtype: {dtype!r} is not known; pass 'bfloat16' or 'float16'")
    bits = np.ascontiguousarray(single).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(single), rounded.reshape(single.shape), single)
