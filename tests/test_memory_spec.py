"""`memory.spec` against transformers' own models on the meta device, name by name and shape by shape."""

import copy
import json
import subprocess
import sys
from importlib.resources import files

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rlinfra_utils.memory import ModelSpec, known_models, model_config

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 40,
}
VARIANTS = {
    "llama with biases, given head_dim": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
    },
    "llama without num_key_value_heads": {"model_type": "llama", "num_key_value_heads": None},
    "mistral": {"model_type": "mistral"},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, last layers slide": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
    "qwen3 without head_dim": {"model_type": "qwen3"},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 16},
    "qwen3_moe, a dense layer": {"model_type": "qwen3_moe", "mlp_only_layers": [1], **MOE},
    "qwen3_moe, every other layer sparse": {"model_type": "qwen3_moe", "decoder_sparse_step": 2, **MOE},
    "qwen3_next": {"model_type": "qwen3_next", **MOE, **DELTA},
    "qwen3_next with biases": {"model_type": "qwen3_next", "attention_bias": True, **MOE, **DELTA},
    "gemma2": {"model_type": "gemma2"},
    "gemma2 with biases, untied": {"model_type": "gemma2", "attention_bias": True, "tie_word_embeddings": False},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2 without query latent": {"model_type": "deepseek_v2", "q_lora_rank": None, **MLA},
    "deepseek_v2 with biases": {"model_type": "deepseek_v2", "q_lora_rank": 20, "attention_bias": True, **MLA},
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 20, **MLA},
}
# What transformers may default to and this package asks for.
NEEDED = {"gemma2": {"sliding_window": 16}}


