"""From a split of the GPUs to a rule: simulate rules, limits and sync intervals, keep the front, pick by the target.

Models: five families of rules at a few settings each, near the best split. Leaves out rules of one's own: sweep them
with `simulator.sweep`. A large loop is simulated as 1 / scale of its batch and slots, which keeps its ratios.
Use: `table = sweep_rules(brief, split); row, met = pick(front(table), brief.target)`.

A rule that reaches its speed by dropping long answers has not earned it: rows that lose more than 2 % of the mean
length are not on the front. Blocked loops are not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rlinfra_utils.plan.brief import Brief, Target
from rlinfra_utils.simulator import CONTROLLERS, LoopConfig, sweep

SETTINGS = (1, 2, 4, 8)
SYNC_INTERVALS = (1, 2, 4)
NUM_STEPS, WARM_UP = 24, 1 / 3
#: Groups of a step that a scaled-down loop keeps at least: "a batch is many groups" has to stay true.
LEAST_GROUPS = 8
LEAST_LENGTH_RATIO = 0.98
DAY_S = 86_400


@dataclass(frozen=True)
class Rule:
    """A controller by name and arguments, and what it bounds; rollouts in `options` are of the full-sized loop."""

    controller: str
    options: dict[str, Any]
    bound_versions: int | None
    bound_of: str
    over_age: str

    def scaled(self, scale: int) -> Any:
        """The controller for a loop of 1 / scale."""
        counted = {"max_rollouts", "concurrency"}
        shrunk = {name: max(1, value // scale) if name in counted else value for name, value in self.options.items()}
        return CONTROLLERS[self.controller](**shrunk)


def rules(brief: Brief, slots: int, sync_interval: int) -> list[Rule]:
    """The rules that are tried: those that keep the target's bound, where it has one.

    Colocated stages take turns, so that for them there is one rule. Raises ValueError where none keeps the bound.
    """
    bound = brief.target.max_lag_versions
    tried = list(_rules(brief, slots, sync_interval))
    kept = [r for r in tried if bound is None or (r.bound_of == "each rollout" and r.bound_versions <= bound)]
    if not kept:
        raise ValueError(f"max_lag_versions={bound}: only the synchronous rule keeps it; use placement='colocated'")
    return kept


def _rules(brief: Brief, slots: int, sync_interval: int) -> Iterator[Rule]:
    """NeMo RL's age counts steps: a group is made for one up to `max_age` ahead, ceil(max_age / interval) versions."""
    if brief.placement == "colocated":
        yield Rule("synchronous", {}, 0, "each rollout", "wait")
        return
    yield Rule("one_step_off", {}, 1, "each rollout", "wait")
    for setting in SETTINGS:
        versions = math.ceil(setting / sync_interval)
        yield Rule("nemo_rl", {"max_age": setting, "at_update": "keep"}, versions, "each rollout", "wait")
        yield Rule("areal", {"max_lag": setting, "concurrency": slots}, setting, "the mean", "train")
        limit = max(1, setting * brief.batch_rollouts // 2)
        yield Rule("bounded_queue", {"max_rollouts": limit}, None, "nothing", "train")
        dropping = {"max_rollouts": 2 * brief.batch_rollouts, "drop_lag": setting}
        yield Rule("bounded_queue", dropping, setting, "each rollout", "drop")


def scale_of(brief: Brief) -> int:
    """The largest divisor of the prompts of a step that leaves `LEAST_GROUPS` of them."""
    prompts = brief.prompts_per_step
    return max(k for k in range(1, prompts + 1) if prompts % k == 0 and (prompts // k >= LEAST_GROUPS or k == 1))


def loop_config(brief: Brief, generate_gpus: int, train_gpus: int, rule: Rule, sync_interval: int) -> LoopConfig:
    """The loop of one candidate. A token takes what makes a batch take `brief.generate` on this many GPUs."""
    scale, slots = scale_of(brief), generate_gpus * brief.slots_per_gpu
    mean_tokens = brief.lengths.mean_cut_at(brief.max_new_tokens)
    return LoopConfig(
        rule.scaled(scale),
        slots_per_replica=max(1, slots // scale),
        lengths_tokens=brief.lengths.law,
        max_tokens=brief.max_new_tokens,
        prompt_tokens=brief.prompt_tokens,
        token_s=brief.generate.at(generate_gpus) * slots / (brief.batch_rollouts * mean_tokens),
        group_size=brief.group_size,
        num_verifiers=max(1, slots // scale),
        verify_s=brief.verify_s,
        batch_rollouts=brief.batch_rollouts // scale,
        train_s=brief.train.at(train_gpus),
        sync_interval=sync_interval,
        sync_s=brief.sync_s,
        drift_nats=brief.drift_nats,
        num_steps=NUM_STEPS,
    )


def sweep_rules(brief: Brief, splits: list[tuple[int, int]], workers: int = 1) -> pd.DataFrame:
    """A row a candidate: its split, `rule` (a `Rule`), `sync_interval`, and `Run.summary`; see `simulator.sweep`."""
    candidates = [
        (gpus, rule, interval)
        for gpus in splits
        for interval in SYNC_INTERVALS
        for rule in rules(brief, gpus[0] * brief.slots_per_gpu, interval)
    ]
    configs = [loop_config(brief, *gpus, rule, interval) for gpus, rule, interval in candidates]
    numbers = sweep(configs, workers, WARM_UP, progress=False).drop(columns="sync_interval", errors="ignore")
    chosen = pd.DataFrame([(*gpus, rule, interval) for gpus, rule, interval in candidates])
    chosen.columns = ["generate_gpus", "train_gpus", "rule", "sync_interval"]
    table = pd.concat([chosen, numbers], axis=1)
    table["updates_per_day"] = DAY_S * table["rollouts_per_s"] * scale_of(brief) / brief.batch_rollouts
    table["tokens_per_s"] *= scale_of(brief)
    return table


def front(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that no other beats in both mean lag (optimizer steps) and updates a day, freshest first."""
    whole = table[(table["status"] == "done") & (table["trained_length_ratio"] >= LEAST_LENGTH_RATIO)]
    ordered = whole.sort_values(["step_lag_mean", "updates_per_day"], ascending=[True, False])
    best_so_far = ordered["updates_per_day"].cummax().shift(fill_value=-1.0)
    return ordered[ordered["updates_per_day"] > best_so_far]


def pick(on_front: pd.DataFrame, target: Target) -> tuple[pd.Series, bool]:
    """The row that the target's rule chooses, and whether it meets the target; if none does, the nearest to it.

    `on_front` is what `front` gave. Raises ValueError where it has no row.
    """
    if on_front.empty:
        raise ValueError(
            "no rule runs to its end without losing long answers; give more slots, or a longer max_new_tokens"
        )
    lag, rate = on_front["step_lag_mean"], on_front["updates_per_day"]
    if target.rule == "fastest_within_lag":
        within = on_front[lag <= target.mean_lag_steps]
        return (on_front.iloc[0], False) if within.empty else (within.iloc[-1], True)
    if target.rule == "freshest_at_rate":
        enough = on_front[rate >= target.updates_per_day]
        return (on_front.iloc[-1], False) if enough.empty else (enough.iloc[0], True)
    return on_front.loc[(on_front["tokens_per_s"] * on_front["normalized_ess"]).idxmax()], True
