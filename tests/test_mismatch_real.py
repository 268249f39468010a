"""`diagnose` on samples of the tiny policy: its text repeats, it is sure of most tokens, and its updates are GRPO's."""

import copy

import numpy as np
import pytest
import torch

from rlinfra_utils import engines, mismatch, policy, timers
from rlinfra_utils.rollouts import Decoding

LONG = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=57, ignore_eos=True)
NUM_UPDATES = 8


@pytest.fixture(scope="module")
def own():
    torch.set_num_threads(1)
    return policy.load_warm_start()[0]


@pytest.fixture(scope="module")
def updated():
    """The policy after real updates; the engine that sampled before them is the warm start."""
    model, tokenizer = policy.load_warm_start()
    loop = policy.SequentialLoop(
        engines.HFEngine(policy.load_warm_start()[0], tokenizer),
        policy.Trainer(model, lr=3e-4),
        tokenizer,
        timers.Trace(),
    )
    for _ in range(NUM_UPDATES):
        loop.step()
    return loop.trainer.model


def read(model, ids):
    """Logits (answers, tokens, vocab); row t predicts token t, and row 0 is empty."""
    with torch.no_grad():
        return np.pad(model(torch.tensor(ids)).logits[:, :-1].float().numpy(), ((0, 0), (1, 0), (0, 0)))


def sampled(engine_model, trained, num_answers=32, seed=0, **changed):
    """What an engine with `engine_model` records, beside the logits of `trained`; and raw log-probs."""
    tokenizer, decoding = policy.make_tokenizer(), LONG.model_copy(update=changed)
    numbers = np.random.default_rng(seed).integers(10, 100, (num_answers, 2)).tolist()
    prompts = [tokenizer(f"{a}+{b}=").input_ids for a, b in numbers]
    made = engines.HFEngine(engine_model, tokenizer).generate(prompts, decoding, seed=seed).completions
    ids, start = np.array([c.prompt_tokens + c.tokens for c in made]), len(prompts[0])
    behavior, raw = np.zeros(ids.shape), np.zeros(ids.shape)
    behavior[:, start:] = [c.behavior_logprobs for c in made]
    raw[:, start:] = [c.raw_logprobs for c in made]
    mask = np.broadcast_to(np.arange(ids.shape[1]) >= start, ids.shape)
    record = {"trainer_logits": read(trained, ids), "tokens": ids, "mask": mask, "decoding": decoding}
    return record | {"behavior": np.minimum(behavior, 0)}, np.minimum(raw, 0)


def gathered(record, ids):
    """The trainer's log-probs of `ids` by torch, 0 off the mask."""
    table = torch.log_softmax(torch.tensor(record["trainer_logits"]).double(), -1).numpy()
    return np.where(record["mask"], np.take_along_axis(table, ids[..., None], -1)[..., 0], 0.0)


def first(record, **changed):
    return mismatch.diagnose(**(record | changed))[0]


def bfloat16(model):
    return copy.deepcopy(model).to(torch.bfloat16)


