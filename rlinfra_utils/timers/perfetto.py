"""The trace file: Chrome trace-event JSON, which ui.perfetto.dev shows and `Trace.merge` reads back.

Format: "Trace Event Format" (Google, 2016): complete events ("X") in microseconds, nested or disjoint on
each thread id, names as metadata events ("M"). Thread ids stand for the lanes of tracks, not for threads.
Leaves out: flows, counters, files of other tools. Times are relative to the first start (`base_ns`).
"""

from __future__ import annotations

import json
import math
import os
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from rlinfra_utils.timers.clocks import MODES
from rlinfra_utils.timers.spans import Source, Span, check_attrs, check_stage, in_order

FORMAT = "rlinfra_utils.timers/1"
_SPAN_ID = re.compile(r"([0-9a-f]{8})-(\d{1,15})")
_MAX_NS = 2**53  # up to here a float of microseconds gives the nanosecond back


def write(path: Path, sources: dict[str, Source], spans: list[Span]) -> None:
    """Write the spans, aside first and then renamed, so that `path` is whole or absent.

    Attributes go to `args`: numpy values as plain ones, non-finite numbers and other objects as text, for
    JSON has none. Raises ValueError if the spans lie further apart than a file can hold (104 days).
    """
    base_ns = min((span.start_ns for span in spans), default=0)
    if max((span.end_ns - base_ns for span in spans), default=0) >= _MAX_NS:
        raise ValueError(f"start_s: spans lie over {_MAX_NS / 1e9:.0f} s apart; Unix time and perf_counter mixed?")
    document = {
        "traceEvents": _events(sources, spans, base_ns),
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, "base_ns": base_ns, "sources": [s._asdict() for s in sources.values()]},
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(document, allow_nan=False))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _events(sources: dict[str, Source], spans: list[Span], base_ns: int) -> list[dict[str, Any]]:
    events = []
    ordered = sorted(sources.values(), key=lambda source: (source.host, source.pid, source.id))
    for pid, source in enumerate(ordered, start=1):
        name = f"{source.process} (pid {source.pid} on {source.host}, {source.mode})"
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        own = sorted((span for span in spans if span.source == source.id), key=lambda span: span.attrs["track"])
        first_tid = 1
        for track, on_track in groupby(own, key=lambda span: span.attrs["track"]):
            lanes = _lanes(list(on_track))
            for tid, lane in enumerate(lanes, start=first_tid):
                label = track if tid == first_tid else f"{track} ({tid - first_tid + 1})"
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": label}})
                events += [_event(span, pid, tid, base_ns) for span in lane]
            first_tid += len(lanes)
    return events


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The spans of one track on as many lanes as they need; on a lane any two are nested or disjoint."""
    lanes: list[list[Span]] = []
    open_ends_ns: list[list[int]] = []  # for each lane, outermost first
    lane_of: dict[int, int] = {}
    for span in in_order(spans):
        beside_parent = lane_of.get(span.parent, 0)
        for lane in sorted(range(len(lanes)), key=lambda lane: lane != beside_parent):
            ends = open_ends_ns[lane]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                break
        else:
            lane = len(lanes)
            lanes.append([])
            open_ends_ns.append([])
        open_ends_ns[lane].append(span.end_ns)
        lanes[lane].append(span)
        lane_of[span.number] = lane
    return lanes


def _event(span: Span, pid: int, tid: int, base_ns: int) -> dict[str, Any]:
    parent = None if span.parent is None else f"{span.source}-{span.parent}"
    ids = {"span": span.id, "parent": parent, "thread": span.thread}
    return {
        "name": span.stage,
        "ph": "X",
        "ts": (span.start_ns - base_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": {name: _json(value) for name, value in span.attrs.items()} | ids,
    }


def _json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _json(item) for name, item in value.items()}
    return _json(value.tolist()) if hasattr(value, "tolist") else str(value)


def read(path: Path) -> tuple[dict[str, Source], list[Span]]:
    """Sources by id, and spans, of a file that `write` wrote. Raises ValueError that names what is wrong."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a whole JSON file: {error}") from None
    other = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise ValueError(f"{path}: otherData.format is not {FORMAT!r}; only files of Trace.to_perfetto are read")
    base_ns = _whole(other, "base_ns", f"{path}: otherData")
    sources = {}
    for index, fields in enumerate(_objects(other, "sources", f"{path}: otherData")):
        source = _source(fields, f"{path}: sources[{index}]")
        if source.id in sources:
            raise ValueError(f"{path}: sources[{index}].id: {source.id!r} comes twice")
        sources[source.id] = source
    spans = {}
    for index, event in enumerate(_objects(document, "traceEvents", str(path))):
        where = f"{path}: traceEvents[{index}]"
        if event.get("ph") == "M":
            continue
        if event.get("ph") != "X":
            raise ValueError(f"{where}.ph: {event.get('ph')!r:.60} is neither 'X' nor 'M'")
        span = _span(event, base_ns, where)
        if span.source not in sources or span.id in spans:
            raise ValueError(f"{where}.args.span: {span.id!r} comes twice or is of no source in the file")
        spans[span.id] = span
    for span in spans.values():
        if span.parent is not None and f"{span.source}-{span.parent}" not in spans:
            raise ValueError(f"{path}: args.parent: {span.source}-{span.parent} of {span.id} is not in the file")
    return sources, list(spans.values())


