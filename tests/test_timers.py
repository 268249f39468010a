"""Spans as recorded and summed up: nesting, inheritance, failures, threads, tasks, bad input."""

import asyncio
import itertools
import math
import pickle
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.timers import Trace


class HandClock:
    """A host clock that moves only when it is told to."""

    def __init__(self):
        self.ns = 0

    def host_ns(self):
        return self.ns


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# A block as a tree: (work before, between and after the children in ns, the children).
trees = st.recursive(
    st.tuples(st.lists(st.integers(0, 10**9), min_size=1, max_size=1), st.just([])),
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda children: st.tuples(
            st.lists(st.integers(0, 10**9), min_size=len(children) + 1, max_size=len(children) + 1), st.just(children)
        )
    ),
    max_leaves=12,
)


def run_tree(trace, tree, work, seen, parent=None):
    """Run a tree as nested blocks; `seen` gets id -> (parent id, own work in ns)."""
    own, children = tree
    with trace.span("block") as span:
        seen[span.id] = (parent, sum(own))
        work(own[0])
        for more, child in zip(own[1:], children):
            run_tree(trace, child, work, seen, span.id)
            work(more)


# ---------------------------------------------------------------- nesting and self time


@given(st.lists(trees, min_size=1, max_size=3))
def test_self_time_is_the_work_done_outside_children(forest):
    clock, seen = HandClock(), {}
    trace = Trace(device=clock)

    def work(ns):
        clock.ns += ns

    for tree in forest:
        run_tree(trace, tree, work, seen)
    rows = trace.frame().set_index("span")
    assert set(rows.index) == set(seen)
    for name, (parent, own_ns) in seen.items():
        assert rows.loc[name, "self_s"] == own_ns / 1e9
        assert rows.loc[name, "parent"] == parent if parent else pd.isna(rows.loc[name, "parent"])
    assert math.isclose(rows["self_s"].sum(), clock.ns / 1e9, abs_tol=1e-9)
    if clock.ns:
        assert math.isclose(trace.summary()["share"].sum(), 1.0)


def test_children_that_overlap_are_taken_out_once_and_only_within_the_parent():
    clock = HandClock()
    trace = Trace(device=clock)
    with trace.span("step"):
        clock.ns = 10 * 10**9
        trace.add("a", 2.0, 5.0)
        trace.add("b", 4.0, 6.0)
        trace.add("within_b", 4.5, 5.5)
        trace.add("queue_wait", 9.0, 12.0, wait=True)
        trace.add("before", 0.0, 0.0)
        trace.add("after", 13.0, 14.0)
    assert trace.frame().set_index("stage")["self_s"].to_dict() == {
        "step": 10 - 4 - 1,  # [0, 10] without [2, 6] and [9, 10]
        "a": 3.0,
        "b": 2.0,
        "within_b": 1.0,
        "queue_wait": 3.0,
        "before": 0.0,
        "after": 1.0,
    }


def test_children_inherit_track_and_warmup_but_not_wait():
    trace = Trace()
    with (
        trace.span("step", track="trainer", warmup=True, wait=True, policy_version=3),
        trace.span("inner"),
        trace.span("innermost", track="engine", warmup=False),
    ):
        trace.add("added", 1.0, 2.0)
    rows = trace.frame().set_index("stage")
    assert rows["track"].to_dict() == {
        "step": "trainer",
        "inner": "trainer",
        "innermost": "engine",
        "added": "engine",
    }
    assert rows["warmup"].to_dict() == {"step": True, "inner": True, "innermost": False, "added": False}
    assert rows["wait"].to_dict() == {"step": True, "inner": False, "innermost": False, "added": False}
    assert rows["policy_version"].dropna().to_dict() == {"step": 3}


def test_default_track_is_process_and_thread():
    trace = Trace()

    def work():
        with trace.span("a"):
            pass

    thread = threading.Thread(target=work, name="verifier-3")
    thread.start()
    thread.join()
    assert trace.frame()["track"].item() == "MainProcess/verifier-3"


def test_attributes_can_be_set_until_known():
    trace = Trace()
    with trace.span("decode") as span:
        span.set(tokens=7, finish="length")
    span.set(tokens=8)
    row = trace.frame().iloc[0]
    assert (row["tokens"], row["finish"], row["span"]) == (8, "length", span.id)


