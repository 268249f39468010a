"""A run for other tools: Prometheus text by its own parser, OpenTelemetry spans, and one HTML page."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from tracing_runs import make_run

from rlinfra_utils import synthetic
from rlinfra_utils.tracing import (
    RunLog,
    alerts,
    dashboard,
    export_spans,
    metrics,
    per_batch,
    read_run,
    to_prometheus,
)

NASTY = 'a"b\\c\n<script>alert(1)</script>&{}'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    steps = make_run(folder, seed=7, num_steps=6)
    return steps, read_run(folder)


@pytest.fixture
def nasty(tmp_path):
    """A run whose every text is markup."""
    log = RunLog(tmp_path / "run", NASTY, NASTY, {NASTY: NASTY})
    record = synthetic.rollouts(1, 0)[0]
    names = ("run_id", "branch_id", "sample_id", "prompt_id", "verifier_version", "stop_reason")
    log.rollouts([record.model_copy(update=dict.fromkeys(names, NASTY))], name="a")
    log.batch(NASTY, 1, [NASTY], 200, 201, {NASTY: 1.0})
    log.event("memory", NASTY, peak_bytes=float("inf"))
    log.event("heartbeat", NASTY)
    log.event("worker_died", NASTY)
    return read_run(log.folder)


def test_prometheus_reads_back_every_value(made):
    parser = pytest.importorskip("prometheus_client.parser")
    found = metrics(made[1])
    text = to_prometheus(found)
    assert text.endswith("\n")
    families = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert {family.type for family in families} == {"gauge"}
    samples = [sample for family in families for sample in family.samples]
    present = [row for row in found.rows if row.value is not None]
    assert len(samples) == len(present)
    for sample, row in zip(samples, present, strict=True):
        assert sample.value == row.value
        assert sample.name.startswith(f"rlinfra_{row.group}_{row.name}")
        identity = {"run_id": "run-7", "branch_id": "main", "config_hash": row.config_hash}
        assert sample.labels == identity | row.labels
    assert "restore" not in text  # absent: no line, not 0


def test_prometheus_text_follows_the_grammar_whatever_the_labels_say(nasty):
    text = to_prometheus(metrics(nasty))
    name, value = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"(?:[-+]?Inf|NaN|[-+]?[0-9.]+(?:e[-+]?[0-9]+)?)"
    label = rf'{name}="(?:[^"\\\n]|\\["\\n])*"'
    sample = re.compile(rf"{name}\{{{label}(?:,{label})*\}} {value}")
    comment = re.compile(rf"# (?:HELP {name} (?:[^\\\n]|\\[\\n])*|TYPE {name} gauge)")
    lines = text.split("\n")
    assert lines.pop() == ""
    assert all(sample.fullmatch(line) or comment.fullmatch(line) for line in lines)
    parser = pytest.importorskip("prometheus_client.parser")
    samples = [s for family in parser.text_string_to_metric_families(text) for s in family.samples]
    assert {s.labels["branch_id"] for s in samples} == {NASTY}
    assert [s.value for s in samples if s.name == "rlinfra_system_peak_memory_bytes"] == [float("inf")]


def test_opentelemetry_carries_the_chain_both_ways(made):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    steps, run = made
    provider, exporter = sdk.TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    num_spans = export_spans(run, provider)
    spans = exporter.get_finished_spans()
    rollouts = {span.attributes["rollout_id"]: span for span in spans if span.name == "rollout"}
    batches = [span for span in spans if span.name == "training_batch"]
    assert num_spans == len(spans) == len(rollouts) + len(batches) == sum(map(len, steps)) + len(steps)
    by_context = {span.context.span_id: span for span in rollouts.values()}
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        linked = [by_context[link.context.span_id].attributes["rollout_id"] for link in batch.links]
        assert linked == [record.sample_id for record in step]
        for record in step[::5]:
            span = rollouts[record.sample_id]
            assert span.attributes["training_batch_id"] == batch.attributes["training_batch_id"]
            assert span.attributes["optimizer_step"] == batch.attributes["optimizer_step"] == number + 1
            assert span.attributes["resulting_policy_version"] == 11 + number
            assert span.attributes["prompt_id"] == record.prompt_id
            assert span.attributes["verifier_version"] == record.verifier_version
            assert str(span.attributes["behavior_policy_version"]).startswith(str(record.versions()[0]))
            duration_s = (span.end_time - span.start_time) / 1e9
            assert duration_s == pytest.approx(record.finished_s - record.started_s, abs=1e-6)
            assert span.end_time <= batch.start_time


def test_without_opentelemetry_the_error_says_what_to_install(made, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rlinfra-utils\[otel\]'"):
        export_spans(made[1], None)


class Balanced(HTMLParser):
    """Every element is closed in order; collects tags, attributes and text."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.sources = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def read_page(path):
    page = Balanced()
    text = path.read_text(encoding="utf-8")
    page.feed(text)
    assert page.open == []
    return page, text


def test_the_page_stands_alone_and_says_what_the_run_says(made, tmp_path):
    run = made[1]
    page, text = read_page(dashboard(run, tmp_path / "page.html"))
    assert page.sources == []
    assert "script" not in page.tags
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in text
    assert "prefers-color-scheme:dark" in text
    words = " ".join(page.text)
    for row in metrics(run).rows:
        assert row.name in words
        assert row.reason in words
    assert "no alert" in words
    assert run.config_hash in words
    lines = [svg for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "values from" in svg]
    rewards = per_batch(run)["mean_reward"]
    drawn = ElementTree.fromstring(next(svg for svg in lines if "mean_reward" in svg))
    dots = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert len(dots) == len(rewards)
    heights = [float(dot.get("cy")) for dot in dots]
    assert heights.index(min(heights)) == rewards.idxmax()  # the highest value is the highest dot


def test_texts_of_the_run_are_escaped_everywhere(nasty, tmp_path):
    page, text = read_page(dashboard(nasty, tmp_path / "page.html"))
    assert "script" not in page.tags
    assert "<script" not in text
    assert NASTY in "".join(page.text)
    assert f"at worker {NASTY}" in str(alerts(nasty))  # the alert that the page shows


def test_a_run_that_just_began_has_a_page(tmp_path):
    RunLog(tmp_path / "run", "r", "main", {})
    page, _ = read_page(dashboard(read_run(tmp_path / "run"), tmp_path / "page.html"))
    assert " ".join(page.text).count("absent: ") == len({row.name for row in metrics(read_run(tmp_path / "run")).rows})
