"""The layers of each family: one small function each, to be read beside the model card.

Models the text decoders in `FAMILIES`, by `model_type`. Leaves out vision towers, quantised storage and
multi-token-prediction heads (transformers drops those on loading). Add a family by adding a function:
it yields one `Layer` for each decoder layer, and leaves bad keys to `Config`, which raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlinfra_utils.memory.blocks import (
    attention,
    delta_state,
    experts,
    four_norms,
    gated_delta_net,
    gated_mlp,
    kv,
    latent,
    latent_attention,
    linear,
    routed,
    two_norms,
)
from rlinfra_utils.memory.config import Config
from rlinfra_utils.memory.layers import Layer, Weight

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def llama(c: Config) -> Iterator[Layer]:
    """Llama 1 to 3, SmolLM2: grouped-query attention and a gated feed-forward."""
    bias = c.flag("attention_bias", False)
    mlp = gated_mlp(c, c.whole("intermediate_size"), bias=c.flag("mlp_bias", False))
    layer = Layer((*attention(c, bias, bias), *mlp, *two_norms(c)), kv(c))
    yield from [layer] * c.num_layers


def mistral(c: Config) -> Iterator[Layer]:
    """Mistral: Llama's layer, with a window on each one unless `sliding_window` is null."""
    mlp = gated_mlp(c, c.whole("intermediate_size"))
    layer = Layer((*attention(c), *mlp, *two_norms(c)), kv(c, c.optional("sliding_window", 4096)))
    yield from [layer] * c.num_layers


def mixtral(c: Config) -> Iterator[Layer]:
    """Mixtral: Mistral's attention, and experts in place of the feed-forward."""
    moe = experts(c, c.whole("num_local_experts"), c.whole("intermediate_size"))
    layer = Layer((*attention(c), *moe, *two_norms(c)), kv(c, c.optional("sliding_window", None)))
    yield from [layer] * c.num_layers


def qwen2(c: Config) -> Iterator[Layer]:
    """Qwen2 and 2.5: biases on queries, keys and values; the last layers may slide."""
    weights = (*attention(c, qkv_bias=True), *gated_mlp(c, c.whole("intermediate_size")), *two_norms(c))
    for window in _qwen_windows(c):
        yield Layer(weights, kv(c, window))


def qwen3(c: Config) -> Iterator[Layer]:
    """Qwen3: no biases, norms on queries and keys, its own head_dim."""
    bias = c.flag("attention_bias", False)
    mlp = gated_mlp(c, c.whole("intermediate_size"))
    weights = (*attention(c, bias, bias, qk_norm=True), *mlp, *two_norms(c))
    for window in _qwen_windows(c):
        yield Layer(weights, kv(c, window))


def _qwen_windows(c: Config) -> list[int | None]:
    """Window of each layer: none at all, or on the layers from `max_window_layers` on."""
    if not c.flag("use_sliding_window", False):
        return [None] * c.num_layers
    window, first = c.whole("sliding_window", 4096), c.whole("max_window_layers", 28, minimum=0)
    if c.values.get("layer_types") is None:
        return [window if index >= first else None for index in range(c.num_layers)]
    return [window if layer_type == SLIDING else None for layer_type in c.layer_types(1, FULL, (FULL, SLIDING))]


