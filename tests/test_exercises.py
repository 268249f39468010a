"""The graded problems: right answers derived anew, hints for likely mistakes, hostile answers, the file of answers."""

import json
import math
import string
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import exercises
from rlinfra_utils.exercises import PROBLEMS
from rlinfra_utils.exercises.pages import STATUSES


@pytest.fixture(autouse=True)
def answers_file(tmp_path, monkeypatch):
    """Each test keeps its answers in a folder of its own."""
    file = tmp_path / "answers.json"
    monkeypatch.setenv("RLINFRA_ANSWERS", str(file))
    return file


WORDS = "some words of my own"

# Every number worked out here with plain arithmetic, by another path than the solution's where there is one.
durations = [4, 4, 4, 12]
weights = [1, 1, 1, 5]
lags = [112 - version for version in (108, 109, 110, 110)]
stages = {"prepare": 0.4, "prefill": 1.6, "decode": 17.8, "verifier": 3.0, "recompute": 2.2, "update": 8.0}
stages |= {"optimizer": 0.6, "sync": 1.4}
token_lags = [44 - 41] * 60 + [44 - 42] * 36
whole_units = sum(num_params * 2 for num_params in (250e6, 250e6, 250e6, 50e6))


engine_logps, recomputed_logps = [-0.10, -1.60, -0.70, -0.25], [-0.12, -1.62, -0.71, -0.25]
trainer_logps = [-0.08, -1.40, -0.75, -0.20]
dispatched, trained_ids = set(range(18)), {*range(10), 11, 12, 14}
cosine_rate = 2 * math.cos(0.3 * math.pi / 2) ** 2  # the half-angle form


def lost_share(interval_s, restart_s=0):
    """Writing, half an interval done twice a failure, and restarts, over 5 hours."""
    per_failure_s = 5 * 3600 / interval_s * 90 + interval_s / 2 + restart_s
    return per_failure_s / (5 * 3600)


def adam_update(moment1, moment2, gradient, num_steps):
    """Update over learning rate after one more gradient; fresh moments are corrected for their start at zero."""
    moment1, moment2 = moment1 + 0.1 * (gradient - moment1), moment2 + 0.001 * (gradient**2 - moment2)
    return moment1 / (1 - 0.9**num_steps) / math.sqrt(moment2 / (1 - 0.999**num_steps))


def rank_gb(num_ranks):
    """Bytes a rank, line by line: bf16 weight and gradient, float32 master and two moments, and the units."""
    return (sum(3e9 / num_ranks * num_bytes for num_bytes in (2, 2, 4, 4, 4)) + whole_units) / 1e9


def pipeline_s(generate_s, train_s, num_batches):
    """Two stages simulated batch by batch."""
    generated = trained = 0.0
    for _ in range(num_batches):
        generated += generate_s
        trained = max(trained, generated) + train_s
    return trained


def mean_lag_of(in_flight, queued, batch, num_versions=200):
    """First in, first out: at each version the oldest batch is taken, and a batch starts; lags counted one by one."""
    outstanding, lags = [0] * (in_flight + queued), []
    for version in range(1, num_versions):
        taken, outstanding = outstanding[:batch], outstanding[batch:] + [version] * batch
        lags += [version - started for started in taken]
    return np.mean(lags[-batch:])


