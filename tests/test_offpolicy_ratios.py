"""Ratios under a mask, against plain Python, field cases with known values, and exact enumeration."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlinfra_utils import offpolicy

GARBAGE = (math.nan, math.inf, -math.inf, 1e30, -9999.0, 1.0, 123.7357)


def log_softmax(logits, temperature=1.0):
    scaled = [z / temperature for z in logits]
    total = math.log(math.fsum(math.exp(z) for z in scaled))
    return [z - total for z in scaled]


@st.composite
def batches(draw):
    """Trainer, behaviour, mask of shape (sequences, tokens), each answer with a token or none."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 12)))
    logprobs = hnp.arrays(np.float64, shape, elements=st.floats(-40, 0))
    return draw(logprobs), draw(logprobs), draw(hnp.arrays(bool, shape))


@given(batches())
def test_ratios_are_what_plain_python_says(batch):
    trainer, behavior, mask = batch
    d = offpolicy.log_ratio(trainer, behavior, mask)
    assert (d[~mask] == 0.0).all()
    sums, means = offpolicy.sequence_log_ratio(d, mask), offpolicy.geometric_log_ratio(d, mask)
    for i in range(len(d)):
        row = [trainer[i, t] - behavior[i, t] for t in range(mask.shape[1]) if mask[i, t]]
        assert d[i][mask[i]].tolist() == row
        if row:
            assert sums[i] == pytest.approx(math.fsum(row), abs=1e-12)
            assert means[i] == pytest.approx(math.fsum(row) / len(row), abs=1e-12)
        else:
            assert math.isnan(sums[i])
            assert math.isnan(means[i])


@settings(max_examples=50)
@given(batches(), st.data())
def test_what_stands_off_the_mask_never_matters(batch, data):
    trainer, behavior, mask = batch
    dirty = [
        np.where(mask, values, data.draw(hnp.arrays(np.float64, mask.shape, elements=st.sampled_from(GARBAGE))))
        for values in (trainer, behavior)
    ]
    clean, same = offpolicy.log_ratio(trainer, behavior, mask), offpolicy.log_ratio(*dirty, mask)
    assert (clean == same).all()
    assert offpolicy.summarize(trainer, behavior, mask) == offpolicy.summarize(*dirty, mask)
    noise = np.where(mask, clean, dirty[0])
    for mode in offpolicy.MODES:
        mine, theirs = (offpolicy.correct(d, mask, mode, low=0.5, high=2.0) for d in (clean, noise))
        assert mine.stats == theirs.stats
        assert (mine.weights == theirs.weights).all()
        assert (mine.keep == theirs.keep).all()
    ratio = np.where(mask, np.exp(clean), dirty[1])
    assert offpolicy.clip_counts(ratio, 0.2, mask) == offpolicy.clip_counts(np.exp(clean), 0.2, mask)


def test_inputs_of_the_field_are_read_alike():
    trainer, behavior = [-0.5, -1.0, -2.0], [-0.7, None, -1.5]  # a record has null off the policy mask
    expected = [-0.5 + 0.7, 0.0, -0.5]
    assert offpolicy.log_ratio(trainer, behavior, [1, 0, 1]).tolist() == pytest.approx(expected)
    tensors = torch.tensor(trainer, dtype=torch.float64), torch.tensor([-0.7, 9.0, -1.5], dtype=torch.float64)
    assert offpolicy.log_ratio(*tensors, torch.tensor([True, False, True])).tolist() == pytest.approx(expected)
    deep = offpolicy.log_ratio(np.full((2, 3, 4), -1.0), np.full((2, 3, 4), -1.5), np.ones((2, 3, 4)))
    assert offpolicy.sequence_log_ratio(deep, np.ones((2, 3, 4))).tolist() == [[2.0] * 3] * 2


def test_logprobs_divided_by_temperature_b16():
    logits, temperature = [2.0, 1.0, 0.0], 0.5
    raw = log_softmax(logits)
    behavior = [p / temperature for p in raw]
    ratios = np.exp(offpolicy.log_ratio(log_softmax(logits, temperature), behavior, [1, 1, 1]))
    assert raw[0] == pytest.approx(-0.407606, abs=1e-6)
    assert ratios == pytest.approx([1.958699] * 3, abs=1e-6)
    assert ratios[0] == pytest.approx(1 / sum(math.exp(p / temperature) for p in raw))


