"""Whatever arrives ends in a named finding in one line: wrong types, sizes, hostile objects."""

import collections
import math
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.rollouts import CODES, Decoding, Rollout, VersionSpan, example, validate

HUGE = pytest.param(10**5000, id="huge")  # too long for Python to print
INT_FIELDS = ["response_length", "eos_token_id", "policy_version", "num_retries", "optimizer_step"]
INT_FIELDS += ["resulting_policy_version", "schema_version"]


def record(**changes):
    return {**example()[0], **changes}


def only(data, **keywords):
    """The single finding on `data`."""
    (finding,) = validate(data, **keywords).findings
    assert "\n" not in finding.message
    assert len(finding.message) < 300
    return finding


@pytest.mark.parametrize("junk", [None, 3, "text", b"bytes", [1, 2], {1, 2}, object(), math.nan, Rollout, HUGE])
def test_not_a_record(junk):
    assert only(junk).code == "not_a_record"


def test_an_empty_mapping_lacks_everything():
    verdict = validate({})
    assert verdict.status == "quarantine"
    assert verdict.codes == ["missing_field"]
    assert (
        len(verdict.findings) == 15
    )  # eleven texts and lists named in P12 and their kind, tokens, masks, version, reward


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"prompt_tokens": "101 42"}, "prompt_tokens"),
        ({"prompt_tokens": (101, 42, 17)}, "prompt_tokens"),
        ({"prompt_tokens": [101, "42", 17]}, "prompt_tokens[1]"),
        ({"prompt_tokens": [101, 42.0, 17]}, "prompt_tokens[1]"),
        ({"prompt_tokens": [101, True, 17]}, "prompt_tokens[1]"),
        ({"prompt_tokens": [101, None, 17]}, "prompt_tokens[1]"),
        ({"prompt_tokens": [[101, 42, 17]]}, "prompt_tokens[0]"),
        ({"policy_mask": [0, 0, 0, 1.0, 1, 1]}, "policy_mask[3]"),
        ({"behavior_logprobs": [-0.3, "-1", -0.2]}, "behavior_logprobs[1]"),
        ({"behavior_logprobs": {"0": -0.3}}, "behavior_logprobs"),
        ({"policy_version": "127"}, "policy_version"),
        ({"policy_version": 127.0}, "policy_version"),
        ({"policy_version": np.int64(127).astype(object) + 0.5}, "policy_version"),
        ({"run_id": 42}, "run_id"),
        ({"run_id": b"run42"}, "run_id"),
        ({"truncated": 0}, "truncated"),
        ({"reward": 1.0}, "reward"),
        ({"reward": {"correctness": "1"}}, "reward.correctness"),
        ({"reward": {"correctness": None}}, "reward.correctness"),
        ({"reward": {"correctness": 10**400}}, "reward.correctness"),
        ({"decoding": "greedy"}, "decoding"),
        ({"decoding": {"temperature": "0.8"}}, "decoding.temperature"),
        ({"decoding": {"stop": "###"}}, "decoding.stop"),
        ({"version_spans": [{"start": 0, "end": 3}]}, "version_spans[0].version"),
        ({"version_spans": [{"start": 0, "end": None, "version": 7}]}, "version_spans[0].end"),
        ({"per_token": {"routing": 3}}, "per_token.routing"),
        ({"extra": {"note": 3}}, "extra.note"),
        ({"started_s": "noon"}, "started_s"),
        ({"run_id": "\ud800"}, "run_id"),
        ({"extra": {"note": "\udfff"}}, "extra"),
        ({"decoding": {"stop": ["\ud800"]}}, "decoding.stop"),
        ({"reward": {"\ud800": 1.0}}, "reward key"),
    ],
)
def test_wrong_types_name_the_path(changes, path):
    finding = only(record(**changes))
    assert (finding.code, finding.status, finding.field) == ("wrong_type", "reject", path)
    assert finding.message.startswith(f"{path}: ")


@pytest.mark.parametrize("field", INT_FIELDS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, HUGE])
def test_integers_beyond_64_bits(field, value):
    finding = only(record(**{field: value}))
    assert (finding.code, finding.field) == ("wrong_type", field)


@pytest.mark.parametrize("field", ["prompt_tokens", "response_tokens", "engine_prompt_tokens", "sampled_tokens"])
def test_token_ids_beyond_64_bits(field):
    assert (only(record(**{field: [1, 2**63, 3]})).code, only(record(**{field: [1, -(2**64), 3]})).field) == (
        "wrong_type",
        field,
    )


def test_other_integers_beyond_64_bits():
    spans = [{"start": 0, "end": 3, "version": 2**63}]
    assert only(record(policy_version=None, version_spans=spans)).field == "version_spans"
    for name in ("top_k", "max_new_tokens"):
        assert only(record(decoding={name: 2**63})).field == f"decoding.{name}"
    assert only(record(decoding={"banned_token_ids": [2**63]})).field == "decoding.banned_token_ids"
    assert only(record(policy_mask=[0, 0, 0, 1, 2**70, 1])).code == "mask_not_binary"


TEN_MB = "x" * 10_000_000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sample_id": TEN_MB}, "sample_id"),
        ({"verifier_version": "v" * 1025}, "verifier_version"),
        ({"verifier_version": "é" * 513}, "verifier_version"),
        ({"stop_reason": TEN_MB}, "stop_reason"),
        ({"decoding": {"logprobs_mode": TEN_MB}}, "decoding.logprobs_mode"),
        ({"decoding": {"stop": [TEN_MB]}}, "decoding.stop"),
        ({"extra": {"log": "x" * 65_537}}, "extra"),
        ({"extra": {TEN_MB: ""}}, "extra key"),
        ({"reward": {TEN_MB: 1.0}}, "reward key"),
        ({"per_token": {TEN_MB: []}}, "per_token key"),
        ({"response_tokens": [5] * 10_000_001}, "response_tokens"),
        ({"behavior_logprobs": np.zeros(10_000_001)}, "behavior_logprobs"),
        ({"per_token": {"routing": [[0.0]] * 10_000_001}}, "per_token.routing"),
    ],
)
def test_too_large(changes, field):
    finding = only(record(**changes))
    assert (finding.code, finding.field) == ("too_large", field)


