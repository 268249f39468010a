"""How a run ends: time is up, interrupted once and twice, starved, hung; each leaves a folder that goes on."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import cluster_runs
import pytest
import torch
from cluster_runs import SMALL, Inline, kinds, sound

from rlinfra_utils.cluster import ClusterConfig, ClusterError, crew, publishing, run, running, trainer_side
from rlinfra_utils.cluster import loop as loop_module
from rlinfra_utils.cluster.__main__ import main
from rlinfra_utils.simulator import CONTROLLERS, Exponential, LogNormal, LoopConfig, simulate
from rlinfra_utils.simulator.rules import BoundedQueue
from rlinfra_utils.tracing import alerts, metrics, read_run

pytestmark = pytest.mark.usefixtures("one_thread")
ENDLESS = SMALL | {"num_updates": 10_000}


class ByLooks:
    """A clock that each look at it moves on, and each sleep: how slow the machine is decides over no deadline."""

    time_ns = staticmethod(time.time_ns)

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        self.now_s += 0.02
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """No Ray: the processes of the run are objects of this one."""
    made = []

    def session(config, address):
        made.append(Inline(config, address))
        return made[-1]

    monkeypatch.setattr(running, "Session", session)
    monkeypatch.setattr(publishing, "import_ray", Inline)
    yield made
    assert all(actor.killed for one in made for actor in one.actors), "a process outlived its run"
    assert not torch.distributed.is_initialized()


def interrupt_at(*moments):
    """A Ctrl-C at each moment, in turn."""
    left = list(moments)

    def watch(loop):
        if left and left[0](loop):
            left.pop(0)
            os.kill(os.getpid(), signal.SIGINT)

    return watch


def goes_on(folder, config, outcome):
    """The run resumed for two more updates; nothing of before is undone after a clean stop."""
    num_updates = outcome.num_updates + 2
    config = ClusterConfig.from_json(config.to_json() | {"num_updates": num_updates, "duration_s": None})
    assert run(config, folder, resume=True).status == "done"
    return sound(folder, num_updates, config)


def test_when_time_is_up_the_run_saves_and_can_go_on(tmp_path, monkeypatch):
    late_s, clock = [0.0], SimpleNamespace(time_ns=time.time_ns)
    clock.perf_counter = lambda: time.perf_counter() + late_s[0]
    monkeypatch.setattr(loop_module, "time", clock)

    def watch(loop):
        if loop.book.counts.step == 3:
            late_s[0] = 3600.0

    config = ClusterConfig(duration_s=3600.0, **(ENDLESS | {"save_every": 10_000}))
    outcome = run(config, tmp_path / "run", watch=watch)
    assert outcome.status == "time is up"
    assert 3 <= outcome.num_updates < 10_000
    found = sound(tmp_path / "run", outcome.num_updates, config)
    assert list(kinds(found, "checkpoint_saved")["step"]) == [outcome.num_updates]
    assert not goes_on(tmp_path / "run", config, outcome).batches["rolled_back"].any()


def test_one_interrupt_is_a_clean_stop(tmp_path):
    config, before = ClusterConfig(**ENDLESS), signal.getsignal(signal.SIGINT)
    outcome = run(config, tmp_path / "run", watch=interrupt_at(lambda loop: loop.book.counts.step == 3))
    assert outcome.status == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    found = sound(tmp_path / "run", outcome.num_updates, config)
    assert kinds(found, "checkpoint_saved")["step"].iloc[-1] == outcome.num_updates >= 3
    assert not goes_on(tmp_path / "run", config, outcome).batches["rolled_back"].any()


def test_a_folder_in_which_a_run_is_going_on_is_not_resumed_by_another(tmp_path):
    config, seen = ClusterConfig(**SMALL), []

    def watch(loop):
        if not seen and loop.book.counts.step == 2:
            with pytest.raises(ClusterError, match="another process runs in it") as caught:
                run(config, tmp_path / "run", resume=True)
            seen.append(str(caught.value))

    assert run(config, tmp_path / "run", watch=watch).status == "done"
    assert len(seen) == 1
    assert "\n" not in seen[0]
    sound(tmp_path / "run", 4, config)


def test_a_second_interrupt_during_the_stop_ends_at_once(tmp_path):
    config, before = ClusterConfig(**(ENDLESS | {"save_every": 4})), signal.getsignal(signal.SIGINT)
    stopping = interrupt_at(lambda loop: loop.book.counts.step == 6, lambda loop: loop.stopping)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", watch=stopping)
    assert signal.getsignal(signal.SIGINT) is before
    assert list(kinds(read_run(tmp_path / "run"), "checkpoint_saved")["step"]) == [4]
    config = ClusterConfig.from_json(config.to_json() | {"num_updates": 8})
    assert run(config, tmp_path / "run", resume=True).num_updates == 8
    found = sound(tmp_path / "run", 8, config)
    undone = found.batches[found.batches["rolled_back"]]
    assert set(undone["optimizer_step"]) <= {5, 6, 7}
    assert {5, 6} <= set(undone["optimizer_step"])


class DropsAll(BoundedQueue):
    """Nothing is ever fresh enough."""

    def judge(self, group, counts):
        return "drop"


def test_a_rule_that_drops_whatever_comes_starves_here_as_in_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setitem(CONTROLLERS, "drops_all", DropsAll)
    monkeypatch.setattr(trainer_side, "STARVED_BATCHES", 3)
    rule = {"controller": "drops_all", "controller_options": {"max_rollouts": 32}}
    with pytest.raises(ClusterError, match=r"^starved: \d+ rollouts dropped or refused since the last") as caught:
        run(ClusterConfig(**(SMALL | rule)), tmp_path / "run")
    assert "\n" not in str(caught.value)
    dropped = len(kinds(read_run(tmp_path / "run"), "dropped")) * SMALL["group_size"]
    assert str(dropped) in str(caught.value)
    assert dropped > 3 * SMALL["prompts_per_step"] * SMALL["group_size"]
    simulated = simulate(
        LoopConfig(
            controller=DropsAll(max_rollouts=32),
            slots_per_replica=2,
            lengths_tokens=LogNormal(30, 0.9),
            train_s=Exponential(0.6),
            batch_rollouts=16,
            num_steps=4,
        )
    )
    assert simulated.status == "starved"


@pytest.mark.parametrize(
    ("hangs", "message"),
    [
        (("worker0", "answer"), "^worker0: died 2 times, max_restarts=1; the last time: no answer to answered within"),
        (("worker0", "hello"), "^worker0: died 2 times, max_restarts=1; the last time: no answer to hello within"),
        (("verifier", "judge"), "^verifier: died 2 times, max_restarts=1; the last time: no answer to judged within"),
        (("trainer0", "hello"), "^trainer0: does not start: no answer to hello within"),
        (("trainer0", "newest"), "cannot be resumed: GetTimeoutError"),
        (
            ("trainer0", "update"),
            "^trainer0: died 2 times, max_restarts=1; the last time: trainer0: no answer to",
        ),
        (("trainer0", "save"), "^trainer0: died 2 times, max_restarts=1; the last time: trainer0: no answer to"),
        (("worker1", "load"), "^weights were not taken 2 times: "),
    ],
    ids=lambda value: value[0] + " " + value[1] if isinstance(value, tuple) else "",
)
def test_a_process_that_never_answers_ends_in_one_line(tmp_path, monkeypatch, hangs, message):
    monkeypatch.setattr(Inline, "hangs", frozenset({hangs}))
    monkeypatch.setattr(crew, "START_S", 20.0)
    clock = ByLooks()
    for module in (crew, loop_module, trainer_side, cluster_runs):
        monkeypatch.setattr(module, "time", clock)
    with pytest.raises(ClusterError, match=message) as caught:
        run(ClusterConfig(deadline_s=20.0, max_restarts=1, **ENDLESS), tmp_path / "run")
    assert "\n" not in str(caught.value)


class BackWithTheTrainer:
    """The verifier's first word, held back until the trainer is starting again; plays `Inline.hangs`."""

    def __init__(self, loop):
        self.members = loop.crew.members

    def __contains__(self, call):
        return call == ("verifier", "hello") and self.members["trainer0"].num_starts == 1