RIGHT = {
    "P01": {"choice": "B"},
    "P02": {"gb": 7 * (2 + 2 + 8), "gib": 7e9 * (2 + 2 + 8) / 1024**3},
    "P03": {"gib": sum(2 * 8 * 128 * 2 for _ in range(32)) * 16 * 8192 / 1024**3},
    "P04": {"pairs": "ABCD"},
    "P05": {
        "sequential_s": sum(45 + 30 for _ in range(8)),
        "pipeline_s": pipeline_s(45, 30, 8),
        "speedup": 8 * 75 / pipeline_s(45, 30, 8),
    },
    "P06": {"utilization": 1 - sum(12 - s for s in durations) / (4 * 12)},
    "P07": {"rho": 8000 / 10000, "why": WORDS},
    "P08": {
        "ess": 1 / sum((w / sum(weights)) ** 2 for w in weights),
        "normalized_ess": np.mean(weights) ** 2 / np.mean(np.square(weights)),
    },
    "P09": {"mean_lag": np.mean(lags), "max_lag": max(lags)},
    "P10": {"interval_s": math.sqrt(2 * 120 * 8 * 3600), "interval_min": math.sqrt(2 * 2 * 8 * 60)},
    "P11": {"answer": "templates, masks, kernels, precision; tokens first"},
    "P12": {"answer": WORDS},
    "L12.1-a": {
        "t_seq_s": sum(stages.values()),
        "largest_share": max(stages.values()) / sum(stages.values()),
        "best_speedup": 1 / (1 - max(stages.values()) / sum(stages.values())),
    },
    "L12.1-b": {"mean_lag": np.mean(token_lags), "max_lag": max(token_lags), "scalar": "C"},
    "L12.2-a": {
        "state_gb": rank_gb(12) - whole_units / 1e9,
        "rank_gb": rank_gb(12),
        "shrink": rank_gb(12) / rank_gb(48),
    },
    "L12.3-a": {
        "staleness": mean_lag_of(96, 32, batch=32),
        "in_flight": next(n for n in range(1, 200) if mean_lag_of(n, 32, batch=32) >= 2.5),
        "wait_s": sum(12_000 for _ in range(32)) / 6_000,
    },
    "L12.4-a": {
        "mismatch": sum(recomputed_logps) - sum(engine_logps),
        "drift": sum(trainer_logps) - sum(recomputed_logps),
        "ratio": math.prod(math.exp(t) / math.exp(e) for t, e in zip(trainer_logps, engine_logps)),
        "recomputed": math.prod(math.exp(t) / math.exp(r) for t, r in zip(trainer_logps, recomputed_logps)),
    },
    "L12.5-a": {
        "hour": lost_share(3600),
        "best": min(lost_share(interval_s) for interval_s in range(60, 18_000, 60)),
        "with_restart": min(lost_share(interval_s, restart_s=180) for interval_s in range(60, 18_000, 60)),
        "moves": "B",
    },
    "L12.5-b": {
        "frontier": min(set(range(100)) - trained_ids),
        "again": len(dispatched - trained_ids),
        "lost": len(set(range(18)) - trained_ids),
        "twice": sum(prompt >= 10 for prompt in trained_ids),
    },
    "L12.5-c": {
        "rate": cosine_rate,
        "update": adam_update(0.001, 1e-4, 0.02, num_steps=10**6),
        "jump": 2
        * adam_update(0, 0, 0.02, num_steps=1)
        / (cosine_rate * adam_update(0.001, 1e-4, 0.02, num_steps=10**6)),
    },
    "L12.5-d": {"choice": "C"},
    "L12.5-e": {"matching": "BDAEC"},
    "L12.5-f": {"choice": "B"},
    "L12.5-g": {
        "verl": sum(128 for _ in range(2)) * 3 / 2,
        "areal": sum([128] * (4 + 10 + 1)) - sum([128] * 10),
        "compare": "C",
    },
}
#: Checks that the course asks for in each lesson.
LESSON_CHECKS = {"12.1": 2, "12.2": 3, "12.3": 4, "12.4": 4, "12.5": 8}
OPEN = {"P11", "P12"}
TOTAL = len(RIGHT)
ALL_ASKS = [(problem.id, name) for problem in PROBLEMS.values() for name in problem.ask]
NUMBERS = [(i, n) for i, n in ALL_ASKS if PROBLEMS[i].ask[n].kind == "number"]


def line(result, name):
    (found,) = [line for line in result.lines if line.startswith(f"{name}: ")]
    return found.removeprefix(f"{name}: ")


# Right answers


