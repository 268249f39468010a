"""Records of seven stacks as rollouts: what was written is read, what was not is missing, nothing is made up."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks_samples import BY_AUTHOR, FORMS, Written, leaves, without

from ci.make_stack_records import RECIPES
from rlinfra_utils import rollouts, stacks
from rlinfra_utils.rollouts.checks_policy import REQUIRED_FILLED, REQUIRED_PRESENT

KINDS = list(stacks.ADAPTERS)
kinds = pytest.mark.parametrize("kind", KINDS)
FULL = {
    **{name: rollouts.example()[0][name] for name in ("run_id", "branch_id", "prompt_id", "group_id", "sample_id")},
    "policy_version": 7,
    "decoding": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed"},
    "tokenizer_version": "bpe-v2",
    "chat_template_version": "chat-v1",
    "reward": {"correctness": 1.0},
    "verifier_version": "arith-v4",
    "environment_version": "shell-v1",
    "stop_reason": "eos",
    "truncated": False,
}


@st.composite
def written(draw, one_author=False):
    """A rollout of at most 12 + 14 tokens whose response starts with a token of the policy."""
    tokens = st.integers(1, 50)
    prompt = draw(st.lists(tokens, min_size=1, max_size=12))
    response = draw(st.lists(tokens, min_size=1, max_size=14))
    rest = [1] if one_author else [0, 1]
    policy = [1] + [draw(st.sampled_from(rest)) for _ in response[1:]]
    logprobs = [draw(st.floats(-9.0, -0.01)) for _ in response]
    return Written(prompt, response, policy, logprobs, draw(st.sampled_from([0.0, 0.5, 1.0])))


def stored(kind):
    return stacks.record(kind)["payload"]


@kinds
@settings(max_examples=30, deadline=None)
@given(w=written())
def test_what_was_written_is_read_back_without_its_padding(kind, w):
    record, missing = stacks.to_rollout(kind, FORMS[kind](w))
    assert (record.prompt_tokens, record.response_tokens) == (w.prompt, w.response)
    assert record.policy_mask == w.mask
    assert record.behavior_logprobs == [x if bit else None for x, bit in zip(w.logprobs, w.policy)]
    if record.reward is not None:
        assert list(record.reward.values()) == [w.reward]
    if kind in BY_AUTHOR:
        assert (record.env_mask or [0] * len(w.mask))[len(w.prompt) :] == [1 - bit for bit in w.policy]
        assert record.response_length == len(w.response)
    else:
        assert record.env_mask is None
        assert ("env_mask" in missing) == (record.response_length is None) == (0 in w.policy)


@kinds
def test_rows_are_read_one_by_one(kind):
    w = Written([1, 2], [3, 4, 5], [1, 1, 1], [-0.5, -0.25, -1.0], 1.0)
    batched = stacks.ADAPTERS[kind].rows is not None
    if batched:
        other, _ = stacks.to_rollout(kind, FORMS[kind](w), row=1)
        assert set(other.response_tokens) == {8}
    with pytest.raises(ValueError, match=r"^row="):
        stacks.to_rollout(kind, FORMS[kind](w), row=2 if batched else 1)


@kinds
@settings(max_examples=30, deadline=None)
@given(w=written())
def test_validate_and_missing_agree(kind, w):
    record, missing = stacks.to_rollout(kind, FORMS[kind](w))
    found = {f.field for f in rollouts.validate(record, partial_rollouts=True).findings if f.code == "missing_field"}
    judged = {*REQUIRED_FILLED, *REQUIRED_PRESENT, "policy_version", "environment_version"}
    assert found == {name for name in missing if name in judged}
    for name in missing.keys() - {"truncated"}:
        assert not getattr(record, name), name


@kinds
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_asserting_what_is_missing_makes_the_record_whole(kind, data):
    w = data.draw(written(one_author=kind not in BY_AUTHOR))
    payload = FORMS[kind](w)
    _, missing = stacks.to_rollout(kind, payload)
    asserted = {name: FULL[name] for name in missing}
    if kind == "PRIME-RL":
        asserted["decoding"] = {**FULL["decoding"], "temperature": 0.7}
    if "truncated" not in missing and kind == "OpenRLHF":
        asserted["stop_reason"] = "length"
    left_out = data.draw(st.sets(st.sampled_from(sorted(asserted))))
    some, still = stacks.to_rollout(kind, payload, {n: v for n, v in asserted.items() if n not in left_out})
    record, none = stacks.to_rollout(kind, payload, asserted)
    assert none == {}
    assert rollouts.validate(record).status == "accept"
    assert record.extra["asserted"] == ", ".join(sorted(asserted))
    lacking = left_out - {"truncated"} if "stop_reason" in asserted.keys() - left_out else left_out
    if "truncated" in asserted.keys() - left_out:
        lacking = lacking | (left_out & {"stop_reason"})
    assert set(still) == lacking
    assert (rollouts.validate(some).status == "accept") == (not lacking - {"group_id", "truncated"})


@kinds
def test_a_field_dropped_from_the_payload_is_missed_and_never_replaced(kind):
    whole, before = stacks.to_rollout(kind, stored(kind))
    for path, _ in leaves(stored(kind)):
        less = without(stored(kind), path)
        if ".".join(path) in stacks.ADAPTERS[kind].essential:
            with pytest.raises(ValueError, match=".".join(path)):
                stacks.to_rollout(kind, less)
            continue
        record, missing = stacks.to_rollout(kind, less)
        for name, value in record:
            if name not in ("extra", "response_length") and value != getattr(whole, name):
                assert value is None, (path, name)
                assert {"version_spans": "policy_version"}.get(name, name) in missing, (path, name)
        assert before.keys() <= missing.keys(), path


@kinds
def test_the_essential_fields_alone_give_tokens_and_masks_alone(kind):
    payload = stored(kind)
    for path, _ in leaves(stored(kind)):
        if ".".join(path) not in stacks.ADAPTERS[kind].essential:
            payload = without(payload, path)
    record, missing = stacks.to_rollout(kind, payload)
    said = {name for name, value in record if value not in (None, {}, 0)} - {"schema_version"}
    assert said <= {"prompt_tokens", "response_tokens", "policy_mask", "env_mask", "response_length"}
    assert missing.keys() >= stacks.FORBIDS.keys() - said - {"env_mask", "environment_version"} - {
        name for name in stacks.FORBIDS if "." in name
    }


def values(node):
    """Every number and text in nested data, but the borders of version spans, which are counts."""
    if isinstance(node, dict):
        node = [entry for name, entry in node.items() if name not in ("start", "end")]
    if isinstance(node, list):
        return [v for entry in node for v in values(entry)]
    return [node]


@kinds
def test_every_value_of_the_record_is_one_of_the_payload(kind):
    record, _ = stacks.to_rollout(kind, stored(kind))
    data = record.model_dump(exclude_none=True, exclude_defaults=True)
    extra = [v for text in data.pop("extra", {}).values() for v in values(_parsed(text))]
    for name in ("policy_mask", "env_mask", "response_length"):  # 0, 1 and a count
        data.pop(name, None)
    known = values(stored(kind))
    ids = [v for v in known if isinstance(v, str)] + [str(v) for v in known if isinstance(v, int)]
    for value in [*values(data), *extra]:
        # The one derived name: NeMo RL's sample id is its group id with a suffix.
        assert value in known or value is None or any(value in (text, text.rpartition("_g")[0]) for text in ids), value


def _parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_one_answer_is_the_same_through_six_stacks():
    """The recipes hand the same answer of the tiny policy to each stack; SkyRL's order is its own."""
    seen = [stacks.to_rollout(k, stored(k))[0] for k in ("TRL async", "verl", "NeMo RL", "PRIME-RL", "AReaL")]
    seen += [stacks.to_rollout("SkyRL", stored("SkyRL"), row=i)[0] for i in range(2)]
    first = seen[0]
    same = [r for r in seen if r.response_tokens == first.response_tokens]
    assert len(same) == 6
    for r in same:
        assert r.prompt_tokens == first.prompt_tokens
        assert r.behavior_logprobs == pytest.approx(first.behavior_logprobs, abs=2e-6)
    cut, _ = stacks.to_rollout("OpenRLHF", stored("OpenRLHF"))
    assert cut.truncated
    assert cut.response_tokens == first.response_tokens[: len(cut.response_tokens)]
    assert cut.behavior_logprobs == first.behavior_logprobs[: len(cut.response_tokens)]


