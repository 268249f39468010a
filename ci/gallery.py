"""Two pages beside the front page: every picture of the series, and every result, each with its way back.

A picture leads to its cell in the lesson; a result to its file or, where it is a stored one, shows date and machine.
It reads what a run has left in its folder and leaves out what is not there.
Use: `pictures(outcomes, folder)`, `results(outcomes, folder)`, both after the run.
"""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

import nbformat

from ci import notebook as nbk
from ci import shell
from rlinfra_utils import levels

RESULTS = nbk.NOTEBOOKS.parent / "results"
BACK = '<nav><a href="index.html">All lessons</a></nav>'

FIGURE = """<figure><a href="{page}#cell-id={cell_id}"><img alt="{alt}" src="data:image/png;base64,{png}"></a>
<figcaption>{alt}</figcaption></figure>"""


def pictures_of(notebook) -> Iterator[tuple[str, str, str]]:
    """Yield (cell id, text alternative, base64 of the PNG) of each picture; the text is empty where there is none."""
    for cell in nbk.code_cells(notebook):
        for output in cell.outputs:
            if png := output.get("data", {}).get("image/png"):
                yield cell.id, output.metadata.get("image/png", {}).get("alt", ""), "".join(png.split())


def pictures(outcomes: list, folder: Path) -> Path:
    """Write `folder`/pictures.html over the executed copies in `folder`/notebooks; return its path."""
    parts = [BACK]
    for outcome in outcomes:
        copy = folder / "notebooks" / f"{outcome.name}.ipynb"
        found = list(pictures_of(nbformat.read(copy, as_version=4))) if copy.exists() else []
        if not found:
            continue
        name = f"{escape(outcome.name)}.html"
        figures = [FIGURE.format(page=name, cell_id=escape(i), alt=escape(alt), png=png) for i, alt, png in found]
        parts.append(f'<h2><a href="{name}">{escape(outcome.title)}</a></h2>')
        parts.append('<div class="grid">' + "\n".join(figures) + "</div>")
    lead = "Every figure of the series with what it shows. A picture leads to the cell that drew it."
    target = folder / "pictures.html"
    target.write_text(shell.page("Pictures", lead, "\n".join(parts)), encoding="utf-8")
    return target


def results(outcomes: list, folder: Path) -> Path:
    """Write `folder`/results.html: result.json of each lesson of the run, then the stored results of levels A to C.

    Raises ValueError, naming the file, where a stored result is malformed.
    """
    lessons = [_lesson(outcome, folder) for outcome in outcomes]
    stored = [_stored(path.stem) for path in sorted(RESULTS.glob("*.json"))]
    parts = [BACK, "<h2>This run</h2>", _card(lessons), "<h2>Stored results</h2>", _card(stored)]
    lead = "What this run measured, and what was stored from machines and levels that this run did not use."
    target = folder / "results.html"
    target.write_text(shell.page("Results", lead, "\n".join(parts)), encoding="utf-8")
    return target


def _lesson(outcome, folder: Path) -> str:
    path = folder / "out" / outcome.name / "result.json"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    way = f"{escape(outcome.name)}.html"
    file = f"out/{escape(outcome.name)}/result.json"
    links = f'<a href="{way}">lesson</a> · <a href="{file}">result.json</a>'
    return _details(escape(outcome.title), links, measured)


def _stored(name: str) -> str:
    record = levels.stored(name)
    hardware = record["hardware"]
    machine = hardware["gpu_name"] or f"{hardware['cpu_count']} CPU cores ({hardware['cpu_model']})"
    words = f"level {record['level']} · {record['date']} · {escape(machine)}"
    return _details(f"<code>{escape(name)}</code>", words, record["result"])


def _details(title: str, words: str, values: dict) -> str:
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(_text(value))}</td></tr>" for key, value in values.items())
    head = f'<summary>{title} <span class="about">· {words}</span></summary>'
    return f'<details>{head}<div class="scroll"><table>{rows}</table></div></details>'


def _text(value) -> str:
    """A value on one line, numbers in four digits."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _card(parts: list[str]) -> str:
    return f'<div class="card">{"".join(parts)}</div>' if any(parts) else '<p class="about">None.</p>'
