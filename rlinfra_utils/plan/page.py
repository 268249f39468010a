"""A plan as one HTML page without a server and without a network: `report`.

Models: the rubric's open lines first, then what will be run, what was predicted, and the keys of seven stacks, folded.
Leaves out interaction. Light or dark as the reader's system is; every text is escaped.
Use: `report(run_plan, "plan.html")`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinfra_utils.plan.brief import Stage
from rlinfra_utils.plan.grading import Rubric, grade
from rlinfra_utils.plan.runplan import Memory, RunPlan
from rlinfra_utils.plan.stackkeys import keys

_STYLE = """
:root{color-scheme:light dark;--bar:#0072B2;--over:#D55E00;--soft:#8883}
body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:72rem;padding:0 1rem}
body{background:#fff;color:#1b1b1b}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:1.2rem 0 .3rem}
table{border-collapse:collapse;font-size:13px}
td,th{padding:.12rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid #8884}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(21rem,1fr));gap:0 1.5rem}section{overflow-x:auto}
.open{border-left:4px solid var(--over);padding-left:.7rem}.pass{border-left:4px solid #009E73;padding-left:.7rem}
.bar{height:.8rem;background:var(--bar)}.over .bar{background:var(--over)}.track{width:9rem;background:var(--soft)}
td b{color:var(--over)}details{margin:.3rem 0}summary{cursor:pointer}
@media (prefers-color-scheme:dark){:root{--bar:#56B4E9;--over:#E69F00}body{background:#16181c;color:#e8e8e8}}
"""


def report(run_plan: RunPlan, path: str | os.PathLike) -> Path:
    """Write the page of a plan to `path` and return that. Raises ValueError for what is no plan, OSError as `open`."""
    rubric = grade(run_plan)
    sections = {
        "What runs": _pairs(_runs(run_plan)),
        "What is predicted": _pairs(_predicted(run_plan)),
        "Memory of one GPU": _memory(run_plan.memory),
        "Contract, sync, recovery": _pairs(_rules(run_plan)),
        "Alerts": _pairs({name: f"{t.value:,.4g} {t.unit} ({t.because})" for name, t in run_plan.alerts.items()}),
        "Numbers and where they are from": _pairs(_numbers(run_plan)),
    }
    grid = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections.items())
    title = html.escape(f"Run plan: {run_plan.brief.model} on {run_plan.brief.num_gpus} GPUs")
    body = (
        f"<h1>{title}</h1>{_headline(rubric)}<section><h2>Rubric</h2>{rubric._repr_html_()}</section>"
        f'<div class="grid">{grid}</div><section><h2>Keys of seven stacks</h2>{keys(run_plan)._repr_html_()}</section>'
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    page = f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _headline(rubric: Rubric) -> str:
    names = [html.escape(line.name) for line in rubric.open]
    if not names:
        return '<p class="pass">Every line of the rubric passes.</p>'
    return f'<p class="open"><b>{len(names)} of {len(rubric.lines)} lines are open:</b> {", ".join(names)}.</p>'


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in pairs.items())
    return f"<table>{rows}</table>"


def _memory(memory: Memory) -> str:
    """A bar a phase, as long as its share of what is usable."""
    rows = []
    for phase, gib in memory.phases_gib.items():
        share = gib / memory.usable_gib
        bar = f'<div class="track"><div class="bar" style="width:{min(100.0, 100 * share):.1f}%"></div></div>'
        over = ' class="over"' if share > 1 else ""
        rows.append(f"<tr{over}><th>{html.escape(phase)}</th><td>{bar}</td><td>{share:.0%}, {gib:.1f} GiB</td></tr>")
    return f"<table>{''.join(rows)}</table><p>{html.escape(memory.verdict)}</p>"


def _runs(p: RunPlan) -> dict[str, str]:
    options = ", ".join(f"{name}={value}" for name, value in p.queue.options.items())
    bound = "none" if p.queue.bound_versions is None else f"{p.queue.bound_versions} versions, of {p.queue.bound_of}"
    return {
        "placement": p.brief.placement,
        "GPUs": f"{p.pools.generate_gpus} generate, {p.pools.train_gpus} train, {p.pools.idle_gpus} idle",
        "batch": f"{p.brief.prompts_per_step} prompts x {p.brief.group_size} answers",
        "lengths": f"log-normal, median {p.brief.lengths.median_tokens:.4g}, cut at {p.brief.max_new_tokens} tokens",
        "rule": f"{p.queue.controller}({options})",
        "weights to engines": f"every {p.queue.sync_interval} optimizer steps",
        "lag bound": f"{bound}; beyond: {p.queue.over_age}",
    }


def _predicted(p: RunPlan) -> dict[str, str]:
    seen = p.predicted
    return {
        "updates a day": f"{seen.updates_per_day:,.0f}",
        "trained tokens/s": f"{seen.tokens_per_s:,.0f}",
        "mean lag": f"{seen.mean_lag_steps:.2f} optimizer steps (largest {seen.max_lag_versions:g} versions)",
        "normalised ESS": f"{seen.normalized_ess:.3f} at {p.brief.drift_nats:.3g} nats a step",
        "pools busy": f"generation {seen.generation_utilization:.0%}, trainer {seen.trainer_utilization:.0%}",
        "queue": f"{seen.mean_queue_rollouts:,.0f} rollouts on average",
        "chosen by": f"{p.brief.target.rule}: one of {seen.num_on_front} on the front, {seen.num_simulated} simulated",
        "target": "met" if seen.met_target else "NOT met by any point of the front",
    }


def _rules(p: RunPlan) -> dict[str, str]:
    c, r = p.contract, p.recovery
    limit = "not known" if p.sync.zero_lag_limit_nats is None else f"{p.sync.zero_lag_limit_nats:.2g} nats"
    return {
        "record": ", ".join(c.required_fields),
        "decoding": ", ".join(f"{name} {value}" for name, value in c.decoding.items()),
        "correction": c.correction if c.correction == "none" else f"{c.correction} at {c.correction_high:g}",
        "weights verified": "at each update" if p.sync.verify_each_update else "not at each update",
        "lag 0 checked": ("at each update" if p.sync.zero_lag_each_update else "not at each update")
        + f", limit {limit}",
        "checkpoints": f"every {r.interval_steps} steps, {r.interval_s:,.0f} s (Young: {r.young_s:,.0f} s)",
        "their price": f"{r.overhead_share:.1%} of the time, for saves and lost work",
        "at a restart": f"queue: {r.queue_at_restart}; data position: {'saved' if r.save_data_position else 'lost'}",
    }


def _numbers(p: RunPlan) -> dict[str, str]:
    brief = p.brief
    values = {
        "lengths": f"median {brief.lengths.median_tokens:.4g} tokens, sigma {brief.lengths.sigma:.3g}",
        "generate": _stage(brief.generate),
        "train": _stage(brief.train),
        "verify_s": f"{brief.verify_s:.3g} s",
        "sync_s": f"{brief.sync_s:.3g} s",
        "checkpoint_write_s": f"{brief.checkpoint_write_s:.3g} s",
        "mtbf_s": f"{brief.mtbf_s:,.0f} s",
        "drift_nats": f"{brief.drift_nats:.3g} nats a step",
        "zero_lag_nats": "not known" if brief.zero_lag_nats is None else f"{brief.zero_lag_nats:.2g} nats",
    }
    return {name: f"{text}: {brief.measured.get(name, 'ASSUMED')}" for name, text in values.items()}


def _stage(stage: Stage) -> str:
    return f"{stage.seconds:.3g} s at {stage.at_gpus} GPUs, of which {stage.serial_share:.0%} does not shrink"
