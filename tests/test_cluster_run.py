"""Real runs on Ray: what they leave behind, what kills cost them, and that nobody outlives them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinfra_utils import checkpoint, policy
from rlinfra_utils.cluster import ClusterConfig, ClusterError, run, session
from rlinfra_utils.rollouts import from_table, validate_table
from rlinfra_utils.tracing import follow, metrics, read_run

pytest.importorskip("ray")
ray = session.import_ray()
pytestmark = pytest.mark.slow
SMALL = {"prompts_per_step": 4, "group_size": 4, "num_updates": 4, "save_every": 2}


@pytest.fixture(scope="module")
def one_ray():
    ray.init(
        num_cpus=8,
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=session.STORE_BYTES,
    )
    yield
    ray.shutdown()


def at_step(step, name, number=signal.SIGKILL):
    """Send a signal to a member once the run has come to a step; `.done` says to whom."""

    def watch(loop):
        member = loop.crew.members[name]
        if not watch.done and loop.book.counts.step >= step and member.ready:
            os.kill(member.pid, number)
            watch.done = True

    watch.done = False
    return watch


def both(*watches):
    return lambda loop: [watch(loop) for watch in watches]


def sound(folder, num_updates, config):
    """The run, once it is sure that its log is whole and that each prompt was trained once."""
    found = read_run(folder)
    assert found.problems == []
    standing = found.batches[~found.batches["rolled_back"]]
    assert len(standing) == num_updates
    ids = [name for names in standing["rollout_ids"] for name in names]
    assert len(ids) == len(set(ids)) == num_updates * config.batch_rollouts
    stored = found.rollouts.set_index("rollout_id").loc[ids]
    groups = stored.groupby("group_id").size()
    assert set(groups) == {config.group_size}
    numbers = {name.split("-p")[1].split("-a")[0] for name in groups.index}
    assert len(numbers) == len(groups), "a prompt was trained twice"
    assert set(validate_table(found.table)["status"].to_pylist()) == {"accept"}
    return found


def kinds(found, kind):
    return found.events[found.events["kind"] == kind]


def test_two_ranks_two_workers_one_kill(one_ray, tmp_path):
    config = ClusterConfig(
        num_trainers=2, controller="bounded_queue", controller_options={"max_rollouts": 32}, minibatches=2, **SMALL
    )
    watch = at_step(2, "worker1")
    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.num_updates, outcome.restarts, watch.done) == ("done", 4, 1, True)
    found = sound(tmp_path / "run", 4, config)
    assert list(kinds(found, "worker_died")["worker"]) == ["worker1"]
    assert kinds(found, "restored").empty
    gaps = [gap for gaps in kinds(found, "weight_sync")["zero_lag_gap_nats"] for gap in gaps]
    assert len(gaps) == 2 * len(kinds(found, "weight_sync"))
    assert max(gaps) < 1e-4
    trained = follow(found, optimizer_step=4)
    assert len(trained.chains) == config.batch_rollouts
    assert {"forward_backward", "verifier", "decode", "weight_sync", "checkpoint"} <= set(found.spans["stage"])
    assert metrics(found).frame().shape[0] > 0
    assert set(kinds(found, "memory")["worker"]) == {"trainer0", "trainer1", "worker0", "worker1", "verifier"}
    assert_replays(found, tmp_path / "run", config)


def assert_replays(found, folder, config):
    """One process that trains on the logged batches has the weights that the two ranks saved."""
    torch.set_num_threads(1)
    model, _ = policy.load_warm_start()
    trainer = policy.Trainer(model, lr=config.lr)
    table = found.table.to_pandas()["sample_id"]
    for names in found.batches["rollout_ids"]:
        rows = [int(np.flatnonzero(table == name)[0]) for name in names]
        records = from_table(found.table.take(rows))
        totals = [policy.total_reward(record.reward) for record in records]
        advantages = policy.group_advantages(totals, config.group_size).values
        trainer.update(records, advantages, minibatches=config.minibatches)
    saved = checkpoint.load(checkpoint.latest(folder / "checkpoints"), require=("policy",))["policy"]
    for name, value in saved.items():
        np.testing.assert_allclose(value, model.state_dict()[name].numpy(), rtol=0, atol=2e-5)


def test_trainer_and_verifier_killed(one_ray, tmp_path):
    config = ClusterConfig(
        controller="bounded_queue", controller_options={"max_rollouts": 32}, **(SMALL | {"num_updates": 5})
    )
    watch = both(at_step(1, "verifier"), at_step(3, "trainer0"))
    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.restarts) == ("done", 2)
    found = sound(tmp_path / "run", 5, config)
    assert set(kinds(found, "worker_died")["worker"]) == {"verifier", "trainer0"}
    assert list(found.description.branches) == ["main", "resume1"]
    assert set(kinds(found, "restored")["step"]) == {2}
    undone = found.batches[found.batches["rolled_back"]]
    assert set(undone["branch_id"]) == {"main"}
    assert list(found.batches[~found.batches["rolled_back"]]["optimizer_step"]) == [1, 2, 3, 4, 5]
    # What the dead trainer had done since its checkpoint is asked again, or declared lost.
    trained = {name for names in found.batches[~found.batches["rolled_back"]]["rollout_ids"] for name in names}
    lost = set(kinds(found, "rollout_lost").get("group_id", []))
    for name in {name for names in undone["rollout_ids"] for name in names} - trained:
        assert name.rsplit("-g", 1)[0] in lost


def test_a_worker_that_never_answers_is_replaced(one_ray, tmp_path):
    config = ClusterConfig(deadline_s=15.0, **(SMALL | {"num_updates": 3}))
    watch = at_step(1, "worker0", signal.SIGSTOP)
    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.restarts) == ("done", 1)
    found = sound(tmp_path / "run", 3, config)
    assert "no answer" in kinds(found, "worker_died")["reason"].iloc[0]


def test_colocated_takes_turns(one_ray, tmp_path):
    config = ClusterConfig(placement="colocated", controller="synchronous", **(SMALL | {"num_updates": 2}))
    assert run(config, tmp_path / "run").status == "done"
    found = sound(tmp_path / "run", 2, config)
    by_id = found.rollouts.set_index("rollout_id")
    for batch in found.batches.itertuples():
        assert set(by_id.loc[batch.rollout_ids, "policy_version"]) == {batch.trained_policy_version}
    spans = found.spans
    trains, decodes = (spans[spans["stage"] == stage] for stage in ("train", "decode"))
    for train in trains.itertuples():
        assert not ((decodes["start_s"] < train.end_s) & (decodes["end_s"] > train.start_s)).any()


def test_a_rule_that_can_go_no_further_says_so(one_ray, tmp_path):
    config = ClusterConfig(
        controller="trl_async",
        controller_options={"queue_maxsize": 4, "max_inflight": 4},
        **(SMALL | {"prompts_per_step": 8}),
    )
    with pytest.raises(ClusterError, match="blocked: TRLAsync starts nothing") as caught:
        run(config, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_no_room(one_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "ROOM_S", 1.0)
    with pytest.raises(ClusterError, match=r"no room within 1 s: the run needs \{'CPU': 22.0") as caught:
        run(ClusterConfig(num_workers=20), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_one_folder_one_run(one_ray, tmp_path):
    with pytest.raises(ClusterError, match="holds no run to resume"):
        run(ClusterConfig(), tmp_path / "run", resume=True)
    config = ClusterConfig(**(SMALL | {"num_updates": 1}))
    run(config, tmp_path / "run")
    with pytest.raises(ClusterError, match="holds a run already"):
        run(config, tmp_path / "run")


def test_exit_codes_of_other_processes_stay_true(tmp_path):
    """Ray's reaper of orphans has a process ignore SIGCHLD, after which every exit code is 0."""
    code = (
        "import subprocess, sys; from rlinfra_utils.cluster import ClusterConfig, session\n"
        "with session.Session(ClusterConfig(num_workers=1)):\n"
        "    print(subprocess.run([sys.executable, '-c', 'raise SystemExit(7)']).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1] == "7", done.stderr


def processes_of(run_id):
    """Processes with a run's marker in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{session.MARKER}={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_from_the_shell_interrupted_and_resumed(tmp_path):
    run_id = f"shell-{os.getpid()}"
    common = [sys.executable, "-m", "rlinfra_utils.cluster", "--out", str(tmp_path / "run")]
    settings = ["--set", f"run_id={run_id}", "--set", "prompts_per_step=4", "--set", "group_size=4"]
    process = subprocess.Popen(
        [*common, "--updates", "100000", *settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " update " in line and len(lines) > 1:
            assert processes_of(run_id)
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(lines) + rest
    assert "interrupted" in rest
    gone_by_s = time.monotonic() + 20
    while processes_of(run_id) and time.monotonic() < gone_by_s:
        time.sleep(0.2)
    assert processes_of(run_id) == []
    done = len(read_run(tmp_path / "run").batches)
    resumed = subprocess.run(
        [*common, "--resume", "--updates", str(done + 2)], capture_output=True, text=True, timeout=300
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    config = ClusterConfig.from_json(read_run(tmp_path / "run").description.config)
    assert config.group_size == 4
    found = sound(tmp_path / "run", done + 2, config)
    assert not found.batches["rolled_back"].any(), "a clean stop undoes nothing"
    again = subprocess.run([*common, "--updates", "1"], capture_output=True, text=True, timeout=100)
    assert again.returncode == 1
    assert again.stderr.startswith("cluster: ")
    assert again.stderr.count("\n") == 1
