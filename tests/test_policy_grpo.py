"""Advantages, ratio, loss and KL, against plain Python, finite differences and torch's own divergence."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.policy import group_advantages, grpo_loss, kl_to_base, token_ratio

# Multiples of 1/8, so that equal and different rewards are told apart without rounding.
REWARDS = st.integers(-80, 80).map(lambda eighths: eighths / 8)


@st.composite
def groups(draw):
    group_size = draw(st.integers(2, 9))
    num_groups = draw(st.integers(1, 6))
    return draw(st.lists(REWARDS, min_size=group_size * num_groups, max_size=group_size * num_groups)), group_size


@given(groups(), st.booleans())
def test_advantages_are_the_formula_group_by_group(rewards_and_size, divide_by_std):
    rewards, group_size = rewards_and_size
    values, num_degenerate = group_advantages(rewards, group_size, divide_by_std)
    expected, expected_degenerate = [], 0
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean, spread = statistics.fmean(group), statistics.pstdev(group)
        expected_degenerate += len(set(group)) == 1
        scale = spread if divide_by_std else 1.0
        expected += [0.0 if len(set(group)) == 1 else (reward - mean) / scale for reward in group]
    assert values.tolist() == pytest.approx(expected, abs=1e-12)
    assert num_degenerate == expected_degenerate


@given(groups(), st.integers(-100, 100), st.integers(1, 50))
def test_advantages_ignore_shift_and_scale_of_the_rewards(rewards_and_size, shift, scale):
    rewards, group_size = rewards_and_size
    moved = [reward * scale + shift for reward in rewards]
    before, after = group_advantages(rewards, group_size), group_advantages(moved, group_size)
    np.testing.assert_allclose(before.values, after.values, atol=1e-9)
    assert before.num_degenerate == after.num_degenerate


@given(groups())
def test_each_group_has_mean_0_and_deviation_1_or_is_all_0(rewards_and_size):
    rewards, group_size = rewards_and_size
    values, num_degenerate = group_advantages(rewards, group_size)
    deviations = values.reshape(-1, group_size).std(axis=1)
    np.testing.assert_allclose(values.reshape(-1, group_size).mean(axis=1), 0, atol=1e-12)
    assert sorted(deviations.round(9).tolist()) == [0.0] * num_degenerate + [1.0] * (len(deviations) - num_degenerate)


def test_float_noise_is_no_signal():
    assert 0.1 + 0.2 != 0.3
    values, num_degenerate = group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], 4)
    assert values.tolist() == [0.0] * 4
    assert num_degenerate == 1


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        ([], 2, r"rewards: shape \(0,\)"),
        (None, 2, "rewards: "),
        ([1.0, None], 2, r"rewards\[1\]=nan"),
        ([[1.0], [1.0, 0.0]], 2, "rewards: rows of unequal length"),
        ([1.0, 0.0], "2", "group_size='2'"),
        ([1.0, 0.0, 1.0, 0.0], 2.5, "group_size=2.5"),
        ([1.0, 0.0, 1.0], 2, r"rewards has shape \(3,\)"),
        ([[1.0, 0.0]], 2, r"rewards has shape \(1, 2\)"),
        ([1.0, 0.0], 1, "group_size=1"),
        ([1.0, 0.0], 0, "group_size=0"),
        ([1.0, float("nan")], 2, r"rewards\[1\]=nan"),
        ([float("inf"), 0.0], 2, r"rewards\[0\]=inf"),
    ],
)
def test_advantages_refuse_malformed_rewards(rewards, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group_size)


def plain_loss(logprobs, behavior, advantages, mask, low, high):
    """The loss as a sum over tokens, in plain Python; the smaller of the two terms is taken case by case."""
    terms = []
    for row, advantage in enumerate(advantages):
        for token, trained in enumerate(mask[row]):
            if trained:
                ratio = math.exp(logprobs[row][token] - behavior[row][token])
                bounded = ratio
                if advantage > 0 and ratio > 1 + high:
                    bounded = 1 + high
                if advantage < 0 and ratio < 1 - low:
                    bounded = 1 - low
                terms.append(-bounded * advantage)
    return sum(terms) / len(terms)


@st.composite
def loss_cases(draw):
    num_rows, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shape = {"min_size": num_tokens, "max_size": num_tokens}
    logprob = st.floats(-4, 0)

    def rows(element):
        return [draw(st.lists(element, **shape)) for _ in range(num_rows)]

    mask = rows(st.booleans())
    mask[0][0] = True
    advantages = draw(st.lists(st.floats(-3, 3), min_size=num_rows, max_size=num_rows))
    return rows(logprob), rows(logprob), advantages, mask, draw(st.floats(0.05, 0.5)), draw(st.floats(0.05, 0.5))


def loss_of(logprobs, behavior, advantages, mask, low=0.2, high=0.2):
    ratio = token_ratio(logprobs, torch.tensor(behavior, dtype=logprobs.dtype), torch.tensor(mask))
    advantages = torch.tensor(advantages, dtype=logprobs.dtype)[:, None]
    return grpo_loss(ratio, advantages, torch.tensor(mask), low, high)


@given(loss_cases())
def test_the_loss_is_the_formula_token_by_token(case):
    logprobs, *rest = case
    loss = loss_of(torch.tensor(logprobs, dtype=torch.float64), *rest)
    assert loss.item() == pytest.approx(plain_loss(logprobs, *rest), abs=1e-9)


def test_the_gradient_agrees_with_finite_differences():
    random = np.random.default_rng(0)
    logprobs, behavior = -random.uniform(0.1, 2, (3, 4)), -random.uniform(0.1, 2, (3, 4))
    advantages, mask = [1.5, -0.5, -1.0], random.random((3, 4)) < 0.8
    weights = torch.tensor(logprobs, requires_grad=True)
    loss_of(weights, behavior, advantages, mask).backward()
    step, slopes = 1e-6, np.zeros((3, 4))
    for index in np.ndindex(3, 4):
        sides = []
        for sign in (1, -1):
            moved = logprobs.copy()
            moved[index] += sign * step
            sides.append(plain_loss(moved, behavior, advantages, mask, 0.2, 0.2))
        slopes[index] = (sides[0] - sides[1]) / (2 * step)
    assert np.count_nonzero(slopes) not in (0, mask.sum())  # some tokens are clipped, some are not
    np.testing.assert_allclose(weights.grad.numpy(), slopes, atol=1e-8)


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logprobs = torch.tensor([[-0.5, -1.0], [-2.0, -0.1]], dtype=torch.float64, requires_grad=True)
    loss = loss_of(logprobs, logprobs.detach().numpy(), [0.7, -1.3], [[True, True], [True, False]])
    loss.backward()
    assert loss.item() == pytest.approx(-(0.7 + 0.7 - 1.3) / 3)
    np.testing.assert_allclose(logprobs.grad, [[-0.7 / 3, -0.7 / 3], [1.3 / 3, 0.0]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        # d loss / d ratio of one token: -advantage, or 0 where the clip has taken over.
        (1.27, 1.0, -1.0),
        (1.29, 1.0, 0.0),
        (1.29, -1.0, 1.0),
        (9.00, -1.0, 1.0),
        (0.81, -1.0, 1.0),
        (0.79, -1.0, 0.0),
        (0.79, 1.0, -1.0),
        (0.01, 1.0, -1.0),
        (1.00, 0.0, 0.0),
    ],
)
def test_the_clip_acts_on_one_side_of_each_advantage(ratio, advantage, slope):
    value = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True]])
    loss = grpo_loss(value, torch.tensor([[advantage]], dtype=torch.float64), mask, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert value.grad.item() == slope
    bounded = {(1.29, 1.0): 1.28, (0.79, -1.0): 0.8}.get((ratio, advantage), ratio)
    assert loss.item() == pytest.approx(-bounded * advantage)


@pytest.mark.parametrize("sentinel", [float("nan"), float("inf"), -float("inf"), 123.7357, -9999.0, 1e30])
def test_the_mask_acts_before_exp(sentinel):
    """What stands off the mask changes neither the loss nor its gradient, whatever it is."""
    mask = torch.tensor([[True, False, True]])
    advantages = torch.tensor([[1.0]])
    results = []
    for filler in (0.0, sentinel):
        logprobs = torch.tensor([[-0.4, -0.6, -0.1]], requires_grad=True)
        behavior = torch.tensor([[-0.5, filler, -0.2]])
        ratio = token_ratio(logprobs, behavior, mask)
        loss = grpo_loss(ratio, advantages, mask) + kl_to_base(logprobs, behavior, mask)
        loss.backward()
        results.append((loss.item(), logprobs.grad.tolist()))
    assert ratio[0, 1] == 1.0
    assert results[0] == results[1]
    assert math.isfinite(results[1][0])
    assert results[1][1][0][1] == 0.0


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_kl_estimate_has_the_true_kl_as_its_mean(logits, random):
    """Averaged over the policy's own distribution, by enumeration, it is torch's KL; and no term is negative."""
    policy = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    base = torch.tensor([random.uniform(-4, 4) for _ in logits], dtype=torch.float64).log_softmax(-1)
    terms = [kl_to_base(policy[None, [i]], base[None, [i]], torch.tensor([[True]])).item() for i in range(len(logits))]
    assert min(terms) >= 0
    mean = sum(p * term for p, term in zip(policy.exp().tolist(), terms))
    categorical = torch.distributions.Categorical
    exact = torch.distributions.kl_divergence(categorical(logits=policy), categorical(logits=base)).item()
    assert mean == pytest.approx(exact, abs=1e-9)


def test_kl_of_a_published_case():
    """RLinf pull request 1534: ten log-ratios whose k3 is 0.007636."""
    gaps = torch.tensor([[0, 0.01, -0.02, 0.25, -0.3, 0.05, 0, 0, 0, 0]], dtype=torch.float64)
    kl = kl_to_base(torch.zeros_like(gaps), gaps, torch.ones_like(gaps, dtype=torch.bool))
    assert kl.item() == pytest.approx(0.007636, abs=5e-7)
