"""Each rule fires on its own incident, none on a clean run, and a change of configuration is named beside the alert."""

import dataclasses
import math

import numpy as np
import pytest
from tracing_runs import CONFIG, INCIDENTS, NUM_STEPS, ONSET, STEP_S, T0_UNIX_S, WORKERS, make_run

from rlinfra_utils.tracing import RULES, Rule, RunLog, alerts, config_hash, metrics, read_run
from rlinfra_utils.tracing.figures import FIGURES

QUEUE_RULE = [rule for rule in RULES if rule.name == "queue_growth"]
ONSET_UNIX_S = T0_UNIX_S + ONSET * STEP_S


@pytest.mark.slow
@pytest.mark.parametrize("incident", INCIDENTS)
def test_a_rule_fires_on_its_own_incident_and_no_other_does(tmp_path, incident):
    make_run(tmp_path / "run", seed=1, incident=incident)
    found = alerts(read_run(tmp_path / "run"))
    assert [alert.rule.name for alert in found] == [INCIDENTS[incident]]
    alert = found[0]
    assert alert.config_hash == config_hash(CONFIG)
    assert alert.config_change is None
    assert found.unjudged == {}
    assert f"{alert.rule.threshold:g}" in alert.evidence
    if incident in ("lag", "ess", "degenerate", "truncation", "length"):
        assert alert.first_unix_s == ONSET_UNIX_S + STEP_S  # the first batch made under the incident
    elif incident in ("silent", "died"):
        assert ONSET_UNIX_S - 10 <= alert.first_unix_s < ONSET_UNIX_S  # the last sign of life
        assert alert.subject == f"worker {WORKERS[1]}"
        assert math.isinf(alert.worst) == (incident == "died")
    elif incident == "queue":
        assert alert.first_unix_s > ONSET_UNIX_S
    assert alert.ongoing == (incident != "length")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_rule_fires_on_a_clean_run(tmp_path, seed):
    make_run(tmp_path / "run", seed=100 + seed)
    found = alerts(read_run(tmp_path / "run"))
    assert list(found) == [], str(found)
    assert found.unjudged == {}


@pytest.mark.slow
def test_a_jump_that_comes_with_a_change_of_configuration_says_so(tmp_path):
    changed = CONFIG | {"max_new_tokens": 400}
    make_run(tmp_path / "run", seed=1, incident="length", changed_config=changed)
    (alert,) = alerts(read_run(tmp_path / "run"))
    assert alert.rule.name == "length_jump"
    assert alert.config_change == "max_new_tokens 96 -> 400"
    assert alert.config_hash == config_hash(changed)
    assert "coincides with a change of configuration: max_new_tokens 96 -> 400" in str(alert)


def test_an_incident_long_after_a_change_is_not_blamed_on_it(tmp_path):
    folder = tmp_path / "run"
    main, second = RunLog(folder, "r", "main", {"a": 1}), RunLog(folder, "r", "second", {"a": 2})
    for step in range(20):
        log = main if step < 2 else second
        log.batch(f"b{step}", step, [f"s{step}"], step, step + 1, {"normalized_ess": 0.9 if step < 15 else 0.1}, step)
    (alert,) = alerts(read_run(folder))
    assert (alert.rule.name, alert.first_unix_s, alert.num_breaches) == ("ess", 15.0, 5)
    assert alert.config_change is None


def ess_log(tmp_path, values):
    log = RunLog(tmp_path / "run", "r", "main", {})
    for step, value in enumerate(values):
        log.batch(f"b{step}", step, [f"s{step}"], step, step + 1, {"normalized_ess": value}, float(step))
    return log


def test_a_value_at_the_threshold_keeps_the_rule_and_a_recovery_ends_the_alert(tmp_path):
    log = ess_log(tmp_path, [0.9, 0.5, 0.4, 0.3, 0.8])
    (alert,) = alerts(read_run(log.folder))
    assert (alert.first_unix_s, alert.worst, alert.num_breaches, alert.ongoing) == (2.0, 0.3, 2, False)
    loose = [dataclasses.replace(rule, threshold=0.25) for rule in RULES if rule.name == "ess"]
    assert list(alerts(read_run(log.folder), rules=loose)) == []
    above = Rule("high_ess", "normalized_ess", 0.9, "of n", "", "")
    assert list(alerts(read_run(log.folder), rules=[above])) == []
    assert len(alerts(read_run(log.folder), rules=[dataclasses.replace(above, threshold=0.8)])) == 1


