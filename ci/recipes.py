"""The recipes of `docs/RECIPES.md`: reads them, runs them, stores what they print, and writes them as one HTML page.

A recipe is a section with one Python block and one text block below it, the output. Links to notebooks become links to
the series' pages. Leaves out the comparison, which is `tests/test_recipes.py`.
Use: `python -m ci.recipes` stores the outputs; `write(folder / "recipes.html")`.
"""

import html
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import mistune
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from ci import shell

SOURCE = Path(__file__).parent.parent / "docs" / "RECIPES.md"
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCKS = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
#: Makes a heavy import fail, then runs the file that is named.
_LIGHT = """
import runpy, sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "ray"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Forbidden())
runpy.run_path(sys.argv[1], run_name="__main__")
"""

STYLE = """
{light_code}
@media (prefers-color-scheme: dark) {{ {dark_code} }}
code {{ font: .875em/1.5 ui-monospace, SFMono-Regular, Consolas, monospace; overflow-wrap: anywhere; }}
pre {{ margin: 0; padding: .9rem 1rem; overflow-x: auto; border: 1px solid var(--line); font-size: .875rem; }}
.source pre {{ background: var(--card); border-radius: 12px 12px 0 0; }}
.source + pre {{ border-top: 0; border-radius: 0 0 12px 12px; color: var(--soft); white-space: pre-wrap; }}
"""


@dataclass(frozen=True)
class Recipe:
    """One section: its question, its text as Markdown, the Python block and the output stored below it."""

    title: str
    text: str
    source: str
    output: str

    @property
    def needs_torch(self) -> bool:
        """Whether the text says so."""
        return "Needs torch" in self.text


def read(path: Path = SOURCE) -> list[Recipe]:
    """The recipes of the page; ValueError, with the title, for a section without one source and one output."""
    found = []
    for title, text in _SECTION.findall(path.read_text(encoding="utf-8")):
        blocks = _BLOCKS.findall(text)
        if len(blocks) != 1 or text.count("```") != 4:
            raise ValueError(f"{path.name}, {title!r}: needs one python block and one text block right below it")
        found.append(Recipe(title, text, *blocks[0]))
    return found


def run(recipe: Recipe, folder: Path, python: str = sys.executable) -> str:
    """Run the block alone as a file in `folder` and return what it printed.

    Without "Needs torch" in its text, an import of torch fails. Raises RuntimeError with the block's own error.
    """
    script = folder / "recipe.py"
    script.write_text(recipe.source, encoding="utf-8")
    command = [python, str(script)] if recipe.needs_torch else [python, "-c", _LIGHT, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a word"]
        raise RuntimeError(f"{recipe.title}: {said[-1]}")
    return done.stdout


def store(path: Path = SOURCE) -> None:
    """Run every recipe and write what it prints into the page."""
    page = path.read_text(encoding="utf-8")
    for recipe in read(path):
        with tempfile.TemporaryDirectory() as folder:
            output = run(recipe, Path(folder))
        blocks = f"{recipe.source}```\n\n```text\n"
        page = page.replace(blocks + recipe.output, blocks + output)
    path.write_text(page, encoding="utf-8")


class _Renderer(mistune.HTMLRenderer):
    """Code in colour, headings that can be linked to, and links into the executed series."""

    def block_code(self, code: str, info: str | None = None) -> str:
        if info != "python":
            return f"<pre>{html.escape(code)}</pre>\n"
        return highlight(code, PythonLexer(), HtmlFormatter(cssclass="source"))

    def heading(self, text: str, level: int, **attributes) -> str:
        return f'<h{level} id="{_anchor(text)}">{text}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        """A lesson's link is named by the heading that it leads to."""
        if lesson := re.fullmatch(r"\.\./notebooks/(\w+)\.ipynb", url):
            return f'<a href="{lesson[1]}.html#{_anchor(text)}">{text}</a>'
        return super().link(text, url, title)


def _anchor(heading: str) -> str:
    """The id that nbconvert gives this heading."""
    return quote(html.unescape(heading).replace(" ", "-"), safe="?/:@!$&'()*+,;=")


def write(target: Path) -> Path:
    """Write the page, with a list of its questions at the head, and return its path."""
    head, _, rest = SOURCE.read_text(encoding="utf-8").partition("\n## ")
    title, lead, use = head.strip().split("\n\n")
    links = [(f"#{_anchor(recipe.title)}", recipe.title) for recipe in read()]
    nav = [f'<a href="{url}">{html.escape(text)}</a>' for url, text in [("index.html", "All lessons"), *links]]
    style = STYLE.format(
        light_code=HtmlFormatter(style="default").get_style_defs(".source"),
        dark_code=HtmlFormatter(style="github-dark").get_style_defs(".source"),
    )
    render = mistune.create_markdown(renderer=_Renderer(escape=False))
    body = f"<style>{style}</style>\n<nav>{' '.join(nav)}</nav>\n{render(use)}{render('## ' + rest)}"
    target.write_text(shell.page(title.removeprefix("# "), lead, body), encoding="utf-8")
    return target


if __name__ == "__main__":
    store()
