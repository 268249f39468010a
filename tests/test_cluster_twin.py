"""The twin: laws that are known come back from a made-up run, and predictions that have a closed form keep to it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.cluster import ClusterConfig, twin
from rlinfra_utils.cluster.twin import Figures, InGroups, Overlap, Times, Twin, compare
from rlinfra_utils.cluster.twin.overlap import share_beside, time_open
from rlinfra_utils.policy import load_warm_start
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.simulator import CONTROLLERS, Controller, Counts
from rlinfra_utils.timers import Trace
from rlinfra_utils.tracing import RunLog

SIZE, GROUPS, UPDATES = 4, 3, 12
PREFILL_S, STEP_S, CALL_S, VERIFY_S, TRAIN_S, TOKEN_S, SYNC_S = 0.02, 0.001, 0.01, 0.004, 0.3, 1e-4, 0.05
ROLLOUT_S = 0.002


def config(**changes):
    values = {
        "controller": "synchronous",
        "num_workers": 1,
        "prompts_per_step": GROUPS,
        "group_size": SIZE,
        "num_updates": UPDATES,
        "forced_tokens": 50,
        "max_new_tokens": 200,
        "pin_cores": True,
        "save_every": 1000,
    }
    return ClusterConfig(**(values | changes))


def times(train_s=TRAIN_S, slower=1.0):
    """Constant times; the workers' are `slower` times as long."""
    return Times(
        prefill_s=PREFILL_S * slower,
        step_s=STEP_S * slower,
        call_core_s=0.0,
        call_s=np.array([CALL_S * slower]),
        verify_s=np.array([VERIFY_S * slower]),
        train_s=np.array([train_s]),
        train_s_per_rollout=0.0,
        train_s_per_padded_token=0.0,
    )


def exact(alone=None, beside=None, **changes):
    """A twin of constant times, which are the same beside the other side unless told otherwise."""
    alone = alone or times()
    values = {
        "config": config(),
        "num_cores": 1,
        "steps": np.array([50.0]),
        "tokens_per_step": float(SIZE),
        "prompt_tokens": 7.0,
        "sync_s": np.array([SYNC_S]),
        "sync_s_per_worker": 0.0,
        "checkpoint_s": 0.0,
        "alone": alone,
        "beside": beside or alone,
        "overlap": Overlap(1.0, 1.0),
    }
    return Twin(**(values | changes))


GROUP_S = PREFILL_S + 50 * STEP_S + CALL_S


def rate(made, **changes):
    return made.figures(made.predict(**changes)).tokens_per_s


def test_synchronous_on_one_worker_is_the_sum_of_its_parts_alone():
    cycle_s = GROUPS * GROUP_S + VERIFY_S + TRAIN_S + SYNC_S
    assert rate(exact(beside=times(train_s=9.0, slower=2.0))) == pytest.approx(GROUPS * SIZE * 50 / cycle_s, rel=1e-6)


@given(workers=st.floats(0.2, 5), trainer=st.floats(0.2, 5))
def test_a_slower_side_is_slower_by_so_much_and_nothing_else_is(workers, trainer):
    cycle_s = workers * GROUPS * GROUP_S + VERIFY_S + trainer * TRAIN_S + SYNC_S
    assert rate(exact().slower(workers, trainer)) == pytest.approx(GROUPS * SIZE * 50 / cycle_s, rel=1e-6)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "2", True, None])
@pytest.mark.parametrize("side", ["workers", "trainer"])
def test_a_side_that_takes_no_time_or_no_number_of_it_is_refused(side, value):
    with pytest.raises(ValueError, match=f"^{side}="):
        exact().slower(**{side: value})


def test_an_overlap_is_found_that_agrees_with_itself():
    # One step off, the workers always at work but for the sync: the trainer trains in a part of that time, and slows
    # them by half in it. Without the rests: period = work (1 + train / (2 period)).
    work_s, train_s = GROUPS * (PREFILL_S + 50 * STEP_S), 0.1
    period_s = (work_s + math.sqrt(work_s**2 + 2 * work_s * train_s)) / 2
    free = {"call_s": np.array([1e-9]), "verify_s": np.array([1e-9]), "train_s": np.array([train_s])}
    alone = replace(times(), **free)
    beside = replace(times(slower=1.5), **free)
    made = exact(alone, beside, sync_s=np.zeros(1))
    found = rate(made, controller="one_step_off", num_updates=40)
    assert found == pytest.approx(GROUPS * SIZE * 50 / period_s, rel=0.01)
    assert rate(exact(alone, sync_s=np.zeros(1)), controller="one_step_off") > 1.1 * found


