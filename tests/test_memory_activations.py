"""`memory.activations` against what autograd saves, and against torch's MemTracker."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from rlinfra_utils.memory import RECIPES, ModelSpec, activations, model_config, training_step

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 2000,
    "tie_word_embeddings": True,
}
RECIPE = {torch.float32: RECIPES["fp32_autocast"], torch.bfloat16: RECIPES["bf16_pure"]}


def build(config, dtype, attention, checkpointing=False):
    implementation = "eager" if attention == "eager" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=dtype, attn_implementation=implementation
    )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def inputs(batch, seq, attention):
    ids = torch.zeros(batch, seq, dtype=torch.long)
    if attention != "sdpa_masked":
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[0, 0] = 0  # one padded token is enough for a mask
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_masked", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_saved_tensors_equal_what_autograd_saves(model_type, dtype, attention):
    config = {**SMALL, "model_type": model_type, **({"head_dim": 48} if model_type == "qwen3" else {})}
    model, batch, seq = build(config, dtype, attention), 2, 24
    skip = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    fed = inputs(batch, seq, attention)
    skip |= {tensor.untyped_storage()._cdata for tensor in fed.values()}
    saved = {}

    def pack(tensor):
        # Kept alive, so that no storage's address is used twice.
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**fed, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in skip)
    predicted = activations(ModelSpec.from_config(config), batch, seq, dtype.itemsize, attention).total
    # A handful of scalars and index tensors is all that is left out.
    assert predicted == pytest.approx(measured, rel=2e-3)


def tracked_peak(config, dtype, attention, batch, seq, checkpointing, foreach, fake=False):
    """Peak bytes that MemTracker sees in the second step of AdamW."""
    with FakeTensorMode() if fake else nullcontext():
        model = build(config, dtype, attention, checkpointing)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        fed = inputs(batch, seq, attention)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *fed.values())
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                output = model(**fed, use_cache=False)
                output.loss.backward()
                del output
                optimizer.step()
                optimizer.zero_grad()
    peaks = tracker.get_tracker_snapshot("peak")
    return next(sum(v for k, v in by_kind.items() if k != "Total") for d, by_kind in peaks.items() if str(d) == "cpu")


# One case for each moment that can be the fullest, over families, dtypes and attention.
CASES = {
    "loss": ({"model_type": "llama"}, torch.float32, "sdpa", 4, 128, False, False),
    "loss, bf16": ({"model_type": "llama"}, torch.bfloat16, "sdpa", 4, 128, False, False),
    "loss, padded": ({"model_type": "qwen2"}, torch.bfloat16, "sdpa_masked", 2, 64, False, False),
    "loss, q/k norms": ({"model_type": "qwen3", "head_dim": 48}, torch.float32, "sdpa", 4, 128, False, False),
    "loss, eager": ({"model_type": "llama"}, torch.bfloat16, "eager", 4, 128, False, False),
    "loss, checkpointing": ({"model_type": "llama"}, torch.float32, "sdpa", 4, 128, True, False),
    "last layer": ({"model_type": "llama", "vocab_size": 300}, torch.float32, "sdpa", 4, 128, False, False),
    "last layer, checkpointing": (
        {"model_type": "llama", "vocab_size": 300},
        torch.bfloat16,
        "sdpa",
        4,
        128,
        True,
        False,
    ),
    "first layer": (
        {"model_type": "qwen3", "head_dim": 48, "vocab_size": 300, "tie_word_embeddings": False},
        torch.float32,
        "eager",
        2,
        64,
        True,
        False,
    ),
    "embedding": ({"model_type": "llama", "vocab_size": 20_000}, torch.float32, "sdpa", 1, 64, True, False),
    "optimizer": ({"model_type": "llama", "tie_word_embeddings": False}, torch.float32, "sdpa", 1, 8, False, False),
    "optimizer, foreach": ({"model_type": "llama"}, torch.bfloat16, "sdpa", 1, 8, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_a_step_is_within_5_percent_of_memtracker(case):
    changes, dtype, attention, batch, seq, checkpointing, foreach = CASES[case]
    config = {**SMALL, **changes}
    step = training_step(
        ModelSpec.from_config(config), RECIPE[dtype], batch, seq, attention, checkpointing, foreach=foreach
    )
    assert step.peak_phase == case.split(",")[0]
    measured = tracked_peak(config, dtype, attention, batch, seq, checkpointing, foreach)
    assert step.peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_135m_models_step_under_fake_tensors(dtype, checkpointing):
    # Fake tensors cannot be asked whether a mask is needed, so transformers makes one.
    config = {**model_config("SmolLM2-135M"), "num_hidden_layers": 6}
    step = training_step(ModelSpec.from_config(config), RECIPE[dtype], 2, 512, "sdpa_masked", checkpointing)
    fed = {"batch": 2, "seq": 512, "checkpointing": checkpointing, "foreach": False}
    measured = tracked_peak(config, dtype, "sdpa", **fed, fake=True)
    assert step.peak_bytes == pytest.approx(measured, rel=0.05)


SPEC = ModelSpec.from_config({**SMALL, "model_type": "llama"})


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 64), st.sampled_from(["sdpa", "sdpa_masked", "eager"]))
def test_activations_grow_with_batch_and_checkpointing_keeps_less(batch, seq, more, attention):
    small, large = (activations(SPEC, n, seq, attention=attention).total for n in (batch, batch + more))
    assert small < large
    assert activations(SPEC, batch, seq, attention=attention, checkpointing=True).total < small


def test_sdpa_is_linear_and_eager_quadratic_in_length():
    def without_loss(seq, attention):
        lines = activations(SPEC, 1, seq, attention=attention).items
        return lines[f"keys, values, scores ({attention})"]

    assert without_loss(4096, "sdpa") == 4 * without_loss(1024, "sdpa")
    assert without_loss(4096, "eager") > 15 * without_loss(1024, "eager")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Gemma-2-9B", "Mixtral-8x7B", "DeepSeek-V3", "Qwen3-Next-80B-A3B"])
def test_outside_the_domain_is_refused(name):
    with pytest.raises(ValueError, match=r"^model_type='.*': known are llama, qwen2, qwen3$"):
        activations(ModelSpec.named(name), 1, 128)


def test_a_sliding_layer_is_outside_the_domain():
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ValueError, match=r"^sliding_window=8: outside the domain"):
        activations(ModelSpec.from_config({**SMALL, "model_type": "qwen2", **sliding}), 1, 128)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch": 0}, "batch=0: needs a whole number of at least 1"),
        ({"seq": -1}, "seq=-1: needs a whole number of at least 1"),
        ({"dtype_bytes": "bf16"}, "dtype_bytes='bf16': needs a finite number above 0"),
        ({"attention": "flash"}, "attention='flash': known are eager, sdpa, sdpa_masked"),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_wrong_argument_is_named(kwargs, message, checkpointing):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        activations(**{"spec": SPEC, "batch": 1, "seq": 8, "checkpointing": checkpointing, **kwargs})
    assert str(error.value) == message


def test_names_are_neither_a_spec_nor_a_recipe():
    with pytest.raises(ValueError, match=r"^spec='Qwen3-4B': needs a ModelSpec"):
        activations("Qwen3-4B", 1, 8)
    with pytest.raises(ValueError, match=r"^recipe='bf16_pure': needs a TrainRecipe"):
        training_step(SPEC, "bf16_pure", 1, 8)
