"""A plan's items in the words of seven stacks: `keys`.

Models: which configuration key of which stack carries an item of a plan, as the code stood at one commit of each, read
and not run. Leaves out what a stack derives by itself, and later versions. An item without a key says so; none is made
up. Use: `print(keys(run_plan, "verl"))`; `keys(run_plan).rows` has all seven.

Rows rest on `stacks.AXES` by the name of a cell, or on a file and lines of their own at the same commit. Values are
the plan's; words such as "product 8" stand where a stack splits one number over two keys.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from rlinfra_utils.doors import choice, instance
from rlinfra_utils.plan.runplan import RunPlan
from rlinfra_utils.stacks import AXES, STACKS
from rlinfra_utils.stacks.data import load

CHECK = "check against your version"
NO_KEY = "no key"
#: The items in order, and what the plan says of each.
ITEMS = {
    "placement": "{placement}",
    "generation GPUs": "{generate_gpus}",
    "training GPUs": "{train_gpus}",
    "group size": "{group_size} answers",
    "prompts a step": "{prompts_per_step}",
    "synchrony": "{synchrony}",
    "staleness bound": "{bound_versions} versions, {bound_of}; beyond: {over_age}",
    "sync interval": "{sync_interval} optimizer steps",
    "queue limit": "{queue_rollouts} rollouts",
    "rollouts in flight": "{slots}",
    "running requests at an update": "{at_update}",
    "temperature": "{temperature}",
    "top_p": "{top_p}",
    "longest answer": "{max_new_tokens} tokens",
    "behaviour log-probs": "of the distribution sampled from",
    "correction": "{correction} at {correction_high}",
    "checkpoint interval": "{checkpoint_steps} optimizer steps",
    "resume": "from the last checkpoint",
    "queue at a restart": "{queue_at_restart}",
    "data position": "saved",
    "weights verified at an update": "each",
    "mismatch at lag 0": "logged",
    "ESS": "logged",
    "versions in the record": "of tokenizer, template, verifier",
}
COLUMNS = ("stack", "item", "planned", "key", "value", "note", "source", "commit", "commit_date", "mark")


@dataclass(frozen=True)
class Keys:
    """One row an item and stack, `COLUMNS`; an HTML face in a notebook, with the sources folded away."""

    rows: pd.DataFrame

    def __str__(self) -> str:
        head = f"{CHECK}; sources and commits are in .rows"
        return f"{self.rows[['stack', 'item', 'planned', 'key', 'value', 'note']].to_string(index=False)}\n{head}"

    def _repr_html_(self) -> str:
        return f"<p><b>{CHECK}</b></p>" + "".join(
            _section(stack, rows) for stack, rows in self.rows.groupby("stack", sort=False)
        )


def keys(run_plan: RunPlan, stack: str | None = None) -> Keys:
    """The plan's items as keys of one stack, or of all seven. Raises ValueError for another name."""
    instance("run_plan", run_plan, RunPlan, "as plan.draw_up gives")
    wanted = STACKS if stack is None else (choice("stack", stack, STACKS),)
    modes = {"", "synchronous" if run_plan.queue.controller == "synchronous" else "asynchronous"}
    if run_plan.contract.correction != "none":
        modes.add("correction")
    table = _table()
    table = table[table["stack"].isin(wanted) & table["mode"].isin(modes)].copy()
    words = _words(run_plan)
    table["planned"] = [ITEMS[item].format(**words) for item in table["item"]]
    for column in ("value", "note"):
        table[column] = [text.format(**words) for text in table[column]]
    table["key"] = table["key"].replace("", NO_KEY)
    table["mark"] = CHECK
    order = {name: i for i, name in enumerate(STACKS)}
    table = table.sort_values("stack", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    return Keys(table[list(COLUMNS)])


@cache
def _table() -> pd.DataFrame:
    """The shipped rows with the source, commit and date of each; a row of neither cell nor source has none."""
    with (files("rlinfra_utils") / "data" / "plan" / "keys.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file, dtype=str, keep_default_na=False)
    cells = AXES.set_index("cell")["source"]
    at = [cells[cell] if cell else "" for cell in table["cell"]]
    table["source"] = ["; ".join(filter(None, pair)) for pair in zip(at, table["source"])]
    read = load("stacks.json")
    for column in ("commit", "commit_date"):
        table[column] = [read[stack][column] for stack in table["stack"]]
    return table


def _words(run_plan: RunPlan) -> dict[str, Any]:
    """What the templates of the table speak of, from the plan."""
    brief, pools, queue = run_plan.brief, run_plan.pools, run_plan.queue
    interval, batch = queue.sync_interval, brief.batch_rollouts
    bound = queue.bound_versions
    if bound is None:  # the rule bounds none: what the simulated run reached
        bound = max(1, round(run_plan.predicted.max_lag_versions))
    slots = pools.generate_gpus * brief.slots_per_gpu
    waiting = queue.options.get("max_rollouts") or max(batch, round(run_plan.predicted.mean_queue_rollouts))
    keeps = queue.make_controller().at_update == "keep"
    groups, prompts = max(1, slots // brief.group_size), brief.prompts_per_step
    return {
        "placement": brief.placement,
        "synchrony": "synchronous" if queue.controller == "synchronous" else f"asynchronous, {queue.controller}",
        "at_update": queue.make_controller().at_update,
        "correction": run_plan.contract.correction,
        "queue_at_restart": run_plan.recovery.queue_at_restart,
        "num_gpus": brief.num_gpus,
        "generate_gpus": pools.generate_gpus,
        "train_gpus": pools.train_gpus,
        "group_size": brief.group_size,
        "prompts_per_step": prompts,
        "prompts_per_version": prompts * interval,
        "batch_rollouts": batch,
        "sync_interval": interval,
        "bound_versions": bound,
        "bound_inclusive": bound + 1,
        "bound_steps": max(1, bound * interval),
        "bound_of": f"of {queue.bound_of}" if queue.bound_versions is not None else "reached, not bounded",
        "over_age": queue.over_age,
        "drop_or_wait": "drop" if queue.over_age == "drop" else "wait",
        "queue_rollouts": waiting,
        "queue_groups": max(1, waiting // brief.group_size),
        "queue_batches": max(1, round(waiting / batch)),
        "slots": slots,
        "slot_groups": groups,
        "skyrl_workers": min(max(groups, prompts), prompts * (bound * interval + 1)),
        "give_if_keep": "give it" if keeps else "leave it off",
        "true_if_keep": str(keeps).lower(),
        "temperature": brief.temperature,
        "top_p": brief.top_p,
        "max_new_tokens": brief.max_new_tokens,
        "correction_high": run_plan.contract.correction_high,
        "checkpoint_steps": run_plan.recovery.interval_steps,
        "checkpoint_versions": max(1, round(run_plan.recovery.interval_steps / interval)),
    }


def _section(stack: str, rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    at = f"{html.escape(stack)}, commit {first['commit'][:12]} of {first['commit_date']}"
    cells = [
        f"<tr><td>{html.escape(row.item)}</td><td>{html.escape(row.planned)}</td><td><code>{html.escape(row.key)}</code></td>"
        f"<td>{html.escape(row.value)}</td><td>{html.escape(row.note)}</td>"
        f'<td style="overflow-wrap:anywhere;font-size:85%">{html.escape(row.source)}</td></tr>'
        for row in rows.itertuples()
    ]
    head = "<tr><th>item</th><th>planned</th><th>key</th><th>value</th><th>note</th><th>read in</th></tr>"
    found = (rows["key"] != NO_KEY).sum()
    title = f"<summary>{at}: a key for {found} of {len(rows)} items</summary>"
    return f'<details>{title}<table style="text-align:left">{head}{"".join(cells)}</table></details>'
