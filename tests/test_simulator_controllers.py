"""Each stack's rule on counts set by hand, as its facts have it, and all of them on one workload."""

from dataclasses import replace

import pytest

from rlinfra_utils.pipeline import admission_limit
from rlinfra_utils.simulator import CONTROLLERS, Controller, Counts, Exponential, Group, LogNormal, LoopConfig, simulate


def counts(batch=64, interval=1, group=8, slots=256, **values):
    """A moment of a loop; what is not named is 0."""
    made = Counts(batch, batch * interval, group, slots)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def group(version, index=0):
    return Group(index, version, step=version, now_s=0.0, size=8)


@pytest.mark.parametrize(
    ("rule", "values", "may_start"),
    [
        # One version's batches and no more: 3 steps done, 4 * 64 offered.
        (("synchronous", {}), {"version": 3, "offered": 255}, True),
        (("synchronous", {}), {"version": 3, "offered": 256}, False),
        (("one_step_off", {}), {"version": 3, "offered": 319}, True),
        (("one_step_off", {}), {"version": 3, "offered": 320}, False),
        # (max_staleness + version + 1) * batch - (accepted + running), with 40 rejected ones given back.
        (("areal", {"max_lag": 4, "concurrency": 512}), {"version": 3, "offered": 551, "discarded": 40}, True),
        (("areal", {"max_lag": 4, "concurrency": 512}), {"version": 3, "offered": 552, "discarded": 40}, False),
        # Its concurrency, by default a batch.
        (("areal", {"max_lag": 4}), {"in_flight": 63, "offered": 63}, True),
        (("areal", {"max_lag": 4}), {"in_flight": 64, "offered": 64}, False),
        # SkyRL counts steps from 1: (4 + 3) * 64 at the third.
        (("skyrl", {}), {"step": 2, "offered": 447}, True),
        (("skyrl", {}), {"step": 2, "offered": 448}, False),
        (("skyrl", {"num_workers": 2}), {"in_flight": 16, "offered": 16}, False),
        # NeMo RL: the next group's step, 64 // 64 + ..., is at most one ahead.
        (("nemo_rl", {}), {"step": 2, "offered": 255}, True),
        (("nemo_rl", {}), {"step": 2, "offered": 256}, False),
        (("nemo_rl_windowed", {}), {"in_flight": 255, "queued": 511}, True),
        (("nemo_rl_windowed", {}), {"in_flight": 256}, False),
        (("nemo_rl_windowed", {}), {"queued": 512}, False),
        # TRL: max_staleness * samples of a step in flight; a queue of 1,024.
        (("trl_async", {}), {"in_flight": 255, "queued": 1023}, True),
        (("trl_async", {}), {"in_flight": 256}, False),
        (("trl_async", {}), {"queued": 1024}, False),
        (("trl_async", {"max_inflight": 10}), {"in_flight": 10}, False),
        # verl V1: a batch a global step, and one of warm-up; dropped ones are refilled.
        (("verl_v1", {}), {"version": 2, "offered": 256, "discarded": 1}, True),
        (("verl_v1", {}), {"version": 2, "offered": 256}, False),
        # PRIME-RL: no further than a batch ahead.
        (("prime_rl", {}), {"in_flight": 1023, "queued": 63}, True),
        (("prime_rl", {}), {"in_flight": 1024}, False),
        (("prime_rl", {}), {"queued": 64}, False),
        # OpenRLHF: a whole batch, when the last has ended and a token is free.
        (("openrlhf", {}), {"offered": 64, "in_flight": 0, "queued": 0}, True),
        (("openrlhf", {}), {"offered": 64, "in_flight": 0, "queued": 64}, False),
        (("openrlhf", {"queue_size": 2}), {"offered": 64, "in_flight": 0, "queued": 64}, True),
        (("openrlhf", {"queue_size": 2}), {"offered": 64, "in_flight": 8, "queued": 56}, False),
        (("openrlhf", {}), {"offered": 40, "in_flight": 40}, True),
        (("bounded_queue", {"max_rollouts": 8}), {"queued": 7}, True),
        (("bounded_queue", {"max_rollouts": 8}), {"queued": 8}, False),
        (("bounded_queue", {}), {"free_slots": 0}, False),
    ],
)
def test_when_work_may_start(rule, values, may_start):
    name, settings = rule
    assert CONTROLLERS[name](**settings).may_start(counts(**values)) is may_start


