"""Turns an executed notebook into one HTML file that needs no network, in light and dark, down to a phone's width.

nbconvert's `lab` template loads MathJax, require.js and mermaid from a CDN: this page leaves them out and draws
formulas as SVG pictures by matplotlib's mathtext. It knows less than MathJax: a formula that it cannot draw stays
readable as its TeX source, and `write` returns it. Pictures keep their white ground in the dark, so that their
colours mean the same. The bootstrap cell is not shown. Use: `write(notebook_path, html_path)`.
"""

import base64
import functools
import html
import io
from pathlib import Path

import matplotlib
import nbformat
from bs4 import BeautifulSoup
from jinja2 import pass_context
from matplotlib import mathtext
from matplotlib.font_manager import FontProperties
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from traitlets.config import Config

from ci import notebook as nbk

STYLE = """
:root { color-scheme: light dark; --jp-content-line-height: 1.6; --jp-content-heading-line-height: 1.25; }
@media (prefers-color-scheme: dark) {
  :root { --jp-layout-color0: #12181f; --jp-layout-color1: #12181f; --jp-cell-editor-background: #19212a;
    --jp-rendermime-table-row-background: #19212a; --jp-content-link-color: #74b8f2; --jp-border-color2: #2c3742;
    --jp-cell-editor-border-color: #2c3742; }
  img.math { filter: invert(0.9); }
}
html, body { background: var(--jp-layout-color0); }
body.jp-Notebook { max-width: 66rem; margin: 0 auto; padding: 0 0.75rem 4rem; height: auto; overflow: visible; }
nav.series { padding: 1rem 0; font: 14px/1.6 system-ui, sans-serif; color: var(--jp-content-font-color1); }
nav.series a { color: var(--jp-content-link-color); text-decoration: none; }
nav.series summary { cursor: pointer; }
div.math, .jp-MarkdownOutput, .jp-OutputArea-output { overflow-x: auto; }
div.math { text-align: center; margin: 1em 0; }
.jp-Cell-inputWrapper:focus, .jp-OutputArea-output:focus-visible { outline: none; }
.jp-InputArea-editor { overflow-x: auto; }
.highlight pre { white-space: pre; width: max-content; min-width: 100%; }
.jp-MarkdownOutput table { display: block; width: fit-content; max-width: 100%; overflow-x: auto; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { max-width: 34rem; }
.jp-RenderedImage img { background: #fff; border-radius: 6px; max-width: 100%; height: auto; }
@media (max-width: 48rem) {
  .jp-InputPrompt, .jp-OutputPrompt { display: none; }
  .jp-RenderedImage img { max-width: none; zoom: 0.72; }
  .jp-RenderedText pre { white-space: pre; }
  .jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { min-width: 4.5rem; }
}
"""

# `data_png` is nbconvert's own without what we do not use, and with the text alternative, which it drops.
TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}
{{ resources.include_css("static/theme-dark.css")
   | replace('type="text/css"', 'media="(prefers-color-scheme: dark)"') }}
<style>STYLE</style>
{%- endblock -%}
{%- block body_header -%}{{ super() }}
<nav class="series"><a href="index.html">All lessons</a>
<details><summary>In this lesson</summary>
{%- for id, text in resources.contents %}<div><a href="#cell-id={{ id }}">{{ text | e }}</a></div>{% endfor -%}
</details></nav>
{%- endblock -%}
{%- block data_png -%}
<div class="jp-RenderedImage jp-OutputArea-output"><img src="data:image/png;base64,{{ output.data['image/png'] }}"
{%- set alt = output | get_metadata('alt', 'image/png') %}{% if alt %} alt="{{ alt | e }}"{% endif %}></div>
{%- endblock -%}
{%- block data_latex -%}
<div class="jp-RenderedLatex jp-OutputArea-output">{{ output.data['text/latex'] | markdown2html }}</div>
{%- endblock -%}
""".replace("STYLE", STYLE)


@functools.cache
def drawn(tex: str, size_pt: float) -> str:
    """Return the formula as an `<img>` with an SVG in it and the TeX source as its text alternative.

    Raises ValueError when mathtext does not know a command in it.
    """
    picture = io.BytesIO()
    font = FontProperties(size=size_pt, math_fontfamily="stix")
    with matplotlib.rc_context({"figure.facecolor": "none"}):
        depth_pt = mathtext.math_to_image(f"${tex}$", picture, prop=font, dpi=72, format="svg")
    source = base64.b64encode(picture.getvalue()).decode()
    style = f"vertical-align:-{depth_pt:.1f}pt"
    return f'<img class="math" alt="{html.escape(tex)}" style="{style}" src="data:image/svg+xml;base64,{source}">'


class Renderer(IPythonRenderer):
    """nbconvert's Markdown renderer with formulas as pictures; `plain` collects the formulas left as TeX."""

    def __init__(self, plain: list, **options):
        super().__init__(**options)
        self.plain = plain

    def inline_math(self, body: str) -> str:
        """Draw `$body$` in the line."""
        return self._math(body, 10.5)

    def block_math(self, body: str) -> str:
        """Draw `$$body$$` on a line of its own, with fractions at full size."""
        return f'<div class="math">{self._math(body, 12.5, display=True)}</div>'

    def latex_environment(self, name: str, body: str) -> str:
        """Show an environment such as `align` as its source: mathtext has none."""
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    def _math(self, body: str, size_pt: float, display: bool = False) -> str:
        tex = " ".join(body.replace(r"\displaystyle", "").split())  # IPython's Math writes the command
        try:
            return drawn(tex.replace(r"\frac", r"\dfrac") if display else tex, size_pt)
        except ValueError:
            self.plain.append(tex)
            return f"<code>{html.escape(tex)}</code>"


class Exporter(HTMLExporter):
    """nbconvert's HTML exporter with our template, our formulas, and no image from another host."""

    def __init__(self, plain: list):
        config = Config()
        config.TagRemovePreprocessor.enabled = True
        config.TagRemovePreprocessor.remove_input_tags = {"hide-input", "bootstrap"}
        super().__init__(config=config, raw_template=TEMPLATE, embed_images=True)
        self.plain = plain

    @pass_context
    def markdown2html(self, context, source):
        """Render Markdown; an image that another host serves becomes its text alternative."""
        cell = context.get("cell", {})
        folder = context.get("resources", {}).get("metadata", {}).get("path", "")
        renderer = Renderer(
            self.plain, escape=False, embed_images=True, path=folder, attachments=cell.get("attachments", {})
        )
        text = MarkdownWithMath(renderer=renderer).render(source)
        if "<img" not in text:
            return text
        soup = BeautifulSoup(text, "html.parser")
        for image in soup.select('img[src^="http"]'):
            image.replace_with(image.get("alt", ""))
        return str(soup)


def contents(notebook) -> list[tuple[str, str]]:
    """Return (cell id, heading) of each Markdown cell that opens a section (`## `)."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    return [(cell.id, cell.source.partition("\n")[0].removeprefix("## ")) for cell in cells]


def write(executed: Path, target: Path) -> list[str]:
    """Write the page of an executed notebook to `target`; return the formulas that it shows as TeX source."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata["title"] = nbk.heading(notebook)[0] or executed.stem
    notebook.metadata.pop("widgets", None)
    plain = []
    resources = {"metadata": {"path": str(executed.parent)}, "contents": contents(notebook)}
    text, _ = Exporter(plain).from_notebook_node(notebook, resources)
    target.write_text(text, encoding="utf-8")
    return plain