def test_a_rule_that_cannot_be_judged_says_so(tmp_path):
    log = ess_log(tmp_path, [0.9] * 3)
    found = alerts(read_run(log.folder))
    assert list(found) == []
    assert found.unjudged["queue_growth"] == "fewer than 96 events of kind queue"
    assert set(found.unjudged) == {rule.name for rule in RULES} - {"ess", "checkpoint_age"}
    assert "not judged: lag: no batch holds lag_max" in str(found)


def queue_run(tmp_path, depth):
    log = RunLog(tmp_path / "run", "r", "main", {})
    log.event("queue", "buffer", 0.0, depth_rollouts=0, depth_tokens=0)
    run = read_run(log.folder)
    readings = run.events.loc[[0] * len(depth)].reset_index(drop=True)
    readings["depth_rollouts"], readings["time_unix_s"] = depth, np.arange(len(depth), dtype=float)
    return dataclasses.replace(run, events=readings)


def drifting(seed, correlation, num):
    """A queue around 40 rollouts that drifts: autoregressive noise, from its stationary law on."""
    rng = np.random.default_rng(seed)
    noise = [rng.standard_normal() / math.sqrt(1 - correlation**2)]
    while len(noise) < num:
        noise.append(correlation * noise[-1] + rng.standard_normal())
    return np.maximum(40 + 10 * math.sqrt(1 - correlation**2) * np.array(noise), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "most"), [(0.0, 0), (0.8, 0), (0.9, 2)])
def test_a_queue_that_drifts_is_seldom_taken_for_one_that_grows(tmp_path, correlation, most):
    fired = [alerts(queue_run(tmp_path / str(s), drifting(s, correlation, 400)), QUEUE_RULE) for s in range(40)]
    assert sum(map(len, fired)) <= most


def test_a_queue_that_grows_through_the_same_noise_is_found(tmp_path):
    for seed in range(10):
        depth = drifting(seed, 0.9, 400) + 3 * np.maximum(np.arange(400) - 150, 0)  # three a reading from 150 on
        (alert,) = alerts(queue_run(tmp_path / str(seed), depth), QUEUE_RULE)
        assert alert.ongoing
        assert 150 < alert.first_unix_s < 250


def test_a_queue_that_fills_at_the_start_and_stays_full_does_not_grow(tmp_path):
    depth = np.minimum(2 * np.arange(400), 64)  # back-pressure holds it at its capacity
    assert list(alerts(queue_run(tmp_path, depth), QUEUE_RULE)) == []


def test_queue_growth_is_the_ratio_that_it_says(tmp_path):
    depth = np.random.default_rng(0).integers(0, 50, 130)
    figure = FIGURES["queue_growth"](queue_run(tmp_path, depth), None, 0.0)
    expected = [min(depth[end - 24 : end]) / max(depth[: end - 48]) for end in range(96, 131)]
    assert list(figure["value"]) == expected
    assert list(figure["time_unix_s"]) == list(range(95, 130))


def beats(log, worker, stamps):
    for stamp in stamps:
        log.event("heartbeat", worker, float(stamp))


def test_silence_ends_with_a_return_and_is_no_alarm_for_a_worker_that_stopped(tmp_path):
    log = RunLog(tmp_path / "run", "r", "main", {})
    beats(log, "back", [0, 10, 20, 100, 110, 120])
    beats(log, "stopped", range(0, 60, 10))
    log.event("worker_stopped", "stopped", 51.0)
    beats(log, "steady", range(0, 121, 10))
    (alert,) = alerts(read_run(log.folder))
    assert (alert.subject, alert.first_unix_s, alert.worst, alert.ongoing) == ("worker back", 20.0, 8.0, False)
    # By the clock of a reader who comes later, the workers that still should beat are silent.
    later = alerts(read_run(log.folder), now_unix_s=160.0)
    assert {alert.subject for alert in later if alert.ongoing} == {"worker back", "worker steady"}


def test_a_worker_that_died_and_came_back_is_not_dead(tmp_path):
    log = RunLog(tmp_path / "run", "r", "main", {})
    beats(log, "w", [0, 10, 20, 30])
    log.event("worker_died", "w", 31.0)
    log.event("worker_started", "w", 40.0)
    beats(log, "w", [50, 60])
    found = alerts(read_run(log.folder))
    assert list(found) == []
    assert "dead_producer" not in found.unjudged


