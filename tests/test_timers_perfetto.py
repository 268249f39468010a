"""Trace files: the viewer's rules by an independent checker, the way back, merging, and hostile files."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.timers import Trace

SPAN = st.tuples(
    st.sampled_from(["decode", "prefill", "verifier"]),
    st.integers(0, 40),  # start, ms
    st.integers(0, 20),  # duration, ms
    st.sampled_from(["engine", "trainer"]),
)


def fill(trace, raw):
    for stage, start, dur, track in raw:
        trace.add(stage, start / 1e3, (start + dur) / 1e3, track=track)
    return trace


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def check_viewer_rules(path):
    """What a trace viewer asks of complete events; returns them. Pair by pair, whatever the writer did."""
    document = json.loads(path.read_text(), parse_constant=refuse)
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    complete = [e for e in document["traceEvents"] if e["ph"] == "X"]
    for event in complete:
        assert isinstance(event["name"], str)
        assert event["name"]
        for field in ("pid", "tid"):
            assert type(event[field]) is int
            assert event[field] >= 0
        for field in ("ts", "dur"):
            assert type(event[field]) in (int, float)
            assert math.isfinite(event[field])
            assert event[field] >= 0
        assert (event["pid"], event["tid"]) in named
        assert event["pid"] in processes
        assert isinstance(event["args"], dict)
    # Ends are sums of two floats of whole nanoseconds: compare them as nanoseconds.
    intervals = [
        (e["pid"], e["tid"], round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000)) for e in complete
    ]
    for (pid_a, tid_a, begin_a, end_a), (pid_b, tid_b, begin_b, end_b) in itertools.combinations(intervals, 2):
        if (pid_a, tid_a) == (pid_b, tid_b):
            disjoint = end_a <= begin_b or end_b <= begin_a
            nested = (begin_a <= begin_b and end_b <= end_a) or (begin_b <= begin_a and end_a <= end_b)
            assert disjoint or nested, (begin_a, end_a, begin_b, end_b)
    return complete


@given(raw=st.lists(SPAN, max_size=25))
@settings(deadline=None)
def test_every_trace_follows_the_viewer_s_rules_and_comes_back_whole(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = fill(Trace(), raw)
    trace.to_perfetto(path)
    complete = check_viewer_rules(path)
    first = min((start for _, start, _, _ in raw), default=0)
    assert sorted((e["name"], e["ts"], e["dur"], e["args"]["track"]) for e in complete) == sorted(
        (stage, (start - first) * 1e3, dur * 1e3, track) for stage, start, dur, track in raw
    )
    pd.testing.assert_frame_equal(Trace.merge([path]).frame(), trace.frame())


@given(
    raw=st.lists(st.tuples(SPAN, st.integers(0, 2)), max_size=20),
    order=st.permutations([0, 1, 2]),
    as_file=st.tuples(*[st.booleans()] * 3),
)
@settings(max_examples=40, deadline=None)
def test_the_order_of_merging_does_not_matter(tmp_path_factory, raw, order, as_file):
    folder = tmp_path_factory.mktemp("parts")
    traces = [fill(Trace(), [span for span, part in raw if part == number]) for number in range(3)]
    for number, trace in enumerate(traces):
        trace.to_perfetto(folder / f"{number}.json")
    plain = Trace.merge(traces)
    mixed = Trace.merge([folder / f"{number}.json" if as_file[number] else traces[number] for number in order])
    nested = Trace.merge([Trace.merge([traces[number] for number in order[:2]]), traces[order[2]]])
    for other in (mixed, nested):
        pd.testing.assert_frame_equal(other.frame(), plain.frame())
        pd.testing.assert_frame_equal(other.critical_path(), plain.critical_path())
    plain.to_perfetto(folder / "all.json")
    assert len(check_viewer_rules(folder / "all.json")) == len(raw)


def test_real_blocks_stay_nested_on_their_lane(tmp_path):
    trace = Trace()
    with trace.span("step", track="trainer"):
        with trace.span("forward"):
            pass
        with trace.span("decode", track="engine"):
            pass
    trace.to_perfetto(tmp_path / "t.json")
    lanes = {e["name"]: e["tid"] for e in check_viewer_rules(tmp_path / "t.json")}
    assert lanes["step"] == lanes["forward"] != lanes["decode"]


def test_a_child_is_drawn_below_its_parent_not_below_a_stranger(tmp_path):
    clock = type("Hand", (), {"host_ns": lambda self: self.ns})()
    trace = Trace(device=clock)
    trace.add("stranger", 0.0, 10.0, track="engine")
    clock.ns = 5 * 10**9
    with trace.span("request", track="engine"):
        trace.add("decode", 6.0, 7.0)
        clock.ns = 15 * 10**9
    trace.to_perfetto(tmp_path / "t.json")
    events = {e["name"]: e for e in check_viewer_rules(tmp_path / "t.json")}
    assert events["decode"]["tid"] == events["request"]["tid"] != events["stranger"]["tid"]
    document = json.loads((tmp_path / "t.json").read_text())
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["engine", "engine (2)"]


def test_spans_back_to_back_share_a_lane(tmp_path):
    fill(Trace(), [("a", 0, 5, "x"), ("b", 5, 5, "x"), ("c", 10, 0, "x")]).to_perfetto(tmp_path / "t.json")
    assert len({e["tid"] for e in check_viewer_rules(tmp_path / "t.json")}) == 1


def test_microseconds(tmp_path):
    trace = Trace()
    trace.add("a", 100.0, 101.0)
    trace.add("b", 101.5, 101.500000001)
    trace.to_perfetto(tmp_path / "t.json")
    a, b = check_viewer_rules(tmp_path / "t.json")
    assert (a["ts"], a["dur"], b["ts"], b["dur"]) == (0, 1e6, 1.5e6, 0.001)


def test_attributes_go_to_args_as_json(tmp_path):
    trace = Trace()
    attrs = {
        "trace_id": "r-17",
        "policy_version": np.int64(3),
        "versions": np.array([3, 4]),
        "loss": math.nan,
        "nested": {"ids": (1, 2), "low": -math.inf},
        "shape": range(3),
        "none": None,
    }
    trace.add("train", 0.0, 1.0, tokens=np.int32(5), **attrs)
    trace.to_perfetto(tmp_path / "t.json")
    args = check_viewer_rules(tmp_path / "t.json")[0]["args"]
    assert {name: args[name] for name in [*attrs, "tokens"]} == {
        "trace_id": "r-17",
        "policy_version": 3,
        "versions": [3, 4],
        "loss": "nan",
        "nested": {"ids": [1, 2], "low": "-inf"},
        "shape": "range(0, 3)",
        "none": None,
        "tokens": 5,
    }
    assert Trace.merge([tmp_path / "t.json"]).summary().loc["train", "tokens"] == 5


def test_nanoseconds_survive_a_file_after_months_of_uptime(tmp_path):
    clock = type("Hand", (), {"host_ns": lambda self: self.ns})()
    trace = Trace(device=clock)
    clock.ns = 3 * 10**16 + 1  # 347 days
    with trace.span("a"):
        clock.ns += 123_456_789_123
        with trace.span("b"):
            clock.ns += 1
    trace.to_perfetto(tmp_path / "t.json")
    pd.testing.assert_frame_equal(Trace.merge([tmp_path / "t.json"]).frame(), trace.frame())
    assert Trace.merge([tmp_path / "t.json"]).frame()["dur_s"].tolist() == [123.456789124, 1e-9]


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    fill(Trace(), [("a", 0, 1, "x")]).to_perfetto(path)
    before = path.read_bytes()

    def full_disk(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("rlinfra_utils.timers.perfetto.os.replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        fill(Trace(), [("b", 0, 1, "x")]).to_perfetto(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_two_clocks_in_one_trace_are_refused(tmp_path):
    trace = Trace()
    trace.add("a", 100.0, 101.0)
    trace.add("b", 1.7e9, 1.7e9 + 1)  # Unix time
    with pytest.raises(ValueError, match=r"start_s: spans lie over .* apart; Unix time and perf_counter mixed"):
        trace.to_perfetto(tmp_path / "t.json")


# ---------------------------------------------------------------- merging


def test_machines_are_placed_by_their_wall_clocks(tmp_path):
    """Machine B booted 1000 s after A, and A 2000 s after C; each saw one event at the same wall time."""
    paths = []
    for name, up_s, boot_s in (("a", 5000.0, 10_000), ("b", 4000.0, 11_000), ("c", 7000.0, 8_000)):
        trace = Trace()
        trace.add(name, up_s, up_s + 2.0)
        path = tmp_path / f"{name}.json"
        trace.to_perfetto(path)
        document = json.loads(path.read_text())
        document["otherData"]["sources"][0] |= {"clock": f"boot-{name}", "host": name, "wall_ns": boot_s * 10**9}
        path.write_text(json.dumps(document))
        paths.append(path)
    a, b, c = paths
    for parts in ([a, b, c], [c, b, a], [Trace.merge([a, b]), c], [c, Trace.merge([b, a])]):
        rows = Trace.merge(parts).frame().set_index("stage")
        assert rows["start_s"].to_dict() == {"a": 7000.0, "b": 7000.0, "c": 7000.0}
        assert rows["dur_s"].tolist() == [2.0, 2.0, 2.0]
    assert Trace.merge([b, a]).frame()["start_s"].tolist() == [5000.0, 5000.0]
    Trace.merge(paths).to_perfetto(tmp_path / "all.json")
    sources = json.loads((tmp_path / "all.json").read_text())["otherData"]["sources"]
    assert {(source["clock"], source["wall_ns"]) for source in sources} == {("boot-c", 8_000 * 10**9)}


def test_a_part_given_twice_is_refused(tmp_path):
    trace = fill(Trace(), [("a", 0, 1, "x")])
    trace.to_perfetto(tmp_path / "t.json")
    for parts in ([trace, trace], [tmp_path / "t.json", trace], [tmp_path / "t.json"] * 2):
        with pytest.raises(ValueError, match=r"parts: .* which an earlier part holds already"):
            Trace.merge(parts)


def test_one_part_outside_a_list_is_refused_and_a_missing_file_is_named(tmp_path):
    for part in ("t.json", tmp_path / "t.json", Trace()):
        with pytest.raises(ValueError, match=r"parts: .* is a single one; give a list"):
            Trace.merge(part)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        Trace.merge([tmp_path / "absent.json"])


def test_modes_of_merged_traces_are_all_stated():
    class Device:
        host_ns = staticmethod(lambda: 0)
        synchronize = staticmethod(lambda: None)

    merged = Trace.merge([fill(Trace(), [("a", 0, 1, "x")]), fill(Trace("cuda_sync", Device()), [("b", 1, 1, "x")])])
    assert merged.summary().attrs["mode"] == "cuda_sync, wall"
    assert merged.frame()["mode"].tolist() == ["wall", "cuda_sync"]


# ---------------------------------------------------------------- hostile files


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small valid file, as text."""
    trace = Trace()
    with trace.span("step", track="trainer", tokens=3), trace.span("decode"):
        pass
    path = tmp_path_factory.mktemp("good") / "t.json"
    trace.to_perfetto(path)
    return path.read_text()


