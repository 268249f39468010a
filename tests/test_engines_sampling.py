"""The distribution sampled from: each filter against transformers' own, all of them against plain Python."""

import math

import pytest
import torch
from engines_fakes import filtered_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlinfra_utils.engines.sampling import keep_min_p, keep_top_k, keep_top_p, processed_logprobs, resolve
from rlinfra_utils.rollouts import Decoding


def random_logits(seed, rows=64, vocab=50, spread=3.0):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value", [0.001, 0.05, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(value):
    logits = random_logits(0)
    assert torch.equal(keep_min_p(logits, value), MinPLogitsWarper(value)(None, logits))


@pytest.mark.parametrize("value", [1, 2, 7, 50, 1000])
def test_top_k_keeps_what_transformers_keeps(value):
    logits = random_logits(1)
    logits[:, 3] = logits[:, 11]
    assert torch.equal(keep_top_k(logits, value), TopKLogitsWarper(value)(None, logits))


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("value", [0.01, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(value, vocab):
    """Both sum in float32, from opposite ends: a token whose mass sits on the bound may fall either way."""
    logits = random_logits(2, rows=20000 // vocab, vocab=vocab)
    ours, theirs = keep_top_p(logits, value), TopPLogitsWarper(value)(None, logits)
    probs = logits.double().softmax(-1)
    mass_before = torch.stack([(row[None, :] * (row[None, :] > row[:, None])).sum(1) for row in probs])
    on_the_bound = (mass_before - value).abs() < 1e-5
    assert torch.equal(ours[~on_the_bound], theirs[~on_the_bound])
    assert on_the_bound.float().mean() < 0.02


def logits_and_decoding():
    """Logits in steps of an eighth: equal ones are exactly equal, and others differ by more than rounding."""
    numbers = st.integers(-64, 64).map(lambda step: step / 8)
    return st.tuples(
        st.lists(numbers, min_size=2, max_size=30),
        st.builds(
            Decoding,
            temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
            top_p=st.sampled_from([None, 0.1, 0.55, 0.95, 1.0]),
            top_k=st.sampled_from([None, -1, 0, 1, 3, 100]),
            min_p=st.sampled_from([0.0, 0.02, 0.4]),
            banned_token_ids=st.sampled_from([[], [0], [1, 1]]),
        ),
    )


@settings(max_examples=300, deadline=None)
@given(logits_and_decoding())
def test_all_filters_together_agree_with_plain_python(case):
    logits, decoding = case
    ours = processed_logprobs(torch.tensor(logits), resolve(decoding, len(logits))).exp()
    expected = torch.tensor(filtered_distribution(logits, decoding))
    if not torch.allclose(ours, expected, atol=1e-5):
        # Arithmetic may put a token on the bound of a filter in or out: then a hair wider or tighter agrees.
        near = [
            decoding.model_copy(update={"min_p": decoding.min_p * f, "top_p": min((decoding.top_p or 1) * g, 1.0)})
            for f in (1 - 1e-5, 1 + 1e-5)
            for g in (1 - 1e-5, 1 + 1e-5)
        ]
        assert any(torch.allclose(ours, torch.tensor(filtered_distribution(logits, d)), atol=1e-4) for d in near)


def test_top_p_renormalises_by_the_kept_mass():
    """Field case B18: 0.75 keeps a mass of 0.8, so each kept log-prob is 0.223144 above the raw one."""
    raw = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    processed = processed_logprobs(raw, resolve(Decoding(temperature=1.0, top_p=0.75), 4))
    assert (raw - processed)[:2].tolist() == pytest.approx([math.log(0.8)] * 2, abs=1e-6)
    assert processed[2:].tolist() == [-math.inf, -math.inf]


def test_top_k_acts_before_top_p():
    """Of [.4, .3, .2, .1] top_k=2 leaves [4/7, 3/7], whose first token alone reaches 0.5; unfiltered it would not."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = processed_logprobs(logits, resolve(Decoding(temperature=1.0, top_k=2, top_p=0.5), 4)).isfinite()
    assert kept.tolist() == [True, False, False, False]


def test_temperature_acts_before_min_p():
    """Odds of 1:4 are above min_p = 0.2; at temperature 0.5 they are 1:16, below it."""
    logits = torch.tensor([0.8, 0.2]).log()
    assert processed_logprobs(logits, resolve(Decoding(temperature=1.0, min_p=0.2), 2)).isfinite().all()
    assert processed_logprobs(logits, resolve(Decoding(temperature=0.5, min_p=0.2), 2)).tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("vocab", [10, 5000])
def test_top_p_takes_the_lower_ids_of_equal_tokens(vocab):
    kept = keep_top_p(torch.zeros(2, vocab), 0.5).isfinite()
    assert kept[:, : vocab // 2].all()
    assert not kept[:, vocab // 2 + 1 :].any()


def test_top_p_keeps_one_token_however_small_it_is():
    kept = keep_top_p(random_logits(3), 1e-9).isfinite()
    assert torch.equal(kept.sum(-1), torch.ones(64, dtype=torch.int64))
    assert torch.equal(kept.int().argmax(-1), random_logits(3).argmax(-1))


def test_greedy_is_a_point_mass_on_the_likeliest_token_that_is_allowed():
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 6.0, 5.0]])
    greedy = processed_logprobs(logits, resolve(Decoding(temperature=0.0), 3))
    assert greedy.tolist() == [[-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]
    banned = processed_logprobs(logits, resolve(Decoding(temperature=0.0, banned_token_ids=[0, 1]), 3))
    assert banned.argmax(-1).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_become_float32_first(dtype):
    logits = random_logits(4).to(dtype)
    processed = processed_logprobs(logits, resolve(Decoding(temperature=0.7, top_p=0.9), 50))
    assert processed.dtype == torch.float32
    assert torch.equal(processed, processed_logprobs(logits.float(), resolve(Decoding(temperature=0.7, top_p=0.9), 50)))
    assert torch.allclose(processed.exp().sum(-1), torch.ones(64), atol=1e-6)


def test_resolve_fills_in_what_was_left_out():
    decoding = resolve(Decoding(temperature=1.0, top_k=-1, max_new_tokens=4), 10)
    assert (decoding.top_p, decoding.top_k, decoding.logprobs_mode, decoding.max_new_tokens) == (1.0, 0, "processed", 4)
    assert not decoding.filters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": None}, "decoding.temperature=None"),
        ({"temperature": -0.5}, "decoding.temperature=-0.5"),
        ({"temperature": math.nan}, "decoding.temperature=nan"),
        ({"temperature": math.inf}, "decoding.temperature=inf"),
        ({"temperature": 1e-9}, "decoding.temperature=1e-09"),
        ({"top_p": 0.0}, "decoding.top_p=0.0"),
        ({"top_p": 1.5}, "decoding.top_p=1.5"),
        ({"top_p": math.nan}, "decoding.top_p=nan"),
        ({"top_k": -2}, "decoding.top_k=-2"),
        ({"min_p": -0.1}, "decoding.min_p=-0.1"),
        ({"min_p": 2.0}, "decoding.min_p=2.0"),
        ({"repetition_penalty": 1.1}, "decoding.repetition_penalty=1.1"),
        ({"stop": ["\n"]}, r"decoding.stop=\['\\n'\]"),
        ({"logprobs_mode": "raw"}, "decoding.logprobs_mode='raw'"),
        ({"banned_token_ids": [10]}, r"decoding.banned_token_ids=\[10\]"),
        ({"banned_token_ids": [-1]}, r"decoding.banned_token_ids=\[-1\]"),
        ({"banned_token_ids": list(range(10))}, "leave at least one token"),
    ],
)
def test_what_is_out_of_range_or_unsupported_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        resolve(Decoding(**{"temperature": 1.0, **fields}), 10)
    assert "\n" not in str(caught.value)