@kinds
def test_stored_records_say_where_they_come_from(kind):
    stored_record = stacks.record(kind)
    assert stored_record["stack"] == kind
    assert stored_record["origin"] == f"made by {RECIPES[kind].made_by}"
    assert stored_record["made_on"][:2] == "20"
    assert stored_record["how"]


def test_recomputed_log_probs_are_not_the_behaviour_policys():
    w = Written([1, 2], [3, 4], [1, 1], [-0.5, -0.25], 1.0)
    for kind, theirs, recomputed in (
        ("TRL sync", "sampling_per_token_logps", "old_per_token_logps"),
        ("OpenRLHF", "rollout_log_probs", "action_log_probs"),
    ):
        record, missing = stacks.to_rollout(kind, without(FORMS[kind](w), (theirs,)))
        assert record.behavior_logprobs is None
        assert recomputed in missing["behavior_logprobs"].found


def test_a_truncated_answer_masked_whole_keeps_its_tokens_and_is_rejected():
    w = Written([1, 2], [3, 4], [1, 1], [-0.5, -0.25], 1.0)
    payload = FORMS["TRL sync"](w)
    payload["completion_mask"] = payload["completion_mask"] * 0
    record, _ = stacks.to_rollout("TRL sync", payload)
    assert record.response_tokens[:2] == [3, 4]
    assert rollouts.validate(record).codes[0] == "no_policy_tokens"


