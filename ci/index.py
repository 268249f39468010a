"""Writes the front page of an executed series: a line a notebook, what ran, when and with which versions.

One HTML file without scripts, fonts or pictures from elsewhere; links are relative, so the folder can be moved or
served. It follows the reader's choice of light or dark. Use: `write(outcomes, folder / "index.html")`.
"""

import datetime
import importlib.metadata
import os
import platform
from html import escape
from pathlib import Path

PACKAGES = ("rlinfra-utils", "torch", "transformers", "numpy", "pandas", "pyarrow", "papermill")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>The infrastructure of online RL: the executed series</title>
<style>
:root {{ --ink: #1c2733; --soft: #5b6b7b; --paper: #fbfcfd; --card: #fff; --line: #dfe5ea; --link: #0b62a8;
  --ok: #1a7f4b; --bad: #b3261e; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e4eaf0; --soft: #9aaaba; --paper: #12181f; --card: #19212a; --line: #2c3742; --link: #74b8f2;
    --ok: #5fc98f; --bad: #ff8a80; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, sans-serif; }}
main {{ max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem; }}
h1 {{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }}
p.lead {{ color: var(--soft); margin: 0 0 2rem; max-width: 44rem; }}
a {{ color: var(--link); text-decoration: none; }}
a:hover {{ text-decoration: underline; }}
ol {{ list-style: none; margin: 0; padding: 0; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); }}
li {{ display: grid; grid-template-columns: 1fr auto; gap: .1rem 1.5rem; padding: 1rem 1.25rem; }}
li + li {{ border-top: 1px solid var(--line); }}
li > a {{ font-weight: 600; font-size: 1.05rem; }}
.run {{ color: var(--soft); font-size: .875rem; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }}
.about {{ color: var(--soft); font-size: .94rem; }}
.ok {{ color: var(--ok); font-weight: 600; }}
.failed {{ color: var(--bad); font-weight: 600; }}
.error {{ grid-column: 1 / -1; color: var(--bad); font: .82rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }}
footer {{ color: var(--soft); font-size: .875rem; margin-top: 1.5rem; }}
@media (max-width: 40rem) {{ li {{ grid-template-columns: 1fr; }} .run {{ text-align: left; }} }}
</style>
</head>
<body>
<main>
<h1>The infrastructure of online RL: the executed series</h1>
<p class="lead">Each number that a lesson predicts is measured in the same lesson; these pages show what was measured
{when} on {machine}.</p>
<ol>
{rows}
</ol>
<footer>{passed} of {count} notebooks passed in {seconds:.1f} s. {versions}.</footer>
</main>
</body>
</html>
"""

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
    """Write the front page over `outcomes` (the list that `run_series.run` returns) and return its path."""
    page = PAGE.format(
        when=datetime.datetime.now().astimezone().strftime("on %d %B %Y at %H:%M %Z").strip(),
        machine=escape(f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
        rows="\n".join(row(outcome) for outcome in outcomes),
        passed=sum(not outcome.failure for outcome in outcomes),
        count=len(outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
        versions=escape(versions()),
    )
    target.write_text(page, encoding="utf-8")
    return target
