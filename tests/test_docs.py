"""The documents agree with what they speak of: links, outcomes, headings, problems, terms, the version, the picture."""

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import matplotlib
import pytest

import rlinfra_utils
from ci import front_picture
from ci import notebook as nbk
from rlinfra_utils.exercises import PROBLEMS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What a title cell has to say, by a word that says it.
TITLE_CELL = {"outcomes": "you can", "memory": "GB", "time": "minute", "limits": "Left out:"}


def rows(name: str) -> list[list[str]]:
    """The cells of each row of the first table in docs/`name`, its head left out."""
    lines = [line for line in (ROOT / "docs" / name).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def lessons(name: str) -> dict[str, Path]:
    """{label: notebook} of the link definitions at the end of docs/`name`."""
    found = re.findall(r"^\[([^\]]+)\]: (\S+\.ipynb)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
    return {label: (ROOT / "docs" / target).resolve() for label, target in found}


@cache
def headings(path: Path) -> set[str]:
    text = "\n".join(cell.source for cell in nbk.read(path).cells if cell.cell_type == "markdown")
    return set(re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@cache
def words(path: Path) -> str:
    """All that a notebook shows in letters: sources, and outputs of text."""
    cells = nbk.read(path).cells
    shown = [cell.source for cell in cells]
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        shown += [output.get("text", "")]
        shown += [text for mime, text in output.get("data", {}).items() if mime.startswith("text/")]
    return "\n".join(shown).casefold()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(page):
    text = page.read_text()
    inline, defined = r"\]\(([^)\s]+)\)", r"^\[[^\]]+\]: (\S+)$"
    targets = re.findall(inline, text) + re.findall(defined, text, re.MULTILINE)
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    local = [target.split("#")[0] for target in targets if not target.startswith(("http", "#"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_readme_stays_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 85


def test_the_readme_names_every_lesson():
    text = (ROOT / "README.md").read_text()
    assert [path.name for path in nbk.find([]) if f"(notebooks/{path.name})" not in text] == []


def test_there_are_19_outcomes():
    table = rows("OUTCOMES.md")
    assert [row[0] for row in table] == [str(number) for number in range(1, 20)]
    assert len({row[1] for row in table}) == 19


@pytest.mark.parametrize("row", rows("OUTCOMES.md"), ids=lambda row: row[0])
def test_an_outcome_is_taught_and_held_where_it_says(row):
    _, _, label, sections, held_by = row
    path = lessons("OUTCOMES.md")[label.strip("[]")]
    assert set(sections.split("<br>")) <= headings(path)
    lesson = f"12.{int(path.name[:2])}"
    (sentinel,) = nbk.tagged(nbk.read(path), "sentinel")
    assert held_by
    for name in held_by.split(", "):
        if name.startswith("`"):
            asserts = [line for line in sentinel.source.splitlines() if line.startswith("assert")]
            assert any(re.search(rf"\b{name.strip('`')}\b", line) for line in asserts), name
        else:
            assert PROBLEMS[name].lesson == lesson
            assert f'attempt("{name}"'.casefold() in words(path)


def test_each_step_of_the_course_is_a_section_of_its_lesson():
    for number in range(1, 6):
        (path,) = nbk.find([f"0{number}"])
        steps = re.findall(rf"\(step 12\.{number}\.(\d)\)", " ".join(headings(path)))
        assert sorted(steps) == list("12345"), path.name


@pytest.mark.parametrize("path", nbk.find([]), ids=lambda path: path.stem)
def test_a_title_cell_states_outcomes_time_memory_and_limits(path):
    title = nbk.read(path).cells[0].source
    assert [what for what, word in TITLE_CELL.items() if word not in title] == []


def test_the_glossary_is_sorted_and_says_each_thing_once():
    terms = [row[0].casefold() for row in rows("GLOSSARY.md")]
    assert terms == sorted(terms)
    assert len(set(terms)) == len(terms) >= 60
    meanings = [row[1] for row in rows("GLOSSARY.md")]
    assert len(set(meanings)) == len(meanings)
    assert [meaning for meaning in meanings if not meaning.endswith(".") or len(meaning) > 250] == []


@pytest.mark.parametrize("row", rows("GLOSSARY.md"), ids=lambda row: row[0])
def test_a_term_occurs_in_the_lesson_that_it_names(row):
    term, _, label = row
    shown = words(lessons("GLOSSARY.md")[label.strip("[]")])
    names = [name.strip(" )`").casefold() for name in term.split("(")]
    assert any(re.search(rf"(?<!\w){re.escape(name)}", shown) for name in names)


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert rlinfra_utils.__version__ == version
    heads = re.findall(r"^## \[?([\d.]+)\]?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == version


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    front_picture.main([str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", front_picture.PAGES)
def test_the_picture_is_what_its_script_draws(page, pictures):
    drawn, stored = (folder / f"loop-{page}.svg" for folder in (pictures, front_picture.FOLDER))
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
    if f"Matplotlib v{matplotlib.__version__}," in stored.read_text():
        assert drawn.read_text() == stored.read_text(), "run `python -m ci.front_picture`"


def test_the_picture_shows_every_token_at_the_version_that_the_simulator_gave_it():
    run = front_picture.simulate(front_picture.config_of("Asynchronous"))
    for row in run.rollouts.dropna(subset="end_s").itertuples():
        drawn = [version for version, _, _ in front_picture.by_version(run, row.start_s, row.end_s)]
        spans = run.spans.loc[run.spans["rollout"] == row.rollout, "version"]
        assert set(spans) <= set(drawn)
    for step in run.steps["step"]:
        assert sum(front_picture.trained_on(run, step).values()) == pytest.approx(1)