def first_event(document):
    return next(event for event in document["traceEvents"] if event["ph"] == "X")


def refuse_file(path, words):
    with pytest.raises(ValueError, match=words) as error:
        Trace.merge([path])
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ts", -5, r"traceEvents\[\d\]\.ts: -5 "),
        ("ts", math.nan, r"\.ts: nan"),
        ("ts", math.inf, r"\.ts: inf"),
        ("ts", "0", r"\.ts: '0'"),
        ("ts", None, r"\.ts: None"),
        ("ts", True, r"\.ts: True"),
        ("ts", 10**400, r"\.ts: 10000"),
        ("dur", -1e-3, r"\.dur: -0\.001"),
        ("dur", [1], r"\.dur: \[1\]"),
        ("name", "", "stage: '' is no name"),
        ("name", None, "stage: None"),
        ("ph", "B", r"\.ph: 'B'"),
        ("ph", None, r"\.ph: None"),
        ("args", None, r"\.args: no track"),
        ("args", [], r"\.args: no track"),
    ],
)
def test_bad_event_fields_are_named(tmp_path, good, field, value, words):
    document = json.loads(good)
    first_event(document)[field] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    refuse_file(path, words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("track", "", "track: ''"),
        ("track", 5, "track: 5"),
        ("tokens", -1, "tokens: -1"),
        ("tokens", 2.5, "tokens: 2.5"),
        ("wait", "yes", "wait: 'yes'"),
        ("after", 3, "after: 3"),
        ("self_s", 3, "self_s: 3"),
        ("thread", 3, r"args\.thread: 3"),
        ("span", None, r"args\.span: None"),
        ("span", "7", r"args\.span: '7'"),
        ("span", "00000000-0", r"args\.span: '00000000-0' comes twice or is of no source"),
        ("parent", "x", r"args\.parent: 'x'"),
        ("parent", "00000000-0", r"args\.parent: '00000000-0' did not begin before"),
    ],
)
def test_bad_args_are_named(tmp_path, good, field, value, words):
    document = json.loads(good)
    first_event(document)["args"][field] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    refuse_file(path, words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("id", 5, r"sources\[0\]\.id: 5"),
        ("pid", -1, r"sources\[0\]\.pid: -1"),
        ("mode", "gpu", r"sources\[0\]\.mode: 'gpu'"),
        ("wall_ns", 1.5, r"sources\[0\]\.wall_ns: 1\.5"),
        ("host", None, r"sources\[0\]\.host: None"),
    ],
)
def test_bad_sources_are_named(tmp_path, good, field, value, words):
    document = json.loads(good)
    document["otherData"]["sources"][0][field] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    refuse_file(path, words)


