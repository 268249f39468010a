"""The simulator where theory has the answer: overlapped stages, queues, Little's law, staleness, field cases."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import pipeline
from rlinfra_utils.simulator import (
    CONTROLLERS,
    Constant,
    Controller,
    Exponential,
    LogNormal,
    LoopConfig,
    Measured,
    Pareto,
    simulate,
)

SECONDS = st.integers(1, 60)
bounded = CONTROLLERS["bounded_queue"]


@dataclass
class Cycle:
    """Lengths one after the other, for ever."""

    values: tuple

    def __post_init__(self):
        self.at = 0

    @property
    def mean(self):
        return float(np.mean(self.values))

    def draw(self, rng, num):
        row = np.array([self.values[(self.at + i) % len(self.values)] for i in range(num)], dtype=float)
        self.at += num
        return row


def stages(generate_s, verify_s, train_s, n, batch=8, **changes):
    """A loop whose batch takes these seconds in each stage."""
    config = LoopConfig(
        controller=bounded(),
        slots_per_replica=batch,
        lengths_tokens=generate_s,
        token_s=1.0,
        prompt_tokens=0,
        num_verifiers=batch,
        verify_s=verify_s,
        batch_rollouts=batch,
        train_s=train_s,
        num_steps=n,
    )
    return replace(config, **changes)


@given(
    generate_s=SECONDS,
    verify_s=st.integers(0, 60),
    train_s=SECONDS,
    n=st.integers(1, 12),
    group=st.sampled_from([1, 4]),
)
def test_constant_stages_are_the_pipeline_formula_exactly(generate_s, verify_s, train_s, n, group):
    # A verifier for each rollout of a batch; where the verdict takes longer than decoding, two batches need one.
    verifiers = 8 * (1 + verify_s // generate_s)
    config = stages(generate_s, verify_s, train_s, n, num_verifiers=verifiers, group_size=group)
    run = simulate(config)
    assert run.status == "done"
    times_s = [generate_s, train_s]
    # With so many verifiers that stage has no beat of its own: it only delays the first batch.
    assert run.end_s == pipeline.pipelined(times_s, n) + verify_s


@given(generate_s=SECONDS, verify_s=SECONDS, train_s=SECONDS, n=st.integers(1, 8))
def test_three_stages_of_one_rollout_at_a_time(generate_s, verify_s, train_s, n):
    run = simulate(stages(generate_s, verify_s, train_s, n, batch=1))
    assert run.end_s == pipeline.pipelined([generate_s, verify_s, train_s], n)


@given(generate_s=SECONDS, verify_s=SECONDS, train_s=SECONDS, n=st.integers(1, 8), sync_s=st.integers(0, 9))
def test_synchronous_is_the_sum(generate_s, verify_s, train_s, n, sync_s):
    config = stages(generate_s, verify_s, train_s, n, controller="synchronous", sync_s=sync_s)
    run = simulate(config)
    assert run.end_s == pipeline.sequential([generate_s, verify_s, train_s, sync_s], n) - sync_s  # the last is not run
    assert run.lag["lag"].tolist() == [0]


@pytest.mark.parametrize(("generate_s", "train_s", "gain"), [(30, 10, 4 / 3), (20, 20, 2.0), (10, 30, 4 / 3)])
def test_field_case_b43_a_what_async_buys(generate_s, train_s, gain):
    # In steps once running: the difference between runs of 20 and of 10 steps.
    def period_s(controller):
        runs = [simulate(stages(generate_s, 0, train_s, n, controller=controller)) for n in (10, 20)]
        return (runs[1].end_s - runs[0].end_s) / 10

    assert period_s("synchronous") / period_s("one_step_off") == pytest.approx(gain)
    deeper = period_s(CONTROLLERS["areal"](max_lag=4))
    assert deeper == pytest.approx(period_s("one_step_off"))  # constant durations: depth adds nothing
    run = simulate(stages(generate_s, 0, train_s, 200, controller="one_step_off"))
    assert 1 - run.summary()["trainer_utilization"] == pytest.approx(1 - train_s / max(generate_s, train_s), abs=0.01)


def test_field_case_b43_b_verls_limit_is_384_outstanding():
    rule = CONTROLLERS["verl_fully_async"](staleness_threshold=0.5)
    config = LoopConfig(rule, slots_per_replica=512, batch_rollouts=128, sync_interval=2, train_s=1e6, duration_s=1e5)
    run = simulate(config)
    assert run.counts.offered == 384  # one batch is with the trainer, and nothing has been synced


def test_field_case_b43_c_slots_idle_behind_one_long_rollout():
    lengths = (1000,) * 15 + (8000,)
    config = stages(Cycle(lengths), 0, 0, 4, batch=16, token_s=0.01, controller="synchronous")
    run = simulate(config)
    assert run.summary()["generation_utilization"] == pytest.approx(23_000 / 128_000)
    assert pipeline.utilization(lengths) == pytest.approx(23_000 / 128_000)


def waits(config, column, seeds=24):
    """Mean wait of each of several independent runs, after the first tenth."""
    means = []
    for seed in range(seeds):
        rows = simulate(replace(config, seed=seed)).rollouts
        wait_s = {"verifier": rows["verify_start_s"] - rows["end_s"], "queue": rows["taken_s"] - rows["ready_s"]}[
            column
        ]
        means.append(wait_s.dropna().iloc[400:].mean())
    return np.array(means)


def within(means, expected):
    """Within 3.8 standard errors: one test in about a thousand would fail by chance, were the seeds not fixed."""
    assert abs(means.mean() - expected) < 3.8 * means.std(ddof=1) / np.sqrt(len(means))
    assert means.std(ddof=1) / np.sqrt(len(means)) < 0.05 * expected  # or the interval would hold anything


#: One slot that is never idle, with exponential times, makes Poisson arrivals of 1 a second behind it.
POISSON = LoopConfig(
    bounded(), slots_per_replica=1, lengths_tokens=Exponential(1e5), token_s=1e-5, batch_rollouts=1, num_steps=4000
)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mm1_wait(load):
    config = replace(POISSON, verify_s=Exponential(load), train_s=0)
    within(waits(config, "verifier"), pipeline.mm1_wait_s(1, load))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_md1_wait(load):
    config = replace(POISSON, verify_s=Constant(load), train_s=0)
    within(waits(config, "verifier"), pipeline.md1_wait_s(1, load))
    within(waits(replace(POISSON, train_s=load), "queue"), pipeline.md1_wait_s(1, load))  # the trainer is a server too


@pytest.mark.slow
def test_mg1_wait_with_a_heavy_tail():
    law = LogNormal(0.4, 0.8)
    scv = np.expm1(0.8**2)
    within(waits(replace(POISSON, verify_s=law, train_s=0), "verifier", 40), pipeline.mg1_wait_s(1, law.mean, scv))


@settings(max_examples=30, deadline=None)
@given(
    group=st.sampled_from([1, 4]),
    train_s=st.floats(0.1, 30),
    drop_lag=st.sampled_from([None, 0, 1]),
    duration_s=st.floats(20, 600),
    seed=st.integers(0, 99),
)
def test_littles_law_to_rounding(group, train_s, drop_lag, duration_s, seed):
    config = LoopConfig(
        bounded(drop_lag=drop_lag),
        group_size=group,
        batch_rollouts=8,
        train_s=train_s,
        duration_s=duration_s,
        seed=seed,
    )
    run = simulate(config)
    queue, rows = run.queue, run.rollouts
    until_s = np.append(queue["time_s"].to_numpy()[1:], run.end_s)
    area = float(queue["rollouts"] @ (until_s - queue["time_s"]))
    came = rows[rows["ready_s"].notna()]
    assert area == pytest.approx((came["taken_s"].fillna(run.end_s) - came["ready_s"]).sum(), rel=1e-9, abs=1e-6)
    assert queue["rollouts"].iloc[-1] == run.counts.queued
    assert queue["tokens"].iloc[-1] == run.counts.queued_tokens
    if run.end_s:
        assert run.summary()["queue_mean"] == pytest.approx(area / run.end_s, rel=1e-9, abs=1e-9)


LAWS = {
    "exponential": Exponential(500),
    "lognormal": LogNormal(300, 1.0),
    "capped Pareto": Pareto(100, 1.3, cap=10_000),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("slots", "batch", "load", "group", "interval"), [(256, 64, 0.8, 8, 1), (64, 32, 0.5, 1, 2)])
def test_mean_staleness_is_the_closed_form(law, slots, batch, load, group, interval):
    lengths = np.floor(LAWS[law].draw(np.random.default_rng(1), 20_000)).clip(1)
    rollout_s = lengths.mean() * 0.02
    train_s = load * batch * rollout_s / slots
    config = LoopConfig(
        bounded(),
        slots_per_replica=slots,
        lengths_tokens=Measured(lengths),
        group_size=group,
        batch_rollouts=batch,
        train_s=train_s,
        sync_interval=interval,
        num_steps=64_000 // batch,
    )
    run = simulate(config)
    summary = run.summary(after_s=0.2 * run.end_s)
    shape = pipeline.tail(lengths, group)
    for count, name in (("rollout", "rollout_lag_mean"), ("token", "lag_mean")):
        predicted = pipeline.mean_staleness(slots, batch, (batch - group) / 2, load, shape, count, interval)
        assert summary[name] == pytest.approx(predicted.versions, rel=0.04), count


def test_at_a_limit_staleness_is_what_is_outstanding():
    # The trainer needs twice the time in which the slots could make a batch.
    common = {"slots_per_replica": 256, "lengths_tokens": Exponential(500), "batch_rollouts": 32, "train_s": 2.5}
    run = simulate(LoopConfig(CONTROLLERS["areal"](max_lag=3, concurrency=256), num_steps=400, **common))
    expected = pipeline.staleness_at_limit(128 - 32, 32)
    assert run.summary(after_s=60)["rollout_lag_mean"] == pytest.approx(expected, rel=0.02) == 3


def test_field_case_b38_lag_counts_the_queue():
    # One rollout a second, a batch of 1, a version each 10 s, and no limit: rollouts decode within a version, and wait.
    run = simulate(
        LoopConfig(bounded(), 1, 1, 1, token_s=1.0, prompt_tokens=0, batch_rollouts=1, train_s=10, num_steps=30)
    )
    late = run.rollouts[run.rollouts["taken_step"] == 20].iloc[0]
    assert late["end_version"] - late["start_version"] <= 1  # while in flight
    assert late["taken_version"] - late["start_version"] == 20 - int((late["start_s"] - 1) // 10) > 15


def test_field_case_b38_the_limit_admits_no_more_than_it_says():
    for lag in (0, 1, 4):
        run = simulate(LoopConfig(bounded(drop_lag=lag), 1, 32, batch_rollouts=8, train_s=1, num_steps=60))
        trained = run.rollouts[run.rollouts["outcome"] == "trained"]
        dropped = run.rollouts[run.rollouts["outcome"] == "dropped"]
        assert (trained["taken_version"] - trained["version"]).max() == lag
        assert (dropped["taken_version"] - dropped["version"]).min() == lag + 1


def b41(controller, num_steps=400, train_s=10):
    """Three of four prompts take 5 s, the fourth 35 s; a step takes 10 s whatever its batch."""
    lengths = Cycle((5, 5, 5, 35) * 2 + (5, 35, 5, 5) * 3 + (35, 5, 5, 5))
    config = LoopConfig(
        controller,
        1,
        64,
        lengths,
        token_s=1.0,
        prompt_tokens=0,
        batch_rollouts=16,
        train_s=train_s,
        num_steps=num_steps,
    )
    return simulate(config)


def test_field_case_b41_discarding_starves_the_long_ones():
    run = b41(bounded(drop_lag=2, max_rollouts=16))
    rows = run.rollouts[run.rollouts["taken_s"] > 200]
    trained, long = rows[rows["outcome"] == "trained"], rows["tokens"] == 35
    assert set(trained["tokens"]) == {5}
    assert set(rows[long]["outcome"]) == {"dropped"}
    assert (rows[long]["taken_version"] - rows[long]["version"]).min() >= 3
    bias = run.length_bias.set_index("to_tokens")
    assert bias.loc[35, "offered"] == pytest.approx(0.25, abs=0.05)
    assert bias.loc[35, "trained"] < 0.02  # those of the start, when the trainer was not yet at work
    assert run.summary(after_s=200)["trained_length_ratio"] == pytest.approx(5 / (0.75 * 5 + 0.25 * 35), rel=0.1)


def test_field_case_b41_admission_keeps_them():
    run = b41(CONTROLLERS["areal"](max_lag=2, concurrency=64))
    trained = run.rollouts[run.rollouts["outcome"] == "trained"]
    assert (trained["tokens"] == 35).mean() == pytest.approx(0.25, abs=0.01)
    assert run.counts.discarded == 0
    assert run.length_bias["ratio"].tolist() == pytest.approx([1, 1])
    summary = run.summary(after_s=200)
    # A bound on the mean over rollouts: the short ones make up for the long ones, which are over it.
    assert summary["rollout_lag_mean"] <= 2 < summary["lag_max"]


class Paced(Controller):
    """The trainer waits where its next version would be one too many for a rollout that runs."""

    def may_take(self, counts):
        return counts.version - counts.oldest_running_version < 2


def test_field_case_b41_a_rule_of_ones_own_paces_the_trainer():
    run = b41(Paced())
    rows = run.rollouts[run.rollouts["end_version"] >= 0]
    trained = rows[rows["outcome"] == "trained"]
    assert (rows["end_version"] - rows["version"]).max() == 2
    assert (trained["tokens"] == 35).mean() == pytest.approx(0.25, abs=0.01)
    late = run.steps[run.steps["taken_s"] > 200]
    # It waits before training, so a rollout's 35 s and then the step's 10 s pass in two periods.
    assert late["taken_s"].diff().mean() == pytest.approx((35 + 10) / 2, rel=0.01)
    assert pipeline.paced_period_s(35, 10, max_lag=2) < (35 + 10) / 2
