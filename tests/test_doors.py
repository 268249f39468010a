"""The door: what comes through, what is refused, and how the refusal reads."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlinfra_utils import doors

HUGE = st.sampled_from([10**400, -(10**400), 10**5000, Fraction(10**400, 3)])
JUNK = st.one_of(st.none(), st.text(), st.booleans(), st.just(math.nan), st.lists(st.integers()), st.binary(), HUGE)


@given(st.integers(1, 2**53))
def test_whole_numbers_come_through_whole_whatever_their_type(value):
    for form in (value, np.int64(value), np.float64(value)):
        assert doors.whole("n", form) == value
        assert type(doors.whole("n", form)) is int


@given(st.floats(0, 1e12))
def test_numbers_come_through_as_they_are(value):
    assert doors.number("x", value) == value
    assert doors.amount("x", value) == value


def test_an_amount_that_is_whole_stays_whole():
    assert type(doors.amount("bytes", 7 * 10**9)) is int


@pytest.mark.parametrize("door", [doors.whole, doors.number, doors.amount])
@given(junk=JUNK)
def test_what_is_no_number_is_refused_in_one_line_that_names_the_field(door, junk):
    with pytest.raises(ValueError, match=r"^field=.*: needs") as refused:
        door("field", junk)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 480  # six items of at most 60 characters, and the sentence


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: doors.whole("n", 0), "n=0: needs a whole number of at least 1"),
        (lambda: doors.whole("n", 1.5), "n=1.5: needs a whole number of at least 1"),
        (lambda: doors.whole("n", 12, 0, 10), "n=12: needs a whole number of 0 to 10"),
        (lambda: doors.whole("n", 2**60), "n=1152921504606846976: needs a whole number of at least 1"),
        (lambda: doors.number("x", 0, above=True), "x=0: needs a number above 0"),
        (lambda: doors.number("x", math.inf), "x=inf: needs a number of at least 0"),
        (lambda: doors.amount("x", math.inf), "x=inf: needs a finite number of at least 0"),
        (lambda: doors.choice("mode", "c", ("b", "a")), "mode='c': known are a, b"),
        (lambda: doors.divides("tp", 3, "num_heads", 8), "tp=3: does not divide num_heads=8"),
        (lambda: doors.instance("x", 7, str, "a name"), "x=7: needs a str, a name"),
        (lambda: doors.number("x", 10**5000, high=math.inf), "x=<int>: needs a number of at least 0"),
        (lambda: doors.floats("x", [1.0, 10**400]), "x: holds object values; needs numbers"),
    ],
)
def test_refusals_say_the_field_its_value_and_what_is_needed(call, said):
    with pytest.raises(ValueError, match=r"needs|known|divide") as refused:
        call()
    assert str(refused.value).startswith(said)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


ODD = {
    "lines": "a\nb\tc",
    "long": "x" * 10_000,
    "bytes": b"\n" * 99,
    "unprintable": Unprintable(),
    "unprintable within": [Unprintable()],
    "huge": 10**5000,
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_value_is_short_and_of_one_line_whatever_it_is(value):
    shown = doors.short(value)
    assert shown.isprintable()
    assert 0 < len(shown) <= 80


class Shelf(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    depth: int = Field(0, ge=0)
    books: dict[str, int] = {}

    @model_validator(mode="after")
    def _is_free(self):
        if self.depth == 7:
            raise ValueError("depth=7: is taken; give another")
        return self


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"depth": -1}, "depth=-1: Input should be"),
        ({"depth": "3"}, "depth='3': Input should be"),
        ({"books": {"a": 1, "b": "two"}}, "books.b='two': Input should be"),
        ({"bad\nname": 1}, r"bad\nname=1: Extra inputs"),
        ([], "value=[]: Input should be"),
        ({"depth": 7}, "depth=7: is taken; give another"),
    ],
)
def test_a_complaint_is_one_line_with_the_field_and_its_value(fields, said):
    with pytest.raises(ValidationError) as refused:
        Shelf.model_validate(fields)
    line = doors.complaint(refused.value)
    assert line.startswith(said)
    assert "\n" not in line
