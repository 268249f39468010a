"""The loop event for event against an independent SimPy model on shared random numbers."""

from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_oracle import SimpyLoop

from rlinfra_utils.simulator import CONTROLLERS, Exponential, LoopConfig, Pareto, simulate
from rlinfra_utils.simulator.workload import Workload

COLUMNS = ["start_s", "end_s", "verify_start_s", "verified_s", "ready_s", "taken_s"]
COLUMNS += ["start_version", "end_version", "taken_version", "taken_step"]


def both(config, max_queued):
    run = simulate(replace(config, controller=CONTROLLERS["bounded_queue"](max_rollouts=max_queued)))
    rows = Workload(config).rows
    needs = [next(rows) for _ in range(run.counts.offered + 2 * config.num_slots * config.group_size)]
    tokens, work_s, verify_s = ([need[i] for need in needs] for i in range(3))
    limit = float("inf") if max_queued is None else max_queued
    return run, SimpyLoop(config, [(s,) for s in work_s], verify_s, tokens, limit).run()


def assert_same(run, model):
    ours = run.rollouts
    # SimPy stops in the midst of the last instant, so that what is dispatched then may differ.
    ours = ours[(ours["start_s"] < run.end_s)]
    assert len(ours) >= len(model.rows) - run.config.num_slots - run.config.group_size
    trained = ours[ours["outcome"] == "trained"]
    assert len(trained) == sum(size for _, _, size, _ in model.steps)
    for name in COLUMNS:
        theirs = np.array([model.rows[index].get(name, np.nan) for index in ours["rollout"]])
        mine = np.where(ours[name] == -1, np.nan, ours[name].astype(float))
        decided = ~np.isnan(theirs) & (theirs < run.end_s) if name.endswith("_s") else ~np.isnan(theirs)
        np.testing.assert_array_equal(mine[decided], theirs[decided], err_msg=name)
    steps = run.steps[["taken_s", "trained_s", "rollouts", "tokens"]].to_numpy()
    np.testing.assert_array_equal(steps, np.array(model.steps, dtype=float))


@pytest.mark.parametrize("max_queued", [None, 128, 8])
def test_every_event_is_simpys(max_queued):
    config = LoopConfig(
        slots_per_replica=64,
        lengths_tokens=Pareto(40, 1.3, cap=4000),
        group_size=4,
        num_verifiers=3,
        verify_s=Exponential(0.2),
        batch_rollouts=32,
        train_s=1.5,
        train_s_per_token=1e-4,
        sync_interval=2,
        num_steps=80,
    )
    if max_queued == 8:
        config = replace(config, batch_rollouts=8)
    run, model = both(config, max_queued)
    assert run.status == "done"
    assert len(model.steps) == 80
    assert run.lag["share"].iloc[1:].sum() > 0.3  # versions do differ
    assert_same(run, model)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 12),
    group_size=st.integers(1, 4),
    groups=st.integers(1, 5),
    verifiers=st.integers(1, 3),
    verify_mean_s=st.sampled_from([0.01, 3.0, 20.0]),
    train_s=st.floats(0.5, 60),
    sync_interval=st.integers(1, 3),
    extra=st.one_of(st.none(), st.integers(0, 40)),
    seed=st.integers(0, 1000),
)
def test_random_loops_are_simpys(
    slots, group_size, groups, verifiers, verify_mean_s, train_s, sync_interval, extra, seed
):
    config = LoopConfig(
        slots_per_replica=slots,
        group_size=group_size,
        num_verifiers=verifiers,
        verify_s=Exponential(verify_mean_s),
        batch_rollouts=group_size * groups,
        train_s=train_s,
        sync_interval=sync_interval,
        num_steps=12,
        seed=seed,
    )
    assert_same(*both(config, None if extra is None else config.batch_rollouts + extra))


def test_field_case_b42_nothing_is_swallowed_as_simpys_abandoned_get_does():
    # A receiver waits 10 s at a time and then sleeps 20 s; sends every 50 s from 500 s; stop at 1,000 s.
    def received(cancels):
        env, got = simpy.Environment(), []
        store = simpy.Store(env)

        def sender():
            yield env.timeout(500)
            while True:
                yield store.put(env.now)
                yield env.timeout(50)

        def receiver():
            while True:
                get = store.get()
                if get in (yield get | env.timeout(10)):
                    got.append(get.value)
                elif cancels:
                    get.cancel()
                yield env.timeout(20)

        env.process(sender())
        env.process(receiver())
        env.run(1000)
        return len(got), len(store.items)

    assert received(cancels=False) == (0, 0)  # ten were sent: the trap
    assert received(cancels=True) == (10, 0)
    # Ours: attempts of 50 s, and a time limit that cuts none off, some, or all but the last retry.
    for timeout_s in (60.0, 49.0):
        faults = {"timeout_s": timeout_s, "max_retries": 1}
        config = LoopConfig(lengths_tokens=50, token_s=1.0, batch_rollouts=1, train_s=1, duration_s=1000)
        run = simulate(replace(config, slots_per_replica=1, faults=type(config.faults)(**faults)))
        counts = run.counts
        whole = counts.trained + counts.training + counts.queued + counts.in_flight + counts.discarded
        assert counts.offered == whole
        assert counts.trained == (19 if timeout_s > 50 else 0)
        assert counts.discarded == (0 if timeout_s > 50 else 10)
