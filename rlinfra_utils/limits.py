"""How far a stage is from the machine's limit: the roofline of decode, prefill and training.

Models: a step takes at least its bytes over the memory bandwidth, and at least its floating-point operations
over the peak rate; the larger of the two is the bound (Williams et al., "Roofline", 2009). Leaves out:
caches that hold the weights, kernel launches, communication, and overlap of the two, so a bound is never beaten
for a model larger than the cache, and rarely reached.
Use: `decode(ModelSpec.named("Qwen2.5-7B"), device("H100"), batch=64, context_tokens=4096)`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from rlinfra_utils.doors import amount
from rlinfra_utils.memory import ModelSpec, kv_cache
from rlinfra_utils.memory.layers import AttentionCache, LatentCache

#: `compute_bound_batch` looks no further: a bound of bandwidth here is one of the cache, at any batch.
LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class Device:
    """What a machine can do at most: memory (bytes), bandwidth (bytes/s), rate by dtype (FLOP/s, dense)."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    source: str

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`; raises ValueError for one that the device has no figure for."""
        if dtype not in self.flops_per_s:
            raise ValueError(f"dtype={dtype!r}: {self.name} has figures for {', '.join(self.flops_per_s)}")
        return self.flops_per_s[dtype]


@dataclass(frozen=True)
class Bound:
    """The least time of one step and what sets it: "bandwidth" or "compute". `tokens` are made per step."""

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


def known_devices() -> list[str]:
    """Names that `device` knows."""
    return list(_table()["devices"])


def device(name: str) -> Device:
    """A device of `data/devices.json` (data sheets, dense figures); raises ValueError for an unknown name."""
    table = _table()["devices"]
    if name not in table:
        raise ValueError(f"name={name!r}: known devices are {', '.join(table)}; this machine: measure()")
    return Device(name, **table[name])


def measure(backend: str = "numpy", seconds: float = 0.5, dtype: str = "float32") -> Device:
    """This machine's bandwidth and its rate in `dtype`, measured: reading a block larger than the caches, and a
    square matrix product; the best of the repetitions that fit into `seconds` for each of the two. So it is what
    this library's kernels reach, and better ones may pass it.

    `backend`: "numpy", "torch" (its threads and kernels, on the CPU) or "cuda" (the current CUDA device; its
    memory_bytes is filled in). Raises ValueError for another one, a dtype that it lacks, or `seconds` <= 0.
    """
    _positive(seconds=seconds)
    if backend not in ("numpy", "torch", "cuda"):
        raise ValueError(f"backend={backend!r}: choose 'numpy', 'torch' or 'cuda'")
    if dtype not in ("float32", "bfloat16", "float16") or (backend == "numpy" and dtype != "float32"):
        raise ValueError(f"dtype={dtype!r}: numpy measures float32; torch and cuda also bfloat16 and float16")
    block, square, wait, memory_bytes = _numpy_work() if backend == "numpy" else _torch_work(backend, dtype)
    side, num_bytes = square.shape[0], block.nbytes
    read_s = _best_s(lambda: (block.max(), wait()), seconds)
    product_s = _best_s(lambda: (square @ square, wait()), seconds)
    return Device(
        "this machine", memory_bytes, num_bytes / read_s, {dtype: 2 * side**3 / product_s}, f"measured with {backend}"
    )


def _numpy_work() -> tuple:
    return np.ones(2**26, np.float32), np.ones((1024, 1024), np.float32), lambda: None, math.nan


def _torch_work(backend: str, dtype: str) -> tuple:
    import torch

    if backend == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend='cuda': torch finds no CUDA device here; use 'torch'")
    cuda = backend == "cuda"
    options = {"dtype": getattr(torch, dtype), "device": backend if cuda else "cpu"}
    num_bytes, side = (2**30, 4096) if cuda else (2**28, 1024)
    block = torch.ones(num_bytes // options["dtype"].itemsize, **options)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if cuda else math.nan
    return block, torch.ones(side, side, **options), torch.cuda.synchronize if cuda else (lambda: None), memory_bytes


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
    _positive(batch=batch, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
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
    in which a token meets half of its sequence on average.
    """
    _positive(num_seqs=num_seqs, seq_tokens=seq_tokens, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
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
    weights once a pass and the gradients once; activations are left out.
    """
    _positive(num_seqs=num_seqs, seq_tokens=seq_tokens, weight_bytes=weight_bytes)
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

    Each sequence adds its own cache to the bytes, so that with a long context no batch gets there.
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
    """Whole sequences of `tokens_per_seq` tokens that a KV pool of `pool_bytes` holds at once, in blocks."""
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


def _best_s(work: Callable[[], object], seconds: float) -> float:
    work()  # the first call pays for pages and threads
    best_s, until_s = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        start_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def _positive(**values: float) -> None:
    for name, value in values.items():
        amount(name, value, above=True)


def _table() -> dict:
    return json.loads((files("rlinfra_utils") / "data" / "devices.json").read_text(encoding="utf-8"))
