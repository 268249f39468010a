"""Writes the front page of an executed series: a line a notebook, what ran, when and with which versions.

Beside it come the pages of pictures and of results (`gallery.py`), so that each lesson, picture and result is two
clicks away. Nothing on them needs the network. Leaves out the lessons' own pages (`page.py`).
Use: `write(outcomes, folder / "index.html")`.
"""

import datetime
import importlib.metadata
import os
import platform
from html import escape
from pathlib import Path

from ci import gallery, shell

PACKAGES = ("rlinfra-utils", "torch", "transformers", "numpy", "pandas", "pyarrow", "papermill")

#: Pages beside the lessons, by file: a link stands on the front page where the file is in its folder.
BESIDE = {
    "pictures.html": "All pictures",
    "results.html": "All results",
    "api/rlinfra_utils.html": "The package, by module",
    "recipes.html": "Recipes",
}

ROW = """<li>
<a href="{name}.html">{title}</a>
<span class="run"><span class="{style}">{verdict}</span> · level {level} · {seconds:.1f} s · {num_cells} cells</span>
<span class="about">{sentence}</span>
<span class="run"><a href="notebooks/{name}.ipynb">{name}.ipynb</a></span>{error}
</li>"""


def row(outcome) -> str:
    """Return the list item of one notebook's outcome."""
    return ROW.format(
        name=escape(outcome.name),
        title=escape(outcome.title or outcome.name),
        sentence=escape(outcome.sentence),
        style="failed" if outcome.failure else "ok",
        verdict="failed" if outcome.failure else "ok",
        level=escape(outcome.level),
        seconds=outcome.seconds,
        num_cells=outcome.num_cells,
        error=f'\n<span class="error">{escape(outcome.failure)}</span>' if outcome.failure else "",
    )


def versions() -> str:
    """Return Python's version and those of the packages that matter, as far as they are installed."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def write(outcomes: list, target: Path) -> Path:
    """Write the front page over `outcomes` (the list that `run_series.run` returns) and return its path.

    Writes pictures.html and results.html into the same folder first.
    """
    gallery.pictures(outcomes, target.parent)
    gallery.results(outcomes, target.parent)
    when = datetime.datetime.now().astimezone().strftime("on %d %B %Y at %H:%M %Z").strip()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    links = [f'<a href="{name}">{words}</a>' for name, words in BESIDE.items() if (target.parent / name).exists()]
    passed, seconds = sum(not outcome.failure for outcome in outcomes), sum(outcome.seconds for outcome in outcomes)
    parts = [
        f"<nav>{' '.join(links)}</nav>",
        "<ol>",
        *map(row, outcomes),
        "</ol>",
        f"<footer>{passed} of {len(outcomes)} notebooks passed in {seconds:.1f} s. {escape(versions())}.</footer>",
    ]
    lead = (
        "What a lesson predicts of this machine is measured in the same lesson; "
        f"these pages show what was measured {when} on {machine}."
    )
    page = shell.page("The infrastructure of online RL: the executed series", lead, "\n".join(parts))
    target.write_text(page, encoding="utf-8")
    return target
