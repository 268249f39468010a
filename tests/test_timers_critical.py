"""The critical path against longest paths found by enumeration, closed forms, and traces with known causes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.timers import Trace

# A task: track, duration, delay before its start (ms), which of the earlier tasks it waits for.
TASK = st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 5), st.sets(st.integers(0, 7), max_size=3))


def schedule(tasks, delays):
    """Run tasks as soon as their track and what they wait for allow: starts, ends (ms) and all edges."""
    starts, ends, edges, last_on = [], [], [], {}
    for number, (track, dur, delay, wanted) in enumerate(tasks):
        before = {other for other in wanted if other < number} | ({last_on[track]} if track in last_on else set())
        starts.append(max((ends[other] for other in before), default=0) + (delay if delays else 0))
        ends.append(starts[-1] + dur)
        edges.append(before)
        last_on[track] = number
    return starts, ends, edges


def record(tasks, starts, ends, with_after):
    trace, ids = Trace(), []
    for number, (track, _, _, wanted) in enumerate(tasks):
        after = {"after": [ids[other] for other in sorted(wanted) if other < number]} if with_after else {}
        ids.append(trace.add(f"task{number}", starts[number] / 1e3, ends[number] / 1e3, track=f"track{track}", **after))
    return trace, ids


def longest_path(tasks, edges):
    """By enumeration of every path, from every task backwards."""

    def longest_to(number):
        return tasks[number][1] + max((longest_to(other) for other in edges[number]), default=0)

    return max(longest_to(number) for number in range(len(tasks)))


@given(st.lists(TASK, min_size=1, max_size=8))
def test_declared_dependencies_give_the_longest_path(tasks):
    starts, ends, edges = schedule(tasks, delays=False)
    trace, ids = record(tasks, starts, ends, with_after=True)
    path = trace.critical_path()
    longest_ms = longest_path(tasks, edges)
    assert max(ends) == longest_ms  # the schedule itself
    assert path.attrs["work_s"] == pytest.approx(longest_ms / 1e3, abs=1e-12)
    assert path.attrs["makespan_s"] == pytest.approx(longest_ms / 1e3, abs=1e-12)
    assert not path["wait"].any()
    chain = [ids.index(span) for span in path["span"]]
    if not any(dur == 0 for _, dur, _, _ in tasks):
        assert all(first in edges[second] for first, second in itertools.pairwise(chain))


@given(st.lists(TASK, min_size=1, max_size=8), st.booleans())
def test_work_and_gaps_cover_the_makespan_without_overlap(tasks, with_after):
    starts, ends, _ = schedule(tasks, delays=True)
    trace, _ = record(tasks, starts, ends, with_after)
    path = trace.critical_path()
    attrs = path.attrs
    assert attrs["makespan_s"] == pytest.approx((max(ends) - min(starts)) / 1e3, abs=1e-12)
    assert attrs["work_s"] + attrs["wait_s"] == pytest.approx(attrs["makespan_s"], abs=1e-12)
    assert path["start_s"].iloc[0] == min(starts) / 1e3
    assert path["end_s"].iloc[-1] == max(ends) / 1e3
    assert path["start_s"].tolist()[1:] == path["end_s"].tolist()[:-1]
    assert path.loc[~path["wait"], "dur_s"].sum() == pytest.approx(attrs["work_s"], abs=1e-12)


@given(st.lists(TASK, min_size=1, max_size=8))
def test_without_declared_dependencies_each_step_goes_to_the_last_end_before_it(tasks):
    tasks = [(track, dur + 1, delay, wanted) for track, dur, delay, wanted in tasks]
    starts, ends, _ = schedule(tasks, delays=True)
    trace, ids = record(tasks, starts, ends, with_after=False)
    path = trace.critical_path(slack_s=0.0)
    chain = [ids.index(span) for span in path.loc[~path["wait"], "span"]]
    assert ends[chain[-1]] == max(ends)
    for first, second in itertools.pairwise(chain):
        assert ends[first] == max(end for end in ends if end <= starts[second])
    assert not [end for end in ends if end <= starts[chain[0]]]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_two_stage_pipeline_has_its_closed_form(generate, train, n, with_after):
    trace, trained = Trace(), 0
    for batch in range(n):
        generated = (batch + 1) * generate
        name = trace.add("generate", generated - generate, generated, track="engine")
        begin = max(generated, trained)
        trace.add("train", begin, begin + train, track="trainer", **({"after": name} if with_after else {}))
        trained = begin + train
    path = trace.critical_path()
    assert path.attrs["makespan_s"] == pytest.approx(generate + train + (n - 1) * max(generate, train))
    assert path.attrs["work_s"] == path.attrs["makespan_s"]
    by_stage = path.groupby("stage")["dur_s"].sum()
    if generate != train:  # the faster stage is on the path once
        faster, once = ("train", train) if generate > train else ("generate", generate)
        assert by_stage[faster] == pytest.approx(once)


def test_two_stage_pipeline_of_the_course():
    trace, trained = Trace(), 0
    for batch in range(8):
        trace.add("generate", batch * 45, (batch + 1) * 45, track="engine")
        begin = max((batch + 1) * 45, trained)
        trace.add("train", begin, begin + 30, track="trainer")
        trained = begin + 30
    assert trace.critical_path().attrs["makespan_s"] == 390


def test_nested_blocks_are_cut_into_what_each_did_itself():
    trace = Trace()
    clock = iter(range(100))  # every read of the clock is a second later
    trace = Trace(device=type("Ticks", (), {"host_ns": staticmethod(lambda: next(clock) * 10**9)}))
    with trace.span("step", track="trainer"):  # 0 .. 7
        with trace.span("decode", track="engine"):  # 1 .. 2
            pass
        with trace.span("queue_wait", wait=True), trace.span("poll"):  # 3 .. 6, 4 .. 5
            pass
    path = trace.critical_path()
    assert list(zip(path["stage"], path["start_s"], path["end_s"])) == [
        ("step", 0, 1),
        ("decode", 1, 2),
        ("step", 2, 3),
        ("wait", 3, 4),
        ("poll", 4, 5),
        ("wait", 5, 6),
        ("step", 6, 7),
    ]
    assert path.attrs == {"mode": "wall", "makespan_s": 7.0, "work_s": 5.0, "wait_s": 2.0}


def test_a_wait_leads_to_the_work_that_ended_it():
    trace = Trace()
    trace.add("generate", 0.0, 9.99, track="engine")
    trace.add("log", 0.0, 1.0, track="trainer")
    trace.add("queue_wait", 1.0, 10.0, track="trainer", wait=True)
    trace.add("train", 10.0, 14.0, track="trainer")
    path = trace.critical_path()
    assert path["stage"].tolist() == ["generate", "wait", "train"]
    assert path.attrs["wait_s"] == pytest.approx(0.01)


def test_bookkeeping_shorter_than_the_slack_does_not_leave_the_track():
    trace = Trace()
    for batch in range(5):  # both are always busy; the engine's spans end within the trainer's bookkeeping
        trace.add("train", batch, batch + 0.99995, track="trainer")
    for index in range(8):
        trace.add("decode", index * 0.49999, (index + 1) * 0.49999, track="engine")
    assert set(trace.critical_path()["stage"]) == {"train", "wait"}
    assert "decode" in set(trace.critical_path(slack_s=0.0)["stage"])


def test_a_short_stage_on_another_track_stays_on_the_path_of_its_thread():
    clock = iter(range(0, 10**7, 10**4))  # every read of the clock is 10 us later, far below the slack
    trace = Trace(device=type("Ticks", (), {"host_ns": staticmethod(lambda: next(clock))}))
    for _ in range(3):
        with trace.span("decode", track="engine"):
            pass
        with trace.span("train", track="trainer"):
            pass
    path = trace.critical_path()
    assert path.loc[~path["wait"], "stage"].tolist() == ["decode", "train"] * 3


def test_after_overrules_a_later_end_elsewhere():
    trace = Trace()
    wanted = trace.add("generate", 0.0, 4.0, track="engine")
    trace.add("eval", 0.0, 5.0, track="other")
    trace.add("train", 5.5, 7.0, track="trainer", after=wanted)
    assert trace.critical_path()["stage"].tolist() == ["generate", "wait", "train"]


def test_after_on_a_block_holds_for_the_child_that_begins_with_it():
    clock = type("Hand", (), {"host_ns": lambda self: self.ns})()
    trace = Trace(device=clock)
    wanted = trace.add("generate", 0.0, 4.0, track="engine")
    trace.add("eval", 0.0, 5.0, track="other")
    clock.ns = 6 * 10**9
    with trace.span("step", track="trainer", after=[wanted]), trace.span("train"):
        clock.ns = 7 * 10**9
    assert trace.critical_path()["stage"].tolist() == ["generate", "wait", "train"]


def test_after_on_a_block_does_not_hold_for_what_it_does_later():
    clock = type("Hand", (), {"host_ns": lambda self: self.ns})()
    trace = Trace(device=clock)
    wanted = trace.add("generate", 0.0, 4.0, track="engine")
    trace.add("push", 0.0, 8.9, track="other")
    clock.ns = 6 * 10**9
    with trace.span("step", track="trainer", after=wanted):
        trace.add("queue_wait", 7.0, 9.0, wait=True)
        clock.ns = 9 * 10**9
        with trace.span("train"):
            clock.ns = 12 * 10**9
    assert trace.critical_path()["stage"].tolist() == ["push", "wait", "train"]


def test_after_a_block_means_its_end_even_if_a_child_outlives_it():
    clock = type("Hand", (), {"host_ns": lambda self: self.ns})()
    trace = Trace(device=clock)
    clock.ns = 0
    with trace.span("generate", track="engine") as generate:
        trace.add("flush", 3.0, 8.0)
        clock.ns = 4 * 10**9
    trace.add("train", 5.0, 9.0, track="trainer", after=generate.id)
    path = trace.critical_path()
    assert list(zip(path["stage"], path["start_s"], path["end_s"])) == [
        ("generate", 0, 3),
        ("wait", 3, 5),
        ("train", 5, 9),
    ]


def test_after_crosses_processes(tmp_path):
    engine, trainer = Trace(), Trace()
    name = engine.add("generate", 0.0, 4.0, track="engine")
    engine.add("generate", 4.0, 4.9, track="engine")
    trainer.add("train", 5.0, 6.0, track="trainer", after=name)
    engine.to_perfetto(tmp_path / "engine.json")
    trainer.to_perfetto(tmp_path / "trainer.json")
    path = Trace.merge([tmp_path / "trainer.json", tmp_path / "engine.json"]).critical_path()
    assert path["stage"].tolist() == ["generate", "wait", "train"]
    assert path["dur_s"].tolist() == [4.0, 1.0, 1.0]


def test_warmup_is_left_out():
    trace = Trace()
    first = trace.add("compile", 0.0, 50.0, warmup=True)
    trace.add("train", 51.0, 52.0, after=first)
    path = trace.critical_path()
    assert path["stage"].tolist() == ["train"]
    assert path.attrs["makespan_s"] == 1.0


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"after": "deadbeef-0"}, "after: 'deadbeef-0', named by 'train' .*, is not in the trace"),
        ({"after": "decode"}, "after: 'decode', named by 'train'"),
        ({"after": "LATE"}, "after: .* ends 2 s after the start of 'train'"),
        ({"after": "EARLY", "wait": True}, "after: .* stands on the wait 'train'"),
    ],
)
def test_bad_dependencies_are_named(attrs, words):
    trace = Trace()
    names = {"EARLY": trace.add("generate", 0.0, 1.0), "LATE": trace.add("generate", 1.0, 3.0)}
    trace.add("train", 1.0, 2.0, **(attrs | {"after": names.get(attrs["after"], attrs["after"])}))
    with pytest.raises(ValueError, match=words) as error:
        trace.critical_path()
    assert "\n" not in str(error.value)


def test_bad_slack_is_named():
    with pytest.raises(ValueError, match="slack_s: -1"):
        Trace().critical_path(slack_s=-1)
