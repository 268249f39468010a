"""From a brief to a plan: `draw_up`.

Models: memory by phase, the split of the GPUs, the rule from the simulator's front, contract, recovery, alerts. Leaves
out the network and prices. Each number is worked out by the module that owns it; nothing is typed in here but defaults
that a plan may change. Use: `run_plan = draw_up(brief)`; then `grade`, `keys`, `report` of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

import pandas as pd

from rlinfra_utils import tracing
from rlinfra_utils.checkpoint import overhead, young_interval
from rlinfra_utils.doors import instance
from rlinfra_utils.memory import GIB, Fit, fit
from rlinfra_utils.pipeline import Split, best_split
from rlinfra_utils.plan.brief import Brief
from rlinfra_utils.plan.choosing import DAY_S, Rule, front, pick, scale_of, sweep_rules
from rlinfra_utils.plan.runplan import Contract, Memory, Pools, Predicted, Queue, Recovery, RunPlan, Sync, Threshold

#: What a rollout has to say so that it can be trained on, audited and followed; names of `rollouts.Rollout`.
REQUIRED_FIELDS = (
    *("run_id", "branch_id", "prompt_id", "group_id", "sample_id"),
    *("prompt_tokens", "response_tokens", "policy_mask", "behavior_logprobs"),
    *("policy_version", "decoding", "tokenizer_version", "chat_template_version"),
    *("reward", "verifier_version", "stop_reason", "truncated"),
)
CORRECTION_HIGH = 2.0
#: A mismatch at lag 0 of this many times the expected one is a fault, not noise.
ZERO_LAG_FACTOR = 3


def draw_up(brief: Brief, workers: int = 1) -> RunPlan:
    """The plan that follows from a brief; `workers` processes simulate. Raises ValueError where none can be made."""
    instance("brief", brief, Brief, "as plan.Brief(...) makes one")
    table = sweep_rules(brief, splits(brief), workers)
    on_front = front(table)
    row, met = pick(on_front, brief.target)
    predicted = _predicted(brief, row, met, len(table), len(on_front))
    queue = _queue(row["rule"], int(row["sync_interval"]))
    recovery = _recovery(brief, DAY_S / predicted.updates_per_day)
    keeps = queue.make_controller().at_update != "finish"
    return RunPlan(
        brief=brief,
        memory=_memory(brief, int(row["train_gpus"])),
        pools=_pools(brief, int(row["generate_gpus"]), int(row["train_gpus"])),
        queue=queue,
        predicted=predicted,
        contract=_contract(brief, queue, partial=keeps),
        sync=_sync(brief),
        recovery=recovery,
        alerts=_alerts(brief, queue, predicted, recovery),
    )


def memory_of(brief: Brief, train_gpus: int) -> Fit:
    """`memory.fit` of the brief with this many GPUs to the trainer."""
    return fit(
        brief.spec,
        brief.usable_bytes,
        train_gpus,
        brief.group_size,
        brief.prompt_tokens + brief.max_new_tokens,
        brief.prompts_per_gpu,
        brief.micro_batch,
        brief.recipe,
        brief.lora_rank,
        strategy=brief.strategy,
        placement=brief.placement,
    )


def _memory(brief: Brief, train_gpus: int) -> Memory:
    found = memory_of(brief, train_gpus)
    return Memory(
        phases_gib={phase.name: phase.total / GIB for phase in found.ledger.phases},
        usable_gib=brief.usable_bytes / GIB,
        is_lower_bound=found.is_lower_bound,
        verdict=found.verdict,
    )


def fewest_train_gpus(brief: Brief) -> int:
    """The fewest GPUs whose shards fit beside a training step; 1 where no number does, as then memory is no guide."""
    counts = range(1, brief.num_gpus)
    first = bisect_left(counts, True, key=lambda gpus: not _over_in_training(memory_of(brief, gpus)))
    return counts[first] if first < len(counts) else 1


def _over_in_training(found: Fit) -> bool:
    return any("trainer" in phase for phase in found.over)


def split_of(brief: Brief) -> Split:
    """`pipeline.best_split` of the brief's curves, the trainer with as many GPUs as its memory needs."""
    fewest = fewest_train_gpus(brief)
    curves = {
        "generate": brief.generate.at,
        "train": lambda gpus: brief.train.at(gpus) if gpus >= fewest else math.inf,
    }
    return best_split(curves, brief.num_gpus)


