"""The four calls of a learner: show, attempt, solution, score.

Models: an attempt counts once every answer can be read; anything else gets a sentence and changes nothing. The same
wrong answers run again are the same attempt; other ones get the general hint besides.
Leaves out: how an answer is judged (`checking`), where it is kept (`store`), how it looks (`pages`, `scoring`).
"""

from __future__ import annotations

from rlinfra_utils.exercises import store
from rlinfra_utils.exercises.checking import NotCounted, check, one_line, shown, typed
from rlinfra_utils.exercises.pages import COMPARE, NOT_ATTEMPTED, NOT_COUNTED, Page, Result
from rlinfra_utils.exercises.problems import PROBLEMS, Problem
from rlinfra_utils.exercises.scoring import Mark, Score


def _find(problem_id: object) -> Problem | None:
    return PROBLEMS.get(problem_id) if type(problem_id) is str else None


def _unknown(problem_id: object) -> str:
    likely = [name for name in PROBLEMS if type(problem_id) is str and name.lower() == problem_id.strip().lower()]
    rest = f'did you mean "{likely[0]}"?' if likely else f"there are {', '.join(PROBLEMS)}"
    return f"{shown(problem_id)} is no problem; {rest}"


def show(problem_id: str | None = None) -> Page:
    """The question, with its options and the line that answers it."""
    problem = _find(problem_id)
    return Page(problem.question if problem else _unknown(problem_id))


def attempt(problem_id: str | None = None, /, *unnamed: object, **answers: object) -> Result:
    """Check the answers to one problem, keep them, and say what to look at.

    Every answer is given by name; `...` means "not attempted", and the rest is kept as a draft. Never raises for an
    answer: one that cannot be read, is missing, is not asked for or is rounded too far is "not counted", with a
    sentence that says why.
    """
    problem = _find(problem_id)
    if problem is None:
        return Result("exercises", NOT_COUNTED, (_unknown(problem_id),))
    if complaints := _complaints(problem, unnamed, answers):
        return Result(problem.id, NOT_COUNTED, tuple(complaints))
    entries, trouble = store.load()
    entry = entries.get(problem.id, store.Entry())
    if any(answer is ... for answer in answers.values()):
        return _not_attempted(problem, answers, entry, trouble)
    return _judged(problem, answers, entry, trouble)


def _complaints(problem: Problem, unnamed: tuple, answers: dict[str, object]) -> list[str]:
    """Sentences about answers without a name, unknown ones and missing ones."""
    if unnamed:
        return [f"{shown(unnamed[0])} has no name; write {problem.call}"]
    asked = ", ".join(problem.ask)
    unknown = [name for name in answers if name not in problem.ask]
    found = [f"{one_line(name)}: {problem.id} does not ask for it; it asks for {asked}" for name in unknown]
    found += [f"{name}: is missing; write {problem.call}" for name in problem.ask if name not in answers]
    return sorted(found)


def _not_attempted(problem: Problem, answers: dict[str, object], entry: store.Entry, trouble: str) -> Result:
    """Keep what was answered as a draft, and recall what was kept before."""
    given = {name: typed(answer) for name, answer in answers.items() if answer is not ...}
    kept = entry.answers | given
    if kept != entry.answers:
        trouble = store.add(store.Line(problem=problem.id, answers=given, status=store.DRAFT))
    lines = []
    if given:
        lines.append(f"still open: {', '.join(name for name in problem.ask if name not in given)}")
    elif not entry.attempts:
        lines.append("Put your answers in place of the dots and run the cell again.")
    if kept:
        before = f"last time {entry.latest}: " if entry.attempts and not given else "kept: "
        lines.append(before + ", ".join(f"{name}={one_line(repr(text), 1_000)}" for name, text in kept.items()))
    return Result(problem.id, NOT_ATTEMPTED, (*lines, *filter(None, [trouble])))


def _judged(problem: Problem, answers: dict[str, object], entry: store.Entry, trouble: str) -> Result:
    """Judge answers that are all there, and keep them if all can be read."""
    text = {name: typed(answers[name]) for name in problem.ask}
    again = entry.attempts > 0 and entry.answers == text
    tried_before = entry.attempts > again
    verdicts, lines, readable = [], [], True
    for name, ask in problem.ask.items():
        try:
            right, line = check(ask, answers[name])
        except NotCounted as error:
            readable, right, line = False, None, str(error)
        if right is False and tried_before and ask.hint not in line:
            line += f" {ask.hint}"
        verdicts.append(right)
        lines.append(f"{name}: {line}")
    if not readable:
        return Result(problem.id, NOT_COUNTED, tuple(lines))
    status = "wrong" if False in verdicts else "right" if True in verdicts else COMPARE
    if not again:
        trouble = store.add(store.Line(problem=problem.id, answers=text, status=status))
    lines.append(f'The solution is open: exercises.solution("{problem.id}")')
    return Result(problem.id, status, (*lines, *filter(None, [trouble])))


def solution(problem_id: str | None = None) -> Page:
    """The worked solution, once the problem was attempted."""
    problem = _find(problem_id)
    if problem is None:
        return Page(_unknown(problem_id))
    entries, note = store.load()
    if not entries.get(problem.id, store.Entry()).attempts:
        text = f"{problem.id}: the solution opens after an attempt: `{problem.call}`"
        return Page("\n\n".join(filter(None, [text, note])))
    return Page(f"**{problem.id} · {problem.title}: solution**\n\n{problem.solution.strip()}")


def score() -> Score:
    """What was attempted and what is right, by lesson, from the file of answers."""
    entries, note = store.load()
    marks = []
    for problem in PROBLEMS.values():
        entry = entries.get(problem.id, store.Entry())
        status = entry.latest or NOT_ATTEMPTED
        marks.append(Mark(problem.id, problem.title, problem.lesson, status, entry.attempts, entry.first == "right"))
    return Score(tuple(marks), tuple(filter(None, [note])))
