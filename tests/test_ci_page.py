"""Pages of executed notebooks: nothing from the network, formulas drawn or readable, hidden inputs hidden."""

import re

import pytest
from nbformat.v4 import new_markdown_cell, new_output
from series_samples import as_if_run, cell, code, good, write

from ci import index, page

DRAWN = [r"T_\text{seq} = \sum_i t_i", r"\frac{a}{b} < 1"]
UNDRAWN = r"\begin{aligned} a &= b \end{aligned}"


@pytest.fixture
def made(tmp_path):
    notebook = good("01_loop", "x = 1")
    text = f"Inline ${DRAWN[0]}$ for \\$5.\n\n$${DRAWN[1]}$$\n\n$${UNDRAWN}$$\n\n![far](https://example.com/a.png)"
    notebook.cells.insert(3, new_markdown_cell(text, id="math"))
    notebook.cells.insert(4, code("secret = 1", "hide-input", cell_id="hidden"))
    as_if_run(notebook)
    shown = {"text/latex": r"$\displaystyle \frac{1}{2}$", "text/plain": "1/2"}
    cell(notebook, "body-0").outputs = [new_output("display_data", data=shown)]
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
    assert len(re.findall(r'<img alt="[^"]*" src="data:image/svg\+xml;base64,', text)) == 3
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


def test_the_index_escapes_what_notebooks_say(tmp_path):
    from ci.run_series import Outcome

    outcome = Outcome("01_a", "<b>Title</b>", "a < b & c", "A", 1.25, 3, "cell x: KeyError: '<y>'")
    text = index.write([outcome], tmp_path / "index.html").read_text()
    assert "&lt;b&gt;Title&lt;/b&gt;" in text
    assert "a &lt; b &amp; c" in text
    assert "KeyError: &#x27;&lt;y&gt;&#x27;" in text
    assert "0 of 1 notebooks passed in 1.2 s" in text
