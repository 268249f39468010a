"""The door: what comes through, what is refused, and how the refusal reads."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import doors

JUNK = st.one_of(st.none(), st.text(), st.booleans(), st.just(math.nan), st.lists(st.integers()), st.binary())


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
    assert len(str(refused.value)) < 400  # six items of at most 40 characters, and the sentence


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
    ],
)
def test_refusals_say_the_field_its_value_and_what_is_needed(call, said):
    with pytest.raises(ValueError, match=r"needs|known|divide") as refused:
        call()
    assert str(refused.value).startswith(said)