def qwen3_moe(c: Config) -> Iterator[Layer]:
    """Qwen3 MoE: Qwen3's attention; experts in each layer that the config does not name dense."""
    bias = c.flag("attention_bias", False)
    window = c.whole("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
    dense = gated_mlp(c, c.whole("intermediate_size"))
    moe = experts(c, _num_experts(c), c.whole("moe_intermediate_size"))
    for is_sparse in _sparse_layers(c):
        mlp = moe if is_sparse else dense
        yield Layer((*attention(c, bias, bias, qk_norm=True), *mlp, *two_norms(c)), kv(c, window))


def qwen3_next(c: Config) -> Iterator[Layer]:
    """Qwen3-Next: three gated delta nets to one layer of gated attention; experts, and one shared by all tokens."""
    bias = c.flag("attention_bias", False)
    full = attention(c, bias, bias, qk_norm=True, gated=True)
    shared = gated_mlp(c, c.whole("shared_expert_intermediate_size"), "mlp.shared_expert")
    moe = experts(c, _num_experts(c), c.whole("moe_intermediate_size"))
    moe += [*shared, *linear("mlp.shared_expert_gate", 1, c.hidden_size)]
    dense = gated_mlp(c, c.whole("intermediate_size"))
    layer_types = c.layer_types(c.whole("full_attention_interval", 4), LINEAR, (FULL, LINEAR))
    for layer_type, is_sparse in zip(layer_types, _sparse_layers(c)):
        mixer, cache = (gated_delta_net(c), delta_state(c)) if layer_type == LINEAR else (full, kv(c))
        yield Layer((*mixer, *(moe if is_sparse else dense), *two_norms(c)), cache)


def _num_experts(c: Config) -> int:
    """Qwen's config.json says `num_experts`; transformers 5 writes the same value as `num_local_experts`."""
    return c.whole("num_local_experts" if "num_local_experts" in c.values else "num_experts")


def _sparse_layers(c: Config) -> list[bool]:
    """Whether each layer has experts: each `decoder_sparse_step`-th that `mlp_only_layers` does not name."""
    step, dense = c.whole("decoder_sparse_step", 1), c.indices("mlp_only_layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(c.num_layers)]


def gemma2(c: Config) -> Iterator[Layer]:
    """Gemma 2: four norms; the first layer slides, the second is full, and so on."""
    bias = c.flag("attention_bias", False)
    weights = (*attention(c, bias, bias), *gated_mlp(c, c.whole("intermediate_size")), *four_norms(c))
    yield from _interleaved(c, weights, interval=2)


def gemma3_text(c: Config) -> Iterator[Layer]:
    """Gemma 3 (text): four norms, norms on queries and keys; five sliding layers to one full."""
    bias = c.flag("attention_bias", False)
    mlp = gated_mlp(c, c.whole("intermediate_size"))
    weights = (*attention(c, bias, bias, qk_norm=True), *mlp, *four_norms(c))
    yield from _interleaved(c, weights, interval=c.whole("sliding_window_pattern", 6))


def gpt_oss(c: Config) -> Iterator[Layer]:
    """gpt-oss: biases everywhere, a learned sink a head, experts stored (in, out); sliding and full in turn."""
    bias = c.flag("attention_bias", True)
    num_experts, width = c.whole("num_local_experts"), c.whole("intermediate_size")
    top_k = routed(c, num_experts)
    weights = (
        Weight("self_attn.sinks", (c.num_heads,)),
        *attention(c, bias, bias),
        *linear("mlp.router", num_experts, c.hidden_size, bias=True),
        Weight("mlp.experts.gate_up_proj", (num_experts, c.hidden_size, 2 * width), top_k),
        Weight("mlp.experts.gate_up_proj_bias", (num_experts, 2 * width), top_k),
        Weight("mlp.experts.down_proj", (num_experts, width, c.hidden_size), top_k),
        Weight("mlp.experts.down_proj_bias", (num_experts, c.hidden_size), top_k),
        *two_norms(c),
    )
    yield from _interleaved(c, weights, interval=2)


def _interleaved(c: Config, weights: tuple[Weight, ...], interval: int) -> Iterator[Layer]:
    """Sliding layers with a full one at each `interval`-th place, or as `layer_types` says."""
    for layer_type in c.layer_types(interval, SLIDING, (FULL, SLIDING)):
        yield Layer(weights, kv(c, c.whole("sliding_window") if layer_type == SLIDING else None))


def deepseek(c: Config) -> Iterator[Layer]:
    """DeepSeek V2 and V3: latent attention; dense feed-forwards first, then experts with shared ones."""
    num_dense, width = c.whole("first_k_dense_replace", minimum=0), c.whole("moe_intermediate_size")
    shared = gated_mlp(c, c.whole("n_shared_experts") * width, "mlp.shared_experts")
    moe = experts(c, c.whole("n_routed_experts"), width) + shared
    dense = gated_mlp(c, c.whole("intermediate_size"))
    for index in range(c.num_layers):
        mlp = dense if index < num_dense else moe
        yield Layer((*latent_attention(c), *mlp, *two_norms(c)), latent(c))


FAMILIES: dict[str, Callable[[Config], Iterator[Layer]]] = {
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
