"""A rubric for a plan: each line passes or stays open, with its reason and what to do. No total.

Models: what can be told from the plan itself (recomputed, not believed) and from the evidence filed in it. Leaves out
taste. A line that nothing could fail would be no line: `tests/test_plan_grading.py` fails each of them.
Use: `print(grade(run_plan))`; `grade(run_plan).open` are the lines to work on.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from rlinfra_utils.checkpoint import young_interval
from rlinfra_utils.doors import instance
from rlinfra_utils.memory import GIB
from rlinfra_utils.plan.brief import FACTS
from rlinfra_utils.plan.choosing import LEAST_LENGTH_RATIO
from rlinfra_utils.plan.drawing import REQUIRED_FIELDS, memory_of, split_of
from rlinfra_utils.plan.runplan import PREFLIGHT, RunPlan

#: The ledger leaves out fragmentation and the engine's workspaces, so that a plan needs this share free.
LEAST_MARGIN = 0.1
#: Within this factor of Young's interval the overhead is at most 1.25 times the least: H(x) / H(1) = (x + 1 / x) / 2.
YOUNG_FACTOR = 2.0
#: A period this much longer than that of the best split is more than the curves' own error.
PERIOD_FACTOR = 1.1


@dataclass(frozen=True)
class Line:
    """One point: passed or open, why, and what to do where it is open."""

    name: str
    passed: bool
    reason: str
    todo: str


@dataclass(frozen=True)
class Rubric:
    """The lines: first of the plan, then of the evidence, in pre-flight order."""

    lines: tuple[Line, ...]

    @property
    def open(self) -> list[Line]:
        """Lines to work on."""
        return [line for line in self.lines if not line.passed]

    def __getitem__(self, name: str) -> Line:
        """The line of this name."""
        return next(line for line in self.lines if line.name == name)

    def frame(self) -> pd.DataFrame:
        """One row a line."""
        return pd.DataFrame([vars(line) for line in self.lines])

    def __str__(self) -> str:
        return "\n".join(
            f"{'pass' if line.passed else 'OPEN'}  {line.name}: {line.reason}"
            + ("" if line.passed else f"\n      to do: {line.todo}")
            for line in self.lines
        )

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td>{'pass' if line.passed else '<b>open</b>'}</td><td>{html.escape(line.name)}</td>"
            f"<td>{html.escape(line.reason)}</td><td>{'' if line.passed else html.escape(line.todo)}</td></tr>"
            for line in self.lines
        ]
        head = "<tr><th></th><th>point</th><th>reason</th><th>to do</th></tr>"
        return f'<table style="text-align:left">{head}{"".join(rows)}</table>'


def grade(run_plan: RunPlan) -> Rubric:
    """The rubric of a plan. Raises ValueError for what is none."""
    instance("run_plan", run_plan, RunPlan, "as plan.draw_up gives")
    return Rubric((*(point(run_plan) for point in _POINTS), *_preflight(run_plan)))


def _memory(p: RunPlan) -> Line:
    found = memory_of(p.brief, p.pools.train_gpus)
    margin = 1 - found.ledger.peak_bytes / p.brief.usable_bytes
    phase = found.ledger.peak_phase
    reason = f"{phase} leaves {margin:.0%} free of {p.brief.usable_bytes / GIB:.0f} GiB; {LEAST_MARGIN:.0%} wanted"
    if found.is_lower_bound:
        reason += "; activations of this model are not counted, so it is a lower bound"
    todo = f"more GPUs, fewer prompts a GPU, a smaller micro-batch or LoRA; {found.verdict}"
    return Line("memory fits with a margin", margin >= LEAST_MARGIN and not found.is_lower_bound, reason, todo)


def _split(p: RunPlan) -> Line:
    name = "split near the crossing"
    if p.brief.placement == "colocated":
        total = p.brief.generate.at(p.brief.num_gpus) + p.brief.train.at(p.brief.num_gpus)
        return Line(name, True, f"colocated: no split, the stages take turns, {total:.1f} s a batch", "")
    best = split_of(p.brief)
    period_s = max(p.brief.generate.at(p.pools.generate_gpus), p.brief.train.at(p.pools.train_gpus))
    reason = (
        f"{p.pools.generate_gpus} + {p.pools.train_gpus} GPUs: a batch every {period_s:.1f} s; "
        f"best {best.gpus['generate']} + {best.gpus['train']}: {best.period_s:.1f} s"
    )
    return Line(name, period_s <= PERIOD_FACTOR * best.period_s, reason, f"take {best.gpus}")


def _staleness(p: RunPlan) -> Line:
    q = p.queue
    if q.bound_of == "nothing":
        reason = f"{q.controller} bounds no age; the simulated run reached {p.predicted.max_lag_versions:g} versions"
    else:
        reason = f"lag since dispatch at most {q.bound_versions} versions, of {q.bound_of}; over that: {q.over_age}"
    todo = "a rule that bounds each rollout (drop_lag, or nemo_rl), or accept it and alert on lag_max"
    return Line("staleness bounded, with its unit", q.bound_of == "each rollout", reason, todo)


def _target(p: RunPlan) -> Line:
    t, seen = p.brief.target, p.predicted
    limits = {
        "mean_lag_steps": (seen.mean_lag_steps, t.mean_lag_steps, "a lag of at most {:g} steps", 1),
        "updates_per_day": (seen.updates_per_day, t.updates_per_day, "at least {:g} updates a day", -1),
    }
    asked = {name: limit for name, limit in limits.items() if limit[1] is not None}
    wanted = " and ".join(words.format(limit) for _, limit, words, _ in asked.values())
    met = all(sign * value <= sign * limit for value, limit, _, sign in asked.values())
    reason = f"{seen.updates_per_day:.0f} updates a day at a mean lag of {seen.mean_lag_steps:.2f} steps; "
    reason += f"wanted: {wanted or 'no number'}"
    todo = "more GPUs, shorter answers, a smaller batch, or another target"
    return Line("target met", met, reason, todo)


def _lengths(p: RunPlan) -> Line:
    ratio, cut = p.predicted.trained_length_ratio, p.brief.lengths.share_cut_at(p.brief.max_new_tokens)
    reason = (
        f"trained answers have {ratio:.1%} of the length offered; {cut:.1%} are cut at {p.brief.max_new_tokens} tokens"
    )
    reason += "; both are reported" if p.contract.report_lengths else "; lengths are not reported"
    ok = p.contract.report_lengths and ratio >= LEAST_LENGTH_RATIO and cut <= 0.05
    return Line("bias of lengths declared", ok, reason, "report offered and trained lengths; drop less, or cut later")


def _contract(p: RunPlan) -> Line:
    missing = [name for name in REQUIRED_FIELDS if name not in p.contract.required_fields]
    if p.contract.partial_rollouts and "version_spans" not in p.contract.required_fields:
        missing.append("version_spans")
    if "version_spans" in p.contract.required_fields:  # which say more than one version
        missing = [name for name in missing if name != "policy_version"]
    mode = p.contract.decoding.get("logprobs_mode")
    reason = f"log-probs {mode}; lacking: {', '.join(missing) or 'nothing'}"
    todo = "require the fields that lack, and the log-probs of the distribution sampled from (processed)"
    return Line("contract names versions and log-probs", not missing and mode == "processed", reason, todo)


def _verified(p: RunPlan) -> Line:
    planned = {"verify": p.sync.verify_each_update, "zero-lag check": p.sync.zero_lag_each_update}
    lacking = [name for name, there in planned.items() if not there]
    limit = p.sync.zero_lag_limit_nats
    reason = f"not at each update: {', '.join(lacking)}" if lacking else "both at each update"
    reason += f", limit {limit:.2g} nats" if limit is not None else ", without a limit"
    todo = "plan both, and measure the mismatch on equal weights once for the limit (zero_lag_nats)"
    return Line("updates verified, lag 0 checked", not lacking and limit is not None, reason, todo)


def _checkpoints(p: RunPlan) -> Line:
    young_s = young_interval(p.brief.checkpoint_write_s, p.brief.mtbf_s)
    ratio = p.recovery.interval_s / young_s
    reason = f"every {p.recovery.interval_s:.0f} s, {ratio:.2f} of Young's {young_s:.0f} s"
    return Line(
        "checkpoints near Young's interval",
        1 / YOUNG_FACTOR <= ratio <= YOUNG_FACTOR,
        reason,
        f"save every {young_s:.0f} s",
    )


def _restart(p: RunPlan) -> Line:
    saved = p.recovery.save_data_position
    reason = f"queue: {p.recovery.queue_at_restart}; data position {'saved' if saved else 'NOT saved'}"
    return Line("restart declared", saved, reason, "save the data position with each checkpoint")


def _alerting(p: RunPlan) -> Line:
    lag, age = p.alerts.get("lag"), p.alerts.get("checkpoint_age")
    wrong = [name for name in ("lag", "ess", "checkpoint_age") if name not in p.alerts]
    if lag and p.queue.bound_of == "each rollout" and lag.value > p.queue.bound_versions:
        wrong.append(f"lag speaks above {lag.value:g}, the rule bounds {p.queue.bound_versions}")
    if age and age.value < p.recovery.interval_s:
        wrong.append(f"checkpoint_age {age.value:.0f} s is below the planned interval: it always speaks")
    reason = f"{len(p.alerts)} rules" + (
        f"; wrong or absent: {', '.join(wrong)}" if wrong else ", in keeping with the plan"
    )
    return Line("alerts in keeping with the plan", not wrong, reason, "set each threshold from the plan's own numbers")


def _measured(p: RunPlan) -> Line:
    assumed = [name for name in FACTS if name not in p.brief.measured]
    reason = f"measured: {', '.join(p.brief.measured) or 'none'}; assumed: {', '.join(assumed) or 'none'}"
    return Line("numbers measured", not assumed, reason, "measure them on a short run and say where, in `measured`")


_POINTS: tuple[Callable[[RunPlan], Line], ...] = (
    _memory,
    _split,
    _staleness,
    _target,
    _lengths,
    _contract,
    _verified,
    _checkpoints,
    _restart,
    _alerting,
    _measured,
)


def _preflight(p: RunPlan) -> Iterator[Line]:
    """A line a pre-flight step: done and as it has to be, or open."""
    for step, (title, tool) in PREFLIGHT.items():
        found = p.evidence.get(step)
        reason = "not done yet" if found is None else f"{found.date}: {found.found}"
        todo = (
            f"do it ({tool}), then with_evidence({step!r}, ...)" if found is None else "find out why, then do it again"
        )
        yield Line(title, found is not None and found.ok, reason, todo)
