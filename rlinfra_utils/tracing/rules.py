"""Alert rules over a run folder, each with a threshold and where that comes from: `RULES`, `alerts`.

Models: a figure beyond its threshold, when it began, how far it went, under which configuration, and whether the
configuration had just changed. Leaves out sending the alert anywhere. Use: `print(alerts(read_run("out/run")))`;
`alerts(run, rules=[replace(rule, threshold=8) for rule in RULES])`.

A threshold is a default to start from: a lag of 5 is a fault in a run that allows 4, and nothing in one that allows 8.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from rlinfra_utils.doors import choice, is_number, short
from rlinfra_utils.tracing.figures import FIGURES, JUMP_BATCHES, standing
from rlinfra_utils.tracing.reading import RunData, require_run


@dataclass(frozen=True)
class Rule:
    """`figure` (of `figures.FIGURES`) beyond `threshold`: above it, or below it unless `above`.

    `source`: where the threshold comes from. `advice`: what to look at first. Raises ValueError for a figure that
    there is not and a threshold that is no number.
    """

    name: str
    figure: str
    threshold: float
    unit: str
    source: str
    advice: str
    above: bool = True

    def __post_init__(self) -> None:
        choice("figure", self.figure, FIGURES)
        if not is_number(self.threshold) or self.threshold != self.threshold:
            raise ValueError(f"threshold={short(self.threshold)}: rule {self.name!r} needs a number")

    def beyond(self, values: pd.Series) -> pd.Series:
        """Which values break the rule; a value equal to the threshold keeps it."""
        return values > self.threshold if self.above else values < self.threshold


@dataclass(frozen=True)
class Alert:
    """A rule was broken by `subject`: from `first_unix_s` on, by `worst` at its worst, `num_breaches` times.

    `ongoing`: the figure's last row breaks it still. `config_change`: what had just changed, or None.
    """

    rule: Rule
    subject: str
    first_unix_s: float
    worst: float
    num_breaches: int
    ongoing: bool
    branch_id: str
    config_hash: str
    config_change: str | None

    @property
    def evidence(self) -> str:
        """One sentence with the numbers."""
        side = "above" if self.rule.above else "below"
        end = "still so at the end" if self.ongoing else "over by the end"
        return (
            f"{self.rule.figure} {self.worst:.4g} {self.rule.unit}, {side} {self.rule.threshold:g}, at {self.subject}; "
            f"first at {self.first_unix_s:.0f} unix s, {self.num_breaches} time(s), {end}"
        )

    def __str__(self) -> str:
        label = f" [coincides with a change of configuration: {self.config_change}]" if self.config_change else ""
        return f"{self.rule.name}: {self.evidence}; branch {self.branch_id}, config_hash {self.config_hash}{label}"


class Alerts(list):
    """A list of `Alert`; `unjudged` says why a rule could not be judged, by its name: silence is not health."""

    def __init__(self, found: Iterable[Alert], unjudged: dict[str, str]) -> None:
        super().__init__(found)
        self.unjudged = unjudged

    def __str__(self) -> str:
        lines = [str(alert) for alert in self] or ["no alert"]
        return "\n".join([*lines, *(f"not judged: {name}: {reason}" for name, reason in self.unjudged.items())])

    def _repr_html_(self) -> str:
        fired = [(a.rule.name, a.evidence, a.config_change or "", a.config_hash, a.rule.advice) for a in self]
        rows = [*fired, *((name, f"not judged: {reason}", "", "", "") for name, reason in self.unjudged.items())]
        head = ("rule", "evidence", "configuration change at the same time", "config_hash", "look at")
        body = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        title = "no alert" if not fired else f"{len(fired)} alert(s)"
        return f"<b>{title}</b><table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{''.join(body)}</table>"


_CHOICE = "a choice of this course"
RULES = (
    Rule(
        "lag",
        "lag_max",
        4,
        "versions",
        "TRL async GRPO max_staleness = 4 (async_grpo_config.py, 2026-08); PRIME-RL and verl allow 8",
        "weight_sync events, queue depth: is the trainer ahead or the engines behind?",
    ),
    Rule(
        "ess",
        "normalized_ess",
        0.5,
        "of n",
        "n / 2, the usual bound for resampling in sequential Monte Carlo (Doucet, de Freitas and Gordon 2001)",
        "lag first, then mismatch.diagnose on a batch of these rollouts",
        above=False,
    ),
    Rule(
        "degenerate_groups",
        "degenerate_group_share",
        0.5,
        "of groups",
        "derived: informative groups/s = groups/s x (1 - share); above 0.5 most of the generation teaches nothing",
        "task difficulty, the verifier, group size",
    ),
    Rule(
        "truncation",
        "truncation_share",
        0.2,
        "of rollouts",
        f"{_CHOICE}; from 0.05 on the p95 of the length is the limit itself",
        "max_new_tokens, stop strings, a policy that no longer ends",
    ),
    Rule(
        "dead_producer",
        "silence_intervals",
        3,
        "heartbeat intervals",
        "Kubernetes liveness probe, failureThreshold = 3 by default (V1Probe)",
        "the worker's own log; what the queue then held",
    ),
    Rule(
        "queue_growth",
        "queue_growth",
        1,
        "times",
        f"{_CHOICE}; a test draws queues that only drift (correlation 0.9 a reading): 1 in 20 at most passes it",
        "verifier and trainer rates; back-pressure",
    ),
    Rule(
        "checkpoint_age",
        "checkpoint_gap_s",
        1800,
        "s",
        f"{_CHOICE}; set it to twice checkpoint.young_interval of your own save time and failure rate",
        "checkpoint_saved events, free disk, the writer's thread",
    ),
    Rule(
        "length_jump",
        "response_length_jump",
        1.5,
        "times",
        f"{_CHOICE}; five batches all beyond the five before: 2 in 252 by chance, and by half as much again",
        "the configuration first: max_new_tokens, template, decoding",
    ),
)


def alerts(run: RunData, rules: Iterable[Rule] = RULES, now_unix_s: float | None = None) -> Alerts:
    """What breaks which rule in `run`, one alert a rule and subject (all batches are one subject), in order of `rules`.

    `now_unix_s` is what silence and ages are counted up to: give time.time() for a run that should be alive; None is
    the latest stamp in the files. Raises ValueError for rules that are none, and a `now_unix_s` before that stamp.
    """
    last_unix_s = require_run(run).last_unix_s
    now_unix_s = (last_unix_s or 0.0) if now_unix_s is None else now_unix_s
    if not is_number(now_unix_s) or not now_unix_s >= (last_unix_s or 0.0):
        raise ValueError(f"now_unix_s={short(now_unix_s)}: needs unix seconds, not before the last stamp {last_unix_s}")
    if not isinstance(rules, Iterable):
        raise ValueError(f"rules={short(rules)}: needs a list of tracing.Rule")
    found: list[Alert] = []
    unjudged: dict[str, str] = {}
    batches = standing(run)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules: {short(rule)} is no tracing.Rule")
        figure = FIGURES[rule.figure](run, batches, now_unix_s)
        if figure.empty:
            unjudged[rule.name] = figure.attrs["reason"]
        is_step = figure["subject"].astype(str).str.startswith("step ")
        groups = figure["subject"].where(~is_step, "training batches")
        found += [alert for _, rows in figure.groupby(groups, sort=False) if (alert := _judge(run, rule, rows))]
    return Alerts(found, unjudged)


def _judge(run: RunData, rule: Rule, rows: pd.DataFrame) -> Alert | None:
    """The alert of one subject, its rows in order of time."""
    beyond = rows[rule.beyond(rows["value"])]
    if beyond.empty:
        return None
    worst = beyond.loc[beyond["value"].idxmax() if rule.above else beyond["value"].idxmin()]
    first = beyond.iloc[0]
    return Alert(
        rule=rule,
        subject=worst["subject"],
        first_unix_s=float(first["time_unix_s"]),
        worst=float(worst["value"]),
        num_breaches=len(beyond),
        ongoing=bool(beyond.index[-1] == rows.index[-1]),
        branch_id=first["branch_id"],
        config_hash=first["config_hash"],
        config_change=config_change(run, first["branch_id"], float(first["time_unix_s"])),
    )


def config_change(run: RunData, branch_id: str, time_unix_s: float) -> str | None:
    """What the configuration of a branch changed against the branch before, if `time_unix_s` is in its beginning.

    The beginning: up to the stamp of its fifth batch. None for the first branch, for later, and for no change.
    """
    branches = list(run.description.branches.values())
    place = [branch.branch_id for branch in branches].index(branch_id) if branch_id in run.description.branches else 0
    own = run.batches.loc[run.batches["branch_id"] == branch_id, "time_unix_s"]
    if place == 0 or (len(own) and time_unix_s > own.iloc[:JUMP_BATCHES].max()):
        return None
    before, after = branches[place - 1].config, branches[place].config
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    changes = [f"{name} {short(before.get(name, 'absent'))} -> {short(after.get(name, 'absent'))}" for name in names]
    return ", ".join(changes) or None