def test_large_is_not_yet_too_large():
    assert validate(record(sample_id="x" * 1024, extra={"log": "x" * 65_536})).status == "accept"


def test_ten_megabytes_where_they_have_no_place():
    assert only(record(advantage=TEN_MB)).code == "unknown_field"
    assert only(record(**{TEN_MB: 1})).code == "unknown_field"
    assert only(record(prompt_tokens=TEN_MB)).code == "wrong_type"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"advantage": 0.5}, "advantage"),
        ({"decoding": {**example()[0]["decoding"], "seed": 3}}, "decoding.seed"),
        (
            {"policy_version": None, "version_spans": [{"start": 0, "end": 3, "version": 7, "host": "a"}]},
            "version_spans[0].host",
        ),
    ],
)
def test_unknown_fields_are_quarantined_and_the_rest_is_checked(changes, path):
    finding = only(record(**changes))
    assert (finding.code, finding.status, finding.field) == ("unknown_field", "quarantine", path)
    assert "extra" in finding.message
    # The other checks go on.
    assert validate(record(**changes, truncated=True)).codes == ["truncation_contradiction", "unknown_field"]


def test_a_malformed_record_has_its_structural_findings_alone():
    broken = record(prompt_tokens="x", policy_version=-1, advantage=1.0)
    assert validate(broken).codes == ["wrong_type", "unknown_field"]
    assert validate(record(schema_version=2, policy_version=-1)).codes == ["schema_version"]
    assert validate(record(sample_id="x" * 2000, prompt_tokens="x")).codes == ["too_large"]


def test_one_finding_a_field_however_many_entries_are_wrong():
    findings = validate(record(prompt_tokens=["a"] * 10_000, response_tokens=["b"] * 10_000)).findings
    assert [f.field for f in findings] == ["prompt_tokens[0]", "response_tokens[0]"]


def test_null_is_absent_everywhere():
    nulls = dict.fromkeys(set(Rollout.model_fields) - set(example()[0]))
    decoding = {**dict.fromkeys(Decoding.model_fields), **example()[0]["decoding"]}
    assert validate(record(**nulls, decoding=decoding)).status == "accept"


def test_models_within_records_and_other_mappings():
    decoding = Decoding(**example()[0]["decoding"])
    spans = [VersionSpan(start=0, end=3, version=7)]
    assert validate(record(decoding=decoding, policy_version=None, version_spans=spans)).status == "accept"
    assert validate(types.MappingProxyType(record())).status == "accept"
    assert validate(collections.ChainMap(record())).status == "accept"


def test_a_model_that_skipped_its_own_checks_is_checked_here():
    skipped = Rollout(**record()).model_copy(update={"policy_mask": "111", "decoding": {"temperature": "hot"}})
    assert {f.field for f in validate(skipped).findings} == {"policy_mask", "decoding.temperature"}
    unchecked = Decoding.model_construct(temperature="hot")
    assert only(record(decoding=unchecked)).field == "decoding.temperature"


class Hostile:
    """Raises whenever it is looked at."""

    def __getattr__(self, name):
        raise RuntimeError("do not touch\nme")

    def __repr__(self):
        raise RuntimeError("do not print me")

    def __len__(self):
        raise RuntimeError("do not count me")


class HostileMapping(collections.abc.Mapping):
    def __getitem__(self, name):
        raise RuntimeError("no")

    def __iter__(self):
        raise RuntimeError("no")

    def __len__(self):
        return 1


@pytest.mark.parametrize("field", ["prompt_tokens", "sample_id", "reward", "decoding", "per_token", "nowhere"])
def test_hostile_objects_reject_their_record(field):
    verdict = validate(record(**{field: Hostile()}))
    assert verdict.status in ("reject", "quarantine")
    assert set(verdict.codes) <= {"wrong_type", "unknown_field"}
    assert all("\n" not in f.message for f in verdict.findings)
    assert only(HostileMapping()).code == "wrong_type"


def test_records_that_contain_themselves():
    data = record()
    data["decoding"] = data
    data["extra"] = {"self": data}
    assert "wrong_type" in validate(data).codes


leaf = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)),
    *(st.just(2**70), st.just(10**400), st.just("\ud800"), st.builds(object), st.sets(st.integers(), max_size=2)),
)
hashable = leaf.filter(lambda value: not isinstance(value, set))
junk = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hashable, inner, max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*Rollout.model_fields, "other"]), junk, max_size=6), st.booleans())
def test_junk_in_any_field_ends_in_findings_of_the_list(fields, partial):
    for data in (fields, record(**fields)):
        verdict = validate(data, current_version=200, max_lag=100, partial_rollouts=partial)
        assert set(verdict.codes) <= set(CODES)
        assert (verdict.status == "accept") == (not verdict.findings)
        assert all(f.message and f.field and "\n" not in f.message for f in verdict.findings)
        assert "\n" not in str(verdict).replace("\n  ", "")


@settings(max_examples=100, deadline=None)
@given(junk)
def test_junk_as_a_record(data):
    verdict = validate(data)
    assert verdict.status != "accept"
    assert set(verdict.codes) <= set(CODES)