def test_a_verifier_that_comes_back_while_the_trainer_starts_judges_nothing_from_before(tmp_path):
    config, killed = ClusterConfig(controller="bounded_queue", controller_options={"max_rollouts": 32}, **SMALL), []

    def watch(loop):
        verifier = loop.crew.members["verifier"]
        if not killed and loop.book.counts.step == 1:
            loop.session.hangs = BackWithTheTrainer(loop)
            loop.session.kill(verifier.handle)
            killed.append("verifier")
        elif killed == ["verifier"] and not verifier.ready and loop.to_judge:
            loop.session.kill(loop.crew.members["trainer0"].handle)
            killed.append("trainer0")

    outcome = run(config, tmp_path / "run", watch=watch)
    assert (outcome.status, outcome.restarts) == ("done", 2)
    assert killed == ["verifier", "trainer0"]
    sound(tmp_path / "run", 4, config)


def test_a_finished_run_has_its_peak_memory_and_nobody_is_called_dead(tmp_path):
    run(ClusterConfig(**SMALL), tmp_path / "run")
    found = read_run(tmp_path / "run")
    members = {"trainer0", "worker0", "worker1", "verifier"}
    peaks = [row for row in metrics(found).rows if row.name == "peak_memory"]
    assert {row.labels["worker"] for row in peaks} == members
    # All of them are this process: with torch loaded it holds more than 100 MB, and less than the machine has.
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert all(100e6 < row.value < total_bytes for row in peaks)
    judged = alerts(found, now_unix_s=found.last_unix_s + 1e6)
    assert [alert for alert in judged if alert.rule.name == "dead_producer"] == []
    assert set(kinds(found, "worker_stopped")["worker"]) == members


def test_the_shell_says_in_one_line_that_ray_is_absent(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # the real session
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "cluster: ray is not installed: pip install 'ray>=2.50'\n"


@pytest.mark.parametrize("place", ["a_file", "a_file/run", "/proc/self"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, monkeypatch, inline, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ClusterError, match=rf"^{place}: cannot be written: ") as caught:
        run(ClusterConfig(), place)
    assert "\n" not in str(caught.value)
    assert inline == []