def meta_parameters(config):
    """Names and shapes of transformers' own parameters; a tied one is listed once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def our_parameters(spec):
    return {name: weight.shape for name, weight in spec.weights()}


@pytest.mark.parametrize("name", known_models())
def test_known_models_equal_transformers(name):
    config = model_config(name)
    spec, theirs = ModelSpec.from_config(config), meta_parameters(config)
    assert our_parameters(spec) == theirs
    assert spec.num_params == sum(torch.Size(shape).numel() for shape in theirs.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant):
    config = {**TINY, **VARIANTS[variant], **NEEDED.get(VARIANTS[variant]["model_type"], {})}
    spec = ModelSpec.from_config(config)
    assert our_parameters(spec) == meta_parameters(config)
    assert spec.parameters().total == spec.num_params
    assert spec.parameters(active=True).total == spec.num_active_params


@pytest.mark.parametrize("name", known_models())
def test_a_config_that_transformers_wrote_reads_the_same(name):
    config = model_config(name)
    written = ModelSpec.from_config(AutoConfig.for_model(**config).to_dict())
    spec = ModelSpec.from_config(config)
    assert written.layers == spec.layers
    assert written.outer == spec.outer


def test_the_shipped_models_span_the_field_and_say_their_source():
    counts = [ModelSpec.named(name).num_params for name in known_models()]
    assert len(counts) >= 14
    assert min(counts) < 0.14e9
    assert max(counts) > 670e9
    for name in known_models():
        entry = json.loads((files("rlinfra_utils") / "data" / "models" / f"{name}.json").read_text())
        assert entry["source"].startswith("config.json of ")
        assert entry["checked"].count("-") == 2
        assert entry["against"]


# Published counts: field cases B09, B11, B12, B14; SmolLM2 from the weights themselves.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("SmolLM2-135M", 134_515_008),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Mixtral-8x7B", 46_702_792_704),
    ],
)
def test_published_totals(name, total):
    assert ModelSpec.named(name).num_params == total


@pytest.mark.parametrize(("name", "active"), [("Qwen3-30B-A3B", 3_353_032_704), ("Mixtral-8x7B", 12_879_925_248)])
def test_active_parameters_b12(name, active):
    assert ModelSpec.named(name).num_active_params == active


@pytest.mark.parametrize("name", [n for n in known_models() if n.startswith(("Qwen2.5", "Llama", "Gemma", "SmolLM2"))])
def test_all_parameters_of_a_dense_model_are_active(name):
    spec = ModelSpec.named(name)
    assert spec.num_active_params == spec.num_params


def test_active_is_total_less_the_experts_that_sleep():
    # Written the other way round: an independent count from the config of DeepSeek-V3.
    c, spec = model_config("DeepSeek-V3"), ModelSpec.named("DeepSeek-V3")
    asleep = c["n_routed_experts"] - c["num_experts_per_tok"]
    sparse_layers = c["num_hidden_layers"] - c["first_k_dense_replace"]
    assert spec.num_params - spec.num_active_params == (
        asleep * sparse_layers * 3 * c["hidden_size"] * c["moe_intermediate_size"]
    )


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "width", "listed_twice", "once"),
    [
        (288, 6, 6, 768, 24_407_712, 15_191_712),
        (512, 8, 8, 1376, 58_073_600, 41_689_600),
        (768, 12, 12, 2048, 134_105_856, 109_529_856),
    ],
)
def test_tied_embeddings_count_once_b11(dim, layers, heads, width, listed_twice, once):
    config = {
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "vocab_size": 32_000,
    }
    assert ModelSpec.from_config({**config, "tie_word_embeddings": True}).num_params == once
    assert ModelSpec.from_config({**config, "tie_word_embeddings": False}).num_params == listed_twice


def test_tied_qwen3_4b_b11():
    untied = ModelSpec.from_config({**model_config("Qwen3-4B"), "tie_word_embeddings": False})
    assert untied.num_params == 4_411_424_256


def test_head_dim_says_where_it_comes_from_b01():
    given_dim = ModelSpec.named("Qwen3-4B")
    assert given_dim.kv_bytes_per_token() == 147_456
    assert "head_dim = 128, given by the config" in given_dim.notes
    without = {key: value for key, value in model_config("Qwen3-4B").items() if key != "head_dim"}
    derived = ModelSpec.from_config({**without, "model_type": "llama"})
    assert derived.kv_bytes_per_token() == 92_160
    assert "head_dim is not in the config: 80 = hidden_size / num_attention_heads" in derived.notes
    # Qwen3's own class has a head_dim of its own, which is not hidden_size / num_attention_heads.
    assert ModelSpec.from_config(without).kv_bytes_per_token() == 147_456
    assert any(note.startswith("head_dim is not in the config: 128") for note in ModelSpec.from_config(without).notes)


def test_each_assumed_value_is_noted():
    spec = ModelSpec.from_config({**TINY, "model_type": "mistral"})
    assert {note.split()[0] for note in spec.notes} == {"head_dim", "sliding_window", "tie_word_embeddings"}


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama4", "", "LLAMA"])
def test_unknown_architecture_is_refused_by_name(model_type):
    with pytest.raises(ValueError, match=r"^model_type='.*': known are deepseek_v2, .*qwen3_next$") as error:
        ModelSpec.from_config({**TINY, "model_type": model_type})
    assert repr(model_type) in str(error.value)


def test_a_multimodal_config_is_pointed_to_its_text_part():
    with pytest.raises(ValueError, match=r"'gemma3'.*text_config"):
        ModelSpec.from_config({"model_type": "gemma3", "text_config": {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: missing from the config of 'qwen3'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: needs a whole number of at least 1"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers='36': needs a whole number of 1 to 10,000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: needs a whole number of 1 to 10,000"),
        ({"vocab_size": float("nan")}, "vocab_size=nan: needs a whole number of at least 1"),
        ({"intermediate_size": -9728}, "intermediate_size=-9728: needs a whole number of at least 1"),
        ({"head_dim": True}, "head_dim=True: needs a whole number of at least 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5: does not divide num_attention_heads=32"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': needs true or false"),
        ({"model_type": 3}, "model_type=3: needs the architecture's name, as in config.json"),
    ],
)
def test_a_wrong_value_is_named(change, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the whole text is compared
        ModelSpec.from_config({**model_config("Qwen3-4B"), **change})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: more than the 8 experts there are"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "needs one name a layer, num_hidden_layers=24"),
        ("gpt-oss-20b", {"layer_types": ["chunked"] * 24}, "layer_types='chunked': known in 'gpt_oss' are"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 5}, "mlp_only_layers=5: needs a list of layer indices"),
        (
            "Qwen2.5-7B",
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            "num_attention_heads=12: does not divide",
        ),
        ("Qwen3-Next-80B-A3B", {"linear_num_key_heads": 5}, "linear_num_key_heads=5: does not divide"),
        ("DeepSeek-V3", {"kv_lora_rank": None}, "kv_lora_rank: missing from the config of 'deepseek_v3'"),
    ],
)
def test_a_family_names_what_is_wrong_with_its_own_keys(name, change, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config({**model_config(name), **change})


def test_key_value_heads_are_not_guessed_where_transformers_has_another_default():
    config = {key: value for key, value in model_config("Qwen3-4B").items() if key != "num_key_value_heads"}
    with pytest.raises(ValueError, match="num_key_value_heads: missing from the config of 'qwen3'"):
        ModelSpec.from_config(config)


def test_a_config_must_be_a_mapping():
    with pytest.raises(ValueError, match=r"^config=\['llama'\]: needs the mapping"):
        ModelSpec.from_config(["llama"])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="name='Qwen3-5B': known are DeepSeek-V2-Lite, "):
        ModelSpec.named("Qwen3-5B")


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(known_models()), data=st.data())
def test_any_damage_to_a_config_ends_in_a_spec_or_one_line(name, data):
    config = copy.deepcopy(model_config(name))
    key = data.draw(st.sampled_from(sorted(config)))
    if data.draw(st.booleans()):
        del config[key]
    else:
        config[key] = data.draw(HOSTILE)
    spec, complaint = read(config)
    if complaint is None:
        assert spec.num_params >= spec.num_active_params > 0
        assert spec.kv_bytes_per_token() >= 0
    else:
        assert "\n" not in complaint
        assert any(name in complaint for name in (key, "num_attention_heads", "num_experts"))


def read(config):
    """A spec and no complaint, or no spec and the text of the ValueError; anything else rises."""
    try:
        return ModelSpec.from_config(config), None
    except ValueError as error:
        return None, str(error)


def test_the_ledgers_load_neither_torch_nor_transformers():
    code = (
        "import sys, rlinfra_utils.memory as m; m.ModelSpec.named('DeepSeek-V3').kv_bytes_per_token();"
        "print([name for name in ('torch', 'transformers', 'vllm', 'ray', 'safetensors') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