def test_overlap_and_shares_of_a_core():
    mine, others = np.array([[0.0, 4.0], [2.0, 6.0], [10.0, 14.0]]), np.array([[1.0, 3.0], [2.5, 5.0], [20.0, 30.0]])
    assert share_beside(mine, others) == pytest.approx(4 / 10)
    assert share_beside(others, mine) == pytest.approx(4 / 14)
    assert share_beside(np.empty((0, 2)), others) == 0
    assert time_open(mine) == pytest.approx(6 + 4)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=8))
def test_time_is_open_once_however_many_are(pairs):
    spans = np.array([[start, start + length] for start, length in pairs], float)
    seconds = {second for start, length in pairs for second in range(start, start + length)}
    assert time_open(spans) == pytest.approx(len(seconds))
    assert share_beside(spans, spans[:1]) == pytest.approx(pairs[0][1] / len(seconds))


def test_what_a_call_takes_of_a_shared_core_is_work_there_and_no_wait():
    slow_call = replace(times(), call_core_s=0.006)
    made, shared = exact(slow_call), exact(slow_call, config=config(num_workers=2))
    alone_s = GROUPS * GROUP_S + VERIFY_S + TRAIN_S + SYNC_S
    assert rate(made) == pytest.approx(GROUPS * SIZE * 50 / alone_s, rel=1e-6)
    shared_s = 3 * (2 * (PREFILL_S + 50 * STEP_S + 0.006) + CALL_S - 0.006) + 2 * VERIFY_S + TRAIN_S + SYNC_S
    assert rate(shared, prompts_per_step=6) == pytest.approx(6 * SIZE * 50 / shared_s, rel=0.01)


