"""The closed list of codes, the verdict's faces, and the keywords at the door."""

import pytest

from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import CODES, STOP_REASONS, Finding, Rollout, Verdict, example, validate

P12_OMITS = ["tokenizer_version", "chat_template_version", "decoding", "verifier_version", "stop_reason"]
OTHERS = ["run_id", "branch_id", "prompt_id", "sample_id", "prompt_tokens", "response_tokens", "policy_mask"]
OTHERS += ["behavior_logprobs", "policy_version", "reward"]


def test_the_good_example_is_accepted_as_a_dict_and_as_a_rollout():
    record, keywords = example()
    assert validate(record, **keywords) == Verdict("accept", ())
    assert validate(Rollout(**record)).status == "accept"


@pytest.mark.parametrize("code", sorted(set(CODES) - {"duplicate_id"}))
def test_each_example_has_its_code_and_status(code):
    record, keywords = example(code)
    verdict = validate(record, **keywords)
    assert code in verdict.codes
    found = [f for f in verdict.findings if f.code == code]
    assert {f.status for f in found} == {CODES[code].status}
    assert all(f.field and "\n" not in f.message and len(f.message) < 300 for f in verdict.findings)


@pytest.mark.parametrize("code", sorted(set(CODES) - {"duplicate_id", "not_a_record"}))
def test_each_example_is_wrong_in_its_changes_alone(code):
    good, (record, _) = example()[0], example(code)
    changed = {name for name in record if record[name] != good.get(name, object())}
    assert changed <= set(CODES[code].changes)
    assert validate(example()[0]).status == "accept"


def test_an_example_is_the_callers_own():
    example()[0]["prompt_tokens"].append(9)
    example("stale")[1].clear()
    assert example()[0]["prompt_tokens"] == [101, 42, 17]
    assert example("stale")[1]
    with pytest.raises(ValueError, match="'stail' is not a finding code"):
        example("stail")


def test_statuses_follow_the_rule_that_absence_quarantines():
    quarantined = {code for code, entry in CODES.items() if entry.status == "quarantine"}
    assert quarantined == {
        "missing_field",
        "unknown_field",
        "retokenised",
        "logprobs_not_behavior",
        "mask_zero_ambiguous",
        "logprob_all_zero",
    }
    assert {entry.status for entry in CODES.values()} == {"quarantine", "reject"}


@pytest.mark.parametrize("field", P12_OMITS + OTHERS)
@pytest.mark.parametrize("how", ["null", "left out"])
def test_p12_each_missing_field_is_quarantined_by_name(field, how):
    record = {**example()[0], field: None}
    if how == "left out":
        del record[field]
    verdict = validate(record)
    assert verdict.status == "quarantine"
    assert [(f.code, f.field) for f in verdict.findings] == [("missing_field", field)]


def test_p12_the_whole_collector_record():
    record = {name: value for name, value in example()[0].items() if name not in P12_OMITS}
    verdict = validate(record)
    assert verdict.status == "quarantine"
    assert sorted(f.field for f in verdict.findings) == sorted(P12_OMITS)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "logprobs_mode"])
def test_p12_decoding_is_part_of_the_behaviour_policy(name):
    record = example()[0]
    del record["decoding"][name]
    assert [(f.code, f.field) for f in validate(record).findings] == [("missing_field", f"decoding.{name}")]


@pytest.mark.parametrize("empty", [{"run_id": ""}, {"reward": {}}, {"prompt_tokens": [], "policy_mask": [1, 1, 1]}])
def test_empty_is_missing(empty):
    verdict = validate({**example()[0], **empty})
    assert (verdict.status, verdict.codes) == ("quarantine", ["missing_field"])
    assert verdict.findings[0].field == next(iter(empty))


def test_environment_tokens_need_the_environments_version():
    record = {**example()[0], "policy_mask": [0, 0, 0, 1, 0, 1], "env_mask": [0, 0, 0, 0, 1, 0]}
    assert [(f.code, f.field) for f in validate(record).findings] == [("missing_field", "environment_version")]
    assert validate({**record, "environment_version": "shell-v1"}).status == "accept"


def test_status_is_that_of_the_worst_finding():
    record = {**example()[0], "verifier_version": None}
    assert validate(record).status == "quarantine"
    assert validate({**record, "policy_version": -1}).status == "reject"


def test_the_verdict_prints_for_people():
    record, keywords = example("stale")
    verdict = validate({**record, "advantage<b>": 1.0}, **keywords)
    first, *lines = str(verdict).splitlines()
    assert first == "reject"
    assert len(lines) == len(verdict.findings) == 2
    assert "policy_version: 127 lags 3 behind 130" in str(verdict)
    page = verdict._repr_html_()
    assert page.count("<tr>") == 3
    assert "advantage&lt;b&gt;" in page
    assert "<table" not in validate(example()[0])._repr_html_()
    assert Finding("stale", "policy_version", "").status == "reject"


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"current_version": -1}, "current_version"),
        ({"current_version": "9"}, "current_version"),
        ({"current_version": 9.0}, "current_version"),
        ({"current_version": True}, "current_version"),
        ({"current_version": 2**63}, "current_version"),
        ({"current_version": 9, "max_lag": -1}, "max_lag"),
        ({"max_lag": 1}, "max_lag"),
        ({"partial_rollouts": "no"}, "partial_rollouts"),
    ],
)
def test_senseless_keywords_are_refused_by_every_door(keywords, name, tmp_path):
    table = rollouts.to_table([example()[0]])
    for call in (
        lambda: validate(example()[0], **keywords),
        lambda: rollouts.validate_table(table, **keywords),
        lambda: rollouts.triage([example()[0]], tmp_path / "parts", **keywords),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("reason", sorted(STOP_REASONS))
def test_every_stop_reason_has_its_end(reason):
    for truncated in (None, True, False):
        codes = validate({**example()[0], "stop_reason": reason, "truncated": truncated}).codes
        if STOP_REASONS[reason] is None:
            assert codes == ["not_finished"]
        else:
            agrees = truncated in (None, STOP_REASONS[reason])
            assert codes == ([] if agrees else ["truncation_contradiction"])
