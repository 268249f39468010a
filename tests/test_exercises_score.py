"""Attempts, drafts, solutions, the score, and the file of answers when several write or nobody can."""

import json
import math
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from exercises_samples import NUMBERS, OPEN, RIGHT, TOTAL, WORDS

from rlinfra_utils import exercises
from rlinfra_utils.exercises import PROBLEMS
from rlinfra_utils.exercises.pages import STATUSES


@pytest.fixture(autouse=True)
def answers_file(tmp_path, monkeypatch):
    """Each test keeps its answers in a folder of its own."""
    file = tmp_path / "answers.json"
    monkeypatch.setenv("RLINFRA_ANSWERS", str(file))
    return file


def lines_of(file):
    return [json.loads(text) for text in file.read_text().splitlines() if text]


# Attempts, drafts, solutions, score


def test_a_literal_ellipsis_is_no_attempt_and_writes_nothing(answers_file):
    result = exercises.attempt("P02", gb=..., gib=...)
    assert result.status == "not attempted"
    assert result.lines == ("Put your answers in place of the dots and run the cell again.",)
    assert not answers_file.exists()


def test_a_draft_is_kept_and_opens_nothing(answers_file):
    result = exercises.attempt("P02", gb=84, gib=...)
    assert result.status == "not attempted"
    assert "still open: gib" in result.lines
    assert "gb='84'" in str(exercises.attempt("P02", gb=..., gib=...))
    assert "opens after an attempt" in str(exercises.solution("P02"))
    assert exercises.score().checked == 0
    for nasty in (None, math.nan, "\ud800", "9" * 10**6, 10**5000, object(), lambda: 0, {1: {2: 3}}):
        assert exercises.attempt("P02", gb=nasty, gib=...).status == "not attempted"
    assert {line["status"] for line in lines_of(answers_file)} == {"draft"}


def test_a_draft_in_words_comes_back_whole():
    words = "It must not be trained on: neither tokenizer nor template, so nobody knows what the tokens meant."
    exercises.attempt("P07", rho=..., why=words)
    assert words in str(exercises.attempt("P07", rho=..., why=...))


def test_cells_run_again_change_nothing(answers_file):
    exercises.attempt("P02", gb=84, gib=78.23)
    before = answers_file.read_bytes()
    assert exercises.attempt("P02", gb=84, gib=78.23).status == "right"
    assert "last time right: gb='84', gib='78.23'" in exercises.attempt("P02", gb=..., gib=...).lines
    assert exercises.attempt("P02", gb=[84], gib=78.23).status == "not counted"
    assert exercises.attempt("P02", gb=84, gib=78.2).status == "not counted"
    assert answers_file.read_bytes() == before
    assert exercises.score().first_try == 1


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
    assert str(exercises.score()).startswith(f"Checked 0 / {TOTAL} · correct 0\n")
    exercises.attempt("P01", choice="A")
    assert str(exercises.score()).startswith(f"Checked 1 / {TOTAL} · correct 0\n")
    exercises.attempt("P01", choice="B")
    exercises.attempt("P03", gib=16)
    exercises.attempt("P12", answer=WORDS)
    score = exercises.score()
    assert (score.checked, score.correct, score.first_try, score.compared) == (3, 2, 1, 1)
    assert str(score).startswith(f"Checked 3 / {TOTAL} · correct 2")
    exercises.attempt("P03", gib=8)
    assert (exercises.score().correct, exercises.score().first_try) == (1, 1)
    assert [line["status"] for line in lines_of(answers_file)] == [
        "wrong", "right", "right", "compare with the solution", "wrong",
    ]  # fmt: skip


def test_the_score_has_a_row_a_lesson():
    exercises.attempt("P01", choice="A")
    exercises.attempt("P12", answer=WORDS)
    exercises.attempt("L12.5-d", choice="C")
    exercises.attempt("P10", interval_s=..., interval_min=43.82)
    rows = {row[0]: row[1:] for row in exercises.score().by_lesson()}
    assert rows == {
        "12.1": (5, 0, 1, 1, 3),
        "12.2": (3, 0, 0, 0, 3),
        "12.3": (4, 0, 0, 0, 4),
        "12.4": (4, 0, 0, 0, 4),
        "12.5": (8, 1, 0, 0, 7),
        "all": (24, 1, 1, 1, 21),
    }
    printed = [text.split() for text in str(exercises.score()).splitlines()]
    assert ["12.1", "5", "0", "1", "1", "3"] in printed


