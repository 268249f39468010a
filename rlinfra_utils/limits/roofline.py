"""The least time of a step on a machine, and what sets it: `decode`, `prefill`, `training`.

Models bytes moved and floating-point operations of one step, from a model's shapes. Leaves out what the package's head
names. Use: `decode(spec, device("H100"), batch=64, context_tokens=4096).tokens_per_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinfra_utils.doors import amount, instance, whole
from rlinfra_utils.limits.machines import Device
from rlinfra_utils.memory import ModelSpec, kv_cache
from rlinfra_utils.memory.layers import AttentionCache, LatentCache
from rlinfra_utils.memory.spec import require_spec

#: `compute_bound_batch` looks no further: a bound of bandwidth here is one of the cache, at any batch.
LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class Bound:
    """The least time of one step, which makes or reads `tokens`, and what sets it: "bandwidth" or "compute".

    `bytes` are moved and `flops` done; `bytes_s` and `flops_s` are the seconds of each at the machine's best.
    """

    tokens: float
    bytes: float
    flops: float
    bytes_s: float
    flops_s: float

    @property
    def step_s(self) -> float:
        """The least time of the step, in seconds."""
        return max(self.bytes_s, self.flops_s)

    @property
    def limit(self) -> str:
        """What sets `step_s`."""
        return "bandwidth" if self.bytes_s >= self.flops_s else "compute"

    @property
    def tokens_per_s(self) -> float:
        """The most tokens a second."""
        return self.tokens / self.step_s

    def share(self, measured_tokens_per_s: float) -> float:
        """Measured rate as a share of the bound."""
        return measured_tokens_per_s / self.tokens_per_s


def decode(
    spec: ModelSpec,
    device: Device,
    batch: int,
    context_tokens: int,
    dtype: str = "bfloat16",
    weight_bytes: float = 2,
    kv_bytes: float = 2,
) -> Bound:
    """One decode step of `batch` sequences with `context_tokens` each behind them: one token a sequence.

    Bytes: each weight once (of a mixture, the experts that the batch reaches; of an embedding that is no head too,
    only rows, which are left out) and each sequence's cache. FLOPs: 2 for each of those weights that a token
    meets, and the attention over the context. `weight_bytes` and `kv_bytes` are bytes a number.

    Raises ValueError for a size that is not positive or an unknown dtype.
    """
    _subject(spec, device, batch=batch)
    _positive(weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    whole("context_tokens", context_tokens, 0)
    cache = kv_cache(spec, context_tokens, batch, kv_bytes).total
    flops = batch * (2 * (_body_params(spec) + _head_params(spec)) + _attention_flops(spec, context_tokens))
    return _bound(batch, _touched_params(spec, batch) * weight_bytes + cache, flops, device, dtype)


def prefill(
    spec: ModelSpec,
    device: Device,
    num_seqs: int,
    seq_tokens: int,
    dtype: str = "bfloat16",
    weight_bytes: float = 2,
    kv_bytes: float = 2,
) -> Bound:
    """Reading `num_seqs` prompts of `seq_tokens` tokens: the weights once, the cache written once.

    FLOPs: 2 for each active weight and token, the head for the last token of a prompt alone, and causal attention,
    in which a token meets half of its sequence on average. Other arguments and errors as in `decode`.
    """
    _subject(spec, device, num_seqs=num_seqs, seq_tokens=seq_tokens)
    _positive(weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    tokens = num_seqs * seq_tokens
    flops = _forward_flops(spec, num_seqs, seq_tokens, head_tokens=num_seqs)
    moved = _touched_params(spec, tokens) * weight_bytes + kv_cache(spec, seq_tokens, num_seqs, kv_bytes).total
    return _bound(tokens, moved, flops, device, dtype)


def training(
    spec: ModelSpec,
    device: Device,
    num_seqs: int,
    seq_tokens: int,
    dtype: str = "bfloat16",
    weight_bytes: float = 2,
    recompute: bool = False,
) -> Bound:
    """One forward and backward pass: three times a forward's FLOPs with the head for every token, four times if the
    forward is recomputed in full.

    The backward pass costs twice the forward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Bytes: the
    weights once a pass and the gradients once; activations are left out. Errors as in `decode`.
    """
    _subject(spec, device, num_seqs=num_seqs, seq_tokens=seq_tokens)
    _positive(weight_bytes=weight_bytes)
    passes, tokens = 4 if recompute else 3, num_seqs * seq_tokens
    flops = passes * _forward_flops(spec, num_seqs, seq_tokens, head_tokens=tokens)
    return _bound(tokens, passes * spec.num_params * weight_bytes, flops, device, dtype)


def compute_bound_batch(
    spec: ModelSpec,
    device: Device,
    context_tokens: int = 0,
    dtype: str = "bfloat16",
    weight_bytes: float = 2,
    kv_bytes: float = 2,
) -> float:
    """The smallest batch at which decode is bound by compute; inf if its caches keep it bound by bandwidth.

    Each sequence adds its own cache to the bytes, so that with a long context no batch gets there. Other arguments
    and errors as in `decode`.
    """

    def computes(batch: int) -> bool:
        return decode(spec, device, batch, context_tokens, dtype, weight_bytes, kv_bytes).limit == "compute"

    high = 1
    while not computes(high):
        high *= 2
        if high > LARGEST_BATCH:
            return math.inf
    low = high // 2  # bound by bandwidth, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def concurrency(
    spec: ModelSpec, pool_bytes: float, tokens_per_seq: int, dtype_bytes: float = 2, block_tokens: int = 16
) -> int:
    """Whole sequences of `tokens_per_seq` tokens that a KV pool of `pool_bytes` holds at once, in blocks.

    Raises ValueError for a pool or a sequence of no bytes, and as `memory.kv_cache` does.
    """
    per_seq = kv_cache(spec, tokens_per_seq, 1, dtype_bytes, "kept", block_tokens).total
    _positive(pool_bytes=pool_bytes, bytes_per_sequence=per_seq)
    return int(pool_bytes // per_seq)


def _head_params(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def _body_params(spec: ModelSpec) -> int:
    """Active weights of the layers: all but head and embedding, which a tied model has in one."""
    return spec.num_active_params - _head_params(spec) * (1 if spec.tied else 2)


def _forward_flops(spec: ModelSpec, num_seqs: int, seq_tokens: int, head_tokens: int) -> float:
    body = 2 * _body_params(spec) + _attention_flops(spec, seq_tokens) / 2
    return num_seqs * seq_tokens * body + 2 * _head_params(spec) * head_tokens


def _attention_flops(spec: ModelSpec, context_tokens: int) -> float:
    """FLOPs of one token's attention over `context_tokens`: a multiply and an add for each head, and each number
    of a key and of a value. MLA with absorbed projections attends in the latent (arXiv:2405.04434, 2.1.2).
    Linear layers are left out: they do not grow with the context, and are small beside their projections.
    """
    flops = 0.0
    for cache, num_layers in spec.caches.items():
        if isinstance(cache, LatentCache):
            flops += num_layers * 2 * spec.num_heads * (2 * cache.latent_dim + cache.rotary_dim) * context_tokens
        elif isinstance(cache, AttentionCache):
            met = min(context_tokens, cache.window or context_tokens)
            flops += num_layers * 2 * spec.num_heads * (cache.key_dim + cache.value_dim) * met
    return flops


def _touched_params(spec: ModelSpec, tokens: int) -> float:
    """Parameters that a step of `tokens` tokens reads: all of a dense model; of a mixture's experts, the expected
    share that `tokens` independent and even draws reach, 1 - (1 - active / all) ** tokens.
    """
    touched = 0.0 if spec.tied else -float(_head_params(spec))  # an embedding of its own is read by rows
    for _, weight in spec.weights():
        missed = 0.0 if weight.active_experts is None else (1 - weight.active_experts / weight.shape[0]) ** tokens
        touched += weight.count * (1 - missed)
    return touched


def _bound(tokens: float, num_bytes: float, flops: float, device: Device, dtype: str) -> Bound:
    return Bound(tokens, num_bytes, flops, num_bytes / device.bytes_per_s, flops / device.rate(dtype))


def _subject(spec: ModelSpec, device: Device, **counts: int) -> None:
    """A model and a device, not their names, and whole numbers of at least 1."""
    require_spec(spec)
    instance("device", device, Device, "as limits.device(name) or limits.measure() gives")
    for name, value in counts.items():
        whole(name, value)


def _positive(**values: float) -> None:
    for name, value in values.items():
        amount(name, value, above=True)
