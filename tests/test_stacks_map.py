"""The map: every stack on every axis, every statement with file, commit and date; its words; its HTML face."""

import datetime
import html.parser
import re

import pytest

from rlinfra_utils import stacks
from rlinfra_utils.stacks.adapters import ADAPTERS
from rlinfra_utils.stacks.data import load
from rlinfra_utils.stacks.fields import FORBIDS

NINE = {"placement", "synchrony", "version_record", "correction", "transport"}
NINE |= {"backends", "resume", "tracing", "orchestration"}


def test_every_stack_has_a_statement_on_every_axis():
    seven = {"TRL", "verl", "OpenRLHF", "NeMo RL", "PRIME-RL", "SkyRL", "AReaL"}
    assert set(stacks.STACKS) == set(stacks.AXES["stack"]) == seven
    assert NINE | {"rollout_record"} == set(stacks.AXIS_TITLES) == set(stacks.AXES["axis"])
    counts = stacks.AXES.groupby(["stack", "axis"]).size()
    assert len(counts) == len(seven) * len(stacks.AXIS_TITLES)


def test_every_statement_says_where_and_when_it_was_read():
    for row in stacks.AXES.to_dict("records"):
        assert all(isinstance(value, str) and value for value in row.values()), row["cell"]
        assert re.fullmatch(r"[0-9a-f]{40}", row["commit"])
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row["repository"])
        committed, checked = (datetime.date.fromisoformat(row[name]) for name in ("commit_date", "date_checked"))
        assert committed <= checked
        for place in row["source"].split("; "):
            assert re.match(r"[\w.-]+/|[\w-]+\.(md|toml|py|sub)\b|text search over |git grep ", place), row["cell"]
    assert stacks.AXES["cell"].is_unique


@pytest.mark.parametrize(
    "word", ["staleness", "max_off_policy_steps", "version", "partial rollout", "async", "group", "mask"]
)
def test_words_with_several_meanings_are_told_apart(word):
    rows = stacks.words().rows
    rows = rows[rows["word"] == word]
    assert len(rows) >= 3
    assert rows["meaning"].is_unique
    assert rows["source"].all()
    assert (rows["commit"].str.len() == 40).all()
    assert all(cell.split("/")[0] == stack for cell, stack in zip(rows["cell"], rows["stack"]))


def test_every_gap_that_names_another_place_is_a_field_of_that_kind():
    elsewhere = load("elsewhere.json")
    assert elsewhere.keys() == ADAPTERS.keys()
    for kind, fields in elsewhere.items():
        assert fields.keys() <= FORBIDS.keys(), kind


class Rows(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.links = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [v for k, v in attrs if k in ("href", "src")]
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1] += data


def test_the_table_filters_by_axis_and_stack():
    part = stacks.table(axis="synchrony", stack="verl")
    assert set(part.rows["axis"]) == {"synchrony"}
    assert set(part.rows["stack"]) == {"verl"}
    assert len(stacks.table().rows) == len(stacks.AXES)
    assert sum(len(stacks.table(axis=axis).rows) for axis in stacks.AXIS_TITLES) == len(stacks.AXES)
    assert "max_off_policy_threshold" in str(part)


@pytest.mark.parametrize("table", [stacks.table(), stacks.words()], ids=["axes", "words"])
def test_the_html_face_shows_every_row_and_loads_nothing(table):
    page = Rows(table._repr_html_())
    assert len(page.rows) == len(table.rows) + 1
    for shown, row in zip(page.rows[1:], table.rows.to_dict("records")):
        assert row["stack"] in shown
        assert row["source"] in shown
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert all(link.startswith("https://github.com/") for link in page.links)


def test_an_unknown_axis_or_stack_is_named():
    for name, value in (("axis", "speed"), ("stack", "trl"), ("axis", 3)):
        with pytest.raises(ValueError, match=f"^{name}=") as error:
            stacks.table(**{name: value})
        assert "\n" not in str(error.value)
