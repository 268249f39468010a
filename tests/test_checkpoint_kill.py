"""SIGKILL in the middle of a save: `latest` and `load` meet a whole checkpoint or none."""

import itertools
import os
import signal
import time
import warnings

import numpy as np
import pytest
from checkpoint_samples import components, same

from rlinfra_utils.checkpoint import Writer, latest, load, save

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def forked(work):
    """Run `work` in a forked child and return its process id; the child never returns to pytest."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def save_dying_at_call(folder, step, number, before):
    """Save, and die before or after the `number`-th call that the disk sees."""
    left = [number]

    def counted(call):
        def dying(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and before:
                kill_self()
            try:
                return call(*args, **kwargs)
            finally:
                if left[0] == 0:
                    kill_self()

        return dying

    for name in ("mkdir", "fsync", "rename", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    save(folder, step, few(step), keep=2)


def few(step):
    """Three files, so that a save has few instants and each is tried."""
    return {name: components(step)[name] for name in ("policy", "counters")}


def is_whole(path, make):
    step = load(path, ["counters"])["counters"]["global_step"]
    return same(load(path, make(step)), make(step))


def quiet_latest(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return latest(folder, few(0))


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("damaged", [False, True], ids=["absent", "replaces a damaged one"])
def test_death_at_each_call_in_turn(tmp_path, before, damaged):
    """Every instant between two calls that change the disk, one after the other."""
    number, died, reached = 0, True, set()
    while died:
        number += 1
        folder = tmp_path / str(number)
        save(folder, 70, few(70))
        save(folder, 80, few(80))
        if damaged:
            (save(folder, 90, few(90)) / "policy.json").write_text("{}")
        child = forked(lambda f=folder, n=number: save_dying_at_call(f, 90, n, before))
        died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        path = quiet_latest(folder)
        reached.add(path.name)
        assert is_whole(path, few)
        assert save(folder, 90, few(90)) == latest(folder, few(90))
        assert not list(folder.glob(".step_*"))
    assert reached == {"step_00000080", "step_00000090"}
    assert number > 12


def large(step):
    return components(step, policy={"weight": np.full((64, 1024), step, "f4")})


def save_forever(folder, first, pipe):
    with Writer(folder, keep=2) as writer:
        writer.save(first, large(first))
        os.write(pipe, b"x")
        for step in range(first + 1, first + 10_000):
            writer.save_async(step, large(step))


@pytest.mark.slow
def test_death_at_random_instants(tmp_path):
    """Forty kills of an asynchronous writer with retention; each child goes on where the last one got to."""
    rng = np.random.default_rng(0)
    reached = [0]
    read_end, write_end = os.pipe()
    for _ in range(40):
        child = forked(lambda: save_forever(tmp_path, reached[-1] + 1, write_end))
        assert os.read(read_end, 1) == b"x"
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        path = latest(tmp_path)
        assert is_whole(path, large)
        reached.append(int(path.name.removeprefix("step_")))
    assert all(before < after for before, after in itertools.pairwise(reached))
    assert len(list(tmp_path.glob("step_*"))) <= 3
    os.close(read_end)
    os.close(write_end)
