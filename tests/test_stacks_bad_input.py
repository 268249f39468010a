"""Hostile payloads and provenance: each ends in one line that names the field."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks_samples import FORMS, Written, leaves, replaced, without

from rlinfra_utils import rollouts, stacks

W = Written([1, 2], [3, 4, 5], [1, 1, 1], [-0.5, -0.25, -1.0], 1.0)
KINDS = list(stacks.ADAPTERS)
kinds = pytest.mark.parametrize("kind", KINDS)


def refused(kind, payload, provenance=None, field="", row=0):
    with pytest.raises(ValueError, match=r"\w") as error:
        stacks.to_rollout(kind, payload, provenance, row=row)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    assert field in message, message
    return message


@kinds
def test_a_payload_without_its_essential_fields_is_refused_by_name(kind):
    for name in stacks.ADAPTERS[kind].essential:
        refused(kind, without(FORMS[kind](W), tuple(name.split("."))), field=name)
    refused(kind, {}, field="missing")


@pytest.mark.parametrize("stack", ["TRL", "trl", "", None, 3, ["verl"]])
def test_an_unknown_stack_is_refused(stack):
    with pytest.raises(ValueError, match=r"^stack=.*TRL sync"):
        stacks.to_rollout(stack, {})
    with pytest.raises(ValueError, match=r"^stack=.*TRL sync"):
        stacks.record(stack)


@pytest.mark.parametrize("payload", [None, [], "text", 7, [("a", 1)], np.zeros(3)])
def test_what_is_no_mapping_is_refused(payload):
    for kind in KINDS:
        refused(kind, payload, field="payload")


@pytest.mark.parametrize("row", [-1, 2, 1.0, True, None, "0"])
def test_a_row_that_is_not_there_is_refused(row):
    for kind in KINDS:
        refused(kind, FORMS[kind](W), field="row=", row=row)


LENGTHS = {  # kind -> fields with one entry a token
    "TRL sync": "prompt_mask completion_mask tool_mask sampling_per_token_logps old_per_token_logps",
    "TRL async": "completion_mask old_log_probs",
    "verl": "batch.attention_mask batch.response_mask batch.rollout_log_probs batch.rm_scores",
    "OpenRLHF": "attention_mask action_mask rollout_log_probs",
    "NeMo RL": "fields.token_mask fields.generation_logprobs",
    "PRIME-RL": "mask logprobs temperatures advantages",
    "SkyRL": "generator_output.loss_masks generator_output.rollout_logprobs",
    "AReaL": "attention_mask loss_mask logprobs versions",
}


@kinds
def test_one_entry_too_few_is_refused_by_name(kind):
    for name in LENGTHS[kind].split():
        payload, path = FORMS[kind](W), tuple(name.split("."))
        column = next(value for where, value in leaves(payload) if where == path)
        cut = [list(row)[:-1] for row in column] if stacks.ADAPTERS[kind].rows else list(column)[:-1]
        refused(kind, replaced(payload, path, cut), field=name)


@kinds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_anything_in_the_place_of_a_field_is_read_or_refused_in_one_line(kind, data):
    payload = FORMS[kind](W)
    path, _ = data.draw(st.sampled_from([(p, None) for p, _ in leaves(payload)]))
    odd = data.draw(
        st.one_of(
            st.sampled_from([None, "text", b"bytes", 7, -1, 2**70, 1.5, math.nan, True, [], {}, [[]], [None], [{}]]),
            st.sampled_from([np.zeros((2, 14)), np.zeros(5), np.array(3), np.array(["a", "b"]), np.zeros((2, 2, 2))]),
            st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=5),
            st.lists(st.lists(st.integers(-2, 2), max_size=5), min_size=2, max_size=2),
        )
    )
    try:
        record, _ = stacks.to_rollout(kind, replaced(payload, path, odd))
    except ValueError as error:
        message = str(error)
    else:
        assert rollouts.validate(record, partial_rollouts=True).status != "accept"
        return
    assert "\n" not in message
    names = {".".join(p) for p, _ in leaves(payload)} | {path[0], "row="}
    assert message.partition(":")[0].partition("=")[0] in {name.rstrip("=") for name in names}, message


def test_types_are_refused_by_name():
    form = FORMS["PRIME-RL"](W)
    for name, value in (
        ("token_ids", [1.0, 2.0, 3.0, 4.0, 5.0]),
        ("token_ids", [True] * 5),
        ("mask", [0, 0, 1, 1, 2]),
        ("logprobs", ["-0.5"] * 5),
        ("logprobs", 0.5),
        ("env_name", 3),
    ):
        refused("PRIME-RL", {**form, name: value}, field=name)
    refused("OpenRLHF", {**FORMS["OpenRLHF"](W), "truncated": [1, 0]}, field="truncated")
    refused("NeMo RL", {**FORMS["NeMo RL"](W), "tags": [7, 7]}, field="tags")
    refused("verl", {**FORMS["verl"](W), "batch": [1]}, field="batch")


def verl_scores(*scores):
    payload = FORMS["verl"](W)
    width = len(payload["batch"]["responses"][0])
    rows = [[*scores, *[0.0] * (width - len(scores))], [0.0] * width]
    return {**payload, "batch": {**payload["batch"], "rm_scores": rows}}


def test_scores_that_do_not_add_up_to_a_reward():
    refused("verl", verl_scores(1.0, None), field="batch.rm_scores")
    refused("verl", verl_scores(1.0, 10**400), field="batch.rm_scores")
    for scores in ((math.inf, -math.inf), (1e308, 1e308), (math.nan,)):
        record, _ = stacks.to_rollout("verl", verl_scores(*scores))
        assert "reward_not_finite" in rollouts.validate(record).codes
    record, _ = stacks.to_rollout("verl", verl_scores(0.1, 0.2, -0.3))
    assert record.reward == {"rm_scores": math.fsum((0.1, 0.2, -0.3))}


def test_numbers_that_are_none_are_left_to_validate():
    payload = FORMS["PRIME-RL"](W)
    record, _ = stacks.to_rollout("PRIME-RL", {**payload, "logprobs": [0.0, 0.0, -0.5, math.nan, 0.25]})
    assert {"logprob_not_finite", "logprob_positive"} <= set(rollouts.validate(record).codes)
    record, _ = stacks.to_rollout("TRL async", {**FORMS["TRL async"](W), "metrics": {"reward": math.nan}})
    assert "reward_not_finite" in rollouts.validate(record).codes


@pytest.mark.parametrize(
    ("provenance", "field"),
    [
        ("tokenizer v2", "provenance"),
        ({"tokenizer": "v2"}, "'tokenizer'"),
        ({"extra": {"a": "b"}}, "extra"),
        ({"schema_version": 1}, "schema_version"),
        ({"tokenizer_version": 2}, "provenance.tokenizer_version"),
        ({"decoding": {"heat": 1.0}}, "provenance.decoding.heat"),
        ({"decoding": "greedy"}, "provenance.decoding"),
        ({"policy_version": "7"}, "provenance.policy_version"),
        ({3: 4}, "3"),
    ],
)
def test_provenance_that_is_no_field_is_refused(provenance, field):
    for kind in KINDS:
        refused(kind, FORMS[kind](W), provenance, field=field)


@pytest.mark.parametrize(
    ("kind", "provenance"),
    [
        ("TRL async", {"group_id": "4"}),
        ("TRL async", {"reward": {"reward": 0.0}}),
        ("TRL async", {"policy_version": 6}),
        ("TRL async", {"version_spans": [{"start": 0, "end": 3, "version": 6}]}),
        ("NeMo RL", {"policy_version": 6}),
        ("verl", {"policy_version": 8}),
        ("AReaL", {"policy_version": 6}),
        ("AReaL", {"version_spans": [{"start": 0, "end": 3, "version": 8}]}),
        ("OpenRLHF", {"truncated": False}),
        ("SkyRL", {"stop_reason": "length"}),
        ("PRIME-RL", {"decoding": {"temperature": 1.0}}),
        *((kind, {"response_tokens": [3, 4, 6]}) for kind in KINDS),
        *((kind, {"behavior_logprobs": [-0.5, -0.25, -2.0]}) for kind in KINDS),
    ],
)
def test_a_contradiction_to_the_payload_is_refused(kind, provenance):
    refused(kind, FORMS[kind](W), provenance, field=f"provenance.{next(iter(provenance))}")


def test_versions_between_the_payloads_first_and_last_may_be_asserted():
    payload = FORMS["verl"](W)
    payload["non_tensor_batch"]["min_global_steps"][0] = 6
    spans = [{"start": 0, "end": 2, "version": 6}, {"start": 2, "end": 3, "version": 7}]
    record, missing = stacks.to_rollout("verl", payload, {"version_spans": spans})
    assert record.versions() == [6, 6, 7]
    assert "policy_version" not in missing
    for version in (6, 7):  # the payload says that there were two
        refused("verl", payload, {"policy_version": version}, field="provenance.policy_version")
    later, _ = stacks.to_rollout("TRL async", FORMS["TRL async"](W), {"policy_version": 9})
    assert later.policy_version == 9


def test_asserting_what_the_payload_says_is_no_contradiction():
    record, _ = stacks.to_rollout("TRL async", FORMS["TRL async"](W), {"group_id": "3", "run_id": None})
    assert record.extra["asserted"] == "group_id"


def test_a_stacks_own_object_is_kept_as_text():
    class TrajectoryID:
        def __repr__(self):
            return "TrajectoryID('q0', 0)"

    payload = FORMS["SkyRL"](W)
    payload["generator_output"]["trajectory_ids"] = [TrajectoryID(), TrajectoryID()]
    record, missing = stacks.to_rollout("SkyRL", payload)
    assert "q0" in record.extra["trajectory_ids"]
    assert "sample_id" in missing
