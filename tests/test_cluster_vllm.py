"""Real vLLM servers as rollout engines; one of them killed in the middle."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from cluster_runs import nobody_left, processes_of

from rlinfra_utils.cluster import ClusterConfig, run
from rlinfra_utils.levels import detect
from rlinfra_utils.tracing import read_run

pytest.importorskip("ray")
pytestmark = pytest.mark.vllm


def servers(run_id):
    """Process ids of the vLLM API servers of a run; other people's are none of ours to kill."""
    found = []
    for pid in processes_of(run_id):
        with contextlib.suppress(OSError):  # a helper that has ended since it was listed
            if b"vllm.entrypoints" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.skipif(detect().vllm_python is None, reason="no vLLM environment: make vllm")
def test_a_vllm_server_killed_in_the_middle(tmp_path):
    run_id, killed = f"vllm-{os.getpid()}", []

    def watch(loop):
        if not killed and loop.book.counts.step >= 2 and loop.crew.members["worker0"].ready:
            killed.extend(servers(run_id))
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):  # it went with the one before
                    os.kill(pid, signal.SIGKILL)

    config = ClusterConfig(
        run_id=run_id,
        engine="vllm",
        num_workers=1,
        groups_at_once=2,
        controller="bounded_queue",
        controller_options={"max_rollouts": 32},
        prompts_per_step=4,
        group_size=4,
        num_updates=5,
        save_every=5,
        digits=2,
        max_new_tokens=8,
    )
    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.restarts) == ("done", 1)
    assert killed
    found = read_run(tmp_path / "run")
    assert found.problems == []
    ids = [name for names in found.batches["rollout_ids"] for name in names]
    assert len(ids) == len(set(ids)) == 5 * config.batch_rollouts
    died = found.events[found.events["kind"] == "worker_died"]
    assert list(died["worker"]) == ["worker0"]
    syncs = found.events[found.events["kind"] == "weight_sync"]
    assert max(gap for gaps in syncs["zero_lag_gap_nats"] for gap in gaps) < 1e-4
    assert nobody_left(run_id)
