"""HFEngine against known answers: closed-form log-probs, sampled frequencies, order, ends, seeds, bad input."""

import math
from collections import Counter

import pytest
import torch
from engines_fakes import VOCAB, PositionModel, bigram_llama, bigram_table, filtered_distribution, random_llama

from rlinfra_utils.engines import Completion, HFEngine, pad_left, teacher_forced_logprobs
from rlinfra_utils.rollouts import Decoding

PLAIN = Decoding(temperature=1.0, max_new_tokens=6)
FILTERED = Decoding(temperature=0.7, min_p=0.02, top_k=9, top_p=0.8, banned_token_ids=[5], max_new_tokens=6)


def plain(**fields):
    return PLAIN.model_copy(update=fields)


def steps(completion):
    """(token before, token sampled, behaviour log-prob, raw log-prob) of each new token."""
    before = [completion.prompt_tokens[-1], *completion.tokens]
    return zip(before, completion.tokens, completion.behavior_logprobs, completion.raw_logprobs)


@pytest.mark.parametrize("decoding", [PLAIN, plain(temperature=0.6), plain(top_p=0.6), plain(top_k=3), FILTERED])
def test_logprobs_are_those_of_the_distribution_sampled_from_and_of_the_raw_one(decoding):
    table = bigram_table()
    engine = HFEngine(bigram_llama(table))
    generation = engine.generate([[3], [1, 2, 9], [4, 4]], decoding, n=8, seed=1)
    raw = table.double().log_softmax(-1)
    for completion in generation.completions:
        for before, token, behavior_logprob, raw_logprob in steps(completion):
            expected = filtered_distribution(table[before].tolist(), decoding)[token]
            assert behavior_logprob == pytest.approx(math.log(expected), abs=1e-5)
            assert raw_logprob == pytest.approx(raw[before, token].item(), abs=1e-5)


def chi_square(counts, probs, num_draws):
    return sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in enumerate(probs) if p > 0)


@pytest.mark.parametrize("decoding", [plain(max_new_tokens=1), FILTERED.model_copy(update={"max_new_tokens": 1})])
def test_sampled_frequencies_follow_the_distribution(decoding):
    """Chi-square has mean df and variance 2 df; four deviations above is a one-in-thousands event."""
    table, num_draws = bigram_table(spread=1.0), 20_000
    generation = HFEngine(bigram_llama(table)).generate([[7]], decoding, n=num_draws, seed=3)
    counts = Counter(completion.tokens[0] for completion in generation.completions)
    probs = filtered_distribution(table[7].tolist(), decoding)
    df = sum(p > 0 for p in probs) - 1
    assert all(probs[token] > 0 for token in counts)
    assert chi_square(counts, probs, num_draws) < df + 4 * math.sqrt(2 * df)
    other = filtered_distribution(table[7].tolist(), decoding.model_copy(update={"temperature": 0.9}))
    assert chi_square(counts, other, num_draws) > df + 10 * math.sqrt(2 * df)


def test_greedy_takes_the_likeliest_token_with_certainty():
    table = bigram_table()
    completion = HFEngine(bigram_llama(table)).generate([[3]], plain(temperature=0.0)).completions[0]
    for before, token, behavior_logprob, raw_logprob in steps(completion):
        assert token == table[before].argmax().item()
        assert behavior_logprob == 0.0
        assert raw_logprob == pytest.approx(table[before].log_softmax(-1).max().item(), abs=1e-5)


PROMPTS = [[1, 3, 5, 7, 9, 11, 13], [4], [6, 6, 8], [1, 3, 5, 7, 9, 11, 13], [2, 15]]


@pytest.mark.parametrize("decoding", [PLAIN, plain(temperature=0.5), plain(temperature=1.3, top_k=6)])
def test_engine_and_trainer_agree_at_zero_lag_whatever_the_padding(decoding):
    """Left padding and the cache on one side; on the other, each sequence alone, without padding or cache."""
    model = random_llama()
    generation = HFEngine(model).generate(PROMPTS, decoding, n=3, seed=5)
    ids, mask = pad_left([c.prompt_tokens + c.tokens for c in generation.completions])
    together = teacher_forced_logprobs(model, ids, attention_mask=mask, decoding=decoding)
    for row, completion in enumerate(generation.completions):
        behavior = torch.tensor(completion.behavior_logprobs)
        ids = torch.tensor([completion.prompt_tokens + completion.tokens])
        logits = model(ids).logits[0, -len(behavior) - 1 : -1].detach()
        probs = [filtered_distribution(at.tolist(), decoding)[t] for at, t in zip(logits, completion.tokens)]
        alone = torch.tensor(probs).log()
        assert (behavior - alone).abs().max() < 1e-5
        assert (behavior - together[row, -len(behavior) :]).abs().max() < 1e-5