def test_a_failed_block_is_kept_and_its_exception_passes_on():
    trace = Trace()
    failure = KeyError("reward")
    with pytest.raises(KeyError) as caught, trace.span("step"), trace.span("verifier"):
        raise failure
    assert caught.value is failure
    assert trace.frame().set_index("stage")["error"].to_dict() == {
        "step": "KeyError: 'reward'",
        "verifier": "KeyError: 'reward'",
    }
    with trace.span("next"):
        pass
    assert trace.frame().set_index("stage")["parent"].isna()["next"]


def test_children_of_a_block_that_is_still_open_are_reported_without_parent():
    trace = Trace()
    with trace.span("run", track="trainer", warmup=True):
        with trace.span("step"):
            pass
        rows = trace.frame()
        assert rows["parent"].isna().all()
        assert (rows["track"].item(), rows["warmup"].item()) == ("trainer", True)
    assert trace.frame().set_index("stage")["parent"].notna()["step"]


def test_two_traces_may_interleave_their_blocks():
    outer, inner = Trace(), Trace()
    with outer.span("a") as a, inner.span("b"), outer.span("c"):
        pass
    assert outer.frame().set_index("stage")["parent"].dropna().to_dict() == {"c": a.id}
    assert inner.frame()["parent"].isna().all()


# ---------------------------------------------------------------- summary

SPAN = st.tuples(
    st.sampled_from(["decode", "prefill", "queue_wait"]),
    st.integers(0, 10**6),  # start, ms
    st.integers(0, 10**5),  # duration, ms
    st.one_of(st.none(), st.integers(0, 10**6)),  # tokens
    st.booleans(),  # wait
    st.booleans(),  # warmup
)


def quantile_by_hand(values, q):
    """Linear interpolation between order statistics, position (n - 1) q."""
    values = sorted(values)
    place = (len(values) - 1) * q
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


@given(st.lists(SPAN, min_size=1, max_size=30))
def test_summary_equals_sums_over_the_raw_spans(raw):
    trace = Trace()
    for stage, start, dur, tokens, wait, warmup in raw:
        attrs = {} if tokens is None else {"tokens": tokens}
        trace.add(stage, start / 1e3, (start + dur) / 1e3, wait=wait, warmup=warmup, **attrs)
    table = trace.summary()
    kept = [span for span in raw if not span[5]]
    work = sum(dur for _, _, dur, _, wait, _ in kept if not wait) / 1e3
    first_ms = {stage: min(span[1] for span in kept if span[0] == stage) for stage in {span[0] for span in kept}}
    assert set(table.index) == set(first_ms)
    assert [first_ms[stage] for stage in table.index] == sorted(first_ms.values())
    assert table.attrs["num_warmup_spans"] == len(raw) - len(kept)
    for stage in first_ms:
        mine = [span for span in kept if span[0] == stage]
        durs = [span[2] / 1e3 for span in mine]
        stating = [span for span in mine if span[3] is not None]
        stated_s = sum(span[2] for span in stating) / 1e3
        own = sum(span[2] for span in mine if not span[4]) / 1e3
        row = table.loc[stage]
        expected = {
            "count": len(mine),
            "total_s": sum(durs),
            "self_s": own,
            "share": own / work if work else math.nan,
            "p50_s": quantile_by_hand(durs, 0.50),
            "p95_s": quantile_by_hand(durs, 0.95),
            "p99_s": quantile_by_hand(durs, 0.99),
            "tokens": sum(span[3] for span in stating),
            "tokens_per_s": sum(span[3] for span in stating) / stated_s if stated_s else math.nan,
            "wait_s": sum(span[2] for span in mine if span[4]) / 1e3,
        }
        assert row.to_dict() == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


def test_results_state_their_mode_and_quantile_method():
    trace = Trace()
    trace.add("a", 0.0, 1.0)
    assert trace.frame()["mode"].tolist() == ["wall"]
    assert trace.summary().attrs == {"mode": "wall", "quantile_method": "linear", "num_warmup_spans": 0}
    assert trace.critical_path().attrs["mode"] == "wall"


