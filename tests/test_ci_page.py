"""Pages of a run: nothing from the network, formulas drawn or readable, every picture described and one click away."""

import base64
import io
import re

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_markdown_cell, new_output
from PIL import Image
from series_samples import as_if_run, cell, code, good, write

from ci import gallery, index, page
from ci import notebook as nbk
from ci.run_series import Outcome

DRAWN = [r"T_\text{seq} = \sum_i t_i", r"\frac{a}{b} < 1"]
ALT = 'Bars of "a" & <b>: the first is the longest.'
UNDRAWN = r"\begin{aligned} a &= b \end{aligned}"


def png() -> str:
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, format="png")
    return base64.b64encode(picture.getvalue()).decode()


@pytest.fixture
def made(tmp_path):
    notebook = good("01_loop", "x = 1")
    text = f"Inline ${DRAWN[0]}$ for \\$5.\n\n$${DRAWN[1]}$$\n\n$${UNDRAWN}$$\n\n![far](https://example.com/a.png)"
    notebook.cells.insert(3, new_markdown_cell(text, id="math"))
    notebook.cells.insert(4, code("secret = 1", "hide-input", cell_id="hidden"))
    as_if_run(notebook)
    shown = {"text/latex": r"$\displaystyle \frac{1}{2}$", "text/plain": "1/2"}
    drawn = new_output("display_data", data={"image/png": png()}, metadata={"image/png": {"alt": ALT}})
    cell(notebook, "body-0").outputs = [new_output("display_data", data=shown), drawn]
    notebook.cells.insert(5, new_markdown_cell("## 1 · What is a < b?\n\nA section.", id="first"))
    cell(notebook, "hidden").outputs = [new_output("stream", name="stdout", text="what it prints")]
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    target = tmp_path / "01_loop.html"
    plain = page.write(write(tmp_path, "01_loop", notebook), target)
    return target.read_text(), plain


def test_a_page_loads_nothing(made):
    text, _ = made
    assert "<script" not in text
    assert "<link" not in text
    assert not re.findall(r'src="(?!data:)', text)
    assert not re.findall(r"url\(['\"]?(?!data:)[^)]*\)", text)
    assert "@import" not in text
    assert ">Open in Colab</a>" in text  # the badge, which another host serves, is its text


def test_formulas_are_pictures_with_their_source_as_text(made):
    text, _ = made
    assert 'alt="T_\\text{seq} = \\sum_i t_i"' in text
    assert 'alt="\\dfrac{a}{b} &lt; 1"' in text
    assert 'alt="\\frac{1}{2}"' in text
    assert len(re.findall(r'<img alt="[^"]*" class="math" src="data:image/svg\+xml;base64,', text)) == 3
    assert "for $5." in text


def test_a_formula_that_cannot_be_drawn_stays_readable_and_is_reported(made):
    text, plain = made
    assert plain == [UNDRAWN]
    assert "<code>\\begin{aligned} a &amp;= b \\end{aligned}</code>" in text


def test_a_hidden_input_leaves_its_output(made):
    text, _ = made
    assert "secret" not in text
    assert "what it prints" in text


def test_a_page_is_titled_by_its_heading_and_links_back(made):
    text, _ = made
    assert "<title>The loop as dataflow</title>" in text
    assert '<a href="index.html">' in text


def test_a_picture_keeps_its_description(made):
    (picture,) = BeautifulSoup(made[0], "html.parser").select(".jp-RenderedImage img")
    assert picture["alt"] == ALT


def test_a_page_lists_its_sections_and_the_links_lead_there(made):
    soup = BeautifulSoup(made[0], "html.parser")
    links = soup.select("nav.series details a")
    assert [link.text for link in links] == ["1 · What is a < b?"]
    assert soup.find(id=links[0]["href"].removeprefix("#")).find("h2")


def test_the_bootstrap_cell_is_not_shown(made):
    assert "importlib.util.find_spec" not in made[0]


def test_a_page_has_a_dark_side(made):
    dark = re.findall(r'<style media="\(prefers-color-scheme: dark\)">(.*?)</style>', made[0], re.DOTALL)
    assert len(dark) == 1
    assert "--jp-content-font-color1" in dark[0]


@pytest.fixture
def series(made, tmp_path):
    """The index and its pages over a run of the sample, whose lesson page `made` has written."""
    result = tmp_path / "out" / "01_loop" / "result.json"
    result.parent.mkdir(parents=True)
    result.write_text('{"result": {"lag": {"mean": 0.93333}, "note": "<i>"}}')
    outcome = Outcome("01_loop", "The loop", "It is timed.", "A", 1.0, 4, None)
    index.write([outcome], tmp_path / "index.html")
    return tmp_path


def test_each_lesson_picture_and_result_is_two_clicks_from_the_index(series):
    def links(name):
        return [a["href"] for a in BeautifulSoup((series / name).read_text(), "html.parser").select("a")]

    beside = [link for link in links("index.html") if (series / link).suffix == ".html"]
    assert {"01_loop.html", "pictures.html", "results.html"} <= set(beside)
    within_two = {link for name in beside for link in links(name)} | set(beside)
    lesson = BeautifulSoup((series / "01_loop.html").read_text(), "html.parser")
    (wanted,) = [f"01_loop.html#{lesson.find(id='cell-id=body-0')['id']}"]
    assert {wanted, "out/01_loop/result.json"} <= within_two
    for link in within_two:
        assert link.startswith(("https://colab", "#")) or (series / link.partition("#")[0]).exists(), link


def test_pictures_and_results_load_nothing_and_say_what_they_show(series):
    pictures, results = ((series / name).read_text() for name in ("pictures.html", "results.html"))
    for text in (pictures, results, (series / "index.html").read_text()):
        assert "<script" not in text
        assert "<link" not in text
        assert "prefers-color-scheme: dark" in text
        assert not re.findall(r'src="(?!data:)', text)
    figure = BeautifulSoup(pictures, "html.parser").select_one("figure")
    assert figure.select_one("img")["alt"] == ALT == figure.select_one("figcaption").text
    assert "mean 0.9333" in results
    assert "&lt;i&gt;" in results
    assert "vllm_speed" in results  # the stored ones


@pytest.mark.parametrize("path", nbk.find([]), ids=lambda path: path.stem[:2])
def test_every_committed_picture_says_in_a_sentence_what_it_shows(path):
    for cell_id, alt, _ in gallery.pictures_of(nbk.read(path)):
        assert len(alt.split()) >= 8, f"{cell_id}: {alt!r}"
        assert alt.endswith("."), f"{cell_id}: {alt!r}"


def test_the_index_links_to_the_pages_that_are_there(tmp_path):
    outcome = Outcome("01_a", "A", "It is.", "A", 1.0, 3, None)
    assert "recipes.html" not in index.write([outcome], tmp_path / "index.html").read_text()
    (tmp_path / "recipes.html").write_text("<p>")
    assert '<a href="recipes.html">' in index.write([outcome], tmp_path / "index.html").read_text()


def test_the_index_escapes_what_notebooks_say(tmp_path):
    outcome = Outcome("01_a", "<b>Title</b>", "a < b & c", "A", 1.25, 3, "cell x: KeyError: '<y>'")
    text = index.write([outcome], tmp_path / "index.html").read_text()
    assert "&lt;b&gt;Title&lt;/b&gt;" in text
    assert "a &lt; b &amp; c" in text
    assert "KeyError: &#x27;&lt;y&gt;&#x27;" in text
    assert "0 of 1 notebooks passed in 1.2 s" in text
