"""`memory.ledger`: sums, units, faces."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.memory import GIB, Ledger, explain

amounts = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 10**15), max_size=5)


@given(amounts, amounts, st.integers(0, 1000))
def test_totals_add_and_scale(left, right, n):
    both = Ledger(left) + Ledger(right)
    assert both.total == sum(left.values()) + sum(right.values())
    assert both == Ledger(right) + Ledger(left)
    assert (n * both).total == n * both.total == (both * n).total
    assert set(both.items) == set(left) | set(right)


def test_lines_of_one_name_are_summed_and_sum_takes_a_start():
    ledgers = [Ledger({"weights": 1, "KV": 2}), Ledger({"weights": 10})]
    assert sum(ledgers, Ledger({})).items == {"weights": 11, "KV": 2}


def test_gb_and_gib():
    ledger = Ledger({"state": 7_000_000_000 * 12})
    assert ledger.gb == 84.0
    assert ledger.gib == pytest.approx(78.23, abs=0.005)
    assert Ledger({"one": GIB}).gib == 1.0


@pytest.mark.parametrize("other", [5, 5.0, None, "5", {"a": 1}])
def test_a_number_is_not_added_silently(other):
    with pytest.raises(TypeError, match="give the amount a name"):
        Ledger({"a": 1}) + other
    with pytest.raises(TypeError, match="give the amount a name"):
        other + Ledger({"a": 1})


def test_sum_without_a_start_is_an_addition_of_a_number():
    with pytest.raises(TypeError):
        sum([Ledger({"a": 1})])


def test_units_do_not_mix():
    parameters = Ledger({"a": 3}, unit="parameters")
    with pytest.raises(ValueError, match="unit='parameters': cannot be added to a Ledger in 'bytes'"):
        Ledger({"a": 1}) + parameters
    with pytest.raises(ValueError, match="unit='parameters': GB and GiB are for bytes"):
        _ = parameters.gib
    assert parameters.times_bytes(2) == Ledger({"a": 6})
    with pytest.raises(ValueError, match="already in bytes"):
        Ledger({"a": 1}).times_bytes(2)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None, True, [1]])
def test_an_amount_is_a_finite_number_of_at_least_zero(value):
    with pytest.raises(ValueError, match=r"^weights=.*: needs a finite number of at least 0$"):
        Ledger({"weights": value})


@pytest.mark.parametrize(
    ("n", "error"), [(-1, ValueError), (float("nan"), ValueError), ("2", TypeError), (None, TypeError)]
)
def test_a_ledger_scales_by_numbers_alone(n, error):
    with pytest.raises(error):
        Ledger({"a": 1}) * n


def test_items_need_names():
    with pytest.raises(ValueError, match="needs a mapping"):
        Ledger([1, 2])


def test_the_printed_table():
    ledger = Ledger({"weights": 2 * GIB, "KV": GIB}, notes=("on one rank",))
    assert str(ledger).splitlines() == [
        "                 bytes     GB    GiB",
        "weights  2,147,483,648  2.147  2.000",
        "KV       1,073,741,824  1.074  1.000",
        "------------------------------------",
        "total    3,221,225,472  3.221  3.000",
        "* on one rank",
    ]
    assert repr(ledger) == str(ledger)


def test_the_html_face_escapes_and_totals():
    page = Ledger({"<weights>": 2 * GIB}, notes=("a & b",))._repr_html_()
    assert "&lt;weights&gt;" in page
    assert "<li>a &amp; b</li>" in page
    assert page.count("2,147,483,648") == 2  # the line and the total


def test_csv_keeps_every_line_exactly(tmp_path):
    Ledger({"a, with comma": 3, "b": 10**18 + 1}).to_csv(tmp_path / "ledger.csv")
    rows = list(csv.reader((tmp_path / "ledger.csv").open()))
    assert rows == [["item", "amount", "unit"], ["a, with comma", "3", "bytes"], ["b", str(10**18 + 1), "bytes"]]


def test_explain_names_every_candidate_within_reach():
    candidates = {"far": Ledger({"x": 200}), "near": Ledger({"x": 99}), "nearer": Ledger({"x": 101.5, "y": 0})}
    assert explain(101, candidates) == ["nearer", "near"]
    assert explain(101, candidates, tolerance=0.001) == []
    with pytest.raises(ValueError, match="measured_bytes=0"):
        explain(0, candidates)
    with pytest.raises(ValueError, match="tolerance='x'"):
        explain(101, candidates, tolerance="x")
    with pytest.raises(ValueError, match=r"candidates\['far'\]=200: needs a Ledger"):
        explain(101, {"far": 200})
