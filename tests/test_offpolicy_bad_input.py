"""Malformed input ends in one line that names the argument, the position and the value."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import offpolicy

NAN, INF = math.nan, math.inf
OK = [-1.0, -2.0]

LOG_RATIO = {
    "unequal lengths": (([-1.0], OK, [1, 1]), r"behavior: shape \(2,\) is not the shape \(1,\) of trainer"),
    "mask too short": ((OK, OK, [1]), r"mask: shape \(1,\) is not the shape \(2,\) of trainer"),
    "mask that would broadcast": (([OK, OK], [OK, OK], [1, 1]), r"mask: shape \(2,\)"),
    "ragged": (([OK, [-1.0]], OK, [1, 1]), "trainer: rows of unequal length"),
    "no tokens": (([], [], []), r"trainer: shape \(0,\)"),
    "no rows": ((np.empty((0, 4)), np.empty((0, 4)), np.empty((0, 4))), r"trainer: shape \(0, 4\)"),
    "one number": ((-1.0, -1.0, 1), r"trainer: shape \(\)"),
    "text": ((["-1.0", "-2.0"], OK, [1, 1]), "trainer: holds .* needs numbers"),
    "text among None": (([None, "-2.0"], OK, [0, 1]), "trainer: holds object"),
    "complex": (([1j, 0], OK, [1, 1]), "trainer: holds complex"),
    "a mapping": (({"a": 1}, OK, [1, 1]), "trainer: holds object"),
    "nan in the trainer": (([-1.0, NAN], OK, [1, 1]), r"trainer\[1\]=nan: is missing under the mask"),
    "null in the record": ((OK, [None, -2.0], [1, 1]), r"behavior\[0\]=nan: is missing under the mask"),
    "inf": (([-1.0, INF], OK, [1, 1]), r"trainer\[1\]=inf: a log-probability is at most 0"),
    "behaviour never samples it": ((OK, [-1.0, -INF], [1, 1]), r"behavior\[1\]=-inf: a sampled token has mass"),
    "trainer loses it": (([-INF, -2.0], OK, [1, 1]), r"trainer\[0\]=-inf: the trainer gives a sampled token no mass"),
    "row and column": (([OK, [-1.0, NAN]], [OK, OK], np.ones((2, 2))), r"trainer\[1, 1\]=nan"),
    "mask of weights": ((OK, OK, [1, 0.5]), r"mask\[1\]=0.5: is neither 0 nor 1"),
    "mask with nan": ((OK, OK, [1, NAN]), r"mask\[1\]=nan"),
    "mask of ids": ((OK, OK, [1, 2]), r"mask\[1\]=2"),
    "no mask": ((OK, OK, None), r"mask: shape \(\)"),
    "with gradients": ((torch.tensor(OK, requires_grad=True), OK, [1, 1]), r"trainer: .*\.detach\(\)"),
    "bfloat16": ((torch.tensor(OK, dtype=torch.bfloat16), OK, [1, 1]), r"trainer: .*\.float\(\)"),
}


@pytest.mark.parametrize("name", LOG_RATIO)
@pytest.mark.parametrize("function", [offpolicy.log_ratio, offpolicy.summarize])
def test_two_logprobs(name, function):
    arguments, message = LOG_RATIO[name]
    raises_one_line(message, function, *arguments)


D, M = [[0.1, -0.2]], [[1, 1]]
OTHERS = {
    "unknown mode": (
        offpolicy.correct,
        (D, M, "sequence_clip"),
        {"high": 2},
        "mode='sequence_clip': known are geometric_mask",
    ),
    "no mode": (offpolicy.correct, (D, M, None), {"high": 2}, "mode=None: known are"),
    "no bound": (offpolicy.correct, (D, M, "token_mask"), {}, "low=None, high=None: token_mask needs a bound"),
    "crossed bounds": (offpolicy.correct, (D, M, "token_mask", 2.0, 0.5), {}, "low=2.0: is above high=0.5"),
    "zero bound": (offpolicy.correct, (D, M, "token_mask"), {"low": 0.0}, "low=0.0: needs a finite ratio above 0"),
    "log bound": (offpolicy.correct, (D, M, "token_mask"), {"low": -0.2}, "low=-0.2: needs a finite ratio above 0"),
    "infinite bound": (offpolicy.correct, (D, M, "token_mask"), {"high": INF}, "high=inf: needs a finite ratio"),
    "nan bound": (offpolicy.correct, (D, M, "token_mask"), {"high": NAN}, "high=nan: needs a finite ratio"),
    "text bound": (offpolicy.correct, (D, M, "token_mask"), {"high": "0.5_2"}, "high='0.5_2': needs a finite ratio"),
    "bool bound": (offpolicy.correct, (D, M, "token_mask"), {"high": True}, "high=True: needs a finite ratio"),
    "nan ratio": (offpolicy.correct, ([[NAN, 0]], M, "token_mask"), {"high": 2}, r"log_ratio\[0, 0\]=nan: is not fin"),
    "inf ratio": (offpolicy.sequence_log_ratio, ([[0, -INF]], M), {}, r"log_ratio\[0, 1\]=-inf: is not finite"),
    "shapes": (offpolicy.geometric_log_ratio, (D, [1, 1]), {}, r"mask: shape \(2,\) is not the shape \(1, 2\)"),
    "clip of nothing": (offpolicy.clip_fraction, ([1.0], 0.2, [0]), {}, "mask: selects no token; .* undefined"),
    "ppo clip of nothing": (offpolicy.ppo_clip_fraction, ([1.0], 0.2, [0], [1.0]), {}, "mask: selects no token"),
    "log in place of ratio": (offpolicy.clip_fraction, ([-0.1], 0.2, [1]), {}, r"ratio\[0\]=-0.1: needs a finite rat"),
    "nan among ratios": (offpolicy.clip_fraction, ([1.0, NAN], 0.2, [1, 1]), {}, r"ratio\[1\]=nan"),
    "eps below 0": (offpolicy.clip_fraction, ([1.0], -0.2, [1]), {}, "eps=-0.2: needs"),
    "eps of three": (offpolicy.clip_fraction, ([1.0], (0.1, 0.2, 0.3), [1]), {}, r"eps=\(0.1, 0.2, 0.3\): needs"),
    "no eps": (offpolicy.clip_fraction, ([1.0], None, [1]), {}, "eps=None: needs"),
    "text eps": (offpolicy.summarize, (OK, OK, [1, 1], "0.2"), {}, "eps='0.2': needs"),
    "advantages too many": (
        *(offpolicy.ppo_clip_fraction, ([[1.0, 1.0]], 0.2, M, [1, 2, 3]), {}),
        r"advantages: shape \(3,\) does not spread over the ratio's \(1, 2\)",
    ),
    "advantage nan": (offpolicy.ppo_clip_fraction, ([1.0], 0.2, [1], [NAN]), {}, r"advantages\[0\]=nan"),
    "logits for support": (offpolicy.support_gap, ([[2.0, 1.0]], [[-0.7, -0.7]], [1]), {}, r"trainer\[0\]=10.1073: is"),
    "nan for support": (
        offpolicy.support_gap,
        ([[NAN, 0.0]], [[-0.7, -0.7]], [1]),
        {},
        r"trainer\[0\]=nan: is the mass",
    ),
    "one token for support": (offpolicy.support_gap, (OK, OK, [1, 1]), {}, "both need"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_door(name):
    function, arguments, named, message = OTHERS[name]
    raises_one_line(message, function, *arguments, **named)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-3, 3), st.text(max_size=2)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200)
@given(anything, anything, anything)
def test_hostile_input_is_refused_by_name_or_answered(trainer, behavior, mask):
    message = ""
    try:
        d = offpolicy.log_ratio(trainer, behavior, mask)
        assert np.isfinite(d).all()
        offpolicy.correct(d, mask, "token_truncate", high=2.0)
    except ValueError as error:
        message = str(error)
    assert re.fullmatch("|((trainer|behavior|mask).*)", message)  # `.` stops at a line break


def raises_one_line(message, function, *arguments, **named):
    with pytest.raises(ValueError, match=message) as caught:
        function(*arguments, **named)
    assert "\n" not in str(caught.value)
