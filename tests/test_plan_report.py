"""The page of a plan stands alone: no network, no script, everything escaped."""

import re
from html.parser import HTMLParser

import pytest
from plan_samples import brief, drawn

from rlinfra_utils import plan


def page(run_plan, tmp_path):
    return plan.report(run_plan, tmp_path / "plan.html").read_text(encoding="utf-8")


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not the last one opened."""

    EMPTY = ("meta", "br", "!doctype")

    def __init__(self):
        super().__init__()
        self.stack = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_page_stands_alone(tmp_path):
    text = page(drawn(), tmp_path)
    assert not re.search(r"<script|<link|<img|src=|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    parser = Balanced()
    parser.feed(text)
    assert parser.stack == []


def test_open_lines_come_first(tmp_path):
    text = page(drawn(), tmp_path)
    num_open, lines = len(plan.grade(drawn()).open), len(plan.grade(drawn()).lines)
    assert f"{num_open} of {lines} lines are open" in text
    assert text.index("lines are open") < text.index("What runs")
    assert text.count("ASSUMED") == 9
    assert page(plan.draw_up(brief(measured={"train": "a trace"})), tmp_path).count("ASSUMED") == 8


def test_text_from_a_plan_is_escaped(tmp_path):
    named = brief(measured={"train": "<script>alert('x')</script>"})
    hostile = plan.draw_up(named).with_evidence("memory", "<img src=x onerror=alert(1)>", ok=True)
    text = page(hostile, tmp_path)
    assert "<script" not in text
    assert "<img" not in text


def test_a_phase_over_the_card_is_marked(tmp_path):
    over = plan.draw_up(brief(gpu_gib=20))
    assert over.memory.margin_share < 0
    assert '<tr class="over">' in page(over, tmp_path)
    assert '<tr class="over">' not in page(drawn(), tmp_path)


def test_what_is_no_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="RunPlan"):
        plan.report({}, tmp_path / "plan.html")
