"""What an engine holds beside its weights: the KV cache, how many tokens fit in a pool, and logits.

Models the useful payload, in whole blocks where a block size is given. Leaves out block tables, CUDA
graphs and workspaces. Use `kv_cache(spec, tokens_per_seq=4096, num_seqs=64).gib`, `kv_capacity(spec, pool_bytes)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinfra_utils.doors import amount, choice, divides, short, whole
from rlinfra_utils.memory.layers import AttentionCache, LatentCache, StateCache
from rlinfra_utils.memory.ledger import Ledger
from rlinfra_utils.memory.spec import MLA_FORMS, ModelSpec, require_spec

WINDOW_RULES = ("freed", "kept")
#: Relative error of a report in whole tokens, of which there are 100,000 or more: a fixed part of nothing may come out
#: below 0 by so much.
_REPORT_ERROR = 1e-5


def kv_cache(
    spec: ModelSpec,
    tokens_per_seq: int,
    num_seqs: int = 1,
    dtype_bytes: float = 2,
    window: str = "freed",
    block_tokens: int | None = None,
    tp: int = 1,
    mla: str = "latent",
) -> Ledger:
    """Bytes of the cache for `num_seqs` sequences of `tokens_per_seq` tokens on one rank, a line a kind of layer.

    Formula: 2 * layers * kv_heads * head_dim * tokens * dtype_bytes (lecture step 12.2.3). `window`: "freed" if
    the allocator gives back what slid out of a window, "kept" if it reserves all tokens (vLLM without
    its hybrid cache manager); equal up to the window. `block_tokens` rounds each sequence up to whole
    blocks. `tp` ranks divide key-value heads and linear states, never an MLA latent, which each holds whole.

    Raises ValueError for negative tokens, an unknown `window` or `mla`, or a `tp` that does not divide the heads.
    """
    require_spec(spec)
    tokens, num_seqs = whole("tokens_per_seq", tokens_per_seq, 0), whole("num_seqs", num_seqs, 0)
    amount("dtype_bytes", dtype_bytes, above=True)
    choice("window", window, WINDOW_RULES)
    choice("mla", mla, MLA_FORMS)
    divides("tp", whole("tp", tp), "num_attention_heads", spec.num_heads)
    block = 1 if block_tokens is None else whole("block_tokens", block_tokens)
    lines = {}
    for cache, num_layers in spec.caches.items():
        if isinstance(cache, StateCache):
            per_seq = cache.bytes_per_sequence(dtype_bytes, tp)
        else:
            held = _held_tokens(tokens, cache.window if window == "freed" else None, block)
            per_seq = held * cache.values_per_token(tp, mla) * dtype_bytes
        lines[f"{cache.label} ({num_layers} layers)"] = per_seq * num_layers * num_seqs
    return Ledger(lines, notes=_kv_notes(spec, window, tp, mla))


def _held_tokens(tokens: int, window: int | None, block: int) -> int:
    """Tokens held, in whole blocks, at the most while a sequence grows to `tokens`.

    A window need not start where a block does, so that a full one may reach into one block more.
    """
    blocks = -(-tokens // block)
    return block * (blocks if window is None else min(blocks, -(-(window - 1) // block) + 1))


def _kv_notes(spec: ModelSpec, window: str, tp: int, mla: str) -> tuple[str, ...]:
    """The conventions behind a KV ledger."""
    notes = []
    if _has_window(spec):
        notes.append(f"tokens outside a sliding window are {'given back' if window == 'freed' else 'kept'}")
    if any(isinstance(cache, LatentCache) for cache in spec.caches):
        notes.append(f"MLA: {'one latent and one rotary key a layer' if mla == 'latent' else 'keys, values expanded'}")
    if tp > 1:
        is_whole = mla == "latent" and any(isinstance(cache, LatentCache) for cache in spec.caches)
        notes.append(f"one of {tp} tensor-parallel ranks: {'held whole by each' if is_whole else 'heads divided'}")
    return tuple(notes)


def kv_capacity(
    spec: ModelSpec,
    pool_bytes: float,
    dtype_bytes: float = 2,
    block_tokens: int = 16,
    tokens_per_seq: int | None = None,
    window: str = "kept",
    tp: int = 1,
    mla: str = "latent",
) -> int:
    """Tokens that fit in a pool of `pool_bytes` on one rank: whole blocks times their length.

    That is what vLLM logs as "KV cache size: N tokens" for a model whose layers all grow with tokens.
    Where part of a sequence does not grow (a linear state, a window that is freed), the number depends on
    the length of the sequences: give `tokens_per_seq`, and it is int(sequences that fit * length), as in `RequestCost`.
    Raises ValueError where it is needed and not given.
    """
    amount("pool_bytes", pool_bytes)
    block = whole("block_tokens", block_tokens)
    has_state = any(isinstance(cache, StateCache) for cache in require_spec(spec).caches)
    if tokens_per_seq is None and (has_state or (window == "freed" and _has_window(spec))):
        raise ValueError("tokens_per_seq=None: needed, as part of what a sequence holds does not grow with its tokens")
    length = block if tokens_per_seq is None else whole("tokens_per_seq", tokens_per_seq)
    per_seq = kv_cache(spec, length, 1, dtype_bytes, window, block, tp, mla).total
    return int(pool_bytes // per_seq) * block if tokens_per_seq is None else int(pool_bytes / per_seq * length)


def _has_window(spec: ModelSpec) -> bool:
    return any(isinstance(cache, AttentionCache) and cache.window for cache in spec.caches)


@dataclass(frozen=True)
class RequestCost:
    """What one request costs, as a pair: `fixed_bytes` whatever its length, and `per_token_bytes`.

    An engine's "KV cache size: N tokens" is derived from it, at one maximal length: pool / N is a
    rate only where nothing is fixed (vllm issue 51041, field case B06). Raises ValueError for bytes that are
    negative or not finite.
    """

    fixed_bytes: float
    per_token_bytes: float

    def __post_init__(self):
        amount("fixed_bytes", self.fixed_bytes)
        amount("per_token_bytes", self.per_token_bytes)

    def bytes(self, tokens: int) -> float:
        """Bytes of a request of `tokens` tokens. Raises ValueError for tokens that are no whole number."""
        return self.fixed_bytes + self.per_token_bytes * whole("tokens", tokens, 0)

    def concurrency(self, pool_bytes: float, tokens: int) -> float:
        """Requests of `tokens` tokens that a pool holds at once, with the fraction.

        Raises ValueError for a request that costs nothing.
        """
        if not self.bytes(tokens):
            raise ValueError(f"tokens={tokens}: such a request costs nothing, any number fits")
        return amount("pool_bytes", pool_bytes) / self.bytes(tokens)

    def reported_tokens(self, pool_bytes: float, max_tokens: int) -> int:
        """The engine's "KV cache size" at a maximal length: int(concurrency * max_tokens)."""
        return int(self.concurrency(pool_bytes, max_tokens) * max_tokens)

    @classmethod
    def from_measurements(cls, first: tuple[int, float], second: tuple[int, float]) -> RequestCost:
        """Recover the pair from two (tokens, bytes of such a request).

        With a report of N tokens at maximal length L, the bytes of a request are pool_bytes * L / N.
        Raises ValueError if the lengths are equal or no pair of non-negative numbers explains both.
        """
        (tokens_1, bytes_1), (tokens_2, bytes_2) = sorted((_measured("first", first), _measured("second", second)))
        if tokens_1 == tokens_2:
            raise ValueError(f"tokens={tokens_1}: twice the same length, two different ones are needed")
        slope = (bytes_2 - bytes_1) / (tokens_2 - tokens_1)
        fixed = bytes_1 - slope * tokens_1
        return cls(0.0 if -_REPORT_ERROR * bytes_1 <= fixed < 0 else fixed, slope)


