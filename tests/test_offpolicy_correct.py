"""The five corrections: plain Python, the definitions of verl and TRL in torch, known cases, lengths."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlinfra_utils import offpolicy
from rlinfra_utils.offpolicy import MODES, correct


@st.composite
def problems(draw):
    """Log-ratios and mask, shape (sequences, tokens), and two bounds of which one may be None."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 10)))
    d = draw(hnp.arrays(np.float64, shape, elements=st.floats(-3, 3)))
    low, high = sorted(draw(st.tuples(st.floats(0.05, 8), st.floats(0.05, 8))))
    bounds = draw(st.sampled_from([(low, high), (None, high), (low, None)]))
    return d, draw(hnp.arrays(bool, shape)), *bounds


def plain_python(d, mask, mode, low, high):
    """Weights and kept tokens, one number at a time."""
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    weights, keep = [], []
    for row, row_mask in zip(d.tolist(), mask.tolist()):
        used = [x for x, m in zip(row, row_mask) if m]
        row_weights, row_keep = [], []
        for x, m in zip(row, row_mask):
            if not m:
                row_weights.append(0.0)
                row_keep.append(False)
                continue
            log = {"token": x, "sequence": math.fsum(used), "geometric": math.fsum(used) / len(used)}[
                mode.split("_")[0]
            ]
            ratio = math.exp(log)
            inside = low <= ratio <= high
            if mode.endswith("truncate"):
                row_weights.append(min(max(ratio, low), high))
                row_keep.append(True)
            else:
                row_weights.append((1.0 if mode == "geometric_mask" else ratio) if inside else 0.0)
                row_keep.append(inside)
        weights.append(row_weights)
        keep.append(row_keep)
    return weights, keep


def far_from_a_bound(d, mask, mode, *bounds):
    """Two roads to one sum part in the last bit; a ratio that near a bound may fall to either side."""
    logs = correct(d, mask, mode, high=1.0).log_weights
    logs = logs[~np.isnan(logs)]
    return all(b is None or not np.isclose(logs, math.log(b), atol=1e-9).any() for b in bounds)


@settings(max_examples=150)
@given(problems(), st.sampled_from(MODES))
def test_weights_are_what_plain_python_says(problem, mode):
    d, mask, low, high = problem
    if not far_from_a_bound(d, mask, mode, low, high):
        return
    result = correct(d, mask, mode, low, high)
    weights, keep = plain_python(d, mask, mode, low, high)
    assert result.keep.tolist() == keep
    np.testing.assert_allclose(result.weights, weights, rtol=1e-12)


@settings(max_examples=80)
@given(problems(), st.sampled_from(MODES))
def test_statistics_are_those_of_the_weights(problem, mode):
    d, mask, low, high = problem
    result = correct(d, mask, mode, low, high)
    stats, by_token = result.stats, mode.startswith("token")
    answers = mask.any(axis=-1)
    left = result.weights[result.keep] if by_token else result.weights.max(axis=-1)[result.keep.any(axis=-1)]
    raw = result.log_weights[mask] if by_token else result.log_weights[answers]
    assert stats.before.num == raw.size
    assert stats.after.num == left.size
    if raw.size:
        assert stats.before.mean == pytest.approx(np.exp(raw).mean())
        assert stats.before.max_log == raw.max()
    if left.size:
        assert stats.after.mean == pytest.approx(left.mean())
        assert stats.after.ess == pytest.approx(offpolicy.ess(left))
    dropped = mask & ~result.keep
    assert stats.total("num_tokens") == mask.sum()
    assert stats.total("num_tokens_dropped") == dropped.sum()
    assert stats.total("num_sequences") == answers.sum()
    assert stats.total("num_sequences_dropped") == (answers & ~result.keep.any(axis=-1)).sum()
    assert stats.total("num_sequences_touched") == dropped.any(axis=-1).sum()
    for b in stats.lengths:
        inside = (mask.sum(axis=-1) >= b.min_length) & (mask.sum(axis=-1) < 2 * b.min_length)
        assert (b.num_sequences, b.num_tokens) == (inside.sum(), mask[inside].sum())
        assert b.num_tokens_dropped == dropped[inside].sum()


