"""One HTML page of a run, without a server and without a network: `dashboard`.

Models: alerts, figures batch by batch with the changes of configuration marked, all metrics, one optimizer step as a
picture, and what is wrong with the files. Leaves out interaction. Light or dark as the reader's system is.
Use: `dashboard(read_run("out/run"), "out/run/dashboard.html")`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from rlinfra_utils.tracing.chain import follow
from rlinfra_utils.tracing.figures import standing
from rlinfra_utils.tracing.metrics import metrics
from rlinfra_utils.tracing.picture import chains_svg, sparkline
from rlinfra_utils.tracing.reading import RunData
from rlinfra_utils.tracing.rules import RULES, Rule, alerts

#: Columns of `per_batch` that are drawn, with their units.
DRAWN = {
    "mean_reward": "",
    "mean_response_tokens": "tokens",
    "truncation_share": "of rollouts",
    "degenerate_group_share": "of groups",
    "lag_max": "versions",
    "normalized_ess": "of n",
    "kl": "nats a token",
    "entropy": "nats a token",
}
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;background:#fff;color:#1b1b1b}
table{border-collapse:collapse;font-size:12px}td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid #8884}
.lines{display:flex;flex-wrap:wrap;gap:1rem}.lines figure{margin:0}section{overflow-x:auto}
@media (prefers-color-scheme:dark){body{background:#16181c;color:#e8e8e8}}
"""


def dashboard(
    run: RunData, path: str | os.PathLike, rules: Iterable[Rule] = RULES, now_unix_s: float | None = None
) -> Path:
    """Write the page of `run` to `path` and return that; see `alerts` and `metrics` for the other arguments.

    Every text from the run is escaped. Raises ValueError as `alerts` does, OSError where the file cannot be written.
    """
    sections = {
        "Alerts": alerts(run, rules, now_unix_s)._repr_html_(),
        "Batch by batch": _lines(run),
        "Metrics of the last branch": metrics(run, now_unix_s=now_unix_s)._repr_html_(),
        "The last optimizer step": _last_step(run),
        "What is wrong with the files": _problems(run),
    }
    title = html.escape(f"Run {run.run_id}")
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections.items())
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1>{_branches(run)}{body}</body></html>\n"
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _branches(run: RunData) -> str:
    rows = [
        f"<tr><td>{html.escape(branch.branch_id)}</td><td>{html.escape(branch.config_hash)}</td>"
        f"<td>{html.escape(', '.join(f'{name}={value}' for name, value in branch.config.items()))}</td></tr>"
        for branch in run.description.branches.values()
    ]
    return f"<table><tr><th>branch</th><th>config_hash</th><th>configuration</th></tr>{''.join(rows)}</table>"


def _lines(run: RunData) -> str:
    """A line a figure over all batches that stand; red where the configuration changed."""
    batches = standing(run).reset_index(drop=True)
    if batches.empty:
        return "<p>no training batch</p>"
    changed = batches["config_hash"].ne(batches["config_hash"].shift(fill_value=batches["config_hash"].iloc[0]))
    marks = [int(place) for place in batches.index[changed]]
    drawn = "".join(_line(batches[column], column, unit, marks) for column, unit in DRAWN.items())
    caption = "Each line runs over the training batches in order; a dashed red bar is a change of configuration."
    return f'<p>{caption}</p><div class="lines">{drawn}</div>'


def _line(values: pd.Series, name: str, unit: str, marks: list[int]) -> str:
    values = values.astype(float)
    known, text = values.dropna(), "absent"
    if len(known):
        text = f"{known.min():.4g} to {known.max():.4g} {unit}".rstrip() + f", last {known.iloc[-1]:.4g}"
    return f"<figure>{sparkline(list(values), name, marks)}<figcaption>{name}: {text}</figcaption></figure>"


def _last_step(run: RunData) -> str:
    if run.batches.empty:
        return "<p>no training batch</p>"
    last = run.batches.iloc[-1]
    return chains_svg(follow(run, optimizer_step=int(last["optimizer_step"]), branch_id=last["branch_id"]))


def _problems(run: RunData) -> str:
    listed = "".join(f"<li>{html.escape(problem)}</li>" for problem in run.problems)
    return f"<ul>{listed}</ul>" if listed else "<p>nothing found</p>"
