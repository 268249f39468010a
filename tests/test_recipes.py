"""The recipes: each block runs alone and prints what the page says, without torch where the page asks for none."""

import re

import pytest
from bs4 import BeautifulSoup

from ci import recipes
from ci.notebook import NOTEBOOKS, read

RECIPES = recipes.read()
ASKED = {
    "My ratio is not 1",
    "Will it fit?",
    "How many GPUs to generation?",
    "Is this rollout trainable?",
    "Would this checkpoint resume?",
    "Did the sync land?",
}
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
#: Torch takes seconds to import.
each_run = pytest.mark.parametrize(
    "recipe", [pytest.param(r, id=r.title, marks=[pytest.mark.slow] * r.needs_torch) for r in RECIPES]
)
BLOCKS = "```python\nprint(1)\n```\n\n```text\n1\n```\n"


def made(source, text=""):
    return recipes.Recipe("made", text, source, "")


def headings(name):
    for cell in read(NOTEBOOKS / name).cells:
        if cell.cell_type == "markdown":
            yield from re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)


def test_the_questions_that_were_asked_have_a_recipe():
    assert {recipe.title for recipe in RECIPES} >= ASKED


@each_run
def test_a_block_prints_what_stands_below_it(recipe, tmp_path):
    assert recipes.run(recipe, tmp_path) == recipe.output


@each
def test_a_block_is_short_and_its_end_is_said(recipe):
    lines = recipe.source.splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 105
    assert "**It ends**" in recipe.text


@each
def test_the_lesson_named_has_the_section_named(recipe):
    title, name = re.search(r"^Lesson: \[(.+)\]\(\.\./notebooks/(.+\.ipynb)\)\.$", recipe.text, re.MULTILINE).groups()
    assert title in headings(name)


def test_only_the_recipe_that_uses_an_engine_needs_torch():
    assert [recipe.title for recipe in RECIPES if recipe.needs_torch] == ["Did the sync land?"]


def test_a_recipe_that_does_not_ask_for_torch_fails_at_its_import(tmp_path):
    with pytest.raises(RuntimeError, match="made: ImportError: torch was imported"):
        recipes.run(made("import torch"), tmp_path)


def test_an_error_in_a_block_is_one_line_with_its_title(tmp_path):
    with pytest.raises(RuntimeError) as raised:
        recipes.run(made("print(3)\n1 / 0"), tmp_path)
    assert str(raised.value) == "made: ZeroDivisionError: division by zero"


def test_storing_replaces_a_wrong_output_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# P\n\n## One\n\nText.\n\n{BLOCKS}\nEnd.\n\n## Two\n\n{BLOCKS.replace('(1)', '(2)')}\nEnd.\n")
    right = page.read_text().replace("print(2)\n```\n\n```text\n1", "print(2)\n```\n\n```text\n2")
    recipes.store(page)
    assert page.read_text() == right


@pytest.mark.parametrize("text", ["No block.\n", BLOCKS + BLOCKS, "```text\n1\n```\n", BLOCKS + "```\nmore\n```\n"])
def test_a_section_without_one_source_and_one_output_is_refused_by_title(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(f"## Mine\n\n{text}")
    with pytest.raises(ValueError, match=r"page.md, 'Mine'"):
        recipes.read(page)


def test_the_page_has_every_recipe_links_into_the_series_and_needs_no_network(tmp_path):
    soup = BeautifulSoup(recipes.write(tmp_path / "recipes.html").read_text(), "html.parser")
    assert [heading.text for heading in soup.select("h2")] == [recipe.title for recipe in RECIPES]
    assert [block.text for block in soup.select(".source pre")] == [recipe.source for recipe in RECIPES]
    assert [block.text for block in soup.select(".source + pre")] == [recipe.output for recipe in RECIPES]
    assert not soup.select("script, link, img, iframe")
    ids = {tag["id"] for tag in soup.select("[id]")}
    names = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    for link in soup.select("a[href]"):
        page, _, place = link["href"].partition("#")
        assert page in {"", "index.html", *(f"{name}.html" for name in names)} or page.startswith("https://"), link
        assert page or place in ids


def test_a_link_into_a_lesson_is_the_anchor_that_its_page_has(tmp_path):
    import nbformat

    from ci import page

    heading = "3 · Same weights, other probabilities (step 12.4.3)"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"## {heading}")]), tmp_path / "x.ipynb"
    )
    page.write(tmp_path / "x.ipynb", tmp_path / "x.html")
    anchors = {tag["id"] for tag in BeautifulSoup((tmp_path / "x.html").read_text(), "html.parser").select("h2[id]")}
    links = BeautifulSoup(recipes.write(tmp_path / "recipes.html").read_text(), "html.parser").select("a")
    (link,) = [link["href"] for link in links if link.text == heading]
    assert link == f"04_staleness_mismatch_sync.html#{anchors.pop()}"