def test_completions_are_ordered_by_prompt():
    generation = HFEngine(bigram_llama(bigram_table())).generate(PROMPTS, PLAIN, n=3)
    assert [c.prompt_index for c in generation.completions] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert all(c.prompt_tokens == PROMPTS[c.prompt_index] for c in generation.completions)
    assert generation.num_new_tokens == sum(len(c.tokens) for c in generation.completions) == 15 * 6


def test_completions_of_one_prompt_differ_and_follow_their_own_prompt():
    """A table that sends i to 2 i + 1 or 2 i + 2 and nowhere else shows whose cache and logits a row got."""
    table = torch.full((VOCAB, VOCAB), -100.0)
    for token in range(7):
        table[token, [2 * token + 1, 2 * token + 2]] = 0.0
    generation = HFEngine(bigram_llama(table)).generate([[0], [1], [0, 2]], plain(max_new_tokens=2), n=64)
    paths = {i: {tuple(c.tokens) for c in generation.completions if c.prompt_index == i} for i in range(3)}
    assert paths[0] == {(1, 3), (1, 4), (2, 5), (2, 6)}
    assert paths[1] == {(3, 7), (3, 8), (4, 9), (4, 10)}
    assert paths[2] == {(5, 11), (5, 12), (6, 13), (6, 14)}


def test_each_distinct_prompt_is_read_once_and_positions_skip_the_padding():
    """At position p the model gives token p + 1 for certain, so the tokens tell the positions that it was given."""
    num_positions = 12
    table = torch.full((num_positions, num_positions), -100.0)
    table[torch.arange(num_positions - 1), torch.arange(1, num_positions)] = 0.0
    model = PositionModel(table)
    generation = HFEngine(model).generate([[0, 0, 0, 0], [0], [0, 0, 0, 0]], plain(max_new_tokens=3), n=2)
    assert [c.tokens for c in generation.completions] == [[4, 5, 6]] * 2 + [[1, 2, 3]] * 2 + [[4, 5, 6]] * 2
    assert model.calls == [(2, 4), (6, 1), (6, 1)]
    assert generation.num_prompt_tokens == 5


def test_seed_repeats_a_call_and_the_global_generator_is_left_alone():
    engine = HFEngine(random_llama(), seed=11)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = (engine.generate(PROMPTS, PLAIN, n=4, seed=7).completions for _ in range(2))
    assert first == second
    assert engine.generate(PROMPTS, PLAIN, n=4, seed=8).completions != first
    stream = [engine.generate(PROMPTS, PLAIN, n=4).completions for _ in range(2)]
    assert stream[0] != stream[1]
    again = HFEngine(random_llama(), seed=11)
    assert [again.generate(PROMPTS, PLAIN, n=4).completions for _ in range(2)] == stream
    assert torch.equal(torch.get_rng_state(), state)


def chain_to_eos(eos):
    """i -> i + 1 for certain, up to `eos`, which goes on to 0."""
    table = torch.full((VOCAB, VOCAB), -100.0)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 0.0
    table[eos] = torch.full((VOCAB,), -100.0).index_fill(0, torch.tensor([0]), 0.0)
    return bigram_llama(table, eos_token_id=eos)


def test_eos_ends_a_completion_and_stays_its_last_action():
    engine = HFEngine(chain_to_eos(5))
    completions = engine.generate([[3], [1], [0], [4]], plain(max_new_tokens=4)).completions
    assert [c.tokens for c in completions] == [[4, 5], [2, 3, 4, 5], [1, 2, 3, 4], [5]]
    assert [c.stop_reason for c in completions] == ["eos", "eos", "length", "eos"]
    assert [len(c.behavior_logprobs) for c in completions] == [2, 4, 4, 1]


def test_decoding_stops_early_once_every_sequence_has_ended():
    model = chain_to_eos(5)
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(output.logits.shape))
    generation = HFEngine(model).generate([[3], [2]], plain(max_new_tokens=50))
    assert [c.tokens for c in generation.completions] == [[4, 5], [3, 4, 5]]
    assert len(calls) == 3
    assert generation.prefill_s > 0
    assert generation.decode_s > 0


def test_ignore_eos_runs_to_the_length():
    completion = HFEngine(chain_to_eos(5)).generate([[3]], plain(max_new_tokens=5, ignore_eos=True)).completions[0]
    assert completion.tokens == [4, 5, 0, 1, 2]
    assert completion.stop_reason == "length"


def test_any_of_several_eos_ids_ends_a_completion():
    engine = HFEngine(chain_to_eos(5), eos_token_id=[2, 4])
    assert [c.tokens for c in engine.generate([[0], [3]], PLAIN).completions] == [[1, 2], [4]]


class Tokenizer:
    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