def splits(brief: Brief) -> list[tuple[int, int]]:
    """(generation, training) near the crossing: a rule may want a little more of one than the averages say."""
    if brief.placement == "colocated":
        return [(brief.num_gpus, brief.num_gpus)]
    middle, fewest = split_of(brief).gpus["generate"], fewest_train_gpus(brief)
    step = max(1, brief.num_gpus // 16)
    near = {middle - step, middle, middle + step}
    return sorted((gpus, brief.num_gpus - gpus) for gpus in near if 1 <= gpus <= brief.num_gpus - fewest)


def _pools(brief: Brief, generate_gpus: int, train_gpus: int) -> Pools:
    idle = 0 if brief.placement == "colocated" else brief.num_gpus - generate_gpus - train_gpus
    return Pools(
        generate_gpus=generate_gpus,
        train_gpus=train_gpus,
        idle_gpus=idle,
        generate_s=brief.generate.at(generate_gpus),
        train_s=brief.train.at(train_gpus),
    )


def _queue(rule: Rule, sync_interval: int) -> Queue:
    return Queue(sync_interval=sync_interval, **vars(rule))


def _predicted(brief: Brief, row: pd.Series, met: bool, num_simulated: int, num_on_front: int) -> Predicted:
    return Predicted(
        updates_per_day=float(row["updates_per_day"]),
        tokens_per_s=float(row["tokens_per_s"]),
        mean_lag_steps=float(row["step_lag_mean"]),
        max_lag_versions=float(row["lag_max"]),
        normalized_ess=float(row["normalized_ess"]),
        generation_utilization=float(row["generation_utilization"]),
        trainer_utilization=float(row["trainer_utilization"]),
        trained_length_ratio=float(row["trained_length_ratio"]),
        mean_queue_rollouts=float(row["queue_mean"]) * scale_of(brief),
        scale=scale_of(brief),
        num_simulated=num_simulated,
        num_on_front=num_on_front,
        met_target=bool(met),
    )


def _contract(brief: Brief, queue: Queue, partial: bool) -> Contract:
    version = "version_spans" if partial else "policy_version"
    decoding = {
        "temperature": brief.temperature,
        "top_p": brief.top_p,
        "top_k": 0,
        "logprobs_mode": "processed",
        "max_new_tokens": brief.max_new_tokens,
    }
    return Contract(
        required_fields=[version if name == "policy_version" else name for name in REQUIRED_FIELDS],
        decoding=decoding,
        max_lag_versions=queue.bound_versions if queue.bound_of == "each rollout" else None,
        partial_rollouts=partial,
        correction="none" if queue.controller == "synchronous" else "token_truncate",
        correction_high=CORRECTION_HIGH,
        report_lengths=True,
    )


def _sync(brief: Brief) -> Sync:
    expected = brief.zero_lag_nats
    limit = None if expected is None else ZERO_LAG_FACTOR * expected
    return Sync(verify_each_update=True, zero_lag_each_update=True, zero_lag_limit_nats=limit)


def _recovery(brief: Brief, step_s: float) -> Recovery:
    """Young's interval in whole steps; its overhead is that of the interval in steps."""
    young_s = young_interval(brief.checkpoint_write_s, brief.mtbf_s)
    steps = max(1, round(young_s / step_s))
    return Recovery(
        interval_steps=steps,
        interval_s=steps * step_s,
        young_s=young_s,
        overhead_share=overhead(steps * step_s, brief.checkpoint_write_s, brief.mtbf_s),
        queue_at_restart=brief.queue_at_restart,
        save_data_position=True,
    )


def _alerts(brief: Brief, queue: Queue, predicted: Predicted, recovery: Recovery) -> dict[str, Threshold]:
    """The rules of `tracing` with what this plan says in place of the defaults that it can better."""
    cut = brief.lengths.share_cut_at(brief.max_new_tokens)
    bound = queue.bound_versions if queue.bound_of == "each rollout" else math.ceil(predicted.max_lag_versions)
    own = {
        "lag": (bound, "the rule's bound" if queue.bound_of == "each rollout" else "largest lag of the simulated run"),
        "ess": (0.8 * predicted.normalized_ess, "0.8 of the predicted normalised ESS"),
        "truncation": (max(2 * cut, 0.01), f"twice the share {cut:.3f} that the law of lengths puts above the limit"),
        "checkpoint_age": (2 * recovery.interval_s, "twice the planned interval"),
    }
    thresholds = {rule.name: (rule.threshold, rule.source) for rule in tracing.RULES} | own
    units = {rule.name: rule.unit for rule in tracing.RULES}
    return {
        name: Threshold(value=float(value), unit=units[name], because=because)
        for name, (value, because) in thresholds.items()
    }


def alert_rules(run_plan: RunPlan) -> list[tracing.Rule]:
    """The plan's thresholds as rules for `tracing.alerts`."""
    return [
        replace(rule, threshold=run_plan.alerts[rule.name].value, source=run_plan.alerts[rule.name].because)
        for rule in tracing.RULES
        if rule.name in run_plan.alerts
    ]
