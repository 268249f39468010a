"""Ranks hold parts of a batch: what they report must add up to the batch, however it was split."""

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlinfra_utils import offpolicy


def close(first, second):
    """Equal dataclasses, floats to rounding."""
    if isinstance(first, float):
        return first == pytest.approx(second, rel=1e-10, abs=1e-10, nan_ok=True)
    if hasattr(first, "__dataclass_fields__"):
        return all(close(getattr(first, name), getattr(second, name)) for name in first.__dataclass_fields__)
    return first == second


@st.composite
def split_batches(draw):
    """Trainer, behaviour, mask over (sequences, tokens), and a rank for each sequence."""
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 9)))
    logprobs = hnp.arrays(np.float64, shape, elements=st.floats(-20, 0))
    ranks = draw(hnp.arrays(np.int64, shape[0], elements=st.integers(0, 3)))
    return draw(logprobs), draw(logprobs), draw(hnp.arrays(bool, shape)), ranks


@settings(max_examples=80)
@given(split_batches())
def test_ranks_add_up_to_the_batch(batch):
    trainer, behavior, mask, ranks = batch
    rows = [ranks == rank for rank in np.unique(ranks)]
    parts = [offpolicy.summarize(trainer[r], behavior[r], mask[r]) for r in rows]
    assert close(reduce(add, parts), offpolicy.summarize(trainer, behavior, mask))
    d = offpolicy.log_ratio(trainer, behavior, mask)
    for mode in offpolicy.MODES:
        parts = [offpolicy.correct(d[r], mask[r], mode, 0.5, 2.0).stats for r in rows]
        assert close(reduce(add, parts), offpolicy.correct(d, mask, mode, 0.5, 2.0).stats)
    ratio = np.exp(d)
    parts = [offpolicy.clip_counts(ratio[r], 0.2, mask[r]) for r in rows]
    assert reduce(add, parts) == offpolicy.clip_counts(ratio, 0.2, mask)


@settings(max_examples=40)
@given(split_batches(), st.randoms(use_true_random=False))
def test_order_and_padding_do_not_matter(batch, random):
    trainer, behavior, mask, _ = batch
    order = list(range(len(mask)))
    random.shuffle(order)
    pad = ((0, 0), (0, 3))
    moved = [np.pad(x[order], pad, constant_values=fill) for x, fill in zip((trainer, behavior, mask), (np.nan, 9, 0))]
    assert close(offpolicy.summarize(trainer, behavior, mask), offpolicy.summarize(*moved))
    first, second = (offpolicy.log_ratio(*x) for x in ((trainer, behavior, mask), moved))
    for mode in offpolicy.MODES:
        a, b = offpolicy.correct(first, mask, mode, high=2.0), offpolicy.correct(second, moved[2], mode, high=2.0)
        assert close(a.stats, b.stats)
        np.testing.assert_allclose(a.weights[order], b.weights[:, : mask.shape[1]], rtol=1e-12)


def test_a_mean_of_the_ranks_means_is_another_number():
    """One rank with 1 token, one with 99: the reason that sums are kept."""
    behavior = np.full((2, 99), -1.0)
    trainer, mask = behavior + np.array([[0.5], [0.0]]), np.arange(99) < np.array([[1], [99]])
    ranks = [offpolicy.summarize(trainer[i], behavior[i], mask[i]) for i in (0, 1)]
    assert (ranks[0] + ranks[1]).token.mean_abs_log == pytest.approx(0.5 / 100)
    assert np.mean([r.token.mean_abs_log for r in ranks]) == 0.25


def test_an_empty_rank_takes_part_without_effect():
    full = offpolicy.summarize([[-1.0, -2.0]], [[-1.5, -2.0]], [[1, 1]])
    empty = offpolicy.summarize([[-1.0, -2.0]], [[-1.5, -2.0]], [[0, 0]])
    assert np.isnan([empty.k1, empty.k3, empty.token.ess, empty.clip.fraction, empty.behavior_zero_share]).all()
    both = full + empty
    assert (both.token, both.sequence, both.geometric, both.clip) == (
        full.token,
        full.sequence,
        full.geometric,
        full.clip,
    )
    assert (both.num_sequences, both.num_empty_sequences) == (1, 1)
    twice = both + empty
    assert (twice.num_sequences, twice.num_empty_sequences, twice.num_tokens) == (1, 2, 2)


def test_what_differs_in_its_question_does_not_add_up():
    arguments = [-1.0], [-1.5], [1]
    with pytest.raises(ValueError, match=r"eps: .* differ"):
        offpolicy.summarize(*arguments) + offpolicy.summarize(*arguments, eps=0.1)
    with pytest.raises(ValueError, match=r"mode, low, high: .* differ"):
        (
            offpolicy.correct([0.5], [1], "token_mask", high=2).stats
            + offpolicy.correct([0.5], [1], "token_mask", high=3).stats
        )