def test_an_update_goes_by_its_widest_answer_and_its_rollouts():
    alone = replace(times(train_s=0.1), train_s_per_rollout=0.001, train_s_per_padded_token=1e-4)
    made = exact(alone)
    for prompts in (3, 6):
        train_s = 0.1 + prompts * SIZE * (0.001 + 1e-4 * (7 + 50))
        cycle_s = prompts * GROUP_S + VERIFY_S + train_s + SYNC_S
        assert rate(made, prompts_per_step=prompts) == pytest.approx(prompts * SIZE * 50 / cycle_s, rel=1e-6)
    # Log-normal lengths: the mean of the largest of three is exp of the median's log, plus a known sum; by quadrature.
    spread = made.update_s(alone, replace(made.config, forced_sigma=0.5))
    x = np.linspace(-8, 8, 20001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * (x[1] - x[0])
    widest = np.trapezoid(np.clip(50 * np.exp(0.5 * x), 1, 200) * 3 * below**2 * density, x)
    assert spread.mean() == pytest.approx(0.1 + 12 * (0.001 + 1e-4 * (7 + widest)), rel=0.02)


def test_two_workers_on_one_core_share_it_and_on_two_do_not():
    # Six groups on two workers: three rounds. Sharing, both decode at half speed; calls overlap with nothing.
    changes = {"num_workers": 2, "prompts_per_step": 6}
    tail_s = VERIFY_S + TRAIN_S + SYNC_S
    apart_s = 3 * GROUP_S + VERIFY_S + tail_s  # the two that end together are verified one after the other
    assert rate(exact(num_cores=2), **changes) == pytest.approx(6 * SIZE * 50 / apart_s, rel=1e-6)
    shared_s = 3 * (2 * (PREFILL_S + 50 * STEP_S) + CALL_S) + VERIFY_S + tail_s
    assert rate(exact(config=config(num_workers=2)), **changes) == pytest.approx(6 * SIZE * 50 / shared_s, rel=0.01)


@pytest.mark.parametrize(("calibrated", "asked"), [(1, 2), (2, 1), (3, 1)])
def test_workers_that_share_a_core_say_nothing_of_workers_that_have_one_each(calibrated, asked):
    made = exact(config=config(num_workers=calibrated))
    with pytest.raises(ValueError, match=rf"^num_workers={asked}: .*calibrate on runs that are alike"):
        made.predict(num_workers=asked)


def test_one_step_off_is_as_slow_as_its_slower_side():
    made = exact(times(train_s=2.0))
    figures = made.figures(made.predict(controller="one_step_off"))
    assert figures.tokens_per_s == pytest.approx(GROUPS * SIZE * 50 / (2.0 + SYNC_S), rel=1e-6)
    assert figures.lag_shares == (0.0, 1.0)
    assert figures.lag_mean == 1.0
    assert figures.queue_p95_batches == 1.0


def test_the_rule_sees_rollouts_where_the_loop_counts_groups():
    seen = []

    class Look(Controller):
        def may_start(self, counts):
            seen.append(counts)
            return True

    counts = Counts(GROUPS, 2 * GROUPS, 1, 5)
    counts.step, counts.version, counts.queued, counts.offered, counts.queued_tokens = 7, 3, 2, 11, 100
    counts.oldest_queued_version = 2
    assert InGroups(Look(), SIZE, "finish", 3.5).may_start(counts)
    shown = seen[0]
    assert (shown.batch, shown.per_version, shown.group_size, shown.slots) == (12, 24, 4, 20)
    assert (shown.queued, shown.offered, shown.queued_tokens) == (8, 44, 350)
    assert (shown.step, shown.version, shown.oldest_queued_version, shown.oldest_queued_s) == (7, 3, 2, math.inf)


def test_variation_is_half_the_absolute_differences():
    a, b = Figures(108.0, 1.0, (0.5, 0.5), 1.0), Figures(100.0, 1.2, (0.2, 0.5, 0.3), 2.5)
    found = compare(a, b)
    assert found["tokens_per_s"] == pytest.approx(1.08)
    assert found["lag_mean"] == pytest.approx(-0.2)
    assert found["lag_variation"] == pytest.approx(0.3)
    assert found["queue_p95_batches"] == pytest.approx(-1.5)
    assert found["missed"] == "lag_variation, queue_p95_batches"


def made_run(folder, of, slower=1.0, skew_s=0.0):
    """A run folder that never was: every time in it is known; workers `slower` times as long, beside a trainer.

    The trainer's clock is `skew_s` before the loop's.
    """
    model_eos = load_warm_start()[1].eos_token_id
    log, trace, rng = RunLog(folder, of.run_id, "main", of.to_json()), Trace(), np.random.default_rng(5)
    now_s, unix_s = 100.0, 1_800_000_000.0
    for step in range(UPDATES):
        records, total, widest, begin_s = [], 0, 0, now_s
        for number in range(GROUPS):
            steps = int(rng.integers(20, 80))
            total += steps * SIZE
            work_s, name = slower * (PREFILL_S + steps * STEP_S), f"s{step}-p{number}"
            # The core is ours for four fifths of the time.
            more = {"tokens": steps * SIZE, "steps": steps, "cpu_s": 0.8 * work_s, "before_cpu_s": 0.004 * slower}
            widest = max(widest, steps)
            trace.add("decode", now_s, now_s + work_s, track="worker0", **more)
            trace.add("answer_call", now_s, now_s + work_s + slower * CALL_S, actor_s=work_s)
            now_s += work_s + slower * CALL_S
            trace.add("verify_call", now_s, now_s + slower * VERIFY_S)
            records += [record(of, f"{name}-g{i}", step, steps, model_eos) for i in range(SIZE)]
        now_s += slower * VERIFY_S
        log.event("queue", time_unix_s=unix_s + now_s - 0.001, depth_rollouts=GROUPS * SIZE, depth_tokens=total)
        log.event("queue", time_unix_s=unix_s + now_s, depth_rollouts=0, depth_tokens=0)
        padded = GROUPS * SIZE * (1 + widest)
        parts = {"logprob_recompute": TOKEN_S * padded / 3, "forward_backward": TOKEN_S * padded * 2 / 3}
        parts |= {"optimizer_step": TRAIN_S}
        train_s = sum(parts.values()) + ROLLOUT_S * GROUPS * SIZE
        at_s = now_s if slower == 1 else begin_s
        now_s = max(now_s, at_s + train_s)
        trace.add("train_call", at_s, at_s + train_s, tokens=total, step=step)
        at_s += skew_s
        trace.add("train", at_s, at_s + train_s, track="trainer0", padded_tokens=padded, cpu_s=train_s)
        for stage, part_s in parts.items():
            trace.add(stage, at_s, at_s + part_s, track="trainer0")
            at_s += part_s
        log.rollouts(records, name=f"b{step}")
        ids = [one.sample_id for one in records]
        log.batch(f"b{step}", step + 1, ids, step, step + 1, time_unix_s=unix_s + now_s)
        trace.add("sync_call", now_s, now_s + SYNC_S, step=step + 1)
        trace.add("load_weights", now_s, now_s + 0.01, track="worker0", cpu_s=0.004)
        trace.add("prove_weights", now_s + 0.02, now_s + 0.03, track="worker0", cpu_s=0.006)
        now_s += SYNC_S
    trace.to_perfetto(folder / "trace.json")


def record(of, sample_id, version, num_tokens, eos_token_id):
    return Rollout(
        run_id=of.run_id,
        branch_id="main",
        sample_id=sample_id,
        group_id=sample_id.rsplit("-", 1)[0],
        prompt_tokens=[1],
        response_tokens=[3] * num_tokens,
        response_length=num_tokens,
        policy_version=version,
        eos_token_id=eos_token_id,
        decoding=Decoding(temperature=1.0),
    )


def test_calibration_finds_the_times_that_were_put_in(tmp_path):
    of = config(forced_sigma=0.4)
    made_run(tmp_path / "turns", of)
    made_run(tmp_path / "both", of, slower=1.5)
    found = twin.calibrate([tmp_path / "both"], [tmp_path / "turns"])
    for regime, slower in ((found.alone, 1.0), (found.beside, 1.5)):
        assert regime.prefill_s == pytest.approx(slower * PREFILL_S, rel=1e-6)
        assert regime.step_s == pytest.approx(slower * STEP_S, rel=1e-6)
        assert regime.call_s == pytest.approx(slower * CALL_S, rel=1e-6)
        assert regime.call_core_s == pytest.approx(slower * 0.004 / 0.8, rel=1e-6)
        assert regime.train_s == pytest.approx(TRAIN_S, rel=1e-6)
        assert regime.train_s_per_rollout == pytest.approx(ROLLOUT_S, rel=1e-6)
        assert regime.train_s_per_padded_token == pytest.approx(TOKEN_S, rel=1e-6)
    assert found.tokens_per_step == SIZE
    assert found.sync_s == pytest.approx(SYNC_S, rel=1e-6)
    assert found.sync_s_per_worker == pytest.approx(0.01, rel=1e-6)
    halfway = found.times(Overlap(found.overlap.workers / 2, 0.0))
    assert halfway.step_s == pytest.approx(1.25 * STEP_S, rel=1e-6)
    measured = twin.measure(tmp_path / "turns")
    assert measured.lag_shares == (1.0,)
    predicted = found.figures(replace(found, config=replace(of, forced_tokens=None)).predict())
    # The made-up lengths are drawn from 20 to 79; nine batches of them vary by some percent.
    assert predicted.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=0.1)
    assert predicted.lag_shares == (1.0,)
    for wrong, kind in ((("turns", "turns"), "asynchronous"), (("both", "both"), "synchronous")):
        with pytest.raises(ValueError, match=rf"trainer is at work in .*needs {kind} runs"):
            twin.calibrate(*([tmp_path / name] for name in wrong))


