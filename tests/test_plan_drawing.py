"""What a plan says follows from its brief: each number against another way to the same one."""

import math

import numpy as np
import pandas as pd
import pytest
from plan_samples import brief, drawn, swept

from rlinfra_utils import memory, plan, tracing
from rlinfra_utils.plan.choosing import LEAST_GROUPS, loop_config, scale_of
from rlinfra_utils.plan.drawing import fewest_train_gpus


def test_the_split_is_the_best_by_brute_force():
    b = brief()
    period_s = {n: max(b.generate.at(n), b.train.at(32 - n)) for n in range(1, 32)}
    best = min(period_s, key=period_s.get)
    pools = drawn().pools
    assert max(plan.split_of(b).stage_s.values()) == period_s[best]
    assert abs(pools.generate_gpus - best) <= 2
    assert pools.generate_gpus + pools.train_gpus == 32


def test_the_trainer_gets_the_gpus_that_its_memory_needs():
    slow_generation = brief(
        gpu_gib=40, num_gpus=16, generate=plan.Stage(seconds=9000, at_gpus=1), prompts_per_gpu=1, max_new_tokens=512
    )
    fewest = fewest_train_gpus(slow_generation)
    fits = [
        not any("trainer" in phase for phase in plan.memory_of(slow_generation, gpus).over) for gpus in range(1, 16)
    ]
    assert fits.index(True) + 1 == fewest > 1
    assert plan.split_of(slow_generation).gpus["train"] == fewest


def test_every_rule_that_bounds_each_rollout_does():
    table = swept()
    bounded = table[[rule.bound_of == "each rollout" for rule in table["rule"]]]
    assert len(bounded) > 50
    over = bounded[bounded["lag_max"] > [rule.bound_versions for rule in bounded["rule"]]]
    assert over.empty, over[["rule", "sync_interval", "lag_max"]]


def test_the_front_is_what_nothing_dominates():
    table = swept()
    whole = table[(table["status"] == "done") & (table["trained_length_ratio"] >= 0.98)]
    lag, rate = whole["step_lag_mean"].to_numpy(), whole["updates_per_day"].to_numpy()
    beaten = [any((lag <= lag[i]) & (rate >= rate[i]) & ((lag < lag[i]) | (rate > rate[i]))) for i in range(len(whole))]
    undominated = whole[~np.array(beaten)]
    points = set(zip(undominated["step_lag_mean"], undominated["updates_per_day"]))
    found = plan.front(table)
    assert set(zip(found["step_lag_mean"], found["updates_per_day"])) == points


def test_a_target_picks_its_row():
    rows = pd.DataFrame(
        {"step_lag_mean": [0.5, 1.0, 4.0], "updates_per_day": [100.0, 200.0, 300.0]}
        | {"tokens_per_s": [1.0, 2.0, 3.0], "normalized_ess": [1.0, 0.9, 0.5]}
    )

    def picked(**target):
        row, met = plan.pick(rows, plan.Target(**target))
        return row["updates_per_day"], met

    assert picked(rule="fastest_within_lag", mean_lag_steps=3.9) == (200, True)
    assert picked(rule="fastest_within_lag", mean_lag_steps=0.4) == (100, False)
    assert picked(rule="freshest_at_rate", updates_per_day=150) == (200, True)
    assert picked(rule="freshest_at_rate", updates_per_day=400) == (300, False)
    assert picked(rule="most_useful_tokens") == (200, True)
    with pytest.raises(ValueError, match="no rule"):
        plan.pick(rows.iloc[:0], plan.Target())


def test_a_scaled_loop_keeps_speed_and_lag_of_the_whole_one():
    whole = brief(prompts_per_step=16)
    scaled = brief(prompts_per_step=64, prompts_per_gpu=8, generate=plan.Stage(seconds=180, at_gpus=16))
    assert (scale_of(whole), scale_of(scaled)) == (2, 8)
    assert scaled.prompts_per_step // scale_of(scaled) == LEAST_GROUPS
    for rule in list(plan.rules(scaled, 22 * scaled.slots_per_gpu, 1))[:4]:
        config = loop_config(scaled, 22, 10, rule, 1)
        slots_s = config.batch_rollouts * config.token_s * scaled.lengths.mean_cut_at(4096)
        assert math.isclose(slots_s / config.num_slots, scaled.generate.at(22), rel_tol=1e-9)


def test_memory_is_that_of_fit():
    p = drawn()
    found = memory.fit(
        memory.ModelSpec.named("Qwen2.5-7B"),
        0.9 * 80 * 2**30,
        p.pools.train_gpus,
        8,
        4596,
        2,
        placement="disaggregated",
    )
    assert math.isclose(max(p.memory.phases_gib.values()) * 2**30, found.ledger.peak_bytes)
    assert math.isclose(p.memory.margin_share, 1 - found.ledger.peak_bytes / (0.9 * 80 * 2**30))


def test_checkpoints_come_at_youngs_interval_in_whole_steps():
    p = drawn()
    step_s = 86_400 / p.predicted.updates_per_day
    assert math.isclose(p.recovery.interval_s, p.recovery.interval_steps * step_s)
    assert abs(p.recovery.interval_s - math.sqrt(2 * 60 * 86_400)) <= step_s / 2


def test_throughput_stays_under_the_bottleneck():
    p = drawn()
    ideal = 86_400 / max(p.pools.generate_s, p.pools.train_s + 5)
    assert 0.7 * ideal < p.predicted.updates_per_day <= 1.02 * ideal


def test_colocated_stages_take_turns():
    p = plan.draw_up(brief(placement="colocated", num_gpus=8))
    assert (p.queue.controller, p.pools.generate_gpus, p.pools.train_gpus) == ("synchronous", 8, 8)
    assert p.predicted.max_lag_versions == 0
    assert p.contract.correction == "none"
    assert not p.contract.partial_rollouts


def test_rollouts_that_may_straddle_an_update_need_spans():
    for p in (drawn(), plan.draw_up(brief(placement="colocated", num_gpus=8))):
        assert ("version_spans" in p.contract.required_fields) == p.contract.partial_rollouts
        assert ("policy_version" in p.contract.required_fields) != p.contract.partial_rollouts


def test_alert_rules_are_those_of_tracing_with_the_plans_thresholds():
    rules = {rule.name: rule for rule in plan.alert_rules(drawn())}
    assert list(rules) == [rule.name for rule in tracing.RULES]
    assert rules["checkpoint_age"].threshold == 2 * drawn().recovery.interval_s
    assert rules["ess"].above is False


def test_a_bound_on_each_rollout_leaves_only_rules_that_keep_it():
    p = plan.draw_up(brief(target=plan.Target(max_lag_versions=2)))
    assert p.queue.bound_of == "each rollout"
    assert p.queue.bound_versions <= 2
    assert p.predicted.max_lag_versions <= 2
    with pytest.raises(ValueError, match="max_lag_versions=0"):
        plan.draw_up(brief(target=plan.Target(max_lag_versions=0)))