def test_an_empty_trace_gives_empty_tables(tmp_path):
    trace = Trace()
    trace.to_perfetto(tmp_path / "empty.json")
    for empty in (trace, Trace.merge([]), Trace.merge([tmp_path / "empty.json"])):
        assert empty.frame().empty
        assert empty.summary().empty
        assert empty.critical_path().empty
        assert empty.critical_path().attrs == {"mode": "wall", "makespan_s": 0.0, "work_s": 0.0, "wait_s": 0.0}


# ---------------------------------------------------------------- threads, tasks, processes


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(trees, min_size=1, max_size=3), min_size=2, max_size=4))
def test_threads_keep_their_own_nesting(forests):
    trace = Trace()
    seen = [{} for _ in forests]
    start = threading.Barrier(len(forests))

    def work(forest, mine):
        start.wait()
        for tree in forest:
            run_tree(trace, tree, lambda ns: time.sleep(0), mine)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=work, args=(forest, mine), name=f"t{index}")
            for index, (forest, mine) in enumerate(zip(forests, seen))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    rows = trace.frame().set_index("span")
    assert rows.index.is_unique
    for index, mine in enumerate(seen):
        own = rows[rows["thread"] == f"t{index}"]
        assert {name: own.loc[name, "parent"] if parent else None for name, (parent, _) in mine.items()} == {
            name: parent for name, (parent, _) in mine.items()
        }
        assert len(own) == len(mine)
        roots = own[own["parent"].isna()]
        assert own["self_s"].sum() == pytest.approx(roots["dur_s"].sum(), abs=1e-9)


def test_asyncio_tasks_keep_their_own_nesting():
    trace = Trace()

    async def request(index):
        with trace.span("request", index=index) as outer:
            await asyncio.sleep(0.001 * (3 - index))
            with trace.span("decode", index=index) as inner:
                await asyncio.sleep(0.001 * index)
        return outer.id, inner.id

    async def serve():
        with trace.span("batch") as batch:
            return batch.id, await asyncio.gather(*(request(index) for index in range(4)))

    batch, pairs = asyncio.run(serve())
    parents = trace.frame().set_index("span")["parent"]
    assert [parents[inner] for _, inner in pairs] == [outer for outer, _ in pairs]
    assert {parents[outer] for outer, _ in pairs} == {batch}


CHILD = """
import sys, time
from rlinfra_utils.timers import Trace
trace = Trace()
with trace.span("generate", track="engine", tokens=int(sys.argv[2])):
    time.sleep(0.01)
trace.to_perfetto(sys.argv[1])
"""


def test_processes_write_files_that_merge_on_one_clock(tmp_path):
    paths = [tmp_path / f"engine{index}.json" for index in range(2)]
    begin_s = time.perf_counter()
    children = [subprocess.Popen([sys.executable, "-c", CHILD, path, str(10 + i)]) for i, path in enumerate(paths)]
    assert [child.wait() for child in children] == [0, 0]
    end_s = time.perf_counter()
    trace = Trace.merge(paths)
    rows = trace.frame()
    assert sorted(rows["tokens"]) == [10, 11]
    assert rows["process"].nunique() == 2
    assert rows["start_s"].min() >= begin_s
    assert rows["end_s"].max() <= end_s
    assert trace.summary().loc["generate", "tokens"] == 21