def sure(model):
    """A policy that is all but certain of most tokens: the logits times 3."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(3.0)
    return twin


def labels_rolled_inside_shards(ids, shards):
    """The first label of a shard is its last one; the others are right."""
    rolled = np.roll(ids.reshape(len(ids), shards, -1), 1, axis=-1).reshape(ids.shape)
    is_first = np.arange(ids.shape[1]) % (ids.shape[1] // shards) == 0
    return np.where(is_first, rolled, ids)


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("to_engine", [copy.deepcopy, bfloat16])
def test_shard_boundary_where_most_wrong_labels_are_the_right_ones(own, shards, to_engine):
    record, _ = sampled(to_engine(own), own)
    ids = record["tokens"]
    labels = labels_rolled_inside_shards(ids, shards)
    at_boundary = record["mask"] & (np.arange(ids.shape[1]) % (ids.shape[1] // shards) == 0)
    assert (labels != ids)[at_boundary].mean() < 0.6  # the text repeats itself
    wrong = gathered(record, labels)
    for logits in (record["trainer_logits"], None):
        answer = first(record, trainer_logits=logits, trainer_logprobs=wrong)
        assert answer.cause == "shard_boundary"
        assert f"first tokens of {shards} shards" in answer.evidence


def test_stale_weights_of_real_updates_are_no_temperature(own, updated):
    """Training sharpens a policy, so a fitted temperature or filter takes away a part: that is no suspicion."""
    for changed in ({}, {"temperature": 0.7}):
        record, _ = sampled(own, updated, **changed)
        assert first(record).cause == "undetermined"
        assert first(record, decoding=None).cause == "undetermined" or changed
        assert first(record, lag=NUM_UPDATES).cause == "policy_lag"
        assert first(record, evidence=mismatch.Evidence(fingerprints=("a", "b"))).cause == "stale_weights"


def test_stale_weights_without_logits_are_no_precision(updated, own):
    record, _ = sampled(own, updated, seed=1)
    own_logprobs = gathered(record, record["tokens"])
    assert first(record, trainer_logits=None, trainer_logprobs=own_logprobs).cause == "undetermined"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_is_named_beside_a_bfloat16_engine(own, updated, temperature):
    for model in (own, updated):
        record, raw = sampled(bfloat16(model), model, temperature=temperature)
        assert first(record, behavior=raw).cause == "temperature"
        assert first(record, decoding=None).cause == "temperature"
        assert first(record, behavior=raw / temperature).cause == "temperature_after_softmax"


def test_what_a_wrong_filter_sets_aside_is_not_explained_by_it(own, updated):
    """Tokens outside a fitted kept set hold the difference; without them there is little to explain."""
    record, _ = sampled(own, updated, num_answers=16, temperature=0.7)
    truncation = next(f for f in mismatch.diagnose(**record) if f.cause == "truncation")
    assert truncation.status not in ("confirmed", "suspected")


def test_zeros_of_a_sure_policy_are_no_placeholder(own):
    """Where the nucleus is one token at each step, 0.0 is the processed log-prob."""
    model = sure(own)
    record, _ = sampled(model, model, num_answers=4, top_p=0.5)
    assert (record["behavior"][record["mask"]] == 0).all()
    assert first(record).cause != "sentinel"
    unsure, _ = sampled(own, own, num_answers=4)
    assert first(unsure, behavior=np.zeros(unsure["tokens"].shape)).cause == "sentinel"


def test_one_parameter_that_fits_the_largest_differences_alone_is_not_named(own):
    """A sure policy in bfloat16: a handful of tokens hold the whole difference, and any parameter fits them."""
    model = sure(own)
    for seed in range(4):
        record, _ = sampled(bfloat16(model), model, num_answers=4, seed=seed)
        size = np.sort(np.abs(gathered(record, record["tokens"]) - record["behavior"])[record["mask"]])
        assert size[-10:].sum() > 0.9 * size.sum()
        assert first(record).cause in ("undetermined", "precision")


@pytest.mark.parametrize("value", [-9999.0, -1.0])
def test_placeholders_where_the_trainer_is_sure(own, value):
    model = sure(own)
    record, _ = sampled(model, model, num_answers=4)
    lost = record["mask"] & (np.random.default_rng(1).random(record["mask"].shape) < 0.05)
    answer = first(record, behavior=np.where(lost, value, record["behavior"]))
    assert (answer.cause, answer.num_left_out) == ("sentinel", lost.sum())


@pytest.mark.parametrize("num_before", [1, 3])
def test_a_mask_that_begins_in_the_prompt_beside_a_bfloat16_engine(own, num_before):
    record, _ = sampled(bfloat16(own), own)
    start = int(record["mask"][0].argmax())
    mask = record["mask"] | (np.arange(64) >= start - num_before)
    answer = first(record, mask=mask)
    assert answer.cause == "mask"
    assert num_before * 32 <= answer.num_left_out <= num_before * 32 + 3  # noise stands out at an end here and there


def test_a_wrong_token_is_no_exact_ratio(own):
    """Without logits: one boundary token makes the sequence ratio, so token ratios do not agree."""
    record, _ = sampled(bfloat16(own), own)
    wrong = gathered(record, np.where(np.arange(64) == 40, np.roll(record["tokens"], 1, axis=1), record["tokens"]))
    answers = mismatch.diagnose(**(record | {"trainer_logits": None, "trainer_logprobs": wrong}))
    assert answers[0].cause not in ("exact_ratio", "precision")


def test_controls_agree(own):
    for seed in range(3):
        for changed in ({}, {"temperature": 0.7}, {"temperature": 1.3}):
            assert first(sampled(own, own, seed=seed, **changed)[0]).cause == "none"
