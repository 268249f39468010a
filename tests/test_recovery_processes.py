"""The run as processes: restarted after kills, stopped by a full disk, and a storm of accidents that loses nothing."""

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
from recovery_samples import TINY

from rlinfra_utils.recovery import KINDS, RecoveryError, RunConfig, Supervisor, broken, drill, run_in_turns, storm, tell
from rlinfra_utils.recovery.storm import _fill_disk
from rlinfra_utils.tracing import read_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NUM_KILLS = 200
DISK_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    run_in_turns(folder, TINY)
    return tell(folder)


def test_processes_do_what_one_process_does(tmp_path, reference):
    with Supervisor(tmp_path, TINY) as run:
        run.wait()
    assert tell(tmp_path) == reference
    assert read_run(tmp_path).problems == []


def test_a_storm_of_kills_loses_nothing(tmp_path):
    report = storm(tmp_path / "storm", RunConfig(), NUM_KILLS, seed=12)
    print(report)
    assert report.num_kills == NUM_KILLS
    assert report.problems == []
    found = {kind: (number, half) for kind, number, half, _ in report.rows()}
    assert set(found) == set(KINDS)
    assert min(number for number, _ in found.values()) >= 10
    for kind in ("trainer during a save", "verifier with a half-written batch"):
        number, half = found[kind]
        assert half >= number / 2, f"{kind}: {half} of {number} blows met the write, too few to prove anything"


def test_a_disk_that_fills_up_after_the_end_of_a_run_is_no_accident(tmp_path):
    with Supervisor(tmp_path, TINY) as run:
        run.wait()
        hits = [_fill_disk(run, random.Random(seed)) for seed in range(8)]
    assert hits == [None] * 8


def test_a_storm_under_the_policy_that_drops_the_queue_loses_nothing(tmp_path):
    report = storm(tmp_path / "storm", RunConfig(), 15, seed=5, queue_policy="drop")
    assert report.num_kills == 15
    assert report.problems == []


@contextmanager
def small_disk(folder, size_bytes):
    """A file system of its own, of so many bytes; skips where the machine does not let us mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk; the storm limits the size of files in its place")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_full_disk_stops_the_run_in_one_line_and_space_lets_it_go_on(tmp_path, reference, seed):
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        folder, ballast = disk / "run", disk / "ballast"
        room_bytes = random.Random(seed).randrange(300_000, 12_000_000)
        ballast.write_bytes(bytes(DISK_BYTES - room_bytes))
        with Supervisor(folder, TINY) as run, pytest.raises(RecoveryError) as caught:
            run.wait()
        assert os.strerror(errno.ENOSPC) in str(caught.value) or "is the disk full" in str(caught.value)
        assert "\n" not in str(caught.value)
        ballast.unlink()
        assert broken(folder, TINY, reference) == []
        with Supervisor(folder, TINY) as run:
            run.wait()
        assert broken(folder, TINY, reference, finished=True) == []


def test_two_supervisors_on_one_folder_are_refused(tmp_path):
    with Supervisor(tmp_path, TINY), pytest.raises(RecoveryError, match="has another supervisor"):
        Supervisor(tmp_path, TINY).__enter__()


def test_an_error_of_a_worker_stops_the_run_with_its_sentence(tmp_path):
    run_in_turns(tmp_path, TINY)
    path = tmp_path / "weights" / "v0005" / "model.safetensors"
    path.write_bytes(b"\x00" + path.read_bytes()[1:])
    with Supervisor(tmp_path, TINY) as run, pytest.raises(RecoveryError, match=r"trainer stopped: .*other content"):
        run.wait()


def test_workers_do_not_outlive_a_supervisor_that_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys, time
            from rlinfra_utils.recovery import RunConfig, Supervisor
            if __name__ == "__main__":
                config = RunConfig(**json.loads(sys.argv[2]))
                with Supervisor(sys.argv[1], config) as run:
                    print(run.pid("collector0"), run.pid("verifier"), flush=True)
                    time.sleep(600)
            """
        )
    )
    config = json.dumps(replace(TINY, num_updates=10_000).to_json())
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), config], stdout=subprocess.PIPE, text=True
    ) as process:
        pids = [int(text) for text in process.stdout.readline().split()]
        process.kill()
    end_s = time.monotonic() + 120
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < end_s, "workers go on without a supervisor"
        time.sleep(0.1)


def _alive(pid):
    """A zombie is none: who collects orphans, and when, is the machine's."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("queue_policy", ["restore", "drop"])
def test_the_drill_recovers_a_run_in_eight_steps(tmp_path, queue_policy):
    report = drill(tmp_path, queue_policy=queue_policy, victims=["trainer", "collector0", "verifier"])
    assert report.ok, str(report)
    assert len(report.steps) == 8
    assert str(report).endswith("recovered")
    assert report._repr_html_().count("<td>yes</td>") == 8


def test_the_drill_says_which_step_failed(tmp_path):
    report = drill(tmp_path, allowed={"reward": (2.0, 3.0)})
    assert [step.ok for step in report.steps] == [True] * 7 + [False]
    assert "outside: reward" in report.steps[-1].found
    assert str(report).endswith("not recovered")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: drill(p, victims=["collector0"]), "victims="),
        (lambda p: drill(p, victims=["trainer", "actor"]), "victims="),
        (lambda p: storm(p, TINY, 0), "num_kills=0"),
        (lambda p: storm(p, TINY, 5, kinds=["full disk"]), "kinds="),
        (lambda p: storm(p, TINY, 5, kinds=["earthquake"]), "kinds="),
        (lambda p: Supervisor(p, TINY, "keep"), "queue_policy='keep'"),
    ],
)
def test_senseless_arguments_are_refused_at_the_door(tmp_path, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(tmp_path / "run")
    assert not (tmp_path / "run").exists()