def _measured(name: str, pair: tuple[int, float]) -> tuple[int, float]:
    """(tokens, bytes) of one measured request."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name}={short(pair)}: needs a pair (tokens, bytes)")
    return whole(f"tokens of {name}", pair[0], 0), amount(f"bytes of {name}", pair[1])


def logits(batch: int, seq: int, vocab: int, dtype_bytes: float = 4, copies: int = 1) -> Ledger:
    """Bytes of `copies` live tensors of shape (batch, seq, vocab); `seq` counts prompt tokens too.

    No sharding of parameters makes them smaller. A training step with transformers' own loss holds up
    to four at once (`activations.training_step`). With vocab=1: the log-probs of the chosen tokens alone.
    Raises ValueError for a size that is not whole, and for `dtype_bytes` that are not above 0.
    """
    amount("dtype_bytes", dtype_bytes, above=True)
    elements = whole("batch", batch) * whole("seq", seq) * whole("vocab", vocab)
    return Ledger({"logits": elements * dtype_bytes * whole("copies", copies)})


def logits_dtype_bytes(measured_bytes: float, batch: int, seq: int, vocab: int, tolerance: float = 0.02) -> int:
    """Bytes an element that a measured logits tensor has: 1, 2, 4 or 8, whatever its label says (field case B13).

    Raises ValueError if none comes within `tolerance`.
    """
    per_element = amount("measured_bytes", measured_bytes) / logits(batch, seq, vocab, dtype_bytes=1).total
    nearest = min((1, 2, 4, 8), key=lambda size: abs(size - per_element))
    if abs(nearest - per_element) > tolerance * nearest:
        raise ValueError(f"measured_bytes={measured_bytes}: {per_element:.3f} bytes an element is no dtype's size")
    return nearest
