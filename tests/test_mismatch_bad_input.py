"""Malformed input ends in one line that names the argument and the value."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import mismatch
from rlinfra_utils.mismatch import Evidence
from rlinfra_utils.rollouts import Decoding

Z = np.zeros((2, 3))
GOOD = {"trainer_logits": Z, "tokens": [0, 1], "behavior": [-1.0, -1.0], "mask": [1, 1]}
NAN = math.nan
BAD = {
    "unequal lengths": ({"behavior": [-1.0]}, r"behavior: shape \(1,\)"),
    "mask too short": ({"mask": [1]}, r"mask: shape \(1,\) is not the shape \(2,\) of tokens"),
    "all masked": ({"mask": [0, 0]}, r"mask: selects none of 2 tokens"),
    "empty": ({"tokens": [], "behavior": [], "mask": []}, r"tokens: shape \(0,\)"),
    "nan in behaviour": ({"behavior": [-1.0, NAN]}, r"behavior\[1\]=nan: is missing under the mask"),
    "null in behaviour": ({"behavior": [None, -1.0]}, r"behavior\[0\]=nan"),
    "B22 above zero": ({"behavior": [-0.7, 123.7357]}, r"behavior\[1\]=123.736: a log-probability is at most 0"),
    "-inf": ({"behavior": [-1.0, -math.inf]}, r"behavior\[1\]=-inf"),
    "nan logits": ({"trainer_logits": [[0.0, NAN, 0.0]] * 2}, r"trainer_logits\[0, 1\]=nan: is not a logit"),
    "log-probs for logits": ({"trainer_logits": [-1.0, -1.0]}, r"trainer_logits: shape \(2,\)"),
    "logits of other length": ({"trainer_logits": np.zeros((3, 3))}, r"trainer_logits: shape \(3, 3\)"),
    "ragged logits": ({"trainer_logits": [[0.0, 1.0], [0.0]]}, "trainer_logits: "),
    "integer logits": ({"trainer_logits": np.zeros((2, 3), int)}, "trainer_logits: holds int64"),
    "logits with gradients": ({"trainer_logits": torch.zeros((2, 3), requires_grad=True)}, r"trainer_logits: .*detach"),
    "token past the vocabulary": ({"tokens": [0, 3]}, r"tokens\[1\]=3: is outside the vocabulary of 3"),
    "token below 0": ({"tokens": [0, -100]}, r"tokens\[1\]=-100: is no token id"),
    "fraction of a token": ({"tokens": [0, 0.5]}, r"tokens\[1\]=0.5"),
    "mask of weights": ({"mask": [1, 0.5]}, r"mask\[1\]=0.5"),
    "no logits, no log-probs": ({"trainer_logits": None}, "trainer_logits: None"),
    "log-probs of other length": ({"trainer_logprobs": [-1.0]}, r"trainer_logprobs: shape \(1,\)"),
    "decoding as a dict": ({"decoding": {"temperature": 1.0}}, "decoding: dict"),
    "negative lag": ({"lag": -1}, "lag: -1 is below 0"),
    "fraction of a version": ({"lag": 0.5}, "lag: float64"),
    "lag of other length": ({"lag": [1, 2, 3]}, r"lag: int64 of shape \(3,\)"),
    "kept set without the token": ({"kept_ids": [[1], [1]]}, r"kept_ids\[\(0,\)\]: lacks the sampled token 0"),
    "kept set out of range": ({"kept_ids": [[0, 9], [1]]}, r"kept_ids\[\(0,\)\]"),
    "kept sets too few": ({"kept_ids": [[0]]}, r"kept_ids\[\(0,\)\]: 1 entries where tokens have 2"),
    "kept sets by name": ({"kept_ids": {"a": [0], "b": [1]}}, r"kept_ids\[\(0,\)\]"),
    "kept set of texts": ({"kept_ids": [["x"], [1]]}, r"kept_ids\[\(0,\)\]"),
    "a token without end": ({"tokens": [0, math.inf]}, r"tokens\[1\]=inf: is no token id"),
    "a logit": ({"trainer_logits": 1.0, "decoding": Decoding(temperature=1.0)}, r"trainer_logits: shape \(\)"),
    "ragged lag": ({"lag": [[1], [1, 2]]}, "lag: rows of unequal length"),
    "ragged log-probs": ({"trainer_logprobs": [[-1.0], [-1.0, -2.0]]}, "trainer_logprobs: rows of unequal length"),
    "evidence as a dict": ({"evidence": {"hidden_kv_lag": 3}}, "evidence=.*: needs an Evidence"),
    "engine ids beyond 64 bits": ({"evidence": Evidence(engine_tokens=[2**70, 1])}, "evidence.engine_tokens: "),
    "kept set missing": ({"kept_ids": [None, [1]]}, r"kept_ids\[\(0,\)\]"),
    "engine ids of no rows": ({"evidence": Evidence(engine_tokens=[[0], [1]])}, "engine_tokens: 2 rows for 1"),
    "logits brought in another shape": (
        {"behavior": [-2.0, -3.0], "evidence": Evidence(logits={"stale_weights": np.zeros((4, 3))})},
        r"evidence.logits: shape \(4, 3\)",
    ),
    "temperature below 0": ({"decoding": Decoding(temperature=-1.0)}, "decoding.temperature: -1"),
    "top_p of 0": ({"decoding": Decoding(temperature=1.0, top_p=0.0)}, "decoding.top_p: 0"),
    "min_p above 1": ({"decoding": Decoding(temperature=1.0, min_p=2.0)}, "decoding.min_p: 2"),
    "banned past the vocabulary": ({"decoding": Decoding(banned_token_ids=[7])}, r"decoding.banned_token_ids: \[7\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_diagnose(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        mismatch.diagnose(**(GOOD | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], [-1.0, -2.0], [1, 1]), "behavior: shape"),
        (([-1.0, -2.0], [-1.0, -2.0], [0, 0]), "mask: selects none of 2"),
        (([], [], []), "trainer: shape"),
        (([-1.0, NAN], [-1.0, -2.0], [1, 1]), r"trainer\[1\]=nan"),
    ],
)
def test_compare(arguments, message):
    with pytest.raises(ValueError, match=message):
        mismatch.compare(*arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gap_by_step": [0.1, -1.0]}, "gap_by_step"),
        ({"gap_by_step": [0.1, NAN]}, "gap_by_step"),
        ({"gap_by_step": [0.1], "restarts": [1]}, "restarts: 1"),
        ({"fingerprints": ("a",)}, "fingerprints"),
        ({"gap_by_step": None}, "gap_by_step=None"),
        ({"gap_by_step": [0.1] * 4, "restarts": [1.5]}, "restarts: 1.5"),
        ({"gap_by_step": [0.1] * 4, "restarts": 3}, "restarts=3"),
        ({"fingerprints": "ab"}, "fingerprints='ab'"),
        ({"fingerprints": (None, "b")}, r"fingerprints=\(None, 'b'\)"),
        ({"hidden_kv_lag": -1}, "hidden_kv_lag=-1"),
        ({"hidden_kv_lag": "x"}, "hidden_kv_lag='x'"),
        ({"logits": {"temperature": Z}}, "'temperature': known are"),
        ({"logits": [Z]}, "evidence.logits="),
    ],
)
def test_evidence(fields, message):
    with pytest.raises(ValueError, match=message):
        Evidence(**fields)


def test_unknown_format():
    with pytest.raises(ValueError, match="dtype: 'fp8'"):
        mismatch.round_to(np.ones(2), "fp8")


LOGPROB = st.sampled_from([0.0, -0.0, -1e-9, -0.5, -3.0, -100.0, -9999.0, -1e30])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(LOGPROB, LOGPROB, st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=12),
    st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]),
    st.booleans(),
    st.integers(0, 2),
)
def test_legal_oddities_are_answered(rows, temperature, with_logits, lag):
    """Any legal record, however odd, gets findings, and they print."""
    trainer, behavior, mask, tokens = map(list, zip(*rows, strict=True))
    mask[0] = 1
    logits = np.array(trainer)[:, None] * np.arange(5.0) if with_logits else None
    decoding = None if temperature is None else Decoding(temperature=temperature, top_p=0.9)
    with np.errstate(all="raise", under="ignore"):
        answers = mismatch.diagnose(logits, tokens, behavior, mask, decoding, lag, trainer_logprobs=trainer)
    assert answers
    assert {f.cause for f in answers} <= set(mismatch.CAUSES)
    assert len({f.cause for f in answers}) == len(answers)
    assert str(answers)
    assert answers._repr_html_()
