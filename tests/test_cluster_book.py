"""The book of a real run decides as the simulator does: the same controller object, event by event."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.cluster import Book, ClusterConfig
from rlinfra_utils.cluster.twin import InGroups
from rlinfra_utils.simulator import CONTROLLERS, Exponential, LogNormal, LoopConfig, simulate

WORKERS, SIZE, GROUPS, NUM_STEPS = 3, 4, 5, 25
OPTIONS = {
    "bounded_queue": {"max_rollouts": 2 * GROUPS * SIZE, "drop_lag": 1},
    "trl_async": {"max_staleness": 1},
    "prime_rl": {"max_inflight": 4 * SIZE},
    "skyrl": {"max_staleness_steps": 1},
    "areal": {"max_lag": 2},
}


def config(name, **changes):
    values = {
        "controller": name,
        "controller_options": OPTIONS.get(name, {}),
        "prompts_per_step": GROUPS,
        "group_size": SIZE,
        "num_workers": WORKERS,
    }
    return ClusterConfig(**(values | changes))


class Replay:
    """A book that is told what a simulated run's processes did, and writes down what it decides."""

    def __init__(self, of, rule):
        self.book = Book(of, rule)
        self.book.set_slots(WORKERS)
        self.of, self.rule = of, rule
        self.free, self.waits, self.paused = True, False, False
        self.dispatched, self.taken, self.dropped, self.groups = [], [], [], {}

    def settle(self, now_s):
        if self.free:
            batch, dropped = self.book.take(now_s)
            self.taken += [(now_s, group.index) for group in batch]
            self.dropped += [(now_s, group.index) for group in dropped]
            self.free = not batch
        if self.paused:
            return
        while not self.waits and (group := self.book.dispatch(now_s)):
            self.dispatched.append((now_s, group.index))
            self.groups[group.index] = group
        while self.book.waiting and len(self.book.running) < WORKERS:
            self.book.start()

    def hear(self, event, tokens):
        book, now_s = self.book, event.time_s
        if event.event == "decoded":
            book.decoded(self.groups[event.group], tokens)
        elif event.event == "closed":
            book.put(self.groups[event.group], now_s)
        elif event.event == "trained":
            book.trained()
            ends, synced = book.counts.step == NUM_STEPS, book.counts.step % self.of.sync_interval == 0
            self.waits = synced and not ends and self.rule.at_update == "finish"
            self.paused, self.free = synced and not ends and not self.waits, not synced and not ends
        elif event.event == "sync_started":
            self.waits, self.paused = False, True
        elif event.event == "published":
            book.updated()
            self.paused, self.free = False, True


@pytest.mark.parametrize("sync_interval", [1, 3])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_it_decides_as_the_simulator(name, sync_interval):
    of = config(name, sync_interval=sync_interval)
    rule = of.make_controller()
    run = simulate(
        LoopConfig(
            controller=InGroups(rule, SIZE, rule.at_update, tokens_per_step=1.0),
            slots_per_replica=WORKERS,
            lengths_tokens=LogNormal(30, 0.9),
            verify_s=Exponential(0.05),
            batch_rollouts=GROUPS,
            train_s=Exponential(0.6),
            sync_interval=sync_interval,
            sync_s=Exponential(0.1),
            num_steps=NUM_STEPS,
        )
    )
    assert run.status == "done", run.reason
    tokens = run.rollouts.set_index("group")["tokens"]
    replay = Replay(of, rule)
    replay.settle(0.0)
    events = run.events
    for event in events.itertuples():
        if event.event in ("decoded", "closed", "trained", "sync_started", "published"):
            replay.hear(event, int(tokens.get(event.group, 0)))
            replay.settle(event.time_s)
    for found, kind in ((replay.dispatched, "dispatched"), (replay.taken, "taken"), (replay.dropped, "dropped")):
        expected = events[events["event"] == kind]
        assert sorted(found) == list(zip(expected["time_s"], expected["group"])), kind


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["start", "lost", "decoded", "put", "fail", "step", "update"]), max_size=120))
def test_no_prompt_is_in_two_places(moves):
    book = Book(config("bounded_queue"), CONTROLLERS["bounded_queue"](max_rollouts=40, drop_lag=0))
    book.set_slots(WORKERS)
    decoded, trained, now_s = [], [], 0.0
    for move in moves:
        now_s += 1.0
        while book.dispatch(now_s):
            pass
        running = list(book.running.values())
        if move == "start" and book.waiting:
            book.start()
        elif move == "lost" and running:
            book.lost(running[0])
        elif move == "decoded" and running:
            book.decoded(running[-1], 7)
            decoded.append(running[-1])
        elif move in ("put", "fail") and decoded:
            group = decoded.pop()
            book.put(group, now_s) if move == "put" else book.fail(group)
        elif move == "step":
            batch, _ = book.take(now_s)
            if batch:
                trained += [book.tasks[group.index].index for group in batch]
                book.trained()
        elif move == "update":
            book.updated()
        counts = book.counts
        parts = counts.in_flight, counts.queued, counts.training, counts.trained, counts.discarded
        assert counts.offered == sum(parts)
        held = [task.index for task in book.tasks.values()]
        assert max(Counter(held + trained).values(), default=1) == 1
        assert counts.queued_tokens == 7 * len(book.queue)
        assert counts.free_slots == (WORKERS - len(book.running) - len(book.waiting)) * SIZE


def test_a_refused_prompt_is_handed_out_next_under_another_name():
    book = Book(config("synchronous"), CONTROLLERS["synchronous"]())
    book.set_slots(WORKERS)
    first = book.dispatch(0.0)
    task = book.tasks[first.index]
    book.start()
    book.decoded(first, 3)
    assert book.fail(first) == 1
    again = book.dispatch(1.0)
    assert book.tasks[again.index].index == task.index
    assert book.tasks[again.index].group_id != task.group_id


def test_a_resumed_book_goes_on_where_the_other_stood():
    of = config("one_step_off")
    book = Book(of, of.make_controller())
    book.set_slots(WORKERS)
    groups = []
    while group := book.dispatch(0.0):
        groups.append(group)
    for _ in range(GROUPS + 2):
        group = book.start()
        book.decoded(group, 9)
        book.put(group, 1.0)
    assert len(book.take(2.0)[0]) == GROUPS
    book.trained()
    waiting = [(book.tasks[group.index], group.version, group.tokens) for group in book.queue]
    resumed = Book(of, of.make_controller(), "resume1", 1, 1, book.position, waiting)
    resumed.set_slots(WORKERS)
    assert resumed.counts.queued == 2 * SIZE
    assert resumed.counts.queued_tokens == 18
    assert resumed.counts.oldest_queued_version == 0
    assert resumed.counts.oldest_running_version == math.inf
    asked = []
    while group := resumed.dispatch(3.0):
        asked.append(resumed.tasks[group.index].index)
    # One step off: what version 1 trains on and a batch more, less what waits.
    assert len(asked) == 2 * GROUPS - 2
    assert asked == list(range(GROUPS + 2, 3 * GROUPS))