WITHIN_S = 60.0
CLUSTER = ("trainer0", "worker0", "worker1", "verifier")


def heard_between_pieces_of_work(folder, seed, num_beats, dies=None):
    """A log as a cluster run's: short gaps while idle, long ones at work, stops at the end unless one `dies`."""
    rng, log = np.random.default_rng(seed), RunLog(folder, "r", "main", {})
    for worker in CLUSTER:
        gaps_s = np.where(rng.random(num_beats) < 0.7, rng.uniform(1, 1.3, num_beats), rng.uniform(5, 50, num_beats))
        stamps = np.cumsum(gaps_s)
        log.event("worker_started", worker, 0.0)
        for stamp in stamps:
            log.event("heartbeat", worker, float(stamp), within_s=WITHIN_S)
        if worker != dies:
            log.event("worker_stopped", worker, float(stamps[-1]) + 8.0)
    return read_run(folder)


@pytest.mark.parametrize("num_beats", [1, 2, 6, 40])
def test_workers_that_are_heard_between_pieces_of_work_are_not_dead(tmp_path, num_beats):
    for seed in range(5):
        run = heard_between_pieces_of_work(tmp_path / str(seed), seed, num_beats)
        found = alerts(run, now_unix_s=1e6)  # long after its end
        assert [alert for alert in found if alert.rule.name == "dead_producer"] == []
        assert "dead_producer" not in found.unjudged


def test_one_that_is_silent_for_three_of_its_declared_intervals_is(tmp_path):
    run = heard_between_pieces_of_work(tmp_path / "run", 0, 40, dies="worker1")
    last_unix_s = run.events.loc[run.events["worker"] == "worker1", "time_unix_s"].max()
    for late_s, expected in ((3 * WITHIN_S - 1, []), (3 * WITHIN_S + 1, ["worker worker1"])):
        now_unix_s = max(run.last_unix_s, last_unix_s + late_s)
        found = [alert for alert in alerts(run, now_unix_s=now_unix_s) if alert.rule.name == "dead_producer"]
        assert [alert.subject for alert in found] == expected


def test_time_between_a_stop_and_the_next_start_is_no_silence(tmp_path):
    log = RunLog(tmp_path / "run", "r", "main", {})
    for start in (0.0, 90_000.0):
        log.event("worker_started", "w", start)
        beats(log, "w", start + np.arange(10, 80, 10))
        log.event("worker_stopped", "w", start + 75)
    silences = FIGURES["silence_intervals"](read_run(log.folder), None, 1e6)
    assert silences["value"].max() == 1.0


def test_a_median_of_too_few_intervals_judges_nobody(tmp_path):
    log = RunLog(tmp_path / "run", "r", "main", {})
    beats(log, "w", [0, 0.1, 10, 10.1])
    found = alerts(read_run(log.folder), now_unix_s=20.0)
    assert list(found) == []
    assert found.unjudged["dead_producer"] == "no worker declares its heartbeat interval or has 5 of them"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: Rule("x", "mood", 1, "", "", ""), "figure='mood'"),
        (lambda run: Rule("x", "lag_max", math.nan, "", "", ""), "threshold=nan"),
        (lambda run: Rule("x", "lag_max", "4", "", "", ""), "threshold='4'"),
        (lambda run: alerts(run, rules=["lag"]), "rules: 'lag' is no"),
        (lambda run: alerts(run, rules=None), "rules=None"),
        (lambda run: alerts(run.folder), "run=.*: needs a RunData, as read_run"),
        (lambda run: metrics(str(run.folder)), "run='.*: needs a RunData, as read_run"),
        (lambda run: alerts(run, now_unix_s=0.5), r"now_unix_s=0.5: .* the last stamp 2"),
        (lambda run: alerts(run, now_unix_s=math.nan), "now_unix_s=nan"),
    ],
)
def test_bad_input_is_one_line(tmp_path, make, message):
    run = read_run(ess_log(tmp_path, [0.9] * 3).folder)
    with pytest.raises(ValueError, match=message) as caught:
        make(run)
    assert "\n" not in str(caught.value)


def test_every_rule_says_where_its_threshold_comes_from():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.advice and rule.unit for rule in RULES)
    assert set(INCIDENTS.values()) == {rule.name for rule in RULES}
    assert NUM_STEPS - ONSET >= 10  # room for five batches after the onset and more