def test_there_are_the_twelve_problems_and_the_lessons_own():
    own = ["L12.1-a", "L12.1-b", "L12.2-a", "L12.3-a", "L12.4-a", *(f"L12.5-{letter}" for letter in "abcdefg")]
    assert list(PROBLEMS) == [f"P{n:02}" for n in range(1, 13)] + own
    by_lesson = Counter(problem.lesson for problem in PROBLEMS.values())
    assert {lesson: by_lesson[lesson] >= num for lesson, num in LESSON_CHECKS.items()} == dict.fromkeys(
        LESSON_CHECKS, True
    )
    assert {p: PROBLEMS[p].lesson for p in ("P01", "P04", "P12")} == dict.fromkeys(("P01", "P04", "P12"), "12.1")


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_right_answers_are_right(problem_id):
    result = exercises.attempt(problem_id, **RIGHT[problem_id])
    assert result.status == ("compare with the solution" if problem_id in OPEN else "right"), str(result)


@pytest.mark.parametrize(("problem_id", "name"), NUMBERS)
def test_the_stored_number_is_the_derived_one(problem_id, name):
    ask = PROBLEMS[problem_id].ask[name]
    assert ask.value == pytest.approx(float(RIGHT[problem_id][name]), rel=1e-9)
    assert exercises.attempt(problem_id, **{**RIGHT[problem_id], name: str(ask.answer)}).status == "right"


@pytest.mark.parametrize(
    ("problem_id", "answers"),
    {
        "P02": {"gb": "84.00", "gib": "78,23"},
        "P03": {"gib": "16"},
        "P05": {"sequential_s": "600", "pipeline_s": 390, "speedup": "1,538"},
        "P06": {"utilization": "1/2"},
        "P08": {"ess": "16/7", "normalized_ess": "4 / 7"},
        "P09": {"mean_lag": "2,75", "max_lag": np.int64(4)},
        "P10": {"interval_s": np.float32(2629.07), "interval_min": "43.82"},
        "L12.1-a": {"t_seq_s": "3.5e1", "largest_share": "0.509", "best_speedup": "2,035"},
    }.items(),
)
def test_rounded_answers_as_the_source_asks_for_them_are_right(problem_id, answers):
    assert exercises.attempt(problem_id, **answers).status == "right"


@pytest.mark.parametrize(("problem_id", "name"), NUMBERS)
def test_the_tolerance_is_a_limit_on_both_sides(problem_id, name):
    ask = PROBLEMS[problem_id].ask[name]
    for sign in (-1, 1):
        inside = ask.value + sign * 0.99 * ask.tolerance
        outside = ask.value + sign * (1.01 * ask.tolerance + 1e-9)
        assert line(exercises.attempt(problem_id, **{**RIGHT[problem_id], name: inside}), name) == "right"
        assert exercises.attempt(problem_id, **{**RIGHT[problem_id], name: outside}).status == "wrong"


def test_tolerances_are_those_of_the_source():
    tolerances = {(i, n): PROBLEMS[i].ask[n].tolerance for i, n in NUMBERS if i.startswith("P")}
    special = {("P02", "gib"): 0.005, ("P05", "speedup"): 0.001, ("P08", "ess"): 1e-4, ("P08", "normalized_ess"): 1e-4}
    special |= {("P09", "max_lag"): 0, ("P10", "interval_s"): 0.01, ("P10", "interval_min"): 0.01}
    assert tolerances == {key: special.get(key, 1e-6) for key in tolerances}


# Hints