@pytest.mark.parametrize(("threshold", "interval"), [(0.1, 1), (0.5, 2), (0, 4)])
def test_verl_fully_async_counts_what_a_sync_left(threshold, interval):
    rule, limit = CONTROLLERS["verl_fully_async"](threshold), admission_limit(64, interval, threshold)
    # 640 had been taken and 30 were outstanding at the last sync, so that limit - 30 more may come.
    held = counts(interval=interval, gone_at_update=640, offered=640 + 30)
    for more, may_start in ((limit - 31, True), (limit - 30, False)):
        held.offered = 670 + more
        assert rule.may_start(held) is may_start


@pytest.mark.parametrize(
    ("rule", "version", "verdicts"),
    [
        # The verdict on groups dispatched at versions 0 to 4, at version 4.
        (("trl_async", {"max_staleness": 2}), 4, ["drop", "drop", "take", "take", "take"]),
        (("prime_rl", {"max_off_policy_steps": 2}), 4, ["drop", "drop", "take", "take", "take"]),
        (("verl_v1", {"max_off_policy_threshold": 2}), 4, ["drop", "drop", "drop", "take", "take"]),  # inclusive
        (("verl_v1", {"max_off_policy_threshold": 2, "strategy": "wait"}), 4, ["take"] * 5),
        (("nemo_rl_windowed", {}), 4, ["drop", "drop", "drop", "take", "take"]),
        (("bounded_queue", {"drop_lag": 3}), 4, ["drop", "take", "take", "take", "take"]),
        (("areal", {"max_lag": 1}), 4, ["take"] * 5),
        (("skyrl", {"max_staleness_steps": 1}), 4, ["take"] * 5),
        (("openrlhf", {}), 4, ["take"] * 5),
        (("verl_fully_async", {}), 4, ["take"] * 5),
    ],
)
def test_the_same_number_is_another_rule_elsewhere(rule, version, verdicts):
    name, settings = rule
    controller = CONTROLLERS[name](**settings)
    assert [controller.judge(group(v), counts(version=version)) for v in range(5)] == verdicts


def test_nemo_rl_takes_a_steps_own_groups():
    rule = CONTROLLERS["nemo_rl"]()
    assert [rule.judge(group(0, index), counts(step=1)) for index in (7, 8, 15, 16)] == ["take", "take", "take", "hold"]


def test_verl_v1_waits_for_a_prompt_at_the_bound():
    rule = CONTROLLERS["verl_v1"]("wait", max_off_policy_threshold=3)
    assert rule.may_take(counts(version=5, oldest_running_version=4))
    assert not rule.may_take(counts(version=5, oldest_running_version=3))
    assert rule.may_take(counts(version=5))  # none runs
    assert CONTROLLERS["verl_v1"]("drop", max_off_policy_threshold=3).may_take(
        counts(version=5, oldest_running_version=0)
    )


@pytest.mark.parametrize(
    ("name", "at_update"),
    [
        ("trl_async", "keep"),
        ("verl_v1", "abort"),
        ("verl_fully_async", "abort"),
        ("openrlhf", "finish"),
        ("nemo_rl", "finish"),
        ("nemo_rl_windowed", "keep"),
        ("prime_rl", "keep"),
        ("skyrl", "keep"),
        ("areal", "abort"),
    ],
)
def test_what_an_update_does_to_work_in_flight(name, at_update):
    assert CONTROLLERS[name]().at_update == at_update
    assert CONTROLLERS["openrlhf"](partial_rollout=True).at_update == "keep"


#: Generation and training about balanced, a heavy tail, groups of 4.
WORKLOAD = LoopConfig(
    slots_per_replica=128,
    lengths_tokens=LogNormal(300, 0.9),
    max_tokens=4096,
    prefill_s_per_token=0.0005,
    group_size=4,
    num_verifiers=8,
    verify_s=Exponential(0.1),
    batch_rollouts=64,
    train_s=5.0,
    sync_s=0.5,
    num_steps=150,
)