def test_eos_comes_from_model_and_tokenizer_and_a_contradiction_is_refused():
    assert HFEngine(chain_to_eos(5), Tokenizer(5)).eos_token_ids == [5]
    assert HFEngine(bigram_llama(bigram_table()), Tokenizer(6)).eos_token_ids == [6]
    assert HFEngine(bigram_llama(bigram_table())).eos_token_ids == []
    with pytest.raises(ValueError, match=r"eos_token_id: is \[6\] in the tokenizer, \[5\] in the model"):
        HFEngine(chain_to_eos(5), Tokenizer(6))
    assert HFEngine(chain_to_eos(5), Tokenizer(6), eos_token_id=6).eos_token_ids == [6]
    for wrong in (VOCAB, -1, [2, 99]):
        with pytest.raises(ValueError, match="eos_token_id="):
            HFEngine(chain_to_eos(5), eos_token_id=wrong)


def test_bfloat16_logits_are_normalised_in_float32():
    """The table is exact in bfloat16, so its float32 log-softmax is the known answer; bfloat16's would be 0.01 off."""
    table = bigram_table()
    engine = HFEngine(bigram_llama(table).bfloat16())
    raw = table.double().log_softmax(-1)
    for completion in engine.generate([[3], [1, 2, 9]], PLAIN, n=8, seed=1).completions:
        for before, token, behavior_logprob, raw_logprob in steps(completion):
            assert behavior_logprob == raw_logprob == pytest.approx(raw[before, token].item(), abs=1e-5)


def test_generation_leaves_the_model_in_the_mode_it_was_in():
    """Dropout off while sampling: a model in training mode gives the same completions as one that is not."""
    expected = HFEngine(random_llama(attention_dropout=0.5)).generate(PROMPTS, PLAIN, n=2, seed=1).completions
    model = random_llama(attention_dropout=0.5).train()
    engine = HFEngine(model)
    assert engine.generate(PROMPTS, PLAIN, n=2, seed=1).completions == expected
    assert model.training
    with pytest.raises(ValueError, match="prompt_ids="):
        engine.generate([], PLAIN)
    assert model.training


def test_completions_carry_the_version_of_the_weights():
    engine = HFEngine(random_llama(), version=4)
    assert {c.policy_version for c in engine.generate(PROMPTS, PLAIN).completions} == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, r"prompt_ids=\[\]"),
        ({"prompt_ids": "12"}, "prompt_ids='12'"),
        ({"prompt_ids": [[1], []]}, r"prompt_ids\[1\]=\[\]"),
        ({"prompt_ids": [[1, VOCAB]]}, r"prompt_ids\[0\]=\[1, 16\]"),
        ({"prompt_ids": [[-1]]}, r"prompt_ids\[0\]=\[-1\]"),
        ({"prompt_ids": [[1.0]]}, r"prompt_ids\[0\]=\[1.0\]"),
        ({"prompt_ids": [[True]]}, r"prompt_ids\[0\]=\[True\]"),
        ({"prompt_ids": ["12"]}, r"prompt_ids\[0\]='12'"),
        ({"prompt_ids": [1, 2]}, r"prompt_ids\[0\]=1:"),
        ({"prompt_ids": [[1] * 60]}, "prompt plus max_new_tokens is 66 tokens: the model has 64 positions"),
        ({"n": 0}, "n=0"),
        ({"n": 1.5}, "n=1.5"),
        ({"decoding": plain(max_new_tokens=None)}, "decoding.max_new_tokens=None"),
        ({"decoding": plain(max_new_tokens=0)}, "decoding.max_new_tokens=0"),
        ({"decoding": plain(stop=["."])}, "decoding.stop="),
        ({"decoding": plain(repetition_penalty=1.2)}, "decoding.repetition_penalty=1.2"),
    ],
)
def test_bad_requests_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        HFEngine(random_llama()).generate(**{"prompt_ids": [[1]], "decoding": PLAIN, **arguments})
    assert "\n" not in str(caught.value)


def test_weights_that_give_nan_are_refused():
    model = random_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="logits are NaN with weights version 3"):
        HFEngine(model, version=3).generate([[1]], PLAIN)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"behavior_logprobs": [-1.0]}, "behavior_logprobs: has 1 values for 2 tokens"),
        ({"raw_logprobs": []}, "raw_logprobs: has 0 values for 2 tokens"),
        ({"stop_reason": "done"}, "stop_reason='done'"),
    ],
)
def test_a_completion_that_contradicts_itself_is_refused(fields, message):
    """What a server sends is checked like the engine's own."""
    good = {
        "prompt_index": 0,
        "prompt_tokens": [1],
        "tokens": [2, 3],
        "behavior_logprobs": [-1.0, -2.0],
        "raw_logprobs": None,
        "stop_reason": "stop",
        "policy_version": 0,
    }
    assert Completion(**good).tokens == [2, 3]
    with pytest.raises(ValueError, match=message):
        Completion(**{**good, **fields})