def _objects(holder: dict[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    items = holder.get(field)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{where}.{field}: not a list of objects")
    return items


def _whole(holder: dict[str, Any], field: str, where: str) -> int:
    value = holder.get(field)
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{where}.{field}: {value!r:.60} is not a whole number in 0 .. 2**63")
    return value


def _source(fields: dict[str, Any], where: str) -> Source:
    for field in ("id", "host", "process", "mode", "clock"):
        if not isinstance(fields.get(field), str):
            raise ValueError(f"{where}.{field}: {fields.get(field)!r:.60} is not a text")
    if fields["mode"] not in MODES:
        raise ValueError(f"{where}.mode: {fields['mode']!r:.60} is not one of {', '.join(MODES)}")
    pid, wall_ns = _whole(fields, "pid", where), _whole(fields, "wall_ns", where)
    return Source(fields["id"], fields["host"], pid, fields["process"], fields["mode"], fields["clock"], wall_ns)


def _span(event: dict[str, Any], base_ns: int, where: str) -> Span:
    start_ns, dur_ns = (_time_ns(event, field, where) for field in ("ts", "dur"))
    args = event.get("args")
    if not isinstance(args, dict) or "track" not in args:
        raise ValueError(f"{where}.args: no track; every span has one")
    attrs = dict(args)
    source, number = _span_id(attrs.pop("span", None), f"{where}.args.span")
    parent, thread = attrs.pop("parent", None), attrs.pop("thread", None)
    if parent is not None:
        parent_source, parent_number = _span_id(parent, f"{where}.args.parent")
        if parent_source != source or parent_number >= number:
            raise ValueError(f"{where}.args.parent: {parent!r} did not begin before {args['span']!r} in its process")
        parent = parent_number
    if not isinstance(thread, str | None):
        raise ValueError(f"{where}.args.thread: {thread!r:.60} is not a text or null")
    try:
        check_stage(event.get("name"))
        check_attrs(attrs)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    start_ns += base_ns
    return Span(source, number, parent, thread, event["name"], start_ns, start_ns + dur_ns, attrs)


def _time_ns(event: dict[str, Any], field: str, where: str) -> int:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_NS / 1000:
        raise ValueError(f"{where}.{field}: {value!r:.60} is not a time of at least 0 us")
    return round(value * 1000)


def _span_id(value: Any, where: str) -> tuple[str, int]:
    match = _SPAN_ID.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"{where}: {value!r:.60} is not a span id")
    return match[1], int(match[2])
