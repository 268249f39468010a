"""What is read out of a run's trace and log, on runs whose every span was put there by hand."""

import numpy as np
import pandas as pd
import pytest

from rlinfra_utils.cluster import comparison
from rlinfra_utils.timers import Trace
from rlinfra_utils.tracing import RunLog, read_run

GROUP = 4
REWARDS = [0.1, 0.3, 0.2, 0.6, 0.7]


def in_turns(folder):
    """An update a second: 0.5 s of decoding by the workers in turns, 0.1 verifying, 0.3 training, 0.1 sync."""
    log = RunLog(folder, run_id="r", branch_id="main", config={"group_size": GROUP})
    traces = {name: Trace() for name in ("trainer0", "worker0", "worker1", "verifier", "loop-1")}
    for step, reward in enumerate(REWARDS):
        stats = {"reward": reward, "clip_share": step / 10, "normalized_ess": 1 - step / 100}
        log.batch(f"b{step}", step + 1, [f"x{step}"], step, step + 1, stats)
        worker = f"worker{step % 2}"
        for name, stage, begin_s, end_s, cpu_s in (
            (worker, "decode", 0.0, 0.25, 0.2),
            (worker, "decode", 0.25, 0.5, 0.2),
            ("verifier", "verifier", 0.5, 0.6, 0.05),
            ("trainer0", "train", 0.6, 0.9, 0.3),
            ("trainer0", "weight_sync", 0.9, 1.0, 0.02),
            ("loop-1", "train_call", 0.55, 0.95, None),
        ):
            spent = {} if cpu_s is None else {"cpu_s": cpu_s}
            traces[name].add(stage, 100 + step + begin_s, 100 + step + end_s, track=name, **spent)
    (folder / "traces").mkdir()
    for name, trace in traces.items():
        trace.to_perfetto(folder / "traces" / f"{name}.json")
    Trace.merge(list(traces.values())).to_perfetto(folder / "trace.json")
    return folder


@pytest.fixture
def folder(tmp_path):
    return in_turns(tmp_path)


def test_a_curve_has_the_time_the_rollouts_and_the_figures_of_each_update(folder):
    rows = comparison.curve(read_run(folder), window=2)
    assert list(rows["update"]) == [1, 2, 3, 4, 5]
    assert np.allclose(rows["time_s"], [0.9, 1.9, 2.9, 3.9, 4.9])
    assert list(rows["num_rollouts"]) == [2 * GROUP * n for n in (1, 2, 3, 4, 5)]
    assert np.allclose(rows["smoothed"], [np.nan, 0.2, 0.25, 0.4, 0.65], equal_nan=True)
    assert np.allclose(rows["clip_share"], [0, 0.1, 0.2, 0.3, 0.4])
    assert np.allclose(rows["normalized_ess"], [1, 0.99, 0.98, 0.97, 0.96])


def test_the_goal_is_reached_by_the_mean_not_by_one_batch(folder):
    rows = comparison.curve(read_run(folder), window=2)
    assert comparison.time_to(rows, 0.25) == pytest.approx(2.9)  # one batch alone had 0.3 at 1.9 s
    assert comparison.time_to(rows, 0.64) == pytest.approx(4.9)
    assert comparison.time_to(rows, 0.9) is None


def test_a_core_is_busy_by_cpu_seconds_within_the_window(folder):
    run = read_run(folder)
    assert comparison.between(run, 1) == pytest.approx((100.9, 104.9))
    shares = comparison.core_shares(run, 101.0, 103.0)
    assert shares == pytest.approx({"trainers": 0.32, "workers": 0.4, "verifier": 0.05})


def test_in_turns_the_whole_update_is_on_the_critical_path(folder):
    expected = {"generate": 0.5, "verify": 0.1, "train": 0.3, "checkpoint": 0.0, "wait": 0.0, "weight sync": 0.1}
    assert comparison.path_shares(folder, 101.0, 104.0) == pytest.approx(expected, abs=1e-9)
    half = comparison.path_shares(folder, 101.25, 101.75)  # spans are cut at the window's ends
    assert half == pytest.approx({"generate": 0.5, "verify": 0.2, "train": 0.3} | dict.fromkeys(
        ("checkpoint", "wait", "weight sync"), 0.0), abs=1e-9)  # fmt: skip


def test_a_summary_is_of_the_updates_asked_for(folder):
    found = comparison.summary(folder, first=2, last=4)
    assert found["update_s"] == pytest.approx(1.0)
    assert found["reward"] == pytest.approx((0.2 + 0.6) / 2)
    assert found["clip_share"] == pytest.approx(0.25)
    assert found["cores"] == comparison.core_shares(read_run(folder), 101.9, 103.9)
    assert sum(found["path"].values()) == pytest.approx(1.0)


def test_a_trace_that_lacks_updates_is_refused(folder):
    RunLog(folder, run_id="r", branch_id="main", config={"group_size": GROUP}).batch("b9", 6, ["y"], 5, 6, {})
    with pytest.raises(ValueError, match=r"the trace has 5 updates, the log 6; a trainer died"):
        comparison.curve(read_run(folder))


def test_a_run_without_traces_is_refused(folder):
    (folder / "trace.json").unlink()
    with pytest.raises(ValueError, match=r"has no trace\.json"):
        comparison.curve(read_run(folder))
    with pytest.raises(ValueError, match=r"has no traces/"):
        comparison.path_shares(folder / "rollouts", 0.0, 1.0)


@pytest.mark.parametrize(("first", "last"), [(0, None), (5, None), (2, 2), (2, 6), (True, None)])
def test_a_stretch_that_is_none_is_refused(folder, first, last):
    with pytest.raises(ValueError, match=r"(first|last)="):
        comparison.between(read_run(folder), first, last)


def test_bad_arguments_are_refused_by_name(folder):
    run = read_run(folder)
    with pytest.raises(ValueError, match=r"window=0"):
        comparison.curve(run, window=0)
    with pytest.raises(ValueError, match=r"reward=nan"):
        comparison.time_to(pd.DataFrame(), float("nan"))
