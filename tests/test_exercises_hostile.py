"""Whatever is typed ends in right, wrong with a hint, or one line that says what is needed; nothing is counted."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from numbers import Real

import numpy as np
import pytest
from exercises_samples import ALL_ASKS, RIGHT, line
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import exercises
from rlinfra_utils.exercises.pages import STATUSES


@pytest.fixture(autouse=True)
def answers_file(tmp_path, monkeypatch):
    """Each test keeps its answers in a folder of its own."""
    file = tmp_path / "answers.json"
    monkeypatch.setenv("RLINFRA_ANSWERS", str(file))
    return file


# Hostile answers


class Nasty:
    def __repr__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


def raising(*_):
    raise ZeroDivisionError("no")


class NastyReal(Real):
    """A real number by its type; whatever is asked of it raises."""

    __float__ = __repr__ = __eq__ = raising
    __hash__ = None


NastyReal.__abstractmethods__ = frozenset()
NastyFloat = type("NastyFloat", (float,), {"__float__": raising, "__str__": raising, "__repr__": raising})
NastyText = type("NastyText", (str,), {"strip": raising, "__len__": raising, "split": raising, "__str__": raising})
NastyDict = type("NastyDict", (dict,), {"get": raising, "__len__": raising, "__repr__": raising})


class Liar:
    """Claims a class that raises, and prints what moves the cursor."""

    @property
    def __class__(self):
        raise RuntimeError("no")

    def __repr__(self):
        return "\x1b[31m\r\n\ud800red"


HOSTILE = {
    "list": [84],
    "tuple": (84,),
    "none": None,
    "bool": True,
    "word": "banana",
    "empty": "",
    "nan": math.nan,
    "nan in words": "nan",
    "inf": -math.inf,
    "inf in words": "1e999",
    "long": "9" * 10_000_000,
    "zero": "1/0",
    "two slashes": "1/2/3",
    "thousands": "1,000.5",
    "percent": "50%",
    "expression": "__import__('os')",
    "complex": 1 + 2j,
    "array": np.zeros(3),
    "set": {1, 2},
    "bytes": b"84",
    "huge": 10**400,
    "unprintable": 10**5000,
    "dict": {"a": 1},
    "nested": {1: {2: 3}, 2: [], 3: None, 4: {}},
    "object": Nasty(),
    "type": int,
    "surrogate": "\ud800 in a text",
    "lambda": lambda: 84,
    "array of one": np.array([84.0]),
    "array without an axis": np.array(84.0),
    "decimal nan": Decimal("sNaN"),
    "decimal infinity": Decimal("-Infinity"),
    "numpy nan": np.float32("nan"),
    "numpy bool": np.bool_(True),
    "unit": "84 GB",
    "escape": "\x1b[2J",
    "nasty real": NastyReal(),
    "nasty float": NastyFloat(84),
    "nasty text": NastyText("84"),
    "nasty dict": NastyDict({1: "A"}),
    "liar": Liar(),
}


def assert_not_counted(result, name):
    assert result.status == "not counted"
    assert 10 < len(line(result, name)) < 200
    assert line(result, name).isprintable()
    str(result).encode()


@pytest.mark.parametrize(("problem_id", "name"), ALL_ASKS)
def test_what_cannot_be_read_gets_a_sentence_and_counts_for_nothing(problem_id, name):
    for value in HOSTILE.values():
        assert_not_counted(exercises.attempt(problem_id, **{**RIGHT[problem_id], name: value}), name)
    assert exercises.score().checked == 0


def test_an_odd_value_inside_of_a_dict_gets_a_sentence():
    for value in HOSTILE.values():
        assert_not_counted(exercises.attempt("P04", pairs={1: value, 2: "B", 3: "C", 4: "D"}), "pairs")


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_unknown_problem_gets_a_sentence(kind):
    problem_id = HOSTILE[kind]
    for answer in (exercises.attempt(problem_id, gb=1), exercises.show(problem_id), exercises.solution(problem_id)):
        assert "P01, P02" in str(answer)
        assert len(str(answer)) < 300
        str(answer).encode()


@pytest.mark.parametrize(("written", "meant"), [("p02", "P02"), (" P02 ", "P02"), ("l12.5-A", "L12.5-a")])
def test_a_slip_in_a_problem_id_is_named(written, meant):
    assert str(exercises.attempt(written, gb=1)).endswith(f'is no problem; did you mean "{meant}"?')
    assert f'did you mean "{meant}"?' in str(exercises.solution(written))


@pytest.mark.parametrize("value", [84, 84.0, "84", "84,0", Fraction(84), Decimal("84"), np.float64(84), np.int8(84)])
def test_numbers_of_many_types_are_numbers(value):
    assert exercises.attempt("P02", gb=value, gib=Decimal("78.23")).status == "right"


def test_names_that_move_the_cursor_are_shown_in_one_line():
    result = exercises.attempt("P02", gb=84, gib=78.23, **{"\x1b[2J\n": 1})
    assert result.status == "not counted"
    assert all(text.isprintable() for text in result.lines)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
scalars |= st.fractions() | st.decimals()
anything = st.recursive(scalars, lambda each: st.lists(each) | st.dictionaries(st.integers(), each), max_leaves=4)


@settings(max_examples=60)
@given(ask=st.sampled_from(ALL_ASKS), value=anything, extra=st.dictionaries(st.text(), anything, max_size=1))
def test_any_answer_ends_in_lines_that_can_be_shown(ask, value, extra):
    problem_id, name = ask
    result = exercises.attempt(problem_id, **({**RIGHT[problem_id], name: value} | extra))
    assert result.status in STATUSES
    assert all(text.isprintable() and len(text) < 400 for text in result.lines)
    json.dumps(result._repr_html_()).encode()


def test_unknown_missing_and_unnamed_answers_are_told():
    unknown = exercises.attempt("P02", gb=84, gib=78.23, kb=1)
    assert unknown.status == "not counted"
    assert line(unknown, "kb") == "P02 does not ask for it; it asks for gb, gib"
    missing = exercises.attempt("P02", gb=84)
    assert "missing" in line(missing, "gib")
    assert 'exercises.attempt("P02", gb=..., gib=...)' in str(missing)
    assert 'exercises.attempt("P01", choice=...)' in str(exercises.attempt("P01", "B"))
    assert "there are P01" in str(exercises.attempt())
    assert exercises.score().checked == 0
