"""Runs every worked solution through the grader, and looks where the notebooks ask for it: a table, 1 on any mismatch.

For each answer it takes what the solution's text says, not the stored key, and gives it to `exercises.attempt`; every
foreseen mistake has to get its own hint, and the solution has to stay closed until the attempt. Each problem is asked
once in its lesson's notebook, all answers open; notebooks after the lessons may ask again. It leaves out whether a
solution is true: `tests/test_exercises.py` derives each answer anew. Use: `python -m ci.instructor`.
"""

import ast
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from IPython.core.inputtransformer2 import TransformerManager

from ci import notebook as nbk
from rlinfra_utils import exercises
from rlinfra_utils.exercises.store import VARIABLE

NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?![\w.]*\d)")
OPEN = "compare with the solution"


class Row(NamedTuple):
    """One answer of one problem: what its solution says, what the grader says to it, and mistakes told apart."""

    problem: str
    answer: str
    solution_says: str
    grader: str
    mistakes: str
    finding: str = ""


def said(problem: exercises.problems.Problem, name: str) -> list[object]:
    """What the text of the solution offers as the answer `name`: candidates, in the order of the text."""
    ask, text = problem.ask[name], problem.solution
    if ask.kind == "number":
        return [found.replace(",", "").replace("−", "-") for found in NUMBER.findall(text)]
    if ask.kind == "choice":
        return re.findall(r"\*\*([A-Z])\.\*\*", text)
    if ask.kind == "matching":
        pairs = {int(number): letter for number, letter in re.findall(r"(\d) (?:→ )?([A-Z])\b", text)}
        return [pairs]
    return [text]


def answered(problem: exercises.problems.Problem, **answers: object) -> exercises.Result:
    """The result of an attempt in which the other answers are the solution's key."""
    key = {name: said(problem, name)[0] if ask.kind == "text" else ask.answer for name, ask in problem.ask.items()}
    return exercises.attempt(problem.id, **(key | answers))


def line(result: exercises.Result, name: str) -> str:
    """What the grader says to the answer `name`."""
    return next(text.removeprefix(f"{name}: ") for text in result.lines if text.startswith(f"{name}: "))


def foreseen(ask: exercises.problems.Ask) -> list[tuple[object, str]]:
    """Wrong answers with the hint that each of them has to get."""
    if ask.kind == "choice":
        return list(ask.hints.items())
    return [(likely.value, likely.hint) for likely in ask.likely]


def check_answer(problem: exercises.problems.Problem, name: str) -> Row:
    """Grade what the solution says, then every foreseen mistake."""
    ask = problem.ask[name]
    wanted = OPEN if ask.kind == "text" else "right"
    judged = {str(value): line(answered(problem, **{name: value}), name) for value in said(problem, name)}
    accepted = [value for value, verdict in judged.items() if verdict == wanted]
    mistakes = foreseen(ask)
    untold = [value for value, hint in mistakes if not line(answered(problem, **{name: value}), name).startswith(hint)]
    findings = [] if accepted else [f"the solution says no answer that the grader takes, among {list(judged)[:8]}"]
    findings += [f"{value} does not get its hint" for value in untold]
    return Row(
        problem.id,
        name,
        accepted[0] if accepted and ask.kind != "text" else "",
        wanted if accepted else "mismatch",
        f"{len(mistakes) - len(untold)} of {len(mistakes)}" if mistakes else "",
        "; ".join(findings),
    )


def check_problem(problem: exercises.problems.Problem) -> list[Row]:
    """The rows of one problem; an early or a closed solution is a finding of its first row."""
    early = problem.solution.strip() in str(exercises.solution(problem.id))
    rows = [check_answer(problem, name) for name in problem.ask]
    late = problem.solution.strip() not in str(exercises.solution(problem.id))
    what = ["the solution is open before an attempt"] * early + ["the solution stays closed after an attempt"] * late
    return [rows[0]._replace(finding="; ".join(filter(None, [rows[0].finding, *what]))), *rows[1:]]


def grade() -> list[Row]:
    """All rows, with answers kept in a folder of their own that is removed."""
    before = os.environ.get(VARIABLE)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for problem in exercises.PROBLEMS.values():
                os.environ[VARIABLE] = str(Path(folder) / f"{problem.id}.jsonl")
                rows += check_problem(problem)
        finally:
            os.environ.pop(VARIABLE, None)
            os.environ.update({VARIABLE: before} if before is not None else {})
    return rows


def calls(notebook, function: str) -> Iterator[tuple[int, str, dict[str, ast.expr]]]:
    """Each `exercises.FUNCTION("ID", name=value)` of the code cells: the cell's place, the id, the named values."""
    transform = TransformerManager().transform_cell
    for place, cell in enumerate(nbk.code_cells(notebook)):
        for node in ast.walk(ast.parse(transform(cell.source))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"exercises.{function}":
                first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
                yield place, str(first), {keyword.arg: keyword.value for keyword in node.keywords}


def placement(paths: list[Path]) -> list[str]:
    """A line for each problem that is not asked once in its lesson, and for each cell that asks amiss."""
    homes = {name: problem.lesson.replace("12.", "0") for name, problem in exercises.PROBLEMS.items()}
    num_asked, lines = Counter(), []
    for path in paths:
        notebook, number = nbk.read(path), path.name[:2]
        shows = {(place, name) for place, name, _ in calls(notebook, "show")}
        for place, name, answers in calls(notebook, "attempt"):
            num_asked[name] += number in homes.values()
            amiss = list(misplaced(name, answers, (place - 1, name) in shows))
            if number in homes.values() and homes.get(name, number) != number:
                amiss.append(f"belongs to notebook {homes[name]}")
            lines += [f"{path.name}: {name}: {what}" for what in amiss]
    return lines + [
        f"{name}: asked in {num_asked[name]} cells of the lessons" for name in homes if num_asked[name] != 1
    ]


def misplaced(name: str, answers: dict[str, ast.expr], shown: bool) -> Iterator[str]:
    """What is wrong with one graded cell; `shown` says whether its question stands right before it."""
    if name not in exercises.PROBLEMS:
        yield f"is no problem; there are {', '.join(exercises.PROBLEMS)}"
        return
    if not shown:
        yield f'no exercises.show("{name}") in the code cell before'
    problem = exercises.PROBLEMS[name]
    if list(answers) != list(problem.ask):
        yield f"asks for {', '.join(answers)}; write {problem.call}"
    if given := [key for key, value in answers.items() if ast.unparse(value) != "..."]:
        yield f"{', '.join(given)} is answered already; leave it open with ..."


def main(folder: Path = nbk.NOTEBOOKS) -> int:
    """Print the table and every finding: 0 when there is none, else 1."""
    rows = grade()
    table = pd.DataFrame(rows).drop(columns="finding").rename(columns={"solution_says": "solution says"})
    print(table.to_string(index=False))
    findings = [f"{row.problem}: {row.answer}: {row.finding}" for row in rows if row.finding]
    findings += placement(nbk.find([], folder))
    print("\n".join([*findings, f"{len(exercises.PROBLEMS)} problems, {len(rows)} answers: {len(findings)} findings"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
