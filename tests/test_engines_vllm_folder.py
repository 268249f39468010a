"""Folders as vLLM has to see them: a view that ties nothing, and weights and adapters that do not fit."""

import json

import pytest
import torch
from engines_fakes import random_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlinfra_utils.engines.vllm_folder import check_adapter, require_same, untied_view

IDS = torch.tensor([[1, 5, 9, 3]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_tied_model_becomes_the_same_model_untied(tmp_path, shard_size):
    model = random_llama(tied=True)
    model.save_pretrained(tmp_path / "tied", max_shard_size=shard_size)
    shapes = untied_view(tmp_path / "tied", tmp_path / "view", tied=True)
    seen = AutoModelForCausalLM.from_pretrained(tmp_path / "view")
    assert seen.config.tie_word_embeddings is False
    assert seen.lm_head.weight.data_ptr() != seen.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits(seen), logits(model))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in seen.state_dict().items()}
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_untied_model_is_linked_as_it_is(tmp_path):
    random_llama(tied=False).save_pretrained(tmp_path / "model")
    untied_view(tmp_path / "model", tmp_path / "view", tied=False)
    assert all(file.is_symlink() for file in (tmp_path / "view").iterdir())
    assert sorted(f.name for f in (tmp_path / "view").iterdir()) == sorted(
        f.name for f in (tmp_path / "model").iterdir()
    )


def test_weights_alone_are_enough_for_a_load(tmp_path):
    model = random_llama(tied=True)
    (tmp_path / "weights").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # both names of the tied tensor
    save_file(state, tmp_path / "weights" / "a.safetensors")
    assert untied_view(tmp_path / "weights", tmp_path / "view", tied=True).keys() == state.keys()


def change(name, make):
    def changed(folder):
        state = load_file(folder / "model.safetensors")
        state[name] = make(state)
        save_file(state, folder / "model.safetensors")

    return changed


def rename_embedding(folder):
    state = load_file(folder / "model.safetensors")
    state["wte.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, folder / "model.safetensors")


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN = {
    "no files": (lambda folder: (folder / "model.safetensors").unlink(), r"with \.safetensors files"),
    "pickle": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04 pickle"), "cannot be read"),
    "cut off": (cut_off, "cannot be read as safetensors"),
    "twice": (
        lambda folder: (folder / "second.safetensors").write_bytes((folder / "model.safetensors").read_bytes()),
        "repeats tensors of another file",
    ),
    "another head": (
        change("lm_head.weight", lambda state: state["model.embed_tokens.weight"] + 1),
        "differ, but the model ties them",
    ),
    "another name": (rename_embedding, "ties its head, but has no 'model.embed_tokens.weight'"),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_folder_that_cannot_be_served_is_refused_in_one_line(tmp_path, break_it, message):
    random_llama(tied=True).save_pretrained(tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as caught:
        untied_view(tmp_path / "model", tmp_path / "view", tied=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2, 3)}, "lacks the model's tensor 'b'"),
        ({"a": (2, 3), "b": (1,), "c": (1,)}, "1 tensors that the model lacks, first 'c'"),
        ({"a": (3, 2), "b": (1,)}, r"'a' has shape \(3, 2\), the model's \(2, 3\)"),
    ],
)
def test_weights_of_another_model_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        require_same(shapes, {"a": (2, 3), "b": (1,)}, "folder")


def save_adapter(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4} | config))
    return folder


BASE = {"model.layers.0.self_attn.q_proj.weight": (6, 4), "lm_head.weight": (8, 4)}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTERS = {
    "rank": ({}, {"r": 16}, "r=16: needs a whole number of 1 to 8"),
    "no rank": ({}, {"r": "2"}, "r='2'"),
    "A": ({f"{Q}.lora_A.weight": (2, 3)}, {}, r"shape \(2, 3\), needs \(2, 4\)"),
    "B": ({f"{Q}.lora_B.weight": (4, 2)}, {}, r"shape \(4, 2\), needs \(6, 2\)"),
    "another base": ({f"{Q.replace('0', '7')}.lora_A.weight": (2, 4)}, {}, "layers.7.*not a LoRA matrix"),
    "head": ({"base_model.model.lm_head.lora_A.weight": (2, 4)}, {}, "lm_head.*not a LoRA matrix"),
    "whole tensor": ({f"{Q}.weight": (6, 4)}, {}, "not a LoRA matrix"),
}


@pytest.mark.parametrize(("shapes", "config", "message"), ADAPTERS.values(), ids=ADAPTERS.keys())
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, shapes, config, message):
    tensors = {f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (6, 2)} | shapes
    folder = save_adapter(tmp_path / "adapter", {name: torch.zeros(shape) for name, shape in tensors.items()}, **config)
    with pytest.raises(ValueError, match=message) as caught:
        check_adapter(folder, BASE, max_rank=8)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_fits_passes_and_one_without_files_does_not(tmp_path):
    tensors = {f"{Q}.lora_A.weight": torch.zeros(2, 4), f"{Q}.lora_B.weight": torch.zeros(6, 2)}
    folder = save_adapter(tmp_path / "adapter", tensors)
    check_adapter(folder, BASE, max_rank=2)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        check_adapter(folder, BASE, max_rank=2)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="not an adapter's config"):
        check_adapter(folder, BASE, max_rank=2)