MISTAKES = {
    ("P02", "gb", 7e9 * 12 / 2**30): "GiB",
    ("P02", "gib", 84): "decimal GB",
    ("P02", "gb", 7 * 16): "master copy",
    ("P02", "gib", 84 * 2**30 / 1e9): "Multiplied",
    ("P03", "gib", 32 * 8 * 128 * 16 * 8192 * 2 / 2**30): "keys and values",
    ("P03", "gib", 2 * 32 * 8 * 128 * 16 * 8192 * 2 / 1e9): "decimal GB",
    ("P03", "gib", 2 * 32 * 8 * 128 * 8192 * 2 / 2**30): "one sequence",
    ("P05", "sequential_s", 8 * max(45, 30)): "max(G, T)",
    ("P05", "pipeline_s", 8 * max(45, 30)): "last batch",
    ("P05", "pipeline_s", 45 + 30 + 8 * 45): "n − 1",
    ("P05", "speedup", 390 / 600): "Upside down",
    ("P05", "speedup", "5/3"): "limit",
    ("P06", "utilization", 24 / 12): "four workers",
    ("P06", "utilization", 12 / 48): "straggler",
    ("P07", "rho", 10 / 8): "Upside down",
    ("P07", "rho", 1 - 8 / 10): "spare",
    ("P08", "ess", 8**2 / 8): "squared",
    ("P08", "ess", 8 / 28): "squared",
    ("P08", "normalized_ess", "16/7"): "divide it by n",
    ("P09", "mean_lag", (4 + 3 + 2) / 3): "110 counts twice",
    ("P09", "max_lag", 2): "smallest",
    ("P10", "interval_s", math.sqrt(2 * 120 * 8)): "hours",
    ("P10", "interval_s", math.sqrt(120 * 28800)): "factor two",
    ("P10", "interval_min", math.sqrt(2 * 120 * 28800)): "in seconds",
    ("L12.1-a", "best_speedup", 35 / 17.8): "what is left",
    ("L12.1-a", "t_seq_s", 17.8): "overlap",
    ("L12.1-a", "largest_share", 100 * 17.8 / 35): "percentage",
    ("L12.1-b", "mean_lag", 2.5): "weigh",
    ("L12.1-b", "max_lag", 44 - 42): "newest",
    ("L12.1-b", "scalar", "B"): "first 60",
    ("L12.2-a", "state_gb", 3 * 16): "all ranks",
    ("L12.2-a", "rank_gb", 4 + 1.6 / 12): "each of them holds",
    ("L12.2-a", "rank_gb", 4 + 0.5): "gathered unit only",
    ("L12.2-a", "shrink", 48 / 12): "does not shrink",
    ("L12.2-a", "shrink", 4 + 1.6 - (1 + 1.6)): "do not subtract",
    ("L12.4-a", "mismatch", sum(engine_logps) - sum(recomputed_logps)): "sign",
    ("L12.4-a", "drift", sum(trainer_logps) - sum(engine_logps)): "mismatch too",
    ("L12.4-a", "ratio", math.exp((sum(trainer_logps) - sum(engine_logps)) / 4)): "geometric",
    ("L12.4-a", "recomputed", math.exp(sum(recomputed_logps) - sum(engine_logps))): "leaves out",
    ("L12.5-a", "hour", 90 / 3600 + 3600 / 18_000): "on average",
    ("L12.5-a", "with_restart", 0.1 + 180 / 1800): "not once in an interval",
    ("L12.5-b", "again", len(dispatched) - 10): "skip set",
    ("L12.5-b", "frontier", max(trained_ids) + 1): "never trained",
    ("L12.5-c", "rate", 2 * (1 - 0.3)): "linear",
    ("L12.5-c", "update", 0.001 / math.sqrt(1e-4)): "before this gradient",
    ("L12.5-c", "jump", 1 / adam_update(0.001, 1e-4, 0.02, 10**6)): "learning rate differs",
    ("L12.5-c", "jump", 2 / cosine_rate): "moments differ",
    ("L12.5-d", "choice", "B"): "reward functions",
    ("L12.5-g", "verl", 128 * 1.5): "two batches",
    ("L12.5-g", "areal", (4 + 1 + 10) * 128): "are trained",
    ("L12.3-a", "staleness", 96 / 32): "flight alone",
    ("L12.3-a", "staleness", 32 / 32): "queue alone",
    ("L12.3-a", "staleness", (96 + 32 + 32) / 32): "settled",
    ("L12.3-a", "in_flight", 2.5 * 32): "in all",
    ("L12.3-a", "in_flight", 96 * 2.5 / 4): "in proportion",
    ("L12.3-a", "wait_s", 32 * 400 / 6000): "heavier",
    ("L12.3-a", "wait_s", 12_000 / 6000): "one agent",
    ("L12.3-a", "wait_s", (96 + 32) * 12_000 / 6000): "flight as well",
    ("P01", "choice", 1): "where work runs",
}


