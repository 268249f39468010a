"""What a run tells: tables that agree with one another, Perfetto, sweeps, calibration, and bad input at the door."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from rlinfra_utils import synthetic
from rlinfra_utils.simulator import (
    CONTROLLERS,
    Constant,
    Exponential,
    Faults,
    LogNormal,
    LoopConfig,
    Measured,
    Pareto,
    Tools,
    calibrate,
    simulate,
    sweep,
)
from rlinfra_utils.timers import Trace

bounded = CONTROLLERS["bounded_queue"]
CONFIG = LoopConfig(
    bounded(max_rollouts=64, drop_lag=2),
    num_replicas=2,
    slots_per_replica=16,
    group_size=4,
    num_verifiers=2,
    verify_s=Exponential(0.2),
    batch_rollouts=32,
    train_s=Exponential(4.0),
    sync_s=0.5,
    checkpoint_interval=3,
    checkpoint_s=1.0,
    num_steps=60,
)


@pytest.fixture(scope="module")
def run():
    return simulate(CONFIG)


def test_events_replay_to_the_counts(run):
    events, held = run.events, {"in_flight": 0, "queued": 0, "training": 0, "trained": 0, "dropped": 0}
    assert events["time_s"].is_monotonic_increasing
    moves = {
        "dispatched": (None, "in_flight"),
        "closed": ("in_flight", "queued"),
        "dropped": ("queued", "dropped"),
        "taken": ("queued", "training"),
    }
    for event in events["event"]:
        if event in moves:
            source, target = moves[event]
            held[target] += CONFIG.group_size
            if source:
                held[source] -= CONFIG.group_size
        elif event == "trained":
            held["trained"], held["training"] = held["trained"] + held["training"], 0
    counts = run.counts
    told = (counts.in_flight, counts.queued, counts.training, counts.trained, counts.discarded)
    assert tuple(held.values()) == told
    number = events["event"].value_counts()
    assert number["started"] == run.rollouts["start_s"].notna().sum() + len(run.lost)
    assert number["published"] == counts.version


def test_lag_is_that_of_brute_force(run):
    published_s = run.steps["sync_end_s"].dropna().to_numpy()
    begun_s = run.steps["sync_start_s"].dropna().to_numpy()[: len(published_s)]

    def decoding_s(start_s, end_s):
        """Seconds from start to end in which engines did not stand still."""
        return end_s - start_s - sum(max(0, min(end_s, e) - max(start_s, b)) for b, e in zip(begun_s, published_s))

    lags = {}
    for row in run.rollouts[run.rollouts["outcome"] == "trained"].itertuples():
        total_s = decoding_s(row.start_s, row.end_s)
        cuts = [row.start_s, *[t for t in published_s if row.start_s < t < row.end_s], row.end_s]
        for begin_s, end_s in itertools.pairwise(cuts):
            version = int((published_s <= begin_s).sum())
            lag = row.taken_version - version
            lags[lag] = lags.get(lag, 0) + row.tokens * decoding_s(begin_s, end_s) / total_s
    table = run.lag[run.lag["tokens"] > 1e-6]
    assert sorted(lags) == table["lag"].tolist()
    np.testing.assert_allclose([lags[lag] for lag in sorted(lags)], table["tokens"], rtol=1e-6)
    trained = run.rollouts[run.rollouts["outcome"] == "trained"]
    assert table["tokens"].sum() == pytest.approx(trained["tokens"].sum())
    summary = run.summary()
    assert summary["lag_mean"] == pytest.approx(np.average(table["lag"], weights=table["tokens"]))
    weights = np.exp(CONFIG.drift_nats**2 * table["lag"])
    assert summary["normalized_ess"] == pytest.approx(1 / np.average(weights, weights=table["tokens"]))


def test_normalized_ess_is_that_of_drawn_weights(run):
    rng, lag = np.random.default_rng(0), run.lag
    config = replace(CONFIG, drift_nats=0.4)
    per_lag = (lag["share"] * 400_000).astype(int)
    lags = np.repeat(lag["lag"], per_lag).to_numpy()
    logs = rng.normal(-0.5 * 0.4**2 * lags, 0.4 * np.sqrt(lags))
    weights = np.exp(logs)
    drawn = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert simulate(config).summary()["normalized_ess"] == pytest.approx(drawn, rel=0.01)


def test_lag_in_steps_counts_those_since_the_last_version():
    config = replace(CONFIG, sync_interval=3, drift_nats=0.3)
    run = simulate(config)
    by_tokens = {"step": [], "weight": [], "tokens": []}
    rows = run.rollouts.set_index("rollout")
    for span in run.spans.itertuples():
        row = rows.loc[span.rollout]
        if row["outcome"] in ("trained", "training"):
            lag = 3 * (row["taken_version"] - span.version) + row["taken_step"] % 3
            values = (lag, math.exp(0.3**2 * lag), span.tokens)
            for name, value in zip(by_tokens, values):
                by_tokens[name].append(value)
    summary = run.summary()
    assert summary["step_lag_mean"] == pytest.approx(np.average(by_tokens["step"], weights=by_tokens["tokens"]))
    assert summary["step_lag_mean"] > 3 * summary["lag_mean"]
    ess = 1 / np.average(by_tokens["weight"], weights=by_tokens["tokens"])
    assert summary["normalized_ess"] == pytest.approx(ess)


def test_summary_adds_up(run):
    summary, rows, steps = run.summary(), run.rollouts, run.steps
    assert summary["elapsed_s"] == run.end_s
    trained = rows[rows["outcome"] == "trained"]
    assert summary["tokens_per_s"] == pytest.approx(trained["tokens"].sum() / run.end_s)
    assert summary["trainer_utilization"] == pytest.approx((steps["trained_s"] - steps["taken_s"]).sum() / run.end_s)
    assert summary["discarded_rollouts"] == run.counts.discarded > 0
    assert summary["wasted_tokens"] == rows.loc[rows["outcome"] == "dropped", "tokens"].sum()
    half = run.summary(after_s=run.end_s / 2)
    assert half["steps"] == (steps["trained_s"] >= run.end_s / 2).sum()
    assert half["tokens_per_s"] == pytest.approx(summary["tokens_per_s"], rel=0.3)


def test_length_bias_shares_are_of_all_that_left(run):
    bias, rows = run.length_bias, run.rollouts
    assert bias["offered"].sum() == pytest.approx(1)
    assert bias["trained"].sum() == pytest.approx(1)
    settled = rows[rows["outcome"].isin(("trained", "dropped"))]
    row = bias.iloc[4]
    within = settled["tokens"].between(row["from_tokens"], row["to_tokens"])
    assert row["offered"] == pytest.approx(within.mean())
    assert row["trained"] == pytest.approx(
        within[settled["outcome"] == "trained"].sum() / (settled["outcome"] == "trained").sum()
    )


def test_perfetto_has_the_run(run, tmp_path):
    path = tmp_path / "loop.json"
    run.to_perfetto(path)
    frame = Trace.merge([path]).frame()
    stages = frame.groupby("stage")["dur_s"]
    assert stages.count()["decode"] == (run.rollouts["end_version"] >= 0).sum()
    steps = run.steps
    assert stages.sum()["forward_backward"] == pytest.approx((steps["trained_s"] - steps["taken_s"]).sum(), abs=1e-4)
    assert stages.count()["weight_sync"] == 59
    assert stages.count()["checkpoint"] == 19
    trainer = frame[frame["track"] == "trainer"].sort_values("start_s")
    assert trainer["end_s"].iloc[-1] - trainer["start_s"].iloc[0] == pytest.approx(trainer["dur_s"].sum(), abs=1e-4)
    assert json.loads(path.read_text())["traceEvents"]
    assert run.trace().critical_path()["dur_s"].sum() <= run.end_s + 1e-6


def test_a_batch_by_tokens_takes_groups_until_it_is_full():
    config = replace(CONFIG, batch_rollouts=None, batch_tokens=4096, controller=bounded(max_tokens=8192), num_steps=30)
    run = simulate(config)
    assert run.status == "done"
    trained = run.rollouts[run.rollouts["outcome"] == "trained"]
    for _, batch in trained.groupby("taken_step"):
        by_group = (
            batch.groupby("group").agg(tokens=("tokens", "sum"), ready_s=("ready_s", "first")).sort_values("ready_s")
        )
        assert by_group["tokens"].sum() >= 4096 > by_group["tokens"].iloc[:-1].sum()


def test_sweep_is_its_runs_in_order_with_any_number_of_workers(capsys):
    configs = [replace(CONFIG, num_steps=10, sync_interval=k, seed=s) for k in (1, 2, 4) for s in (0, 1)]
    alone = sweep(configs)
    assert "simulated 6 of 6" in capsys.readouterr().err
    pd.testing.assert_frame_equal(alone, sweep(configs, workers=2, progress=False))
    assert capsys.readouterr().err == ""
    for row, config in zip(alone.to_dict("records"), configs):
        assert row["tokens_per_s"] == simulate(config).summary()["tokens_per_s"]
        assert row["controller"].startswith("BoundedQueue(max_rollouts=64")
        default = math.isnan(row["sync_interval"])
        assert (1 if default else row["sync_interval"]) == config.sync_interval
    half = sweep(configs[:1], warm_up=0.5, progress=False)
    assert half["steps"][0] < alone["steps"][0]


def test_calibration_gives_a_traced_loop_back(run):
    config = calibrate(run.trace().frame(), group_size=4, batch_rollouts=32)
    assert (config.group_size, config.batch_rollouts, config.sync_interval, config.checkpoint_interval) == (4, 32, 1, 3)
    assert config.sync_s.mean == pytest.approx(0.5, abs=1e-6)
    assert config.checkpoint_s == pytest.approx(1.0, abs=1e-6)
    assert config.train_s.mean == pytest.approx((run.steps["trained_s"] - run.steps["taken_s"]).mean())
    rows = run.rollouts[run.rollouts["verified_s"].notna()]
    assert config.verify_s.mean == pytest.approx((rows["verified_s"] - rows["verify_start_s"]).mean(), rel=1e-6)


def test_calibration_on_a_synthetic_collection_predicts_it():
    workload = synthetic.Workload(tool_share=0, retry_share=0, speed_sigma=0.0, max_tool_calls=1)
    spans = synthetic.trace(2048, seed=3, workload=workload)
    frame = spans.frame()
    config = calibrate(frame)
    assert (config.num_slots, config.batch_rollouts, config.num_steps) == (8, 16, 128)
    assert config.token_s == pytest.approx(0.02, rel=1e-6)
    assert config.prefill_s_per_token == pytest.approx(0.0004, rel=1e-6)
    predicted = simulate(replace(config, sync_s=0.0))  # in that collection no one stands still for the weights
    assert predicted.end_s == pytest.approx(frame["end_s"].max(), rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="tokens"), "trace_frame: has no column tokens"),
        (lambda frame: frame[frame["stage"] != "decode"], "trace_frame: has no decode span"),
        (lambda frame: frame[frame["stage"] == "decode"], "trace_frame: has no forward_backward span"),
        (lambda frame: frame.assign(warmup=True), "trace_frame: has no decode span after warm-up, of none"),
        (lambda frame: frame.assign(tokens=pd.NA), "tokens of decode"),
        (lambda frame: frame.assign(stage=frame["stage"].replace("verifier", "environment")), "environment spans"),
        (lambda frame: "a path", "trace_frame: has no column stage"),
    ],
)
def test_calibration_refuses_what_it_cannot_read(run, change, message):
    with pytest.raises(ValueError, match=message) as refused:
        calibrate(change(run.trace().frame()))
    assert "\n" not in str(refused.value)


GOOD = {"batch_rollouts": 8, "num_steps": 4}


class Endless:
    mean = math.inf

    def draw(self, rng, num):
        return np.ones(num)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"controller": "arael"}, "controller='arael': known are areal, bounded_queue"),
        ({"controller": CONTROLLERS["areal"]}, r"controller=.*is it a class without \(\)"),
        ({"slots_per_replica": 0}, "slots_per_replica=0"),
        ({"num_replicas": 1.5}, "num_replicas=1.5"),
        ({"num_verifiers": True}, "num_verifiers=True"),
        ({"token_s": 0}, "token_s=0"),
        ({"token_s": float("nan")}, "token_s=nan"),
        ({"token_s_per_active": -0.1}, "token_s_per_active=-0.1"),
        ({"train_s": -1}, "train_s=-1"),
        ({"train_s": float("nan")}, "train_s=nan"),
        ({"sync_s": float("inf")}, "sync_s=inf"),
        ({"verify_s": "fast"}, "verify_s='fast'"),
        ({"lengths_tokens": 0}, "lengths_tokens=0: needs a mean above 0"),
        ({"lengths_tokens": Endless()}, "lengths_tokens=.*the mean is inf; cap the law"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"group_size": 3}, "batch_rollouts=8: needs a multiple of group_size=3"),
        ({"batch_tokens": 4096}, "batch_rollouts=8, batch_tokens=4096: give just one"),
        ({"batch_rollouts": None}, "batch_rollouts=None, batch_tokens=None"),
        ({"batch_rollouts": None, "batch_tokens": 64, "controller": "areal"}, "batch_tokens=64: AReaL counts batches"),
        ({"sync_interval": 0}, "sync_interval=0"),
        ({"num_steps": None}, "num_steps=None, duration_s=None"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"duration_s": 0}, "duration_s=0"),
        ({"seed": -1}, "seed=-1"),
        ({"drift_nats": float("inf")}, "drift_nats=inf"),
        ({"faults": None}, "faults=None"),
        ({"tools": 3}, "tools=3"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    LoopConfig(**GOOD)
    with pytest.raises(ValueError, match=message) as refused:
        LoopConfig(**(GOOD | changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pareto(16, 1.0), "alpha=1.0: the mean is infinite; give alpha above 1, or a cap"),
        (lambda: Pareto(16, 0.5, cap=8), "cap=8"),
        (lambda: Pareto(0, 2), "minimum=0"),
        (lambda: LogNormal(-1, 1), "median=-1"),
        (lambda: LogNormal(1, float("nan")), "sigma=nan"),
        (lambda: Exponential(0), "mean=0"),
        (lambda: Constant(float("nan")), "value=nan"),
        (lambda: Measured([]), "values=.*is empty"),
        (lambda: Measured([1, float("nan")]), r"values\[1\]=nan"),
        (lambda: Faults(hang_share=1.5), "hang_share=1.5"),
        (lambda: Faults(timeout_s=0), "timeout_s=0"),
        (lambda: Faults(mtbf_s=-1), "mtbf_s=-1"),
        (lambda: Faults(max_retries=-1), "max_retries=-1"),
        (lambda: Tools(calls=-1), "calls=-1"),
        (lambda: simulate({"batch_rollouts": 8}), "config=.*needs a LoopConfig"),
        (lambda: sweep([LoopConfig(**GOOD), 7]), r"configs\[1\]=7"),
        (lambda: sweep(LoopConfig(**GOOD)), "configs=LoopConfig"),
        (lambda: sweep([], workers=0), "workers=0"),
        (lambda: sweep([], warm_up=1.0), "warm_up=1.0"),
        (lambda: simulate(LoopConfig(**GOOD)).summary(after_s=1e9), "after_s="),
    ],
)
def test_bad_laws_and_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "law",
    [
        Constant(3.0),
        Exponential(5.0),
        LogNormal(300, 0.8),
        Pareto(16, 1.0, cap=4096),
        Pareto(16, 0.7, cap=500),
        Pareto(16, 3.0),
    ],
)
def test_a_laws_mean_is_that_of_its_draws(law):
    drawn = law.draw(np.random.default_rng(5), 400_000)
    assert drawn.mean() == pytest.approx(law.mean, rel=0.02)
    assert (drawn >= 0).all()
    rng = np.random.default_rng(9)
    both = np.concatenate([law.draw(rng, 10), law.draw(rng, 5)])
    np.testing.assert_array_equal(both, law.draw(np.random.default_rng(9), 15))


def test_an_empty_sweep_is_an_empty_table():
    assert sweep([], progress=False).empty
