"""The graded problems: a question, an answer checked with a hint, then the worked solution, and a score.

Models: numbers (with the source's tolerances), choices, matchings, and open answers that you compare yourself.
Leaves out: grading of free text; nothing leaves this machine (`store` keeps answers in one local file).

    exercises.show("P02")
    exercises.attempt("P02", gb=..., gib=...)   # a literal ... means: not attempted
    exercises.solution("P02")                   # opens after an attempt
    exercises.score()                           # a table by lesson; exercises.score().to_html("score.html")
"""

from rlinfra_utils.exercises.desk import attempt, score, show, solution
from rlinfra_utils.exercises.pages import Page, Result
from rlinfra_utils.exercises.problems import PROBLEMS
from rlinfra_utils.exercises.scoring import Mark, Score