@pytest.mark.parametrize(("problem_id", "name", "value"), MISTAKES)
def test_a_likely_mistake_gets_its_own_hint(problem_id, name, value):
    result = exercises.attempt(problem_id, **{**RIGHT[problem_id], name: value})
    assert result.status == "wrong"
    assert MISTAKES[problem_id, name, value] in line(result, name)


@pytest.mark.parametrize(("problem_id", "name"), NUMBERS)
def test_every_stored_mistake_is_wrong_and_finds_its_hint_however_it_is_rounded(problem_id, name):
    for likely in PROBLEMS[problem_id].ask[name].likely:
        for value in (likely.value, float(f"{likely.value:.4g}")):
            result = exercises.attempt(problem_id, **{**RIGHT[problem_id], name: value})
            assert (result.status, line(result, name)) == ("wrong", likely.hint)


def test_an_unforeseen_wrong_number_gets_the_general_hint():
    for problem_id, name in NUMBERS:
        result = exercises.attempt(problem_id, **{**RIGHT[problem_id], name: -987.654})
        assert line(result, name) == PROBLEMS[problem_id].ask[name].hint != ""


def test_wrong_pairs_are_named():
    result = exercises.attempt("P04", pairs="ABDC")
    assert result.status == "wrong"
    assert "3: " in line(result, "pairs")
    assert "4: " in line(result, "pairs")
    assert "1: " not in line(result, "pairs")


def test_no_hint_gives_away_a_number_that_the_question_does_not_have():
    for problem_id, name in NUMBERS:
        ask, question = PROBLEMS[problem_id].ask[name], PROBLEMS[problem_id].text.split()
        for hint in (ask.hint, *(likely.hint for likely in ask.likely)):
            words = {word.strip(string.punctuation) for word in hint.split()}
            assert f"{ask.value:g}" not in words - {word.strip(string.punctuation) for word in question}, hint


# The same answer in its many forms


@pytest.mark.parametrize("answer", ["B", "b", " b ", 2, "2", np.int64(2)])
def test_a_choice_is_a_letter_or_a_number(answer):
    assert exercises.attempt("P01", choice=answer).status == "right"


@pytest.mark.parametrize(
    "answer",
    ["ABCD", "abcd", "A B C D", "a, b, c, d", "1234", {1: "A", 2: "b", 3: 3, 4: "4"}, dict(zip("4321", "DCBA"))],
)
def test_pairs_are_letters_in_order_or_a_dict(answer):
    assert exercises.attempt("P04", pairs=answer).status == "right"


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000))
def test_a_fraction_is_read_as_its_quotient(fraction):
    from rlinfra_utils.exercises.checking import read_number

    value = fraction.numerator / fraction.denominator
    decimal = f"{value:.12f}"
    assert read_number(f"{fraction.numerator}/{fraction.denominator}") == pytest.approx(value)
    assert read_number(fraction) == pytest.approx(value)
    assert read_number(decimal) == read_number(decimal.replace(".", ",")) == float(decimal)


def test_open_answers_are_left_to_the_reader():
    few = exercises.attempt("P11", answer="masks, kernels, and something else that I forgot")
    assert few.status == "compare with the solution"
    assert "at least 4" in line(few, "answer")
    assert line(exercises.attempt("P11", **RIGHT["P11"]), "answer") == "compare with the solution"
    half = exercises.attempt("P07", rho=0.8, why=WORDS)
    assert half.status == "right"
    assert line(half, "why") == "compare with the solution"


