"""The parts that a model is made of: a weight with its name and shape, a cache, a layer that has both.

Models counts, not values. Names and shapes are those of the transformers class on the meta device, so
that a reader can lay them side by side. A cache says what a layer keeps of the past, per token or per sequence.
Leaves out bytes (`inference`, `training`) and what a family is built of (`families`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Weight:
    """One parameter tensor. `active_experts`: of the shape[0] experts stacked in it, those a token is routed to."""

    name: str
    shape: tuple[int, ...]
    active_experts: int | None = None

    @property
    def count(self) -> int:
        """Number of parameters held in memory."""
        return prod(self.shape)

    @property
    def active_count(self) -> int:
        """Number of parameters that one token meets."""
        return self.count if self.active_experts is None else self.active_experts * prod(self.shape[1:])


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of one attention layer. `window`: tokens that later ones may look at; None for all."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def label(self) -> str:
        """Name of the ledger line."""
        return "full attention" if self.window is None else f"sliding window {self.window:,}"

    def values_per_token(self, tp: int = 1, mla: str = "latent") -> int:
        """Numbers kept for one token on one of `tp` ranks.

        With more ranks than heads each rank holds one head, so that some heads are held twice (vLLM and
        Megatron do so). Raises ValueError for a `tp` that neither divides the heads nor is a multiple of them.
        """
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(f"tp={tp}: neither divides num_key_value_heads={self.num_kv_heads} nor is a multiple")
        return max(1, self.num_kv_heads // tp) * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class LatentCache:
    """One MLA layer: a latent and a rotary key shared by all heads, or keys and values expanded from them.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (table 1: (d_c + d_h^R) numbers a token and layer).
    """

    latent_dim: int
    rotary_dim: int
    num_heads: int
    key_dim: int
    value_dim: int
    window: None = None

    label = "latent (MLA)"

    def values_per_token(self, tp: int = 1, mla: str = "latent") -> int:
        """Numbers kept for one token on one rank: the latent is whole on each rank, expanded heads are divided.

        Raises ValueError for a `tp` that does not divide expanded heads.
        """
        if mla == "latent":
            return self.latent_dim + self.rotary_dim
        if self.num_heads % tp:
            raise ValueError(f"tp={tp}: does not divide num_attention_heads={self.num_heads}")
        return self.num_heads // tp * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class StateCache:
    """One linear-attention layer: a state that does not grow with tokens.

    The last inputs of its convolution are kept in the model's dtype, the recurrent state in float32, as
    transformers' cache object does (its `conv_states` hold `kernel` columns; vLLM keeps kernel - 1).
    """

    num_key_heads: int
    conv_values: int
    recurrent_values: int

    label = "linear-attention state"

    def bytes_per_sequence(self, dtype_bytes: float, tp: int = 1) -> float:
        """Bytes kept for one sequence, however long, on one of `tp` ranks.

        Raises ValueError for a `tp` that does not divide the key heads.
        """
        if self.num_key_heads % tp:
            raise ValueError(f"tp={tp}: does not divide linear_num_key_heads={self.num_key_heads}")
        return (self.conv_values * dtype_bytes + self.recurrent_values * 4) / tp


Cache = AttentionCache | LatentCache | StateCache


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its weights (names inside the layer) and what it keeps of the past."""

    weights: tuple[Weight, ...]
    cache: Cache

    @property
    def num_params(self) -> int:
        """Parameters of this layer."""
        return sum(weight.count for weight in self.weights)