@settings(max_examples=60)
@given(problems(), st.sampled_from(MODES[:4]))
def test_equal_to_trl(problem, mode):
    """TRL 1.10, `vllm_importance_sampling_mode`: differences times mask, summed or not, exp, clamp or zero."""
    d, mask, low, high = problem
    if not far_from_a_bound(d, mask, mode, low, high):
        return
    difference = torch.tensor(d) * torch.tensor(mask)
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(min=low, max=high)
    else:
        outside = (ratio < (low or -math.inf)) | (ratio > (high or math.inf))
        ratio = ratio.masked_fill(outside, 0.0)
    expected = ratio.expand(d.shape) * torch.tensor(mask)  # TRL multiplies by the mask in the loss
    np.testing.assert_allclose(correct(d, mask, mode, low, high).weights, expected.numpy(), rtol=1e-12)


@settings(max_examples=60)
@given(
    problems(),
    st.sampled_from([("token_k1", "token_mask"), ("seq_sum_k1", "sequence_mask"), ("seq_mean_k1", "geometric_mask")]),
)
def test_equal_to_verl_rejection(problem, names):
    """verl `rollout_rs`: k1 = -log r; keep log a <= k1 <= log b. So "a_b" bounds the ratio by 1/b and 1/a."""
    d, mask, low, high = problem
    option, mode = names
    low, high = low or min(0.1, high or 0.1), high or max(8.0, low or 8.0)
    if not far_from_a_bound(d, mask, mode, low, high):
        return
    k1, m = -torch.tensor(d), torch.tensor(mask)
    total = (k1 * m).sum(-1, keepdim=True)
    statistic = {"token_k1": k1, "seq_sum_k1": total, "seq_mean_k1": total / m.sum(-1, keepdim=True).clamp(min=1)}[
        option
    ]
    a, b = 1 / high, 1 / low
    kept = (statistic >= math.log(a)) & (statistic <= math.log(b)) & m
    result = correct(d, mask, mode, low, high)
    assert (result.keep == kept.numpy()).all()
    if mask.any():
        rejected = (m & ~kept).sum() / m.sum()
        assert result.stats.dropped_token_share == pytest.approx(float(rejected))


def test_equal_to_verl_effective_sample_size():
    """verl `rollout_is_eff_sample_size`: 1 / mean of (w / mean w)^2 over tokens, of truncated or masked weights."""
    rng = np.random.default_rng(0)
    d, mask = rng.normal(0, 0.5, (6, 20)), rng.random((6, 20)) < 0.8
    for mode, low in (("token_truncate", None), ("token_mask", 0.7)):
        result = correct(d, mask, mode, low, 1.5)
        w = torch.tensor(result.weights)[torch.tensor(mask)]
        assert result.stats.effective_share == pytest.approx(float(1 / (w / w.mean()).square().mean()))


def test_sum_and_geometric_mean_disagree_about_a_long_answer_b19():
    d, mask = np.full(100, 0.012), np.ones(100)
    verdicts = {mode: correct(d, mask, mode, high=3.0) for mode in MODES}
    assert {mode: c.keep.all() for mode, c in verdicts.items()} == {
        "token_truncate": True,
        "token_mask": True,
        "sequence_truncate": True,
        "sequence_mask": False,
        "geometric_mask": True,
    }
    truncated = verdicts["sequence_truncate"]
    assert (truncated.weights == 3.0).all()
    assert truncated.stats.before.mean == pytest.approx(3.320117, abs=1e-6)  # before the clamp
    assert truncated.log_weights == pytest.approx(1.2)
    assert verdicts["geometric_mask"].stats.before.mean == pytest.approx(1.012072, abs=1e-6)


def test_the_sequence_mask_drops_the_long_and_the_geometric_one_does_not():
    """The same drift a token at lengths 8 to 512: only the sum turns it into a length filter."""
    lengths = np.array([8, 16, 32, 64, 128, 256, 512])
    mask = np.arange(512) < lengths[:, None]
    d = np.full(mask.shape, 0.012)
    by_sum = correct(d, mask, "sequence_mask", high=3.0).stats
    assert [(b.min_length, b.num_sequences_dropped) for b in by_sum.lengths] == [
        *((8, 0), (16, 0), (32, 0), (64, 0), (128, 1), (256, 1), (512, 1))
    ]
    assert by_sum.dropped_sequence_share == 3 / 7
    assert by_sum.dropped_token_share == 896 / 1016
    assert correct(d, mask, "geometric_mask", high=1.02).stats.dropped_token_share == 0.0


