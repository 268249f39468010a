"""The four calls of a learner: show, attempt, solution, score.

Models: an attempt counts once every answer can be read; anything else gets a sentence and changes nothing.
Leaves out: how an answer is judged (`checking`), where it is kept (`store`), how it looks (`pages`).
"""

from __future__ import annotations

from rlinfra_utils.exercises import store
from rlinfra_utils.exercises.checking import MAX_TEXT, Unreadable, check, shown
from rlinfra_utils.exercises.pages import Page, Result, Score
from rlinfra_utils.exercises.problems import PROBLEMS, Problem

COMPARE = "compare with the solution"


def _unknown(problem_id: object) -> str:
    return f"{shown(problem_id)} is no problem; there are {', '.join(PROBLEMS)}"


def _find(problem_id: object) -> Problem | None:
    return PROBLEMS.get(problem_id) if isinstance(problem_id, str) else None


def show(problem_id: str | None = None) -> Page:
    """The question, with its options and the line that answers it."""
    problem = _find(problem_id)
    return Page(problem.question if problem else _unknown(problem_id))


def attempt(problem_id: str | None = None, /, *unnamed: object, **answers: object) -> Result:
    """Check the answers to one problem, keep them, and say what to look at.

    Every answer is given by name; `...` means "not attempted", and the rest is kept as a draft. Never raises for
    an answer: one that cannot be read, is missing or is not asked for gets status "unreadable" and a sentence.
    """
    problem = _find(problem_id)
    if problem is None:
        return Result("exercises", "unreadable", (_unknown(problem_id),))
    if complaints := _complaints(problem, unnamed, answers):
        return Result(problem.id, "unreadable", tuple(complaints))
    if any(answer is ... for answer in answers.values()):
        return _not_attempted(problem, answers)
    verdicts, lines, readable = [], [], True
    for name, ask in problem.ask.items():
        try:
            right, line = check(ask, answers[name])
            verdicts.append(right)
        except Unreadable as error:
            readable, line = False, str(error)
        lines.append(f"{name}: {line}")
    if not readable:
        return Result(problem.id, "unreadable", tuple(lines))
    status = "wrong" if False in verdicts else "right" if True in verdicts else COMPARE
    return Result(problem.id, status, (*lines, *_keep(problem, answers, status)))


def _complaints(problem: Problem, unnamed: tuple, answers: dict[str, object]) -> list[str]:
    """Sentences about answers without a name, unknown ones and missing ones."""
    asked = ", ".join(problem.ask)
    found = [f"{shown(unnamed[0])} has no name; write {problem.call}"] if unnamed else []
    found += [
        f"{name[:60]}: {problem.id} does not ask for it; it asks for {asked}" for name in answers.keys() - problem.ask
    ]
    found += [f"{name}: is missing; write {problem.call}" for name in problem.ask if name not in answers]
    return found[:1] if unnamed else sorted(found)


def _not_attempted(problem: Problem, answers: dict[str, object]) -> Result:
    """Keep what was answered as a draft, and recall what was kept before."""
    given = {name: _as_text(answer) for name, answer in answers.items() if answer is not ...}
    state, note = store.load()
    notes = [note]
    if given:
        state.problems.setdefault(problem.id, store.Entry()).answers.update(given)
        notes.append(store.save(state))
    lines = [f"still open: {', '.join(name for name in problem.ask if name not in given)}"] if given else []
    if kept := state.problems.get(problem.id):
        lines.append("kept: " + ", ".join(f"{name}={text!r}" for name, text in kept.answers.items()))
    return Result(problem.id, "not attempted", (*lines, *filter(None, notes)))


def _keep(problem: Problem, answers: dict[str, object], status: str) -> list[str]:
    """Record the attempt; sentences about the file, if there is anything to say."""
    state, trouble = store.load()
    entry = state.problems.setdefault(problem.id, store.Entry())
    entry.answers = {name: _as_text(answers[name]) for name in problem.ask}
    entry.attempts += 1
    entry.first = entry.first or status
    entry.latest = status
    return [note for note in (trouble, store.save(state)) if note]


def _as_text(answer: object) -> str:
    text = str(answer) if isinstance(answer, str | float) else shown(answer)
    return text[:MAX_TEXT].encode(errors="replace").decode()


def solution(problem_id: str | None = None) -> Page:
    """The worked solution, once the problem was attempted."""
    problem = _find(problem_id)
    if problem is None:
        return Page(_unknown(problem_id))
    state, note = store.load()
    if not state.attempted(problem.id):
        text = f"{problem.id}: the solution opens after an attempt: `{problem.call}`"
        return Page("\n\n".join(filter(None, [text, note])))
    return Page(f"**{problem.id} · {problem.title}: solution**\n\n{problem.solution.strip()}")


def score() -> Score:
    """How many problems were attempted and how many are right, by the file of answers."""
    state, note = store.load()
    entries = [state.problems[name] for name in PROBLEMS if state.attempted(name)]
    return Score(
        checked=len(entries),
        total=len(PROBLEMS),
        correct=sum(entry.latest == "right" for entry in entries),
        first_try=sum(entry.first == "right" for entry in entries),
        compared=sum(entry.latest == COMPARE for entry in entries),
        lines=tuple(filter(None, [note])),
    )