@pytest.mark.parametrize("skew_s", [-0.0005, 0.0005])
def test_clocks_that_differ_change_no_time_of_the_trainer(tmp_path, skew_s):
    made_run(tmp_path, config(forced_sigma=0.4), skew_s=skew_s)
    times = twin.read_times(tmp_path).times
    assert times.train_s == pytest.approx(TRAIN_S, rel=1e-6)
    assert times.train_s_per_rollout == pytest.approx(ROLLOUT_S, rel=1e-6)
    assert times.train_s_per_padded_token == pytest.approx(TOKEN_S, rel=1e-6)


def test_what_the_twin_does_not_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^num_workers=3: 2 cores"):
        exact(num_cores=2).predict(num_workers=3)
    with pytest.raises(ValueError, match=r"^changes=.*HFEngine"):
        exact().predict(engine="vllm")
    made_run(tmp_path / "loose", config(pin_cores=False))
    with pytest.raises(ValueError, match=r"^pin_cores=False"):
        twin.read_times(tmp_path / "loose")
    RunLog(tmp_path / "bare", "run0", "main", config().to_json())
    with pytest.raises(ValueError, match="has no trace"):
        twin.read_times(tmp_path / "bare")
    with pytest.raises(ValueError, match="0 updates; needs at least"):
        twin.measure(tmp_path / "bare")


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_rule_can_be_predicted(name):
    run = exact(times(train_s=0.1)).predict(controller=name)
    assert len(run.steps) == UPDATES
