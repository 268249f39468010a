"""Teacher-forced log-probs: exact values and gradients, no full logits, padding, filters, refusals."""

import math
import re
from itertools import pairwise

import pytest
import torch
from engines_fakes import VOCAB, PositionModel, bigram_llama, bigram_table, filtered_distribution, random_llama

from rlinfra_utils.engines import pad_left, teacher_forced_logprobs
from rlinfra_utils.rollouts import Decoding


def random_ids(batch=3, seq=11, seed=0):
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def full_logprobs(model, ids, temperature=1.0):
    """The plain way: all logits, log-softmax, pick."""
    logits = model(input_ids=ids).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30, 1000, None])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_values_are_those_of_the_full_log_softmax(chunk_tokens, temperature):
    model, ids = random_llama(), random_ids()
    with torch.no_grad():
        ours = teacher_forced_logprobs(model, ids, temperature, chunk_tokens)
        assert ours.dtype == torch.float32
        assert ours.shape == (3, 10)
        assert (ours - full_logprobs(model, ids, temperature)).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_the_full_log_softmax(tied):
    """With a weight for each token, so that a token that got another's gradient would show."""
    ids, weights = random_ids(), torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    gradients = []
    for logprobs in (full_logprobs, lambda m, i, t: teacher_forced_logprobs(m, i, t, chunk_tokens=4)):
        model = random_llama(tied=tied)
        (logprobs(model, ids, 0.7) * weights).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() < 1e-5 * (1 + expected.abs().max()), name


def test_known_answers_by_token_and_by_position():
    table = bigram_table()
    ids = random_ids()
    by_token = teacher_forced_logprobs(bigram_llama(table), ids)
    assert (by_token - table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]).abs().max() < 1e-5
    by_position = teacher_forced_logprobs(PositionModel(table), ids)
    expected = table[: ids.shape[1] - 1].log_softmax(-1)[torch.arange(10), ids[:, 1:]]
    assert (by_position - expected).abs().max() < 1e-5


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing(side):
    model, lengths = random_llama(), [9, 2, 5]
    rows = [random_ids(1, length, seed=length)[0].tolist() for length in lengths]
    before = {"left": [9 - n for n in lengths], "right": [0, 0, 0], "both": [0, 3, 2]}[side]
    ids = torch.full((3, 9), 3)
    mask = torch.zeros(3, 9, dtype=torch.int64)
    for i, (row, start) in enumerate(zip(rows, before)):
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    logprobs = teacher_forced_logprobs(model, ids, chunk_tokens=3, attention_mask=mask)
    for i, (row, start) in enumerate(zip(rows, before)):
        alone = full_logprobs(model, torch.tensor([row]))[0]
        assert (logprobs[i, start : start + len(row) - 1] - alone).abs().max() < 1e-5
        assert logprobs[i].count_nonzero() == len(row) - 1
    logprobs.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_left_padding_puts_a_response_at_the_end_of_its_row():
    ids, mask = pad_left([[1, 2, 3], [4]])
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    for sequences in ([], [[1], []]):
        with pytest.raises(ValueError, match="sequences: has"):
            pad_left(sequences)


def test_a_row_of_one_token_has_nothing_to_predict():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    logprobs = teacher_forced_logprobs(random_llama(), random_ids(2, 3), attention_mask=mask)
    assert logprobs[1].tolist() == [0.0, 0.0]
    as_bool = teacher_forced_logprobs(random_llama(), random_ids(2, 3), attention_mask=mask.bool())
    assert torch.equal(as_bool, logprobs)
    assert teacher_forced_logprobs(random_llama(), random_ids(1, 2), attention_mask=mask[1:, 1:]).tolist() == [[0.0]]


def test_decoding_gives_the_processed_logprob_and_minus_infinity_outside_the_kept_set():
    table, ids = bigram_table(), random_ids(4, 12)
    decoding = Decoding(temperature=0.8, top_k=6, top_p=0.9, banned_token_ids=[2])
    logprobs = teacher_forced_logprobs(bigram_llama(table), ids, decoding=decoding)
    expected = [
        [filtered_distribution(table[before].tolist(), decoding)[token] for before, token in pairwise(row)]
        for row in ids.tolist()
    ]
    expected = torch.tensor(expected).log()
    assert torch.equal(logprobs.isinf(), expected.isinf())
    assert 0 < logprobs.isinf().sum() < logprobs.numel()
    kept = expected.isfinite()
    assert (logprobs[kept] - expected[kept]).abs().max() < 1e-5


