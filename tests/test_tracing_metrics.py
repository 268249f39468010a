"""The four groups of metrics against sums written another way; what the files do not hold is absent, never 0."""

import math
from collections import Counter

import numpy as np
import pytest
from tracing_runs import CONFIG, NUM_STEPS, STEP_S, T0_UNIX_S, make_run

from rlinfra_utils import synthetic
from rlinfra_utils.rollouts import STOP_REASONS
from rlinfra_utils.tracing import RunLog, config_hash, metrics, per_batch, read_run

NAMES = {
    "data": "prompt_tokens response_tokens stop_reason_share truncation_share technical_failure_share "
    "degenerate_group_share reward",
    "policy": "kl_to_base entropy behavior_logprob importance_ratio normalized_ess policy_lag_mean policy_lag_max",
    "system": "rollout_duration stored_to_trained queue_depth weight_sync peak_memory retry_events rollout_retries "
    "throughput queue_wait utilisation",
    "reliability": "checkpoint_age checkpoint_save restore lost_rollouts worker_deaths restart_gap",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics") / "run"
    steps = make_run(folder, seed=6)
    synthetic.trace(40, seed=2).to_perfetto(folder / "trace.json")
    return steps, read_run(folder)


def test_data(made):
    steps, run = made
    records = [record for step in steps for record in step]
    found = metrics(run)
    lengths = sorted(len(record.response_tokens) for record in records)
    assert found["response_tokens"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["response_tokens"]["max"] == lengths[-1]
    for share in (50, 95, 99):
        assert found["response_tokens"][f"p{share}"] == pytest.approx(np.percentile(lengths, share))
    ends = Counter(record.stop_reason for record in records)
    assert found["stop_reason_share"] == pytest.approx({end: num / len(records) for end, num in ends.items()})
    assert found["truncation_share"] == pytest.approx(ends["length"] / len(records))
    rewards = [sum(record.reward.values()) for record in records]
    assert found["reward"]["mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_degenerate_groups_are_counted_within_a_batch(made):
    """synthetic names its groups anew for each step, so a group id means something within a batch alone."""
    steps, run = made
    shares = []
    for step, share in zip(steps, per_batch(run)["degenerate_group_share"], strict=True):
        groups = {}
        for record in step:
            groups.setdefault(record.group_id, set()).add(sum(record.reward.values()))
        shares.append(sum(len(values) == 1 for values in groups.values()) / len(groups))
        assert share == pytest.approx(shares[-1])
    assert metrics(run)["degenerate_group_share"] == pytest.approx(sum(shares) / len(shares))


def test_policy(made):
    steps, run = made
    batches = per_batch(run)
    for number, step in enumerate(steps):
        lags, weights = [], []
        for record in step:
            num_prompt = len(record.prompt_tokens)
            lags += [10 + number - version for version in record.versions()]
            trainer = [row[0] for row in record.per_token["trainer_logprobs"]][num_prompt:]
            weights += [math.exp(t - b) for t, b in zip(trainer, record.behavior_logprobs, strict=True)]
        row = batches.iloc[number]
        assert row["lag_max"] == max(lags)
        assert row["lag_mean"] == pytest.approx(sum(lags) / len(lags))
        assert row["mean_ratio"] == pytest.approx(sum(weights) / len(weights))
        ess = sum(weights) ** 2 / sum(w * w for w in weights)
        assert row["normalized_ess"] == pytest.approx(ess / len(weights))
    found = metrics(run)
    assert found["policy_lag_max"] == batches["lag_max"].max()
    assert found["kl_to_base"] == pytest.approx(sum(0.001 * step for step in range(NUM_STEPS)) / NUM_STEPS)
    logprobs = [value for step in steps for record in step for value in record.behavior_logprobs]
    assert found["behavior_logprob"] == pytest.approx(sum(logprobs) / len(logprobs))


def test_system(made):
    steps, run = made
    found = metrics(run)
    durations = [record.finished_s - record.started_s for step in steps for record in step]
    assert found["rollout_duration"]["p99"] == pytest.approx(np.percentile(durations, 99))
    assert found["stored_to_trained"]["mean"] == pytest.approx(40)
    assert found["peak_memory"] == {"trainer": 1_000_000 + NUM_STEPS - 1}
    assert found["rollout_retries"] == sum(record.num_retries for step in steps for record in step)
    spans = synthetic.trace(40, seed=2).frame()
    decode = spans[spans["stage"] == "decode"]
    assert found["throughput"]["decode"] == pytest.approx(decode["tokens"].sum() / decode["dur_s"].sum())
    makespan_s = spans["end_s"].max() - spans["start_s"].min()
    busy_s = decode.loc[decode["track"] == "engine-0", "dur_s"].sum()
    others = spans[(spans["track"] == "engine-0") & (spans["stage"] != "decode")]["dur_s"].sum()
    assert found["utilisation"]["engine-0"] == pytest.approx((busy_s + others) / makespan_s)
    waiting = spans[spans["stage"] == "queue_wait"]["dur_s"].sum()
    assert found["queue_wait"] == pytest.approx(waiting)
    trainer = spans[(spans["track"] == "trainer") & (spans["stage"] != "queue_wait")]["dur_s"].sum()
    assert found["utilisation"]["trainer"] == pytest.approx(trainer / makespan_s)


def test_reliability(made):
    _, run = made
    last_saved = max(step for step in range(NUM_STEPS) if step % 3 == 0)
    saved_unix_s = T0_UNIX_S + (last_saved + 1) * STEP_S + 1
    assert metrics(run, now_unix_s=saved_unix_s + 77)["checkpoint_age"] == pytest.approx(77)
    found = metrics(run)
    assert found["checkpoint_age"] == pytest.approx(run.last_unix_s - saved_unix_s)
    assert found["checkpoint_save"]["max"] == 1.5
    assert (found["lost_rollouts"], found["worker_deaths"]) == (0, 0)  # counted: the log has events, none of these


def test_every_row_has_its_configuration_and_every_name_its_row(made):
    found = metrics(made[1])
    assert {row.config_hash for row in found.rows} == {config_hash(CONFIG)}
    for group, names in NAMES.items():
        assert [*dict.fromkeys(row.name for row in found.rows if row.group == group)] == names.split()
    assert all((row.value is None) == bool(row.reason) for row in found.rows)
    frame = found.frame()
    assert list(frame.columns) == ["group", "name", "value", "unit", "window", "config_hash", "labels", "reason"]


def test_of_a_run_that_holds_nothing_everything_is_absent_and_says_why(tmp_path):
    RunLog(tmp_path, "r", "main", CONFIG)
    found = metrics(read_run(tmp_path))
    assert [row.value for row in found.rows] == [None] * sum(len(names.split()) for names in NAMES.values())
    assert all(row.reason for row in found.rows)
    with pytest.raises(KeyError, match=r"truncation_share: is absent: no rollout of this branch"):
        found["truncation_share"]
    with pytest.raises(KeyError, match="is no metric; the names are"):
        found["speed"]
    with pytest.raises(ValueError, match="branch_id='x': the run has main"):
        metrics(read_run(tmp_path), "x")


def test_each_absent_field_takes_its_metric_along_and_no_other(tmp_path):
    """A record stripped of one field: the metrics of that field are absent."""
    gone = {
        "prompt_tokens": {"prompt_tokens", "behavior_logprob", "policy_lag_mean", "policy_lag_max"},
        "behavior_logprobs": {"behavior_logprob"},
        "policy_version": {"policy_lag_mean", "policy_lag_max"},
        "reward": {"reward", "degenerate_group_share"},
        "group_id": {"degenerate_group_share"},
        "stop_reason": {"stop_reason_share", "technical_failure_share"},
        "truncated": {"truncation_share"},
        "started_s": {"rollout_duration"},
    }

    def absent(name, **changes):
        log = RunLog(tmp_path / name, "r", "main", {})
        base = {"run_id": "r", "policy_version": 100, "version_spans": None}
        made = [record.model_copy(update=base | changes) for record in synthetic.rollouts(16, 0)]
        log.rollouts(made)
        log.batch("b", 1, [record.sample_id for record in made], 100, 101)
        return {row.name for row in metrics(read_run(log.folder)).rows if row.value is None}

    whole = absent("whole")
    for field, names in gone.items():
        assert absent(field, **{field: None}) - whole == names, field


def test_technical_failures_are_the_ends_that_are_neither_end_nor_truncation(tmp_path):
    log = RunLog(tmp_path, "r", "main", {})
    records = synthetic.rollouts(len(STOP_REASONS), 0)
    log.rollouts([r.model_copy(update={"run_id": "r", "stop_reason": s}) for r, s in zip(records, STOP_REASONS)])
    expected = sum(value is None for value in STOP_REASONS.values()) / len(STOP_REASONS)
    assert metrics(read_run(tmp_path))["technical_failure_share"] == pytest.approx(expected)


def test_log_probs_that_make_no_sense_are_absent_with_the_sentence(tmp_path):
    log = RunLog(tmp_path, "r", "main", {})
    record = synthetic.rollouts(1, 0)[0]
    side = [[0.5]] * (len(record.prompt_tokens) + len(record.response_tokens))
    log.rollouts([record.model_copy(update={"run_id": "r", "per_token": {"trainer_logprobs": side}})])
    log.batch("b", 1, [record.sample_id], 5, 6)  # its tokens are of version 97 and above
    rows = {row.name: row for row in metrics(read_run(tmp_path)).rows}
    assert "a log-probability is at most 0" in rows["normalized_ess"].reason
    assert "is above current_version=5" in rows["policy_lag_max"].reason


def test_a_restart_is_compared_step_by_step(tmp_path):
    log = RunLog(tmp_path, "r", "main", {})
    losses = {1: 1.0, 2: 0.9, 3: 0.8}
    for step, loss in losses.items():
        log.batch(f"b{step}", step, [f"s{step}"], step - 1, step, {"loss": loss}, float(step))
    log.event("restored", "trainer", 4.0, step=1, seconds=2.5)
    log.batch("b2", 2, ["s2"], 1, 2, {"loss": 1.7}, 5.0)
    found = metrics(read_run(tmp_path))
    assert found["restart_gap"] == {"loss/same step": pytest.approx(0.8)}
    assert found["restore"]["max"] == 2.5
    assert {row.window for row in found.rows if row.group == "policy"} == {
        "branch main, 2 batches"
    }  # b1 and the second b2