@pytest.fixture(scope="module")
def runs():
    rules = {name: CONTROLLERS[name]() for name in CONTROLLERS}
    rules |= {
        "areal": CONTROLLERS["areal"](max_lag=4, concurrency=128),
        "trl_async": CONTROLLERS["trl_async"](max_inflight=128),
        "prime_rl": CONTROLLERS["prime_rl"](max_inflight=128),
    }
    return {name: simulate(replace(WORKLOAD, controller=rule)) for name, rule in rules.items()}


def group_lag(run):
    trained = run.rollouts[run.rollouts["outcome"] == "trained"]
    return trained["taken_version"] - trained["version"]


def test_every_rule_runs_on_one_workload(runs):
    assert {name: run.status for name, run in runs.items()} == dict.fromkeys(CONTROLLERS, "done")
    assert {run.counts.trained for run in runs.values()} == {64 * 150}


def test_bounds_hold_where_the_rule_promises_them(runs):
    assert group_lag(runs["synchronous"]).max() == 0
    assert group_lag(runs["one_step_off"]).max() == 1
    assert group_lag(runs["openrlhf"]).max() == 1  # a queue of one batch
    assert group_lag(runs["nemo_rl"]).max() == 1
    assert group_lag(runs["nemo_rl_windowed"]).max() == 1
    assert group_lag(runs["trl_async"]).max() <= 4
    assert group_lag(runs["prime_rl"]).max() <= 8


def test_budgets_bound_the_mean_and_not_each_rollout(runs):
    for name in ("areal", "skyrl"):
        lag = group_lag(runs[name])
        assert lag.mean() <= 4 < lag.max(), name
        assert runs[name].counts.discarded == 0


def test_overlap_buys_throughput_and_costs_lag(runs):
    tokens_per_s = {name: run.summary()["tokens_per_s"] for name, run in runs.items()}
    lag = {name: run.summary()["lag_mean"] for name, run in runs.items()}
    ess = {name: run.summary()["normalized_ess"] for name, run in runs.items()}
    assert tokens_per_s["synchronous"] < tokens_per_s["one_step_off"] < tokens_per_s["skyrl"]
    assert lag["synchronous"] < lag["one_step_off"] < lag["skyrl"]
    assert ess["synchronous"] == 1 > ess["one_step_off"] > ess["skyrl"]


def test_a_rule_of_ones_own_is_a_small_class():
    class Half(Controller):
        def may_start(self, counts):
            return counts.free_slots > 0 and counts.queued < counts.batch / 2

    run = simulate(replace(WORKLOAD, controller=Half(), num_steps=20))
    assert run.status == "done"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CONTROLLERS["areal"](max_lag=-1), "max_lag=-1"),
        (lambda: CONTROLLERS["areal"](concurrency=0), "concurrency=0"),
        (lambda: CONTROLLERS["skyrl"](max_staleness_steps=1.5), "max_lag=1.5"),
        (lambda: CONTROLLERS["nemo_rl"](at_update="kept"), "at_update='kept': known are abort, finish, keep"),
        (lambda: CONTROLLERS["verl_v1"](strategy="skip"), "strategy='skip'"),
        (lambda: CONTROLLERS["verl_v1"](max_off_policy_threshold=0), "max_off_policy_threshold=0"),
        (lambda: CONTROLLERS["verl_fully_async"](float("nan")), "staleness_threshold=nan"),
        (lambda: CONTROLLERS["openrlhf"](queue_size=0), "queue_size=0"),
        (lambda: CONTROLLERS["trl_async"](max_staleness=0), "max_staleness=0"),
        (lambda: CONTROLLERS["prime_rl"](max_inflight=0), "max_inflight=0"),
        (lambda: CONTROLLERS["bounded_queue"](max_rollouts=0), "max_rollouts=0"),
        (lambda: CONTROLLERS["bounded_queue"](max_tokens=float("nan")), "max_tokens=nan"),
        (lambda: CONTROLLERS["bounded_queue"](max_lag=4, drop_lag=2), "max_lag=4: never reached, as drop_lag=2"),
        (lambda: CONTROLLERS["bounded_queue"](bytes_per_token=0), "bytes_per_token=0"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)
