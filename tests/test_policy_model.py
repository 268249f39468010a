"""The tiny policy's files: tokenizer, weights and provenance, as our loader and as transformers read them."""

import json
import pickle
import shutil
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci import make_warm_start
from rlinfra_utils import policy
from rlinfra_utils.engines import HFEngine

ALPHABET = string.digits + "+-= "
TOKENIZER = policy.make_tokenizer()


@pytest.fixture
def copy_of_warm_start(tmp_path):
    return shutil.copytree(policy.WARM_START, tmp_path / "warm_start")


@given(st.text(ALPHABET, max_size=40))
def test_text_survives_the_tokenizer_one_token_a_character(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER(text).input_ids == [TOKENIZER.bos_token_id, *ids]


@given(st.lists(st.integers(0, len(policy.VOCABULARY) - 1), max_size=20))
def test_any_ids_decode_to_their_tokens_in_a_row(ids):
    assert TOKENIZER.decode(ids) == "".join(policy.VOCABULARY[i] for i in ids)


@pytest.mark.parametrize("text", ["a", "12*30=", "12+30=\n", "١+١=", "1\x00", "\u200b"])
def test_a_character_outside_the_vocabulary_is_not_lost(text):
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER(text)


def test_the_chat_template_writes_the_prompt_of_the_task():
    user, answer = {"role": "user", "content": "12+30"}, {"role": "assistant", "content": "42"}
    prompt = TOKENIZER.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert prompt == TOKENIZER("12+30=").input_ids
    assert TOKENIZER.apply_chat_template([user, answer], tokenize=False) == "<bos>12+30=42<eos>"


def test_tokenizer_version_follows_content_and_not_the_last_call(copy_of_warm_start):
    version = policy.tokenizer_version(TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(copy_of_warm_start)
    assert policy.tokenizer_version(tokenizer) == version
    tokenizer(["1", "12"], padding=True, truncation=True, max_length=8)
    assert policy.tokenizer_version(tokenizer) == version
    tokenizer.add_tokens(["*"])
    assert policy.tokenizer_version(tokenizer) != version
    assert len(version) == 12


def test_chat_template_version_follows_the_template():
    tokenizer = policy.make_tokenizer()
    version = policy.chat_template_version(tokenizer)
    assert version == policy.chat_template_version(AutoTokenizer.from_pretrained(policy.WARM_START))
    tokenizer.chat_template += " "
    assert policy.chat_template_version(tokenizer) != version
    tokenizer.chat_template = None
    assert policy.chat_template_version(tokenizer) == "none"


def test_the_model_has_the_size_that_its_shape_implies():
    hidden, inner, layers, vocab = 128, 256, 2, len(policy.VOCABULARY)
    a_layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    model = policy.tiny_llama(seed=0)
    assert model.num_parameters() == vocab * hidden + layers * a_layer + hidden
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(TOKENIZER)


def test_seeds_decide_the_weights_and_leave_the_callers_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (policy.tiny_llama(seed).lm_head.weight for seed in (1, 1, 2))
    policy.load_warm_start()
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_transformers_loads_the_folder_and_computes_the_same():
    model, tokenizer = policy.load_warm_start()
    theirs = AutoModelForCausalLM.from_pretrained(policy.WARM_START)
    ids = torch.tensor([tokenizer("12+30=").input_ids])
    assert torch.equal(model(ids).logits, theirs(ids).logits)
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id
    assert theirs.config.pad_token_id == tokenizer.pad_token_id
    assert theirs.config.head_dim == 32


def test_loading_unpickles_nothing(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a pickle was read")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, forbidden)
    policy.load_warm_start()
    suffixes = {path.suffix for path in policy.WARM_START.iterdir()}
    assert suffixes == {".json", ".jinja", ".safetensors"}


def test_the_folder_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in policy.WARM_START.iterdir()) < 1_500_000


def test_other_weights_under_the_same_provenance_are_refused(copy_of_warm_start):
    weights = copy_of_warm_start / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights_sha256=[0-9a-f]{64} of .*restore the file"):
        policy.load_warm_start(copy_of_warm_start)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"weights": "x"}'])
def test_malformed_provenance_is_named(copy_of_warm_start, text):
    (copy_of_warm_start / "provenance.json").write_text(text)
    with pytest.raises(ValueError, match=r"provenance\.json: not a JSON object with weights_sha256"):
        policy.load_warm_start(copy_of_warm_start)


@pytest.mark.parametrize("name", ["model.safetensors", "provenance.json"])
def test_a_missing_file_is_named(copy_of_warm_start, name):
    (copy_of_warm_start / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        policy.load_warm_start(copy_of_warm_start)


def test_provenance_says_what_the_weights_do():
    """Shares of 2,000 answers: within five standard deviations of what the script measured."""
    model, tokenizer = policy.load_warm_start()
    said = policy.provenance()
    assert said == json.loads((policy.WARM_START / "provenance.json").read_text())
    assert said["num_params"] == model.num_parameters()
    measured = policy.evaluate(HFEngine(model, tokenizer), tokenizer, num_prompts=2000, seed=123)
    for part in ("correctness", "format"):
        share = said[f"{part}_sampled"]
        assert measured[part] == pytest.approx(share, abs=5 * (share * (1 - share) / 2000) ** 0.5)
    assert 0.3 <= said["correctness_sampled"] <= 0.6


def test_what_the_script_writes_is_what_is_loaded(tmp_path):
    model = policy.tiny_llama(seed=3)
    make_warm_start.write(model, TOKENIZER, {"correctness_sampled": 0.0}, tmp_path)
    loaded, tokenizer = policy.load_warm_start(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert policy.tokenizer_version(tokenizer) == policy.provenance(tmp_path)["tokenizer_version"]
