"""Real runs on Ray: what they leave behind, what kills cost them, and that nobody outlives them."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from cluster_runs import SMALL, kinds, nobody_left, processes_of, sound
from safetensors.torch import load_file

from rlinfra_utils import checkpoint, policy, sync
from rlinfra_utils.cluster import ClusterConfig, ClusterError, run, session
from rlinfra_utils.cluster.__main__ import STEP, parser
from rlinfra_utils.rollouts import from_table
from rlinfra_utils.tracing import follow, metrics, read_run

pytest.importorskip("ray")
ray = session.import_ray()
pytestmark = pytest.mark.slow


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


def assert_alike(found, expected, num_steps, lr=3e-4):
    """But for gradients of nothing but rounding: Adam moves such a weight by lr times a sign, which is anybody's."""
    apart = np.concatenate([np.abs(value - expected[name]).ravel() for name, value in found.items()])
    assert (apart > 2e-5).mean() < 1e-4
    assert apart.max() <= 2 * lr * num_steps


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
    replayed = {name: value.numpy() for name, value in model.state_dict().items()}
    assert_alike(saved, replayed, trainer.optimizer_step, config.lr)


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
    config = ClusterConfig(deadline_s=40.0, run_id=f"silent-{os.getpid()}", **(SMALL | {"num_updates": 3}))
    watch = at_step(1, "worker0", signal.SIGSTOP)
    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.restarts) == ("done", 1)
    found = sound(tmp_path / "run", 3, config)
    assert "no answer" in kinds(found, "worker_died")["reason"].iloc[0]
    assert nobody_left(config.run_id)


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


def test_ray_itself_is_reached_by_its_address(one_ray):
    session.reach(ray.get_runtime_context().gcs_address)


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1] == "7", done.stderr


def started_from_a_shell(folder, run_id):
    """The command, its process once an update is done, and what it said; a job of its own, which Ctrl-C hits whole."""
    common = [sys.executable, "-m", "rlinfra_utils.cluster", "--out", str(folder)]
    settings = ["--set", f"run_id={run_id}", "--set", "prompts_per_step=4", "--set", "group_size=4"]
    process = subprocess.Popen(
        [*common, "--updates", "100000", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = ""
    for line in process.stdout:
        said += line
        if " update " in line:
            break
    assert processes_of(run_id), said
    return common, process, said


def test_two_interrupts_from_the_shell_end_at_once_and_leave_nobody(tmp_path):
    run_id = f"twice-{os.getpid()}"
    _, process, said = started_from_a_shell(tmp_path / "run", run_id)
    for member in processes_of(run_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGSTOP)  # so that the clean stop waits
    os.killpg(process.pid, signal.SIGINT)
    for line in process.stdout:  # two signals at once would be one
        said += line
        if "  interrupted: " in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said + rest
    assert rest.splitlines()[-1] == "cluster: ended at once; --resume goes on from the last checkpoint"
    assert nobody_left(run_id)


def test_from_the_shell_interrupted_and_resumed(tmp_path):
    run_id = f"shell-{os.getpid()}"
    common, process, said = started_from_a_shell(tmp_path / "run", run_id)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said + rest
    assert "interrupted" in rest
    assert nobody_left(run_id)
    done = len(read_run(tmp_path / "run").batches)
    resumed = subprocess.run(
        [*common, "--resume", "--updates", str(done + 2)], capture_output=True, text=True, timeout=300
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    config = ClusterConfig.from_json(read_run(tmp_path / "run").description.config)
    assert config.group_size == 4
    found = sound(tmp_path / "run", done + 2, config)
    assert not found.batches["rolled_back"].any(), "a clean stop undoes nothing"
    again = subprocess.run([*common, "--updates", "1"], capture_output=True, text=True, timeout=300)
    assert again.returncode == 1
    assert again.stderr.startswith("cluster: ")
    assert again.stderr.count("\n") == 1


def test_the_step_that_help_shows_runs_under_torchrun(tmp_path):
    """Two ranks publish what one rank publishes, and it is no longer the warm start."""
    published = {}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        (folder / "step.py").write_text(STEP)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        done = subprocess.run([*launch, "step.py"], cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        with sync.hold(folder / "weights") as held:
            assert held.version == 1
            published[num_ranks] = load_file(held.path / "model.safetensors")
    warm = policy.load_warm_start()[0].state_dict()
    assert published[1].keys() == published[2].keys()
    assert max((published[1][name] - warm[name]).abs().max().item() for name in published[1]) > 1e-4
    one, two = ({name: value.numpy() for name, value in published[ranks].items()} for ranks in (1, 2))
    assert_alike(one, two, num_steps=1)
    assert all(line in parser().format_help() for line in STEP.splitlines())