# Hostile answers


class Nasty:
    def __repr__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


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
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(("problem_id", "name"), ALL_ASKS)
def test_what_cannot_be_read_gets_a_sentence_and_counts_for_nothing(problem_id, name, kind):
    result = exercises.attempt(problem_id, **{**RIGHT[problem_id], name: HOSTILE[kind]})
    assert result.status == "unreadable"
    assert 10 < len(line(result, name)) < 200
    assert "\n" not in line(result, name)
    assert exercises.score().checked == 0


@pytest.mark.parametrize("problem_id", [None, 2, "P13", "p02", "", ["P02"], Nasty(), "x" * 10_000_000])
def test_an_unknown_problem_gets_a_sentence(problem_id):
    for answer in (exercises.attempt(problem_id, gb=1), exercises.show(problem_id), exercises.solution(problem_id)):
        assert "P01, P02" in str(answer)
        assert len(str(answer)) < 300


def test_unknown_missing_and_unnamed_answers_are_told():
    unknown = exercises.attempt("P02", gb=84, gib=78.23, kb=1)
    assert unknown.status == "unreadable"
    assert line(unknown, "kb") == "P02 does not ask for it; it asks for gb, gib"
    missing = exercises.attempt("P02", gb=84)
    assert "missing" in line(missing, "gib")
    assert 'exercises.attempt("P02", gb=..., gib=...)' in str(missing)
    assert 'exercises.attempt("P01", choice=...)' in str(exercises.attempt("P01", "B"))
    assert "there are P01" in str(exercises.attempt())
    assert exercises.score().checked == 0


# Attempts, drafts, solutions, score


def test_a_literal_ellipsis_is_no_attempt_and_writes_nothing(answers_file):
    result = exercises.attempt("P02", gb=..., gib=...)
    assert str(result) == "P02: not attempted"
    assert not answers_file.exists()


def test_a_draft_is_kept_and_opens_nothing(answers_file):
    result = exercises.attempt("P02", gb=84, gib=...)
    assert result.status == "not attempted"
    assert "still open: gib" in result.lines
    assert "gb='84'" in str(exercises.attempt("P02", gb=..., gib=...))
    assert "opens after an attempt" in str(exercises.solution("P02"))
    assert exercises.score().checked == 0
    for nasty in HOSTILE.values():
        assert exercises.attempt("P02", gb=nasty, gib=...).status == "not attempted"
    json.loads(answers_file.read_text())


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_the_solution_opens_after_an_attempt(problem_id):
    closed = str(exercises.solution(problem_id))
    assert "opens after an attempt" in closed
    assert PROBLEMS[problem_id].call in closed
    wrong = {n: WORDS if PROBLEMS[problem_id].ask[n].kind == "text" else v for n, v in RIGHT[problem_id].items()}
    wrong |= {n: -1 for i, n in NUMBERS if i == problem_id}
    exercises.attempt(problem_id, **wrong)
    assert PROBLEMS[problem_id].solution.strip() in str(exercises.solution(problem_id))


def test_the_score_counts_attempts_first_tries_and_open_answers(answers_file):
    assert str(exercises.score()) == f"Checked 0 / {TOTAL} · correct 0"
    exercises.attempt("P01", choice="A")
    assert str(exercises.score()) == f"Checked 1 / {TOTAL} · correct 0"
    exercises.attempt("P01", choice="B")
    exercises.attempt("P03", gib=16)
    exercises.attempt("P12", answer=WORDS)
    score = exercises.score()
    assert (score.checked, score.correct, score.first_try, score.compared) == (3, 2, 1, 1)
    assert str(score).startswith(f"Checked 3 / {TOTAL} · correct 2")
    exercises.attempt("P03", gib=8)
    assert exercises.score().correct == 1
    assert json.loads(answers_file.read_text())["problems"]["P03"] == {
        "answers": {"gib": "8"},
        "attempts": 2,
        "first": "right",
        "latest": "wrong",
    }