FORK = """
import os, sys
from rlinfra_utils.timers import Trace
trace = Trace()
with trace.span("parent"):
    pass
with trace.span("open") as span:
    pid = os.fork()
    if pid == 0:
        with trace.span("child"):
            pass
        trace.to_perfetto(sys.argv[1])
        os._exit(0)
    os.waitpid(pid, 0)
trace.to_perfetto(sys.argv[2])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_starts_with_an_empty_trace_of_its_own(tmp_path):
    paths = [tmp_path / "child.json", tmp_path / "parent.json"]
    subprocess.run([sys.executable, "-c", FORK, *paths], check=True)
    assert Trace.merge(paths[:1]).frame()["stage"].tolist() == ["child"]
    rows = Trace.merge(paths).frame().set_index("stage")
    assert set(rows.index) == {"parent", "open", "child"}
    assert rows["parent"].isna().all()
    assert rows["process"].nunique() == 2


def test_a_trace_does_not_pickle():
    with pytest.raises(TypeError, match=r"Trace.merge") as error:
        pickle.dumps(Trace())
    one_line(error)


def test_recording_needs_no_torch():
    code = "import sys, rlinfra_utils.timers; assert 'torch' not in sys.modules, 'torch came along'"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("start_s", "end_s", "words"),
    [
        (2.0, 1.0, "end_s: 1.0 lies before start_s 2.0"),
        (-1.0, 1.0, "start_s: -1.0"),
        (0.0, math.nan, "end_s: nan"),
        (math.nan, 0.0, "start_s: nan"),
        (0.0, math.inf, "end_s: inf"),
        (-math.inf, 0.0, "start_s: -inf"),
        (0.0, 1e300, "end_s: 1e+300"),
        (0.0, 10**400, "end_s: "),
        ("0", 1.0, "start_s: '0'"),
        (None, 1.0, "start_s: None"),
        (True, 1.0, "start_s: True"),
        (0.0, 1j, "end_s: 1j"),
    ],
)
def test_bad_times_are_named(start_s, end_s, words):
    trace = Trace()
    with pytest.raises(ValueError) as error:  # noqa: PT011 the words are checked below
        trace.add("decode", start_s, end_s)
    assert one_line(error).startswith(words)
    assert trace.frame().empty


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"tokens": -1}, "tokens: -1"),
        ({"tokens": 1.5}, "tokens: 1.5"),
        ({"tokens": math.nan}, "tokens: nan"),
        ({"tokens": "12"}, "tokens: '12'"),
        ({"tokens": True}, "tokens: True"),
        ({"tokens": 2**53}, "tokens: 9007199254740992"),
        ({"track": ""}, "track: ''"),
        ({"track": 3}, "track: 3"),
        ({"wait": "no"}, "wait: 'no'"),
        ({"warmup": 1}, "warmup: 1"),
        ({"after": 7}, "after: 7"),
        ({"after": [7]}, "after: [7]"),
        ({"dur_s": 1.0}, "dur_s: 1.0"),
        ({"mode": "greedy"}, "mode: 'greedy'"),
    ],
)
def test_bad_attributes_are_named_at_every_door(attrs, words):
    trace = Trace()
    with trace.span("open") as span:
        for door in (trace.span, lambda stage, **attrs: trace.add(stage, 0.0, 1.0, **attrs)):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                door("decode", **attrs)
            assert one_line(error).startswith(words)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            span.set(**attrs)
        assert one_line(error).startswith(words)


@pytest.mark.parametrize("stage", ["", "  ", None, 3, b"decode"])
def test_an_empty_stage_is_refused(stage):
    for door in (lambda: Trace().span(stage), lambda: Trace().add(stage, 0.0, 1.0)):
        with pytest.raises(ValueError, match=r"stage: .* is no name") as error:
            door()
        one_line(error)


def test_an_unknown_mode_is_refused():
    for mode in ("cpu", "", None, ["wall"]):
        with pytest.raises(ValueError, match="is not one of wall, cuda_sync, cuda_events") as error:
            Trace(mode)
        one_line(error)


def test_track_and_warmup_come_too_late_once_a_block_is_open():
    with Trace().span("step") as span:
        for name, value in (("track", "engine"), ("warmup", True)):
            with pytest.raises(ValueError, match=f"{name}: .* comes too late"):
                span.set(**{name: value})


def test_closing_out_of_order_is_refused_and_leaves_the_trace_usable():
    trace = Trace()
    outer, inner = trace.span("outer"), trace.span("inner")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ValueError, match="stage: 'outer' closes out of order: innermost here is 'inner'"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(ValueError, match="innermost here is no block"):
        outer.__exit__(None, None, None)
    assert trace.frame()["stage"].tolist() == ["outer", "inner"]


def test_a_block_is_entered_once_and_has_an_id_from_then_on():
    span = Trace().span("step")
    with pytest.raises(ValueError, match="stage: 'step' has no id before it is entered"):
        _ = span.id
    with span, pytest.raises(ValueError, match="stage: 'step' was entered before"):
        span.__enter__()


def test_ids_are_unique_over_traces():
    ids = [Trace().add("a", 0.0, 1.0) for _ in range(100)]
    assert not any(first == second for first, second in itertools.combinations(ids, 2))
