"""What decoder layers are built from: projections, norms, attentions, feed-forwards, experts.

Models names and shapes, as transformers 5 holds them: projections are (out, in), the experts of a layer
are stacked in one tensor (a checkpoint lists them one by one). Leaves out values and buffers, and which block a model
has where: `families` says that. Each block is a list of weights; a config that lacks a key raises as `Config` says.
"""

from __future__ import annotations

from rlinfra_utils.doors import divides
from rlinfra_utils.memory.config import Config
from rlinfra_utils.memory.layers import AttentionCache, LatentCache, StateCache, Weight


def linear(name: str, num_out: int, num_in: int, bias: bool = False) -> list[Weight]:
    """A projection, with or without bias."""
    return [Weight(f"{name}.weight", (num_out, num_in)), *([Weight(f"{name}.bias", (num_out,))] if bias else [])]


def norm(name: str, dim: int) -> list[Weight]:
    """A root-mean-square norm: one scale a channel."""
    return [Weight(f"{name}.weight", (dim,))]


def two_norms(c: Config) -> list[Weight]:
    """A norm before attention and one before the feed-forward."""
    return norm("input_layernorm", c.hidden_size) + norm("post_attention_layernorm", c.hidden_size)


def four_norms(c: Config) -> list[Weight]:
    """Gemma's: a norm before and after each half."""
    after = norm("pre_feedforward_layernorm", c.hidden_size) + norm("post_feedforward_layernorm", c.hidden_size)
    return two_norms(c) + after


def attention(
    c: Config, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False, gated: bool = False
) -> list[Weight]:
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values of width `head_dim`.

    A gated one projects a gate for each query beside it.
    """
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return [
        *linear("self_attn.q_proj", queries * (2 if gated else 1), c.hidden_size, qkv_bias),
        *linear("self_attn.k_proj", keys, c.hidden_size, qkv_bias),
        *linear("self_attn.v_proj", keys, c.hidden_size, qkv_bias),
        *linear("self_attn.o_proj", c.hidden_size, queries, o_bias),
        *(norm("self_attn.q_norm", c.head_dim) + norm("self_attn.k_norm", c.head_dim) if qk_norm else []),
    ]


def kv(c: Config, window: int | None = None) -> AttentionCache:
    """Keys and values of a grouped-query layer."""
    return AttentionCache(c.num_kv_heads, c.head_dim, c.head_dim, window)


def latent_attention(c: Config) -> list[Weight]:
    """MLA: keys and values come out of one narrow latent, queries may (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    heads, latent, rotary = c.num_heads, c.whole("kv_lora_rank"), c.whole("qk_rope_head_dim")
    nope, value, bias = c.whole("qk_nope_head_dim"), c.whole("v_head_dim"), c.flag("attention_bias", False)
    query_rank, query_dim = c.optional("q_lora_rank", 1536), heads * (nope + rotary)
    queries = (
        linear("self_attn.q_proj", query_dim, c.hidden_size)
        if query_rank is None
        else [
            *linear("self_attn.q_a_proj", query_rank, c.hidden_size, bias),
            *norm("self_attn.q_a_layernorm", query_rank),
            *linear("self_attn.q_b_proj", query_dim, query_rank),
        ]
    )
    return [
        *queries,
        *linear("self_attn.kv_a_proj_with_mqa", latent + rotary, c.hidden_size, bias),
        *norm("self_attn.kv_a_layernorm", latent),
        *linear("self_attn.kv_b_proj", heads * (nope + value), latent),
        *linear("self_attn.o_proj", c.hidden_size, heads * value, bias),
    ]


def latent(c: Config) -> LatentCache:
    """What an MLA layer keeps."""
    rotary, nope = c.whole("qk_rope_head_dim"), c.whole("qk_nope_head_dim")
    return LatentCache(c.whole("kv_lora_rank"), rotary, c.num_heads, nope + rotary, c.whole("v_head_dim"))


def gated_delta_net(c: Config) -> list[Weight]:
    """Linear attention with a short convolution and a matrix for state (Gated DeltaNet, arXiv:2412.06464)."""
    keys, values, value_heads = _delta_dims(c)
    return [
        Weight("linear_attn.dt_bias", (value_heads,)),
        Weight("linear_attn.A_log", (value_heads,)),
        Weight("linear_attn.conv1d.weight", (2 * keys + values, 1, c.whole("linear_conv_kernel_dim", 4))),
        *linear("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, c.hidden_size),
        *linear("linear_attn.in_proj_ba", 2 * value_heads, c.hidden_size),
        *norm("linear_attn.norm", c.whole("linear_value_head_dim")),
        *linear("linear_attn.out_proj", c.hidden_size, values),
    ]


def delta_state(c: Config) -> StateCache:
    """The state of a gated delta net: a (key, value) matrix a value head, and the convolution's last inputs."""
    keys, values, value_heads = _delta_dims(c)
    matrix = c.whole("linear_key_head_dim") * c.whole("linear_value_head_dim")
    conv = (2 * keys + values) * c.whole("linear_conv_kernel_dim", 4)
    return StateCache(c.whole("linear_num_key_heads"), conv, value_heads * matrix)


def _delta_dims(c: Config) -> tuple[int, int, int]:
    """Widths of all keys and of all values together, and the number of value heads."""
    key_heads, value_heads = c.whole("linear_num_key_heads"), c.whole("linear_num_value_heads")
    divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)
    return key_heads * c.whole("linear_key_head_dim"), value_heads * c.whole("linear_value_head_dim"), value_heads


def gated_mlp(c: Config, width: int, name: str = "mlp", bias: bool = False) -> list[Weight]:
    """Feed-forward with a gate: three projections."""
    return [
        *linear(f"{name}.gate_proj", width, c.hidden_size, bias),
        *linear(f"{name}.up_proj", width, c.hidden_size, bias),
        *linear(f"{name}.down_proj", c.hidden_size, width, bias),
    ]


def experts(c: Config, num_experts: int, width: int) -> list[Weight]:
    """A router and `num_experts` gated feed-forwards, of which a token meets `num_experts_per_tok`."""
    top_k = routed(c, num_experts)
    return [
        Weight("mlp.gate.weight", (num_experts, c.hidden_size)),
        Weight("mlp.experts.gate_up_proj", (num_experts, 2 * width, c.hidden_size), top_k),
        Weight("mlp.experts.down_proj", (num_experts, c.hidden_size, width), top_k),
    ]


def routed(c: Config, num_experts: int) -> int:
    """Experts that a token is sent to."""
    top_k = c.whole("num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok={top_k}: more than the {num_experts} experts there are")
    return top_k