def test_all_right_answers_together():
    for problem_id, answers in RIGHT.items():
        exercises.attempt(problem_id, **answers)
    score = exercises.score()
    assert (score.checked, score.total, score.compared) == (TOTAL, TOTAL, len(OPEN))
    assert score.correct == score.first_try == TOTAL - len(OPEN)


# The file


def test_the_default_file_is_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("RLINFRA_ANSWERS")
    monkeypatch.chdir(tmp_path)
    exercises.attempt("P03", gib=16)
    assert [file.name for file in tmp_path.iterdir()] == ["rlinfra_answers.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"problems": {"P02": 5}}',
        b'{"problems": {"P02": {"attempts": "2"}}}',
        b'{"other": 1}',
        b"[" * 100_000,
    ],
)
def test_a_corrupt_file_is_set_aside_with_a_sentence(answers_file, content):
    for number in (1, 2):
        answers_file.write_bytes(content)
        result = exercises.attempt("P03", gib=16)
        assert result.status == "right"
        assert f"kept as answers.unreadable-{number}.json" in str(result)
        assert answers_file.with_name(f"answers.unreadable-{number}.json").read_bytes() == content
        assert str(exercises.score()).startswith(f"Checked 1 / {TOTAL} · correct 1")


def test_an_interrupted_write_leaves_the_old_file(answers_file, monkeypatch):
    exercises.attempt("P03", gib=16)
    before = answers_file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    result = exercises.attempt("P03", gib=8)
    assert "No space left on device" in str(result)
    assert answers_file.read_bytes() == before
    assert list(answers_file.parent.iterdir()) == [answers_file]


@pytest.mark.parametrize("place", ["missing/answers.json", "file/answers.json", "folder"])
def test_where_nothing_can_be_written_answers_live_in_memory(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("RLINFRA_ANSWERS", str(tmp_path / place))
    result = exercises.attempt("P03", gib=16)
    assert result.status == "right"
    assert "RLINFRA_ANSWERS" in str(result)
    assert "16 GiB" in str(exercises.solution("P03"))
    assert str(exercises.score()).startswith(f"Checked 1 / {TOTAL} · correct 1")
    assert (tmp_path / "folder").is_dir()


def test_a_file_of_another_edition_keeps_its_problems(answers_file):
    answers_file.write_text('{"problems": {"Q99": {"attempts": 1, "latest": "right"}}}')
    exercises.attempt("P03", gib=16)
    assert exercises.score().checked == 1
    assert set(json.loads(answers_file.read_text())["problems"]) == {"Q99", "P03"}


# Pages


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_a_question_says_what_to_answer_in_text_and_in_markdown(problem_id):
    page = exercises.show(problem_id)
    problem = PROBLEMS[problem_id]
    assert page._repr_markdown_() == str(page) == repr(page)
    assert all(part in str(page) for part in (problem.title, problem.text.strip(), problem.call))
    for ask in problem.ask.values():
        assert all(option in str(page) for option in ask.options + ask.items)
    assert problem.solution.strip() not in str(page)


@pytest.mark.parametrize("problem_id", PROBLEMS)
def test_problem_data_is_complete(problem_id):
    for ask in PROBLEMS[problem_id].ask.values():
        if ask.kind == "number":
            assert ask.likely
            assert len({likely.value for likely in ask.likely}) == len(ask.likely)
        if ask.kind == "choice":
            assert set(ask.hints) | {ask.answer} == set(ask.letters)
        if ask.kind == "matching":
            assert len(ask.hints) == len(ask.items) == len(ask.answer)


def test_results_escape_what_was_typed_and_carry_no_terminal_codes():
    result = exercises.attempt("P02", gb="<script>alert(1)</script>", gib=1)
    page = result._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert result.status in STATUSES
    assert "\x1b" not in page + str(result) + exercises.score()._repr_html_()


def test_exercises_need_no_torch():
    import subprocess

    code = "import rlinfra_utils.exercises, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
