"""Weights into the engine: all of them or none, and a version that says which."""

import math

import pytest
import torch
from engines_fakes import random_llama
from safetensors.torch import save_file

from rlinfra_utils.engines import HFEngine
from rlinfra_utils.rollouts import Decoding

GREEDY = Decoding(temperature=0.0, max_new_tokens=4)


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_state(folder, state, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous().clone() for key, tensor in state.items()}, folder / name)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_load_takes_a_folder_that_transformers_saved(tmp_path, tied):
    other = random_llama(seed=1, tied=tied)
    other.save_pretrained(tmp_path)
    engine = HFEngine(random_llama(seed=0, tied=tied), version=2)
    tensors = dict(engine.model.named_parameters())
    engine.load(tmp_path, 3)
    assert is_same(state_of(engine.model), state_of(other))
    assert all(parameter is tensors[name] for name, parameter in engine.model.named_parameters())
    completion = engine.generate([[1, 2]], GREEDY).completions[0]
    assert completion.policy_version == engine.version == 3
    assert completion.tokens == HFEngine(other).generate([[1, 2]], GREEDY).completions[0].tokens


def test_load_takes_several_files(tmp_path):
    other = random_llama(seed=1)
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    engine = HFEngine(random_llama())
    engine.load(tmp_path, 1)
    assert is_same(state_of(engine.model), state_of(other))


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_a_tied_head_may_come_under_either_name_or_both(tmp_path, left_out):
    other = random_llama(seed=1)
    state = state_of(other)
    state.pop(left_out, None)
    engine = HFEngine(random_llama())
    engine.load(save_state(tmp_path / "w", state), 1)
    assert is_same(state_of(engine.model), state_of(other))
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


def test_adopt_copies_from_memory_and_stays_a_copy():
    trainer, engine = random_llama(seed=1).train(), HFEngine(random_llama())
    engine.adopt(trainer, 7)
    assert engine.version == 7
    assert is_same(state_of(engine.model), state_of(trainer))
    with torch.no_grad():
        trainer.model.norm.weight.add_(1.0)
    assert not is_same(state_of(engine.model), state_of(trainer))


def test_weights_are_converted_to_the_dtype_of_the_engine():
    trainer, engine = random_llama(seed=1), HFEngine(random_llama().bfloat16())
    engine.adopt(trainer, 1)
    assert is_same(state_of(engine.model), state_of(random_llama(seed=1).bfloat16()))


def with_tensor(name, change):
    def changed(state):
        state[name] = change(state[name])

    return changed


BROKEN_STATES = {
    "missing": (lambda s: s.pop("model.norm.weight"), "lacks the model's tensor 'model.norm.weight'"),
    "unknown": (lambda s: s.update(extra=torch.ones(1)), "1 tensors that the model lacks, first 'extra'"),
    "prefixed": (
        lambda s: s.update({f"module.{k}": s.pop(k) for k in list(s)}),
        "tensors that the model lacks, first 'module.",
    ),
    "shape": (with_tensor("model.norm.weight", lambda t: t[:3]), r"shape \(3,\), the model's \(32,\)"),
    "transposed": (
        with_tensor("model.layers.0.mlp.up_proj.weight", lambda t: t.T),
        r"shape \(32, 64\), the model's \(64, 32\)",
    ),
    "integers": (with_tensor("model.norm.weight", lambda t: t.to(torch.int8)), "is torch.int8, the model's is"),
    "nan": (with_tensor("model.norm.weight", lambda t: t * math.nan), "not finite in torch.float32"),
    "untied": (
        with_tensor("lm_head.weight", lambda t: t + 1),
        "'model.embed_tokens.weight' and 'lm_head.weight' differ",
    ),
    "both tied names missing": (
        lambda s: (s.pop("lm_head.weight"), s.pop("model.embed_tokens.weight")),
        "lacks the model's tensor 'model.embed_tokens.weight'",
    ),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN_STATES.values(), ids=BROKEN_STATES.keys())
def test_weights_that_do_not_fit_leave_weights_and_version_as_they_were(tmp_path, break_it, message):
    engine = HFEngine(random_llama(), version=5)
    before = state_of(engine.model)
    state = state_of(random_llama(seed=1))
    break_it(state)
    with pytest.raises(ValueError, match=message) as caught:
        engine.load(save_state(tmp_path / "w", state), 6)
    assert "\n" not in str(caught.value)
    assert engine.version == 5
    assert is_same(state_of(engine.model), before)


def test_an_untied_engine_does_not_take_a_file_without_the_head(tmp_path):
    random_llama(seed=1, tied=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks the model's tensor 'lm_head.weight'"):
        HFEngine(random_llama(tied=False)).load(tmp_path, 1)


def test_values_too_large_for_the_dtype_of_the_engine_are_refused():
    trainer, engine = random_llama(seed=1), HFEngine(random_llama().half())
    with torch.no_grad():
        trainer.model.norm.weight.fill_(1e6)
    with pytest.raises(ValueError, match=r"'model.norm.weight' holds values that are not finite in torch.float16"):
        engine.adopt(trainer, 1)
    assert engine.version == 0


def pickle_only(folder):
    torch.save(state_of(random_llama()), folder / "pytorch_model.bin")


def cut_off(folder):
    random_llama().save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def not_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04 a pickle under another name")


def empty_file(folder):
    (folder / "model.safetensors").touch()


def same_tensor_twice(folder):
    state = state_of(random_llama())
    save_state(folder, state, "a.safetensors")
    save_state(folder, {"model.norm.weight": state["model.norm.weight"]}, "b.safetensors")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder with .safetensors files"),
        (pickle_only, "is not a folder with .safetensors files"),
        (cut_off, "model.safetensors cannot be read as safetensors"),
        (not_safetensors, "model.safetensors cannot be read as safetensors"),
        (empty_file, "model.safetensors cannot be read as safetensors"),
        (same_tensor_twice, "b.safetensors repeats tensors of another file, first 'model.norm.weight'"),
    ],
)
def test_a_folder_that_cannot_be_read_changes_nothing(tmp_path, make, message):
    make(tmp_path)
    engine = HFEngine(random_llama(seed=3), version=5)
    before = state_of(engine.model)
    with pytest.raises(ValueError, match=message) as caught:
        engine.load(tmp_path, 6)
    assert "\n" not in str(caught.value)
    assert engine.version == 5
    assert is_same(state_of(engine.model), before)


def test_a_folder_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        HFEngine(random_llama()).load("nowhere", 1)


@pytest.mark.parametrize("version", [-1, 1.0, True, None, "2"])
def test_a_version_is_an_integer_from_0_up(version):
    engine = HFEngine(random_llama(), version=5)
    for act in (engine.adopt, engine.load, lambda model, version: HFEngine(model, version=version)):
        with pytest.raises(ValueError, match="version="):
            act(random_llama(seed=1), version)
    assert engine.version == 5