def test_bounds_are_allowed_values():
    for bound in (0.7, 1.3, 3.0):
        d = [math.log(bound)]
        for mode in ("token_mask", "sequence_mask", "geometric_mask"):
            assert correct(d, [1], mode, low=bound, high=bound).keep.all()
        for mode in ("token_truncate", "sequence_truncate", "token_mask"):
            assert correct(d, [1], mode, high=bound).weights[0] <= bound
    assert correct([math.log(3.0)], [1], "token_truncate", high=3.0).stats.outside.fraction == 0.0


def test_what_lay_outside_is_counted_by_side_whether_clipped_or_dropped():
    d, mask = np.log([0.1, 0.4, 1.0, 2.5, 9.0]), np.ones(5)
    for mode in ("token_truncate", "token_mask"):
        outside = correct(d, mask, mode, low=0.5, high=2.0).stats.outside
        assert (outside.num, outside.num_low, outside.num_high) == (5, 2, 2)
    assert correct(d, mask, "token_truncate", low=0.5, high=2.0).weights == pytest.approx([0.5, 0.5, 1, 2, 2])
    assert correct(d, mask, "token_mask", low=0.5, high=2.0).weights == pytest.approx([0, 0, 1, 0, 0])


def test_an_answer_without_a_token_is_neither_kept_nor_dropped():
    d, mask = np.array([[1.0, 1.0], [math.nan, math.inf]]), np.array([[1, 1], [0, 0]])
    for mode in MODES:
        result = correct(d, mask, mode, high=1.5)
        assert result.stats.total("num_sequences") == 1
        assert result.weights[1].tolist() == [0.0, 0.0]
        assert np.isnan(result.log_weights[1]).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_selects_nothing_is_undefined_not_zero(mode):
    stats = correct(np.zeros((2, 3)), np.zeros((2, 3)), mode, high=2.0).stats
    for value in (
        *(stats.before.mean, stats.after.mean, stats.before.normalized_ess, stats.effective_share),
        *(stats.dropped_token_share, stats.dropped_sequence_share, stats.touched_sequence_share),
        stats.outside.fraction,
    ):
        assert math.isnan(value)
    assert stats.lengths == ()


def test_all_dropped_leaves_nothing():
    stats = correct([2.0, 2.0], [1, 1], "token_mask", high=1.5).stats
    assert (stats.dropped_token_share, stats.effective_share) == (1.0, 0.0)
    assert math.isnan(stats.after.ess)


def test_an_answer_that_lost_a_token_is_touched_not_dropped():
    d = np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    stats = correct(d, np.ones((3, 2)), "token_mask", high=2.0).stats
    shares = (stats.dropped_token_share, stats.dropped_sequence_share, stats.touched_sequence_share)
    assert shares == (3 / 6, 1 / 3, 2 / 3)


def test_modes_combine_through_keep():
    d = np.array([[0.1, 0.9], [0.0, 0.2]])
    geometric = correct(d, np.ones((2, 2)), "geometric_mask", high=1.2)
    assert geometric.keep.tolist() == [[False, False], [True, True]]
    both = correct(d, geometric.keep, "token_truncate", high=1.1)
    assert both.weights == pytest.approx(np.array([[0, 0], [1.0, 1.1]]))


def test_extreme_ratios_are_bounded_without_overflow():
    d = np.array([800.0, -800.0, 0.0])
    with np.errstate(all="raise", under="ignore"):
        result = correct(d, np.ones(3), "token_truncate", low=0.5, high=2.0)
        assert result.weights.tolist() == [2.0, 0.5, 1.0]
        assert result.stats.before.max_abs_log == 800.0
    with pytest.raises(ValueError, match=r"log_weights\[0\]=800: its weight is beyond float64; give high"):
        correct(d, np.ones(3), "token_mask", low=0.5)
