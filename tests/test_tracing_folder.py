"""The run folder: what was logged is read back, by many writers, after kills, and whatever lies in it."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracing_runs import make_run

from rlinfra_utils import rollouts, synthetic
from rlinfra_utils.tracing import RunFolderError, RunLog, alerts, config_hash, read_run

CONFIG = {"lr": 1e-4, "batch": {"size": 8, "stop": ["a", "b"]}}


@pytest.fixture
def log(tmp_path):
    return RunLog(tmp_path / "run", "r", "main", CONFIG)


def records(num, seed=0, run_id="r"):
    return [r.model_copy(update={"run_id": run_id}) for r in synthetic.rollouts(num, seed)]


def test_what_was_logged_is_read_back(log):
    made = records(16)
    log.rollouts(made[:10], name="a", time_unix_s=1.0)
    log.rollouts(rollouts.to_table(made[10:]), name="b", time_unix_s=2.0)
    log.batch("b1", 1, [r.sample_id for r in made[:8]], 100, 101, {"loss": 0.5, "kl": float("nan")}, 3.5)
    log.event("queue", "buffer", 4.25, depth_rollouts=np.int64(3), depth_tokens=90)
    run = read_run(log.folder)
    assert run.problems == []
    assert rollouts.from_table(run.table) == made
    assert list(run.rollouts["rollout_id"]) == [r.sample_id for r in made]
    assert list(run.rollouts["file"]) == ["a.parquet"] * 10 + ["b.parquet"] * 6
    batch = run.batches.iloc[0]
    assert batch["rollout_ids"] == [r.sample_id for r in made[:8]]
    assert (batch["stats"]["loss"], np.isnan(batch["stats"]["kl"])) == (0.5, True)
    assert (batch["trained_policy_version"], batch["resulting_policy_version"], batch["time_unix_s"]) == (100, 101, 3.5)
    assert list(run.events["kind"]) == ["rollouts", "rollouts", "queue"]
    assert list(run.events["num_rollouts"])[:2] == [10, 6]
    assert run.events["depth_rollouts"].iloc[2] == 3
    assert set(run.batches["config_hash"]) | set(run.events["config_hash"]) == {config_hash(CONFIG)}
    assert run.last_unix_s == 4.25


def test_config_hash_is_sha256_of_sorted_json_whatever_the_order():
    text = json.dumps(CONFIG, sort_keys=True, separators=(",", ":"))
    assert config_hash(CONFIG) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert config_hash(dict(reversed(CONFIG.items()))) == config_hash(CONFIG)
    assert config_hash(CONFIG | {"lr": 2e-4}) != config_hash(CONFIG)


def test_a_resume_brings_the_same_configuration_and_a_change_needs_a_branch(log):
    again = RunLog(log.folder, "r", "main", dict(reversed(CONFIG.items())))
    assert (again.config_hash, again.started_unix_s) == (log.config_hash, log.started_unix_s)
    with pytest.raises(RunFolderError, match=r"'main' ran with config_hash .* \(lr was 0.0001, is 0.5\)"):
        RunLog(log.folder, "r", "main", CONFIG | {"lr": 0.5})
    other = RunLog(log.folder, "r", "warm", CONFIG | {"lr": 0.5})
    with pytest.raises(RunFolderError, match="holds run 'r', not 'q'"):
        RunLog(log.folder, "q", "main", CONFIG)
    assert RunLog(log.folder, "r", "main", CONFIG).config == CONFIG  # the older branch is still there
    described = read_run(log.folder).description
    assert {name: branch.config_hash for name, branch in described.branches.items()} == {
        "main": log.config_hash,
        "warm": other.config_hash,
    }
    assert described.branch_id == "warm"


def test_a_name_makes_repeated_work_one_file(log):
    log.rollouts(records(4), name="step-1")
    log.rollouts(records(4), name="step-1")
    run = read_run(log.folder)
    assert len(run.rollouts) == 4
    assert run.problems == []


def _write_many(folder, worker, num_lines):
    log = RunLog(folder, "r", f"branch-{worker % 2}", {"worker": worker % 2})
    for i in range(num_lines):
        log.event("heartbeat", f"w{worker}", number=i, filler="x" * (i * 37 % 20_000))


def test_lines_of_many_processes_do_not_mix(tmp_path):
    """Lines far above PIPE_BUF and the page size, and a run that all of them begin at once."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(tmp_path / "run", worker, 150)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert set(run.description.branches) == {"branch-0", "branch-1"}
    for worker, lines in run.events.groupby("worker"):
        assert list(lines["number"]) == list(range(150)), worker
        assert [len(filler) for filler in lines["filler"]] == [i * 37 % 20_000 for i in range(150)]