def test_temperature_on_one_side_b17():
    trainer, behavior = log_softmax([2.0, 1.0, 0.0], 0.6), log_softmax([2.0, 1.0, 0.0])
    ratios = np.exp(offpolicy.log_ratio(trainer, behavior, [1, 1, 1]))
    assert ratios == pytest.approx([1.227565, 0.630253, 0.323583], abs=1e-6)


def test_nucleus_on_one_side_b18():
    p, kept_mass = [0.5, 0.3, 0.15, 0.05], 0.8
    trainer = [math.log(x) for x in p]
    behavior = [math.log(x / kept_mass) for x in p[:2]] + [-math.inf] * 2
    d = offpolicy.log_ratio(trainer, behavior, [1, 1, 0, 0])
    assert d[:2] == pytest.approx([-0.223144] * 2, abs=1e-6)
    steps = [math.log(s) for s in (0.8, 0.95, 1.0, 0.9)]
    assert np.exp(offpolicy.sequence_log_ratio(steps, [1] * 4)) == pytest.approx(0.684)
    assert offpolicy.support_gap([trainer], [behavior], [1]) == pytest.approx([0.2])


def test_the_sum_is_exact_and_varies_while_the_tokens_agree_b19():
    d, mask = np.full(100, 0.012), np.ones(100)
    assert np.exp(d[0]) == pytest.approx(1.012072, abs=1e-6)
    assert np.exp(offpolicy.sequence_log_ratio(d, mask)) == pytest.approx(3.320117, abs=1e-6)
    assert np.exp(offpolicy.geometric_log_ratio(d, mask)) == pytest.approx(1.012072, abs=1e-6)
    kept = [offpolicy.correct(d[:t], mask[:t], "sequence_mask", high=3.0).keep.all() for t in range(1, 101)]
    assert kept.index(False) + 1 == 92
    long = np.full(9_000, math.log(0.0596) / 9_000)
    assert long[0] == pytest.approx(-3.1334e-4, abs=1e-8)
    assert np.exp(offpolicy.geometric_log_ratio(long, np.ones(9_000))) == pytest.approx(0.999687, abs=1e-6)
    assert np.exp(offpolicy.sequence_log_ratio(long, np.ones(9_000))) == pytest.approx(0.0596)


def test_engine_difference_spends_the_trust_region_b28():
    d = np.array([0, 0.01, -0.02, 0.25, -0.3, 0.05, 0, 0, 0, 0])
    behavior, mask = np.full(10, -2.0), np.ones(10)
    engine = offpolicy.summarize(behavior + d, behavior, mask)
    assert engine.clip.fraction == 0.2
    assert engine.token.mean_abs_log == pytest.approx(0.063)
    assert engine.k3 == pytest.approx(0.007636, abs=1e-6)
    updates = offpolicy.summarize(behavior + d, behavior + d, mask)  # old log-probs recomputed by the trainer
    assert (updates.clip.fraction, updates.token.mean_abs_log, updates.k3, updates.k1) == (0, 0, 0, 0)


def test_a_logprob_above_zero_is_refused_b22():
    behavior = [-0.7, 123.7357, -27.1481]
    with pytest.raises(ValueError, match=r"behavior\[1\]=123.736: a log-probability is at most 0"):
        offpolicy.log_ratio([-0.7, -0.1, -27.0], behavior, [1, 1, 1])
    with pytest.raises(ValueError, match=r"behavior\[1\]"):
        offpolicy.summarize([-0.7, -0.1, -27.0], behavior, [1, 1, 1])
    assert offpolicy.log_ratio([-27.0], [-27.1481], [1]) == pytest.approx([0.1481])
    assert offpolicy.log_ratio([5e-7], [-0.1], [1]) == pytest.approx([0.1], abs=1e-6)  # rounding, not an error


