"""A plan is data: it goes through YAML and JSON unchanged, and what is no plan ends in one line."""

import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import FIELDS, brief, changed, drawn

from rlinfra_utils import plan


@pytest.mark.parametrize("written", [lambda p: p.to_yaml(), lambda p: p.to_json()], ids=["yaml", "json"])
def test_a_plan_goes_through_text_unchanged(written):
    given_plan = drawn().with_evidence("memory", "line one\nline two: 'quoted' é", ok=True)
    assert plan.RunPlan.from_yaml(written(given_plan)) == given_plan
    assert plan.Brief.from_yaml(written(given_plan.brief)) == given_plan.brief


def test_yaml_is_read_by_the_plain_safe_loader_as_well():
    assert yaml.safe_load(drawn().to_yaml()) == json.loads(drawn().to_json())


BAD_TEXT = {
    "alias": ("a: &x 1\nb: *x", "alias"),
    "key twice": ("model: a\nmodel: b", "'model' stands twice"),
    "no yaml": ("[[[", "is no plan in YAML"),
    "python object": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "deep": ("[" * 20_000, "is no plan in YAML"),
    "no mapping": ("- 1", "RunPlan="),
    "empty": ("", "RunPlan=None"),
    "set": ("!!set {a}", "JSON cannot"),
    "infinite": ("model: .inf", "JSON|compliant"),
    "not text": (b"model: a", "needs the text"),
    "long": ("a" * 1_000_001, "1,000,001 characters"),
    "unhashable key": ("? [a]\n: 1", "unhashable"),
}


@pytest.mark.parametrize(("text", "said"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_text_that_is_no_plan_ends_in_one_line(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        plan.RunPlan.from_yaml(text)
    assert "\n" not in str(caught.value)


BAD_FIELDS = {
    "num_gpus": [0, -1, 1.5, "8", True, None, 1],
    "gpu_gib": [0, -80, math.nan, math.inf],
    "group_size": [1, 0],
    "model": ["no such model", "", 7],
    "config": [{"model_type": "no such"}, {}, "config.json"],
    "recipe": ["fp64"],
    "placement": ["somewhere"],
    "lengths": [{"median_tokens": 0, "sigma": 1}, {"median_tokens": 9}, 300, None],
    "generate": [{"seconds": 0, "at_gpus": 1}, {"seconds": 1, "at_gpus": 0}, {"seconds": 1, "at_gpus": 1, "serial": 1}],
    "target": [{"rule": "fastest_within_lag"}, {"rule": "freshest_at_rate"}, {"rule": "best"}],
    "mtbf_s": [120, 0],
    "measured": [{"colour": "blue"}, {"train": 3}],
    "temperature": [0, -1],
    "wrong_name": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_FIELDS.items() for value in values])
def test_a_bad_field_is_named_in_one_line(name, value):
    named = "model_type|config" if name == "config" else name
    with pytest.raises(ValueError, match=named) as caught:
        plan.Brief(**{**FIELDS, name: value})
    assert "\n" not in str(caught.value)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(plan.RunPlan.model_fields)), HOSTILE)
def test_whatever_stands_in_a_section_ends_in_a_plan_or_one_line(section, value):
    said = ""
    try:
        plan.RunPlan.from_mapping({**drawn().to_mapping(), section: value})
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        ("queue", {"controller": "no such"}, "controller"),
        ("queue", {"options": {"colour": 1}}, "options"),
        ("queue", {"options": {"max_age": -1}}, "max_age"),
        ("queue", {"bound_versions": None}, "bound_versions"),
        ("contract", {"required_fields": ["colour"]}, "colour"),
        ("contract", {"decoding": {"heat": 1}}, "heat"),
        ("alerts", {"colour": {"value": 1, "unit": "", "because": ""}}, "colour"),
        ("evidence", {"colour": {"date": "2026-01-01", "found": "x", "ok": True}}, "colour"),
        ("evidence", {"memory": {"date": "yesterday", "found": "x", "ok": True}}, "date"),
        ("pools", {"idle_gpus": 1}, "num_gpus"),
    ],
)
def test_an_edit_by_hand_that_makes_no_sense_is_named(section, changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        changed(drawn(), section, **changes)
    assert "\n" not in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(st.floats(1, 5000), st.floats(0, 1.5), st.integers(1, 8192))
def test_cut_lengths_against_drawn_ones(median, sigma, limit):
    lengths = plan.Lengths(median_tokens=median, sigma=sigma)
    drawn_tokens = lengths.law.draw(np.random.default_rng(0), 100_000)
    cut = np.minimum(drawn_tokens, limit)
    error = 5 * cut.std() / math.sqrt(len(cut)) + 1e-9 * median
    assert abs(lengths.mean_cut_at(limit) - cut.mean()) <= error
    assert abs(lengths.share_cut_at(limit) - (drawn_tokens > limit).mean()) <= 5 * 0.5 / math.sqrt(len(cut)) + 1e-9


def test_a_law_is_fitted_to_measured_lengths():
    tokens = np.random.default_rng(1).lognormal(math.log(300), 0.7, 50_000).astype(int) + 1
    found = plan.Lengths.fitted(tokens)
    assert abs(found.median_tokens / 300 - 1) < 0.02
    assert abs(found.sigma / 0.7 - 1) < 0.02
    with pytest.raises(ValueError, match="below 1"):
        plan.Lengths.fitted([0, 3])


def test_evidence_is_filed_under_a_preflight_step():
    with pytest.raises(ValueError, match="forced_failure"):
        drawn().with_evidence("luck", "fine", ok=True)
    with pytest.raises(ValueError, match="found"):
        drawn().with_evidence("memory", "", ok=True)


def test_a_brief_is_a_brief():
    assert brief().batch_rollouts == 128
    with pytest.raises(ValueError, match="needs a Brief"):
        plan.draw_up({"model": "Qwen2.5-7B"})