def test_gradients_through_filters_are_finite_and_right():
    """Of the kept tokens' log-probs; tokens outside the kept set get no gradient from them."""
    table, ids = bigram_table(), random_ids(2, 8)
    model = bigram_llama(table)
    decoding = Decoding(temperature=0.8, top_k=6)
    logprobs = teacher_forced_logprobs(model, ids, chunk_tokens=3, decoding=decoding)
    logprobs[logprobs.isfinite()].sum().backward()
    rows = table.clone().requires_grad_()
    kept = rows >= rows.topk(6).values[:, -1:]
    expected = (rows / 0.8).masked_fill(~kept, -math.inf).log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    expected[expected.isfinite()].sum().backward()
    # logits = 4 * head(one-hot): the head's gradient is four times that of the table.
    assert (model.lm_head.weight.grad - 4 * rows.grad.T).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_normalised_in_float32(dtype):
    """The table is exact in bfloat16 and its softmax is not: bfloat16 arithmetic would be 0.01 off."""
    table = bigram_table() if dtype == torch.bfloat16 else bigram_table().half().float()
    ids = random_ids()
    logprobs = teacher_forced_logprobs(bigram_llama(table).to(dtype), ids)
    assert logprobs.dtype == torch.float32
    assert (logprobs - table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]).abs().max() < 1e-5


@pytest.mark.parametrize("with_gradient", [False, True])
def test_logits_exist_for_one_chunk_at_a_time(with_gradient):
    """The head sees one column for the check of the model, then chunks, in backward the chunks again."""
    model, num_tokens = random_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, out: num_tokens.append(args[0].shape[:-1].numel()))
    with torch.set_grad_enabled(with_gradient):
        logprobs = teacher_forced_logprobs(model, random_ids(3, 11), chunk_tokens=8)
    assert num_tokens == [3, 8, 8, 8, 6]
    if with_gradient:
        logprobs.sum().backward()
        assert sorted(num_tokens[5:]) == [6, 8, 8, 8]


def test_default_chunk_holds_96_mib_of_logits():
    num_tokens = []
    model = PositionModel(torch.zeros(40, 2**20))
    model.head.register_forward_hook(lambda module, args, out: num_tokens.append(args[0].shape[:-1].numel()))
    with torch.no_grad():
        logprobs = teacher_forced_logprobs(model, random_ids(1, 40))
    assert num_tokens[1:] == [24, 15]
    assert logprobs[0].tolist() == pytest.approx([-20 * math.log(2)] * 39)


def test_models_that_do_more_than_their_head_are_refused():
    table = bigram_table()
    for changed in (PositionModel(table, scale=0.5), PositionModel(table, hidden_scale=2.0)):
        with pytest.raises(ValueError, match="PositionModel changes hidden states or logits around its head"):
            teacher_forced_logprobs(changed, random_ids())


@pytest.mark.parametrize("softcap", [30.0, None])
def test_gemma_2_is_taken_without_its_softcap_only(softcap):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=softcap,
    )
    model, ids = Gemma2ForCausalLM(config).eval(), random_ids()
    if softcap is None:
        assert (teacher_forced_logprobs(model, ids) - full_logprobs(model, ids)).abs().max() < 1e-5
    else:
        with pytest.raises(ValueError, match="Gemma2ForCausalLM changes"):
            teacher_forced_logprobs(model, ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "ids: is torch.int64 (3,)"),
        ({"ids": torch.zeros(2, 1, dtype=torch.int64)}, "ids: is torch.int64 (2, 1)"),
        ({"ids": torch.zeros(0, 4, dtype=torch.int64)}, "ids: is torch.int64 (0, 4)"),
        ({"ids": torch.zeros(2, 4)}, "ids: is torch.float32 (2, 4)"),
        ({"ids": torch.tensor([[1, VOCAB]])}, "ids: holds 1 to 16"),
        ({"ids": torch.tensor([[-100, 1]])}, "ids: holds -100 to 1"),
        ({"ids": [[1, 2]]}, "ids: is a list"),
        ({"attention_mask": torch.ones(3, 4, dtype=torch.int64)}, "attention_mask: is (3, 4)"),
        ({"attention_mask": torch.full((3, 11), 2)}, "attention_mask: holds values besides 0 and 1"),
        ({"attention_mask": torch.full((3, 11), math.nan)}, "attention_mask: holds values besides 0 and 1"),
        ({"attention_mask": torch.eye(11, dtype=torch.int64)[:3] * 0}, "attention_mask[0]: has 0 runs of ones"),
        ({"attention_mask": torch.tensor([[1] * 11, [1, 0] * 5 + [1], [1] * 11])}, "attention_mask[1]: has 6 runs"),
        ({"temperature": -1.0}, "decoding.temperature=-1.0"),
        ({"temperature": 0.5, "decoding": Decoding(temperature=0.5)}, "temperature=0.5: decoding.temperature is 0.5"),
        ({"decoding": Decoding(temperature=1.0, repetition_penalty=1.3)}, "decoding.repetition_penalty=1.3"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
    ],
)
def test_malformed_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        teacher_forced_logprobs(**{"model": random_llama(), "ids": random_ids(), **arguments})
    assert "\n" not in str(caught.value)