@settings(max_examples=30)
@given(st.lists(st.floats(-4, 4), min_size=2, max_size=6), st.integers(0, 2**31))
def test_divergences_are_their_expectations_by_enumeration(logits, seed):
    """Each answer of two tokens once, with its behaviour probability as multiplicity: exact sums, no sampling."""
    rng = np.random.default_rng(seed)
    other = (np.asarray(logits) + rng.normal(0, 0.5, len(logits))).tolist()
    behavior, trainer = log_softmax(logits), log_softmax(other)
    kl = math.fsum(math.exp(b) * (b - t) for b, t in zip(behavior, trainer))
    chi_square = math.fsum(math.exp(2 * t - b) for b, t in zip(behavior, trainer)) - 1
    k1, k3, squares, mean = [], [], [], []
    for b, t in zip(behavior, trainer):
        one = offpolicy.summarize([t], [b], [1])
        share = math.exp(b)
        k1.append(share * one.k1)
        k3.append(share * one.k3)
        mean.append(share * one.token.mean)
        squares.append(share * (one.token.chi_square + 1))
    assert math.fsum(k1) == pytest.approx(kl, abs=1e-12)
    assert math.fsum(k3) == pytest.approx(kl, abs=1e-12)
    assert math.fsum(mean) == pytest.approx(1.0)
    assert math.fsum(squares) - 1 == pytest.approx(chi_square, abs=1e-9)
    torch_kl = torch.nn.functional.kl_div(
        torch.tensor(trainer), torch.tensor(behavior), log_target=True, reduction="sum"
    )
    assert kl == pytest.approx(float(torch_kl), abs=1e-5)


def test_the_expected_sequence_ratio_is_one_only_with_support():
    """All answers of three tokens over a vocabulary of three; the nucleus keeps two of them."""
    trainer = log_softmax([0.3, -0.2, 0.9])
    full, nucleus = log_softmax([0.0, 0.0, 0.5]), [-math.inf, *log_softmax([0.0, 0.5])]
    for behavior, gap in ((full, 0.0), (nucleus, math.exp(trainer[0]))):
        assert offpolicy.support_gap([trainer], [behavior], [1]) == pytest.approx([gap])
        total = 0.0
        for answer in itertools.product(range(3), repeat=3):
            if all(behavior[a] > -math.inf for a in answer):
                d = offpolicy.log_ratio([trainer[a] for a in answer], [behavior[a] for a in answer], [1, 1, 1])
                probability = math.exp(sum(behavior[a] for a in answer))
                total += probability * math.exp(offpolicy.sequence_log_ratio(d, [1, 1, 1]))
        assert total == pytest.approx((1 - gap) ** 3)


def test_logprobs_of_exactly_zero_are_counted():
    greedy = offpolicy.summarize([[-0.1, -0.2], [-0.3, 5.0]], [[0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 0]])
    assert (greedy.num_behavior_zero, greedy.behavior_zero_share, greedy.trainer_zero_share) == (3, 1.0, 0.0)
    filled = offpolicy.summarize([0.0, -0.2], [-0.5, 0.0], [1, 1])
    assert (filled.behavior_zero_share, filled.trainer_zero_share) == (0.5, 0.5)


def test_clip_fractions_by_name():
    ratio, mask = np.array([[0.5, 0.9, 1.3], [0.5, 1.3, 1.1]]), np.array([[1, 1, 1], [1, 1, 0]])
    advantages = np.array([[1.0], [-1.0]])
    assert offpolicy.clip_fraction(ratio, 0.2, mask) == 4 / 5
    assert offpolicy.ppo_clip_fraction(ratio, 0.2, mask, advantages) == 2 / 5  # 1.3 up, 0.5 down
    assert offpolicy.clip_fraction(ratio, (0.2, 0.4), mask) == 2 / 5
    counts = offpolicy.clip_counts(ratio, 0.2, mask, advantages)
    assert (counts.num, counts.num_low, counts.num_high) == (5, 1, 1)
    assert offpolicy.ppo_clip_fraction(ratio, 0.2, mask, np.zeros_like(ratio)) == 0.0


@settings(max_examples=50)
@given(batches(), st.floats(0.01, 0.5), st.floats(0.01, 0.5), st.integers(0, 2**31))
def test_ppo_clip_fraction_is_where_the_clipped_loss_has_no_gradient(batch, low, high, seed):
    trainer, behavior, mask = batch
    d = np.clip(offpolicy.log_ratio(trainer, behavior, mask), -1, 1)
    advantages = np.random.default_rng(seed).normal(size=mask.shape)
    if not mask.any():
        return
    policy = torch.tensor(d, requires_grad=True)
    ratio, a = policy.exp(), torch.tensor(advantages)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    (loss * torch.tensor(mask)).sum().backward()
    silent = (policy.grad == 0).numpy() & mask
    assert offpolicy.ppo_clip_fraction(np.exp(d), (low, high), mask, advantages) == pytest.approx(
        silent.sum() / mask.sum()
    )
