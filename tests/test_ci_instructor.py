"""`ci.instructor` passes on what is committed, and says what is wrong where something is."""

import os

import nbformat
import pytest
from series_samples import write

from ci import instructor
from rlinfra_utils.exercises import PROBLEMS


@pytest.fixture(autouse=True)
def answers_file(tmp_path, monkeypatch):
    """Each test keeps its answers in a folder of its own."""
    monkeypatch.setenv("RLINFRA_ANSWERS", str(tmp_path / "mine.jsonl"))


def test_the_series_and_its_problems_pass(capsys, tmp_path):
    assert instructor.main() == 0
    printed = capsys.readouterr().out
    assert set(PROBLEMS) <= set(printed.split())
    assert printed.endswith(": 0 findings\n")
    assert os.environ["RLINFRA_ANSWERS"] == str(tmp_path / "mine.jsonl")
    assert list(tmp_path.iterdir()) == []


def changed(monkeypatch, problem_id, **fields):
    monkeypatch.setitem(PROBLEMS, problem_id, PROBLEMS[problem_id].model_copy(update=fields))


@pytest.mark.parametrize(
    ("problem_id", "right", "wrong"),
    [("P02", "78.23", "73.28"), ("P01", "**B.**", "**C.**"), ("L12.5-e", "1 → B", "1 → C"), ("P08", "4/7", "3/7")],
)
def test_a_solution_that_says_something_else_is_a_mismatch(problem_id, right, wrong, monkeypatch):
    solution = PROBLEMS[problem_id].solution.replace("0.5714", "")
    assert right in solution
    changed(monkeypatch, problem_id, solution=solution.replace(right, wrong))
    findings = [row for row in instructor.check_problem(PROBLEMS[problem_id]) if row.finding]
    assert [row.grader for row in findings] == ["mismatch"]


def test_a_foreseen_mistake_that_the_grader_takes_is_a_finding(monkeypatch):
    ask = PROBLEMS["P06"].ask["utilization"].model_copy(update={"tolerance": 2.0})
    changed(monkeypatch, "P06", ask={"utilization": ask})
    (finding,) = instructor.check_problem(PROBLEMS["P06"])
    assert "0.25 does not get its hint" in finding.finding


SHOW, ATTEMPT = 'exercises.show("P06")', 'exercises.attempt("P06", utilization=...)'


def placed(tmp_path, name, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return instructor.placement([write(tmp_path, name, nbformat.v4.new_notebook(cells=cells))])


@pytest.mark.parametrize(
    ("name", "sources", "finding"),
    [
        ("03_x", [SHOW, ATTEMPT], None),
        ("07_x", [SHOW, ATTEMPT], "P06: asked in 0 cells"),
        ("02_x", [SHOW, ATTEMPT], "02_x.ipynb: P06: belongs to notebook 03"),
        ("03_x", [ATTEMPT], 'no exercises.show("P06")'),
        ("03_x", [SHOW, ATTEMPT, SHOW, ATTEMPT], "P06: asked in 2 cells"),
        ("03_x", [SHOW, ATTEMPT.replace("...", "0.5")], "utilization is answered already"),
        ("03_x", [SHOW, ATTEMPT.replace("utilization", "share")], "asks for share; write"),
        ("03_x", ["%%level B x\n" + SHOW, "!ls\n" + ATTEMPT.replace("P06", "P66")], "P66: is no problem"),
    ],
)
def test_a_cell_that_asks_amiss_is_found(tmp_path, name, sources, finding):
    lines = [line for line in placed(tmp_path, name, *sources) if "P06" in line or "P66" in line]
    assert (finding is None and lines == []) or any(finding in line for line in lines), lines