def test_other_broken_files_are_named(tmp_path, good):
    path = tmp_path / "bad.json"
    document = json.loads(good)
    twice, orphan, sources, loop = (json.loads(good) for _ in range(4))
    step, decode = (event for event in loop["traceEvents"] if event["ph"] == "X")
    step["args"]["parent"] = decode["args"]["span"]
    twice["traceEvents"].append(first_event(twice))
    orphan["traceEvents"].remove(next(e for e in orphan["traceEvents"] if e["name"] == "step"))
    sources["otherData"]["sources"] *= 2
    cases = {
        "": "not a whole JSON file",
        good[:-1]: "not a whole JSON file",
        "[" * 100_000: "not a whole JSON file",
        "null": "otherData.format is not",
        "[]": "otherData.format is not",
        json.dumps({"traceEvents": []}): "otherData.format is not",
        json.dumps(document | {"traceEvents": None}): "traceEvents: not a list of objects",
        json.dumps(document | {"traceEvents": [1]}): "traceEvents: not a list of objects",
        json.dumps(document | {"otherData": document["otherData"] | {"base_ns": -1}}): "base_ns: -1",
        json.dumps(document | {"otherData": document["otherData"] | {"sources": {}}}): "sources: not a list of objects",
        json.dumps(twice): "comes twice",
        json.dumps(loop): "args.parent: .* did not begin before",
        json.dumps(orphan): "args.parent: .* is not in the file",
        json.dumps(sources): r"sources\[1\]\.id: .* comes twice",
    }
    for text, words in cases.items():
        path.write_text(text)
        refuse_file(path, words)
    path.write_bytes(b"\xff\xfe\x00")
    refuse_file(path, "not a whole JSON file")


@given(st.data())
@settings(max_examples=60)
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, good, data):
    path = tmp_path_factory.mktemp("cut") / "t.json"
    path.write_text(good[: data.draw(st.integers(0, len(good) - 1))])
    refuse_file(path, "not a whole JSON file")


def places(value, here=()):
    """Every place in a JSON document, as a path of keys."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*here, key))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_is_refused_in_one_line_or_gives_a_sound_trace(tmp_path_factory, good, data):
    document = json.loads(good)
    place = data.draw(st.sampled_from([place for place in places(document) if place]))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(JSON_VALUES)
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    path.write_text(json.dumps(document))
    try:
        trace = Trace.merge([path])
        rows, _ = trace.frame(), trace.summary()
        assert (rows["dur_s"] >= 0).all()
        trace.critical_path()
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017 either outcome is right
