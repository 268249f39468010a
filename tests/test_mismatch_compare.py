"""`compare` against numbers worked out by hand and against the field cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import mismatch
from rlinfra_utils.mismatch import round_to, token_logprobs
from rlinfra_utils.rollouts import Decoding


def test_places_bins_and_sums():
    trainer = [[-1.0, -2.0, -9.0], [-0.5, -3.0, -0.1]]
    behavior = [[-1.0, -1.5, 7.0], [-0.6, -3.0, -0.1]]
    found = mismatch.compare(trainer, behavior, [[1, 1, 0], [1, 1, 1]])
    assert np.isnan(found.delta[0, 2])
    assert found.first_diverging == (0, 1)
    assert [place.index for place in found.largest] == [(0, 1), (1, 0)]
    assert found.largest[0][1:] == (-2.0, -1.5, -0.5)
    assert found.sequence_log_weight == pytest.approx([-0.5, 0.1])
    w = np.exp([-0.5, 0.1])
    assert found.normalized_ess == pytest.approx(w.sum() ** 2 / (w**2).sum() / 2)
    assert [(b.low, b.num_tokens) for b in found.by_position] == [(0, 2), (1, 2), (2, 1)]
    assert found.by_position[1].mean == pytest.approx(-0.25)
    assert sum(b.num_tokens for b in found.by_probability) == 5
    edges = [b for b in found.by_probability if b.low == 0.1]
    assert edges[0].num_tokens == 2  # exp(-1) and exp(-2); exp(-0.5) = 0.61, exp(-3) = 0.05, exp(-0.1) = 0.90
    assert "first diverging token" in str(found)
    assert "<table>" in found._repr_html_()


def test_equal_logprobs_diverge_nowhere():
    found = mismatch.compare([-1.0, -2.0], [-1.0, -2.0], [1, 1])
    assert found.first_diverging is None
    assert found.largest == ()
    assert found.normalized_ess == 1.0


def test_field_case_b28_clip_share_without_lag():
    delta = np.array([0, 0.01, -0.02, 0.25, -0.3, 0.05, 0, 0, 0, 0])
    summary = mismatch.compare(delta - 1.0, np.full(10, -1.0), np.ones(10)).summary
    assert summary.token.mean_abs_log == pytest.approx(0.063)
    clip = summary.clip
    assert (clip.num_low + clip.num_high) / clip.num == pytest.approx(0.2)
    assert summary.k3 == pytest.approx(0.007636, abs=5e-7)


def test_field_case_b25_rounding_to_even():
    logits = np.array([[20.06, 20.0, 10.0]], dtype=np.float32)
    exact = token_logprobs(logits, np.array([0]))
    for dtype, rounded, delta in (("bfloat16", [20, 20, 10], -0.029551), ("float16", None, 0.001212)):
        narrow = round_to(logits, dtype)
        assert rounded is None or narrow.tolist() == [rounded]
        assert (token_logprobs(narrow, np.array([0])) - exact)[0] == pytest.approx(delta, abs=2e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=8))
def test_rounding_is_torchs(values):
    x = np.array(values, dtype=np.float32)
    for dtype in ("bfloat16", "float16"):
        theirs = torch.tensor(x).to(getattr(torch, dtype)).float().numpy()
        assert np.array_equal(round_to(x, dtype), theirs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    st.sampled_from([None, 0.3, 0.8, 0.95]),
    st.sampled_from([None, 0, 1, 5, 100]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_processed_logprobs_are_the_engines(seed, temperature, top_p, top_k, min_p):
    """The engine's own torch filters are the oracle: another implementation of the same order."""
    from rlinfra_utils.engines import sampling

    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(6, 23)).astype(np.float32) * 3
    decoding = Decoding(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, banned_token_ids=[3])
    theirs = sampling.processed_logprobs(torch.tensor(logits), sampling.resolve(decoding, 23)).numpy()
    for token in range(23):
        ours = token_logprobs(logits, np.full(6, token), decoding)
        np.testing.assert_allclose(ours, theirs[:, token], atol=2e-5)


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = np.array([[1.0, 2.0, 2.0]] * 3)
    assert token_logprobs(logits, np.array([0, 1, 2]), Decoding(temperature=0.0)).tolist() == [
        -math.inf,
        0.0,
        -math.inf,
    ]