def _begin_branch(folder, barrier, number):
    barrier.wait()
    RunLog(folder, "r", f"branch-{number}", {"number": number})


@pytest.mark.parametrize("attempt", range(3))
def test_branches_begun_at_the_same_moment_are_all_there(tmp_path, attempt):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    workers = [context.Process(target=_begin_branch, args=(tmp_path, barrier, number)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(read_run(tmp_path).description.branches) == {f"branch-{number}" for number in range(8)}


def _write_until_killed(folder, told):
    log = RunLog(folder, "r", "main", {})
    for i in range(10**6):
        log.event("heartbeat", "victim", number=i, filler="y" * 30_000)
        told.value = i + 1


@pytest.mark.parametrize("seed", range(10))
def test_sigkill_costs_no_line_that_a_call_returned_from(tmp_path, seed):
    context = multiprocessing.get_context("fork")
    told = context.Value("q", 0, lock=False)  # a lock would die with its holder
    victim = context.Process(target=_write_until_killed, args=(tmp_path / "run", told))
    victim.start()
    while told.value == 0:
        assert victim.is_alive()
        time.sleep(0.001)
    time.sleep(np.random.default_rng(seed).uniform(0, 0.02))
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    RunLog(tmp_path / "run", "r", "main", {}).event("heartbeat", "survivor")
    run = read_run(tmp_path / "run")
    assert list(run.events["worker"])[-1] == "survivor"
    assert list(run.events["number"])[:-1] == list(range(len(run.events) - 1))
    assert len(run.events) - 1 >= told.value
    assert len(run.problems) <= 1


def test_a_line_cut_anywhere_costs_itself_and_no_other(log):
    for i in range(3):
        log.event("heartbeat", f"w{i}", 10.0 + i, nested={"time_unix_s": 5})
    path = log.folder / "events.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in range(last + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        run = read_run(log.folder)
        assert list(run.events["worker"]) == ["w0", "w1"]
        assert len(run.problems) == 1
        assert run.problems[0].startswith("events.jsonl:3: is torn")
        assert "the last line" in run.problems[0]
        log.event("heartbeat", "next", 20.0)  # the line that follows on the same row
        run = read_run(log.folder)
        assert list(run.events["worker"]) == ["w0", "w1", "next"]
        assert ["whole line behind it is kept" in problem for problem in run.problems] == [True]
    path.write_bytes(whole[:-1])  # all but the line feed: nothing is lost
    assert list(read_run(log.folder).events["worker"]) == ["w0", "w1", "w2"]


def test_a_disk_that_takes_half_a_line_is_an_error_and_the_log_goes_on(log, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
    with pytest.raises(RunFolderError, match="bytes of a line; is the disk full"):
        log.event("heartbeat", "lost")
    monkeypatch.undo()
    log.event("heartbeat", "kept")
    assert list(read_run(log.folder).events["worker"]) == ["kept"]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["events.jsonl", "batches.jsonl", "run.json", "rollouts/x.parquet", "trace.json"]),
    junk=st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["time_unix_s", "kind", "stats", "rollout_ids", "step"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)
def test_whatever_lies_in_the_folder_ends_in_a_problem_or_one_line(name, junk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("junk") / "run"
    log = RunLog(folder, "r", "main", CONFIG)
    log.event("restored", "t", 5.0, step=0, seconds=1.0)
    log.batch("b", 1, ["a"], 0, 1, time_unix_s=4.0)
    with open(folder / name, "ab" if name.endswith("l") else "wb") as file:
        file.write(junk + b"\n")
    if name == "run.json":
        with pytest.raises(RunFolderError) as caught:
            read_run(folder)
        assert "\n" not in str(caught.value)
        return
    run = read_run(folder)
    assert all("\n" not in problem for problem in run.problems)
    if junk.strip(b"\n"):
        assert any(problem.startswith(name) for problem in run.problems)


def line(**changes):
    good = {"time_unix_s": 1.0, "branch_id": "main", "config_hash": "h", "training_batch_id": "b", "optimizer_step": 1}
    good |= {"rollout_ids": ["a"], "trained_policy_version": 0, "resulting_policy_version": 1, "stats": {}}
    return json.dumps(good | changes)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (line(optimizer_step="1"), "optimizer_step='1'"),
        (line(optimizer_step=-1), "optimizer_step=-1"),
        (line(rollout_ids=[1]), "rollout_ids.0=1"),
        (line(stats={"loss": "low"}), "stats.loss='low'"),
        (line(surprise=1), "surprise=1"),
        (line(time_unix_s=float("inf")), "time_unix_s=inf"),
        (line(optimizer_step=10**30), "optimizer_step=1000"),
        (line(rollout_ids=[]), "rollout_ids=[]"),
        (line(training_batch_id="\ud800"), "holds half a surrogate pair"),
        ("[]", "value=[]"),
        ("{}", "time_unix_s="),
    ],
)
def test_a_batch_line_that_makes_no_sense_is_left_out_by_field_and_value(log, text, place):
    (log.folder / "batches.jsonl").write_text(text + "\n")
    run = read_run(log.folder)
    assert run.batches.empty
    assert run.problems[0].startswith(f"batches.jsonl:1: {place}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.batch("b", 1, [], 0, 1), r"rollout_ids=\[\]"),
        (lambda log: log.batch("b", 1, ["a", "a"], 0, 1), r"rollout_ids=\['a'\]"),
        (lambda log: log.batch("b", 1, "abc", 0, 1), "rollout_ids='abc'"),
        (lambda log: log.batch("b", 1, None, 0, 1), "rollout_ids=None"),
        (lambda log: log.batch("b", 1, [["a"]], 0, 1), r"rollout_ids=\[\['a'\]\]"),
        (lambda log: log.batch("b", -1, ["a"], 0, 1), "optimizer_step=-1"),
        (lambda log: log.batch("b", 1, ["a"], 0, 1, {"loss": None}), "stats.loss=None"),
        (lambda log: log.batch("b", 1, ["a"], 0, 1, [3]), r"stats=\[3\]"),
        (lambda log: log.event(""), "kind=''"),
        (lambda log: log.event("queue", depth_rollouts=1), "depth_tokens=None"),
        (lambda log: log.event("restored", step=1.5, seconds=1), "step=1.5"),
        (lambda log: log.event("memory", peak_bytes=-1), "peak_bytes=-1"),
        (lambda log: log.event("restored", step=float("inf"), seconds=1), "step=inf"),
        (lambda log: log.event("x", branch_id="other"), "branch_id='other'"),
        (lambda log: log.event("x", field=object()), "needs what JSON holds"),
        (lambda log: log.event("x", field="\ud800"), "needs what JSON holds"),
        (lambda log: log.event("x", time_unix_s=float("nan")), "time_unix_s=nan"),
        (lambda log: log.event("x", time_unix_s=10**400), "time_unix_s=1000"),
        (lambda log: log.rollouts([{"run_id": "r"}]), "sample_id: a record has none"),
        (lambda log: log.rollouts([{"sample_id": "s"}]), "run_id: a record has none"),
        (lambda log: log.rollouts(records(1, run_id="other")), "run_id='other'"),
        (lambda log: log.rollouts([], name="../out"), r"name='../out'"),
        (lambda log: RunLog(log.folder, "", "main", {}), "run_id=''"),
        (lambda log: RunLog(log.folder, "r", "main", [1]), r"config=\[1\]"),
        (lambda log: RunLog(log.folder, "r", "main", {"x": float("nan")}), "needs what JSON holds"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_written(log, call, message):
    before = {path: path.read_bytes() for path in log.folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message) as caught:
        call(log)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in log.folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["batches.jsonl", "events.jsonl"])
def test_a_file_that_cannot_be_read_is_a_problem(log, name):
    (log.folder / name).unlink(missing_ok=True)
    (log.folder / name).mkdir()
    assert read_run(log.folder).problems == [f"{name}: cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "weight_sync", "version": math.inf, "seconds": 1.0}, "version=inf: an event of kind 'weight_"),
        ({"kind": "heartbeat", "within_s": "x"}, "within_s='x': needs a number"),
        ({"kind": "x", "note": "\ud800"}, "holds half a surrogate pair"),
        ({"kind": "rollouts", "file": "../run.json", "num_rollouts": 1}, "rollouts/../run.json: was written"),
        ({"kind": "rollouts", "file": "a" * 5000, "num_rollouts": 1}, "was written and is not there"),
    ],
)
def test_an_event_that_makes_no_sense_is_a_problem(log, fields, words):
    event = {"time_unix_s": 1.0, "branch_id": "main", "config_hash": "h"}
    with open(log.folder / "events.jsonl", "a") as file:
        file.write(json.dumps(event | fields) + "\n")
    run = read_run(log.folder)
    assert any(words in problem for problem in run.problems)
    alerts(run)


def test_no_run_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match=r"run\.json: No such file"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_bytes(b"")
    with pytest.raises(RunFolderError, match=r"is no run\.json"):
        read_run(tmp_path)


def test_what_the_files_say_against_one_another_is_found(log):
    made = records(4)
    ids = [r.sample_id for r in made]
    log.rollouts(made, name="a")
    log.rollouts(made[:1], name="b")
    log.rollouts(made[:1], name="gone").unlink()
    log.batch("b1", 1, ids[:2], 0, 1)
    log.batch("b2", 2, [ids[1], "ghost"], 1, 2)
    log.batch("b2", 3, [ids[2]], 2, 3)
    rollouts.write(records(1, seed=9, run_id="q"), log.folder / "rollouts" / "z.parquet")
    expected = [
        f"{ids[0]!r} is there 2 times, in a.parquet, b.parquet",
        "records of run 'q'",
        "1 rollouts of 'b2' are stored nowhere, 'ghost' first",
        "training_batch_id 'b2' of branch 'main' stands 2 times",
        f"{ids[1]!r} was trained on 2 times",
        "gone.parquet: was written and is not there",
    ]
    problems = read_run(log.folder).problems
    assert len(problems) == len(expected)
    for text in expected:
        assert sum(text in problem for problem in problems) == 1, text


def test_a_restore_undoes_the_later_steps_of_its_branch_and_no_others(tmp_path):
    folder = tmp_path / "run"
    main, side = RunLog(folder, "r", "main", {}), RunLog(folder, "r", "side", {"x": 1})
    for step in range(1, 6):
        main.batch(f"m{step}", step, [f"m{step}"], step - 1, step, time_unix_s=float(step))
        side.batch(f"s{step}", step, [f"s{step}"], step - 1, step, time_unix_s=float(step))
    main.event("restored", "trainer", 5.5, step=3, seconds=1.0)
    for step in (4, 5):  # the same work again
        main.batch(f"m{step}", step, [f"m{step}"], step - 1, step, time_unix_s=step + 2.0)
    run = read_run(folder)
    undone = run.batches[run.batches["rolled_back"]]
    assert list(undone["training_batch_id"]) == ["m4", "m5"]
    assert list(undone["time_unix_s"]) == [4.0, 5.0]
    assert [problem for problem in run.problems if "times" in problem] == []


def test_a_clean_run_has_no_problem_and_an_unfinished_file_is_not_read(tmp_path):
    made = make_run(tmp_path / "run", seed=3, num_steps=3)
    (tmp_path / "run" / "rollouts" / ".x.parquet.1.aside").write_bytes(b"half")
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert list(run.rollouts["rollout_id"]) == [r.sample_id for step in made for r in step]
    assert isinstance(run.events, pd.DataFrame)