def test_a_loss_mask_with_holes_is_quarantined_as_ambiguous():
    w = Written([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, -0.25, -1.0], 1.0)
    for kind in set(FORMS) - set(BY_AUTHOR):
        record, missing = stacks.to_rollout(kind, FORMS[kind](w))
        assert "env_mask" in missing
        assert "mask_zero_ambiguous" in rollouts.validate(record).codes
        _, missing = stacks.to_rollout(kind, FORMS[kind](w), {"env_mask": [0, 0, 0, 1, 0]})
        assert "env_mask" not in missing
        assert "environment_version" in missing


def test_versions_of_tokens_become_spans():
    payload = FORMS["AReaL"](Written([1, 2], [3, 4, 5, 6], [1, 0, 1, 1], [-0.5] * 4, 1.0))
    payload["versions"][0, :6] = [-1, -1, 6, -1, 6, 7]
    record, missing = stacks.to_rollout("AReaL", payload)
    assert record.versions() == [6, 6, 6, 7]
    assert record.policy_version is None
    assert "policy_version" not in missing


def test_the_table_of_presence_tells_part_from_none():
    frame = stacks.presence()
    assert list(frame.columns) == KINDS
    assert (frame.loc["tokenizer_version"] == "no").all()
    assert frame.loc["policy_version", "AReaL"] == "yes"
    assert frame.loc["policy_version", "TRL async"] == "part"
    assert frame.loc["behavior_logprobs", "TRL sync"] == "part"
    told = stacks.to_rollout("AReaL", stored("AReaL"), {"tokenizer_version": "v2", "decoding": FULL["decoding"]})
    frame = stacks.presence({"told": told})
    assert frame.loc["tokenizer_version", "told"] == frame.loc["decoding", "told"] == "asserted"