class Balanced(HTMLParser):
    """Collects text; fails on a tag that is closed and was not opened."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.open += [tag] * (tag != "meta")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_score_page_is_one_file_that_reads_in_light_and_dark(tmp_path):
    exercises.attempt("P01", choice="A")
    page = exercises.score().to_html(tmp_path / "score.html").read_text(encoding="utf-8")
    parsed = Balanced(page)
    assert parsed.open == []
    assert {problem.title for problem in PROBLEMS.values()} <= {text.strip() for text in parsed.text}
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page
    assert "<script" not in page
    assert Balanced(exercises.score()._repr_html_()).open == []


def luminance(color):
    """Relative luminance as WCAG 2.1 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", ["#ffffff", "#111111", "#12181f"])
def test_signs_stand_out_on_light_and_on_dark(paper):
    for _, color in STATUSES.values():
        darker, lighter = sorted((luminance(color), luminance(paper)))
        assert (lighter + 0.05) / (darker + 0.05) >= 3  # WCAG 2.1, 1.4.11: graphics


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
    assert [file.name for file in tmp_path.iterdir()] == ["rlinfra_answers.jsonl"]


FOREIGN = [b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"problems": {"P02": 5}}', b"[" * 100_000, b"a note to myself\n"]
FOREIGN += [
    b'{"problem": "P02", "answers": {}, "status": "perfect"}',
    b'{"problem": 2, "answers": {}, "status": "right"}',
]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_somebody_else_is_left_alone(answers_file, content):
    answers_file.write_bytes(content)
    result = exercises.attempt("P03", gib=16)
    assert result.status == "right"
    assert "left alone; set RLINFRA_ANSWERS" in str(result)
    assert answers_file.read_bytes() == content
    assert "16 GiB" in str(exercises.solution("P03"))
    assert str(exercises.score()).startswith(f"Checked 1 / {TOTAL} · correct 1")
    answers_file.unlink()
    exercises.attempt("P01", choice="B")
    assert [line["problem"] for line in lines_of(answers_file)] == ["P03", "P01"]


@pytest.mark.parametrize("content", [*FOREIGN, b'\n{"problem": "P02", "ans'])
def test_a_torn_or_odd_line_spoils_only_itself(answers_file, content):
    exercises.attempt("P03", gib=16)
    with open(answers_file, "ab") as stream:
        stream.write(content)
    result = exercises.attempt("P01", choice="B")
    assert "1 of 2 lines cannot be read" in str(result)
    score = exercises.score()
    assert (score.checked, score.correct) == (2, 2)
    assert "1 of 3 lines cannot be read" in str(score)
    assert content in answers_file.read_bytes()


def test_an_empty_file_is_a_fresh_start(answers_file):
    answers_file.write_bytes(b"\n\n")
    assert "cannot" not in str(exercises.attempt("P03", gib=16))
    assert exercises.score().checked == 1


def test_a_full_disk_loses_nothing_of_this_session(answers_file, monkeypatch):
    exercises.attempt("P03", gib=16)
    before = answers_file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        result = exercises.attempt("P01", choice="A")
    assert "No space left on device" in str(result)
    assert answers_file.read_bytes() == before
    assert exercises.score().checked == 2
    exercises.attempt("P01", choice="B")
    assert [line["status"] for line in lines_of(answers_file)] == ["right", "wrong", "right"]


@pytest.mark.parametrize("place", ["missing/answers.jsonl", "file/answers.jsonl", "folder", "x" * 300])
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


def test_notebooks_that_run_at_once_lose_nothing(answers_file):
    """Four processes answer at the same time; each of their lines is there, whole."""
    code = """if True:
        import sys
        from rlinfra_utils import exercises
        sys.stdin.readline()  # the starting gun
        for number in range(40):
            exercises.attempt(sys.argv[1], **{sys.argv[2]: 1000 + number})
    """
    asks = [("P03", "gib"), ("P06", "utilization"), ("P03", "gib"), ("P06", "utilization")]
    running = [subprocess.Popen([sys.executable, "-c", code, *ask], stdin=subprocess.PIPE, text=True) for ask in asks]
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in running] == [0] * 4
    assert exercises.score().lines == ()
    written = [(line["problem"], *line["answers"].values()) for line in lines_of(answers_file)]
    for problem_id, _ in asks:
        assert {text for name, text in written if name == problem_id} == {str(1000 + number) for number in range(40)}


def test_a_file_of_another_edition_keeps_its_problems(answers_file):
    answers_file.write_text('{"problem": "Q99", "answers": {"x": "1"}, "status": "right"}\n')
    exercises.attempt("P03", gib=16)
    assert exercises.score().checked == 1
    assert [line["problem"] for line in lines_of(answers_file)] == ["Q99", "P03"]


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
            assert ask.value
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
    code = "import rlinfra_utils.exercises, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
