"""The loop's contract: nothing lost at any event, limits that stop only what is new, updates, faults, dead ends."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.simulator import (
    CONTROLLERS,
    Controller,
    Exponential,
    Faults,
    LogNormal,
    LoopConfig,
    Measured,
    Tools,
    simulate,
)

bounded = CONTROLLERS["bounded_queue"]


@st.composite
def configs(draw):
    """Any loop at all: pools, tools, faults, batched decoding, and each controller at its own defaults."""
    group = draw(st.integers(1, 4))
    name = draw(st.sampled_from(sorted(CONTROLLERS)))
    faults = Faults(
        hang_share=draw(st.sampled_from([0.0, 0.0, 0.05])),
        timeout_s=draw(st.sampled_from([None, 3.0, 12.0])),
        max_retries=draw(st.integers(0, 2)),
        mtbf_s=draw(st.sampled_from([None, 20.0, 200.0])),
        restart_s=draw(st.sampled_from([0.0, 5.0])),
    )
    return LoopConfig(
        controller=name,
        num_replicas=draw(st.integers(1, 3)),
        slots_per_replica=draw(st.integers(1, 6)),
        lengths_tokens=draw(st.sampled_from([LogNormal(200, 0.9), Measured([50, 50, 900]), 200])),
        token_s=0.02,
        token_s_per_active=draw(st.sampled_from([0.0, 0.0, 0.004])),
        prefill_s_per_token=draw(st.sampled_from([0.0, 0.001])),
        tools=draw(st.sampled_from([Tools(), Tools(Measured([0, 1, 3]), Exponential(1.0))])),
        group_size=group,
        num_verifiers=draw(st.integers(1, 2)),
        verify_s=draw(st.sampled_from([0.0, Exponential(0.3)])),
        batch_rollouts=group * draw(st.integers(1, 6)),
        train_s=draw(st.sampled_from([0.0, 0.5, Exponential(6.0)])),
        sync_interval=draw(st.integers(1, 3)),
        sync_s=draw(st.sampled_from([0.0, 0.4])),
        checkpoint_interval=draw(st.sampled_from([None, 2])),
        checkpoint_s=1.0,
        faults=faults,
        num_steps=draw(st.sampled_from([None, 8])),
        duration_s=120.0,
        seed=draw(st.integers(0, 9999)),
    )


class Conservation:
    """Looks at every event."""

    def __init__(self):
        self.seen, self.now_s, self.last = 0, 0.0, (0, 0, 0, 0, 0)

    def __call__(self, counts):
        self.seen += 1
        held = counts.in_flight + counts.queued + counts.training
        assert counts.offered == held + counts.trained + counts.discarded
        assert min(counts.in_flight, counts.queued, counts.training, counts.queued_tokens) >= 0
        assert (counts.queued == 0) == (counts.queued_tokens == 0) == (counts.oldest_queued_s == np.inf)
        assert counts.oldest_running_version <= counts.version or counts.in_flight == 0
        assert counts.now_s >= self.now_s
        only_grow = (counts.offered, counts.trained, counts.discarded, counts.version, counts.step)
        assert all(now >= before for now, before in zip(only_grow, self.last))
        self.now_s, self.last = counts.now_s, only_grow


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(config=configs())
def test_nothing_is_lost_at_any_event(config):
    watch = Conservation()
    run = simulate(config, watch)
    assert watch.seen or run.status != "done" or run.end_s == config.duration_s
    rows, counts = run.rollouts, run.counts
    # The same from the other side: the rows, not the loop's counters.
    by_outcome = rows["outcome"].value_counts()
    told = {"trained": counts.trained, "training": counts.training, "queued": counts.queued}
    told |= {"in_flight": counts.in_flight}
    assert {name: int(by_outcome.get(name, 0)) for name in told} == told
    assert by_outcome.get("dropped", 0) + by_outcome.get("failed", 0) == counts.discarded
    assert rows["rollout"].tolist() == list(range(counts.offered))
    # No more rollouts in slots than there are slots, by sweeping over the attempts.
    starts = pd.concat([rows["start_s"].dropna(), run.lost["start_s"]])
    ends = pd.concat([rows["end_s"].dropna(), run.lost["end_s"]])
    at = np.concatenate([starts, ends])
    order = np.lexsort((np.r_[np.ones(len(starts)), np.zeros(len(ends))], at))
    held = np.cumsum(np.r_[np.ones(len(starts)), -np.ones(len(ends))][order])
    assert held.max(initial=0) <= config.num_slots
    # Each trained rollout went through its stages in order, and its tokens have versions that it could see.
    trained = rows[rows["outcome"] == "trained"]
    in_order = ["dispatched_s", "start_s", "end_s", "verify_start_s", "verified_s", "ready_s", "taken_s"]
    assert (np.diff(trained[in_order].to_numpy(), axis=1) >= -1e-9).all()
    spans = run.spans.merge(trained, on="rollout", suffixes=("", "_group"))
    made = spans.groupby("rollout")["tokens"].sum()
    np.testing.assert_allclose(made, trained.set_index("rollout")["tokens"].loc[made.index], rtol=1e-6)
    assert len(made) == len(trained)
    assert (spans["version"] <= spans["end_version"]).all()
    assert (spans["version"] >= spans["start_version"]).all()
    if run.end_s:
        summary = run.summary()
        for name in ("generation_utilization", "verifier_utilization", "trainer_utilization"):
            assert -1e-9 <= summary[name] <= 1 + 1e-9, name
    assert (run.reason != "") == (run.status in ("blocked", "starved"))


@settings(max_examples=30, deadline=None)
@given(config=configs())
def test_same_seed_same_events(config):
    one, two = simulate(config), simulate(config)
    pd.testing.assert_frame_equal(one.events, two.events)
    assert one.summary() == pytest.approx(two.summary(), nan_ok=True) if one.end_s else True


def test_configurations_meet_the_same_rollouts():
    config = LoopConfig(verify_s=Exponential(1.0), group_size=2, batch_rollouts=8, duration_s=400, num_steps=20)
    base = simulate(config).rollouts
    for other in (
        replace(config, controller="synchronous"),
        replace(config, slots_per_replica=32, train_s=9.0),
        replace(config, controller="areal", token_s_per_active=0.01, tools=Tools(2, 1.0)),
        replace(config, faults=Faults(hang_share=0.1, timeout_s=60.0)),
    ):
        rows = simulate(other).rollouts
        num = min(len(rows), len(base))
        assert num >= 64
        assert rows["tokens"][:num].tolist() == base["tokens"][:num].tolist()
        both = rows["verified_s"][:num].notna() & base["verified_s"][:num].notna()
        times_s = [(table["verified_s"] - table["verify_start_s"])[:num][both] for table in (rows, base)]
        np.testing.assert_allclose(*times_s, atol=1e-9)
    assert simulate(replace(config, seed=1)).rollouts["tokens"].tolist() != base["tokens"].tolist()


def test_the_same_attempts_hang_under_every_configuration():
    faults = Faults(hang_share=0.1, timeout_s=100.0)
    config = LoopConfig(faults=faults, batch_rollouts=8, num_steps=60)
    hung = []
    for slots in (8, 16):
        run = simulate(replace(config, slots_per_replica=slots))
        first = run.lost[(run.lost["rollout"] < 100) & (run.lost["attempt"] == 0)]
        hung.append(sorted(first["rollout"]))
    assert hung[0] == hung[1] != []


def test_a_limit_stops_new_work_and_not_what_has_begun():
    depths = []

    def watch(counts):
        depths.append((counts.queued, counts.offered))

    config = LoopConfig(bounded(max_rollouts=4), 1, 32, batch_rollouts=4, train_s=60.0, duration_s=600)
    simulate(config, watch)
    deepest = max(depth for depth, _ in depths)
    assert 4 < deepest <= 4 + 32
    for (_, before), (depth, offered) in itertools.pairwise(depths):
        assert offered == before or depth < 4  # nothing is dispatched at the limit


@pytest.mark.parametrize(
    ("limits", "measure"),
    [
        ({"max_rollouts": 10}, lambda counts: counts.queued / 10),
        ({"max_tokens": 9000}, lambda counts: counts.queued_tokens / 9000),
        ({"max_bytes": 18e3, "bytes_per_token": 2.0}, lambda counts: counts.queued_tokens * 2.0 / 18e3),
        ({"max_age_s": 20.0}, lambda counts: counts.batch_ready * (counts.now_s - counts.oldest_queued_s) / 20.0),
        ({"max_lag": 3}, lambda counts: counts.batch_ready * (counts.version - counts.oldest_queued_version) / 3),
        ({"max_rollouts": 80, "max_tokens": 9000}, lambda counts: counts.queued_tokens / 9000),
    ],
    ids=["rollouts", "tokens", "bytes", "age", "lag", "several"],
)
def test_each_limit_holds_new_work(limits, measure):
    before = {"offered": 0, "blocked": 0}

    def watch(counts):
        full = measure(counts) >= 1
        grew = counts.offered > before["offered"]
        before["blocked"] += full and counts.free_slots > 0
        # All that is dispatched in an event is dispatched after it, with the queue as it is seen here.
        assert not (full and grew)
        before["offered"] = counts.offered

    config = LoopConfig(bounded(**limits), 1, 8, batch_rollouts=8, train_s=15.0, sync_interval=1, duration_s=900)
    run = simulate(config, watch)
    assert run.counts.trained > 100
    assert before["blocked"] > 0


#: Two slots, 10 s rollouts of 100 tokens, two a batch, weights that take 2 s. Taken at 10 s, trained at 13 s.
UPDATE = LoopConfig(
    slots_per_replica=2,
    lengths_tokens=100,
    token_s=0.1,
    prompt_tokens=50,
    batch_rollouts=2,
    train_s=3.0,
    sync_s=2.0,
    num_steps=2,
)


def spans_of(run, rollout):
    rows = run.spans[run.spans["rollout"] == rollout].sort_values("version")
    return list(zip(rows["version"].tolist(), rows["tokens"].round(6).tolist()))


class Started(Controller):
    def __init__(self, at_update):
        self.at_update = at_update


@pytest.mark.parametrize("batched", [False, True])
def test_keep_mixes_versions_and_costs_the_pause(batched):
    run = simulate(replace(UPDATE, controller=Started("keep"), **speed(batched)))
    second = run.rollouts.iloc[2]
    assert (second["start_s"], second["end_s"]) == pytest.approx((10.0, 22.0))  # 10 s of work and the pause, 13 to 15
    assert spans_of(run, 2) == [(0, 30.0), (1, 70.0)]
    assert run.summary()["generation_utilization"] == pytest.approx(23 / 25)  # 25 s in all
    assert run.reread_tokens == 0


@pytest.mark.parametrize("batched", [False, True])
def test_abort_reads_prompt_and_partial_again(batched):
    # A step of a lone sequence takes 0.08 s, of two 0.1 s: what a prompt token takes alone is longer beside another.
    prefill_s = 0.008 if batched else 0.01
    config = replace(UPDATE, controller=Started("abort"), prefill_s_per_token=prefill_s, **speed(batched))
    run = simulate(config)
    # Prefill 0.5 s: taken at 10.5, trained at 13.5, weights until 15.5; by then 2.5 s of decoding, 25 tokens.
    assert run.rollouts["start_s"].iloc[2] == pytest.approx(10.5)
    assert run.reread_tokens == pytest.approx(2 * (50 + 25))
    assert run.rollouts["end_s"].iloc[2] == pytest.approx(15.5 + 0.75 + 7.5)
    assert spans_of(run, 2) == [(0, 25.0), (1, 75.0)]


@pytest.mark.parametrize("batched", [False, True])
def test_finish_leaves_one_version_and_holds_everyone(batched):
    run = simulate(replace(UPDATE, controller=Started("finish"), **speed(batched)))
    assert run.rollouts["end_s"].iloc[2] == pytest.approx(20.0)
    assert spans_of(run, 2) == [(0, 100.0)]
    assert run.steps[["sync_start_s", "sync_end_s"]].iloc[0].tolist() == pytest.approx([20.0, 22.0])
    assert run.steps["taken_s"].iloc[1] == pytest.approx(22.0)  # the trainer waits, too
    assert run.rollouts["start_s"].iloc[4] == pytest.approx(22.0)  # and so do the slots


def speed(batched):
    """The same speed for two active sequences."""
    return {"token_s": 0.06, "token_s_per_active": 0.02} if batched else {}


def stepped(lengths, slots, token_s, token_s_per_active):
    """Continuous batching token by token: every step gives each active sequence one token."""
    now_s, waiting, active, ends = 0.0, list(enumerate(lengths)), {}, {}
    while waiting or active:
        while waiting and len(active) < slots:
            index, length = waiting.pop(0)
            active[index] = length
        now_s += token_s + token_s_per_active * len(active)
        for index in list(active):
            active[index] -= 1
            if not active[index]:
                del active[index]
                ends[index] = now_s
    return [ends[index] for index in range(len(lengths))]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=25), slots=st.integers(1, 8))
def test_continuous_batching_is_that_of_single_steps(lengths, slots):
    class Given(Controller):
        def may_start(self, counts):
            return counts.free_slots > 0 and counts.offered < len(lengths)

    class Row:
        mean = float(np.mean(lengths))

        def draw(self, rng, num):
            return np.resize(np.array(lengths, dtype=float), num)

    config = LoopConfig(
        Given(),
        1,
        slots,
        Row(),
        token_s=0.5,
        token_s_per_active=0.25,
        prompt_tokens=0,
        train_s=0,
        num_steps=1,
        batch_rollouts=len(lengths),
    )
    run = simulate(config)
    # A sequence that ends within a step's length of another starts its successor at once, not at the next step:
    # all ends lie on steps here, so both agree.
    np.testing.assert_allclose(run.rollouts["end_s"], stepped(lengths, slots, 0.5, 0.25), rtol=1e-9)


def test_batched_decoding_spreads_over_replicas_and_lets_tools_wait():
    config = LoopConfig(
        "synchronous",
        2,
        4,
        100,
        token_s=0.08,
        token_s_per_active=0.01,
        prompt_tokens=0,
        batch_rollouts=4,
        train_s=0,
        tools=Tools(1, 3.0),
        num_steps=1,
    )
    run = simulate(config)
    # Two to a replica: 50 tokens at 0.1 s, a tool call of 3 s, 50 tokens at 0.1 s.
    assert run.rollouts["end_s"].tolist() == pytest.approx([13.0] * 4)


def test_a_time_limit_repeats_and_then_gives_the_group_up():
    config = LoopConfig(
        "synchronous",
        1,
        1,
        Measured([100]),
        token_s=0.1,
        prompt_tokens=0,
        batch_rollouts=2,
        num_steps=3,
        duration_s=100.0,
        faults=Faults(timeout_s=4.0, max_retries=2),
    )
    run = simulate(config)
    assert run.rollouts["outcome"].iloc[0] == "failed"
    assert run.lost["rollout"].iloc[:6].tolist() == [0, 0, 0, 1, 1, 1]  # repeated before what has waited
    assert run.lost["end_s"].iloc[:3].tolist() == pytest.approx([4.0, 8.0, 12.0])
    assert run.lost["tokens"].iloc[:3].tolist() == pytest.approx([40.0] * 3)
    assert run.counts.trained == 0
    assert run.summary()["wasted_tokens"] >= 40 * len(run.lost)


@pytest.mark.parametrize("batched", [0.0, 0.001])
def test_a_dead_replicas_rollouts_are_made_elsewhere(batched):
    faults = Faults(mtbf_s=60.0, restart_s=20.0)
    config = LoopConfig(
        bounded(),
        4,
        4,
        token_s_per_active=batched,
        batch_rollouts=16,
        group_size=4,
        num_steps=60,
        faults=faults,
        sync_s=0.5,
    )
    run = simulate(config)
    assert run.status == "done"
    assert (run.lost["why"] == "died").sum() > 20
    assert run.counts.discarded == 0
    healthy = simulate(replace(config, faults=Faults()))
    assert run.end_s > healthy.end_s


def test_hung_rollouts_with_a_time_limit_are_repeated():
    faults = Faults(hang_share=0.1, timeout_s=200.0, max_retries=10)
    run = simulate(LoopConfig(bounded(), 1, 32, batch_rollouts=32, num_steps=20, faults=faults))
    assert run.status == "done"
    assert len(run.lost) > 20
    assert run.lost["tokens"].max() < 200.0 / 0.02
    assert (run.lost["end_s"] - run.lost["start_s"]).to_numpy() == pytest.approx(200.0)


class Nothing(Controller):
    """A look-ahead of zero: no rollout may be begun before a version that no rollout has made."""

    def may_start(self, counts):
        return counts.offered < counts.version * counts.batch


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"controller": Nothing()}, "the trainer waits for 16 rollouts .* holds 0; Nothing starts nothing"),
        ({"controller": bounded(max_rollouts=2)}, "holds 9; BoundedQueue starts nothing"),
        (
            {"controller": CONTROLLERS["trl_async"](max_inflight=4, queue_maxsize=8)},
            "holds 11; TRLAsync starts nothing",
        ),
        ({"faults": Faults(hang_share=0.3)}, "8 of 8 slots hang and Faults.timeout_s is None"),
        ({"controller": "one_step_off", "faults": Faults(hang_share=0.02)}, "hang"),
        ({"controller": "nemo_rl", "faults": Faults(timeout_s=20.0, max_retries=0)}, "NeMoRL starts nothing"),
    ],
    ids=[
        "look-ahead of zero",
        "queue below a batch",
        "trl below a batch",
        "hung",
        "hung update",
        "step without its own",
    ],
)
def test_a_blocked_run_names_what_is_missing(changes, missing):
    config = LoopConfig(slots_per_replica=8, batch_rollouts=16, num_steps=1000)
    run = simulate(replace(config, **changes))
    assert run.status == "blocked"
    assert pd.Series(run.reason).str.contains(missing).all(), run.reason
    assert "\n" not in run.reason
    assert run.summary()["status"] == "blocked"


@pytest.mark.parametrize(
    "changes",
    [
        {"controller": bounded(drop_lag=0), "lengths_tokens": 1000, "slots_per_replica": 1, "batch_rollouts": 4},
        {"faults": Faults(timeout_s=0.01), "lengths_tokens": 1000},
        {"faults": Faults(mtbf_s=1.0), "lengths_tokens": Measured([10_000])},
        {"faults": Faults(mtbf_s=1.0, hang_share=1.0)},
    ],
    ids=["all dropped", "all time out", "always dies", "hangs and dies"],
)
def test_a_starved_run_ends(changes):
    class DropAll(Controller):
        def judge(self, group, counts):
            return "drop"

    config = replace(LoopConfig(batch_rollouts=8, num_steps=10_000), **changes)
    if "controller" in changes:
        config = replace(config, controller=DropAll())
    run = simulate(config)
    assert run.status == "starved"
    assert run.reason
    assert run.counts.trained == 0


def test_a_controller_that_answers_nonsense_is_refused():
    class Endless(Controller):
        def may_start(self, counts):
            return True

    class Odd(Controller):
        def judge(self, group, counts):
            return "maybe"

    config = LoopConfig(batch_rollouts=8, num_steps=10)
    with pytest.raises(ValueError, match=r"controller=Odd: judge gave 'maybe'"):
        simulate(replace(config, controller=Odd()))
    with pytest.raises(ValueError, match="controller=Endless: dispatches without end"):
        simulate(replace(config, controller=Endless(), group_size=8))
