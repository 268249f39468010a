"""Public reports of broken rollouts, restated small: what the contract says of each, and of its neighbours."""

import math

import pytest

from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import Rollout, VersionSpan, example, validate, validate_table


def record(**changes):
    return {**example()[0], **changes}


def response(tokens, mask=None, logprobs=None, **changes):
    """A record with prompt [1, 2] and this response; mask over the response, the policy's alone if left out."""
    mask = [1] * len(tokens) if mask is None else mask
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    fields = {"prompt_tokens": [1, 2], "response_tokens": tokens, "policy_mask": [0, 0, *mask]}
    return record(**{**fields, "behavior_logprobs": logprobs, "response_length": None, "truncated": None, **changes})


def codes(data, **keywords):
    """The codes of one record; the table path has to agree."""
    verdict = validate(data, **keywords)
    row = validate_table(rollouts.to_table([data]), **keywords).to_pylist()[0]
    assert (row["status"], row["codes"]) == (verdict.status, verdict.codes)
    return verdict.codes


def decoding(**changes):
    return {**example()[0]["decoding"], **changes}


# B16-B18: what the log-probs are of.


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_p": 0.75},
        {"top_k": 2},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"banned_token_ids": [7]},
    ],
)
def test_b16_to_b18_raw_logprobs_under_a_filter_cannot_be_undone(filters):
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert codes(record(decoding=decoding(**plain, logprobs_mode="raw"))) == []
    assert codes(record(decoding=decoding(**{**plain, **filters}, logprobs_mode="raw"))) == ["logprobs_not_behavior"]
    assert codes(record(decoding=decoding(**{**plain, **filters}, logprobs_mode="processed"))) == []


def test_b18_renormalised_over_the_kept_set_is_the_behaviour_policys_value():
    kept = 0.5 + 0.3  # p = [.5, .3, .15, .05] under top_p = 0.75
    processed = [math.log(0.5 / kept), math.log(0.3 / kept)]
    assert math.log(0.5) - processed[0] == pytest.approx(-0.223144, abs=1e-6)
    data = response([0, 1], logprobs=processed, eos_token_id=None, decoding=decoding(temperature=1.0, top_p=0.75))
    assert codes(data) == []


# B22: log-probs that are none.


def test_b22_logprob_above_zero():
    verdict = validate(record(behavior_logprobs=[-0.7, 123.7357, -27.1481]))
    assert (verdict.status, verdict.codes) == ("reject", ["logprob_positive"])
    assert "behavior_logprobs[1]: 123.7357" in verdict.findings[0].message


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-27.1481, None),
        (0.0, None),
        (1e-6, None),
        (1.1e-6, "logprob_positive"),
        (math.nan, "logprob_not_finite"),
        (math.inf, "logprob_not_finite"),
        (-math.inf, "logprob_not_finite"),
        (None, "logprob_missing"),
        (-9999.0, "logprob_sentinel"),
        (-9998.9, None),
    ],
)
def test_b22_neighbours_under_the_mask_and_off_it(value, code):
    assert codes(record(behavior_logprobs=[-0.7, value, -0.2])) == ([code] if code else [])
    env = {"env_mask": [0, 0, 0, 0, 1, 0], "environment_version": "shell-v1", "policy_mask": [0, 0, 0, 1, 0, 1]}
    assert codes(record(behavior_logprobs=[-0.7, value, -0.2], **env)) == []


def test_b22_no_logprob_at_all_is_absence():
    assert codes(record(behavior_logprobs=[None, None, None])) == ["missing_field"]


@pytest.mark.parametrize(
    ("count", "changes", "code"),
    [
        (8, {}, "logprob_all_zero"),
        (7, {}, None),
        (8, {"temperature": 1.0}, "logprob_all_zero"),
        (8, {"temperature": 0.0}, None),  # greedy: log 1
        (8, {"top_p": 0.9}, None),  # a nucleus of one token
        (8, {"top_k": 1}, None),
        (8, {"min_p": 0.5}, None),
    ],
)
def test_zeros_that_are_a_filler_and_zeros_that_are_not(count, changes, code):
    data = response([5] * count, logprobs=[0.0] * count, decoding=decoding(**changes))
    assert codes(data) == ([code] if code else [])
    data["behavior_logprobs"][3] = -1e-3
    assert codes(data) == []


# B29, B30: a second tokenisation.


def test_b29_ids_built_from_text_are_quarantined():
    """Sampled [1, 2] ("he", "llo") with two log-probs; the record has [3] ("hello")."""
    sampled = {"sampled_tokens": [1, 2], "logprobs": [-0.3, -0.4], "stop_reason": "length", "eos_token_id": None}
    verdict = validate(response([3], **sampled))
    assert (verdict.status, verdict.codes) == ("quarantine", ["retokenised"])
    assert codes(response([3], **sampled, response_length=2)) == ["retokenised"]
    assert codes(response([1, 2], **sampled)) == []
    # Three ids out of two sampled ones: the engine's own count is of the sampled ones still.
    for counted in (None, 2):
        assert codes(response([3, 4, 5], **sampled, response_length=counted)) == ["retokenised"]
    # And so are its version spans.
    spans = {"policy_version": None, "version_spans": [VersionSpan(start=0, end=2, version=7)]}
    for ids in ([3], [3, 4, 5]):
        assert codes(response(ids, **sampled, **spans)) == ["retokenised"]


def test_b29_neighbours():
    assert codes(response([3, 4], logprobs=[-0.3, -0.4], sampled_tokens=[3, 5])) == ["retokenised"]
    # Two log-probs explain nothing where three tokens were sampled.
    assert codes(response([3], logprobs=[-0.3, -0.4], sampled_tokens=[1, 2, 4])) == ["length_mismatch", "retokenised"]
    # Without the engine's ids, lengths that differ contradict each other.
    assert codes(response([3], logprobs=[-0.3, -0.4])) == ["length_mismatch"]
    # Environment tokens are none of the engine's sampled ones.
    env = {"mask": [1, 0, 1], "env_mask": [0, 0, 0, 1, 0], "environment_version": "shell-v1"}
    assert codes(response([7, 8, 9], sampled_tokens=[7, 9], **env)) == []
    assert codes(response([7, 8, 9], sampled_tokens=[7, 8, 9], **env)) == ["retokenised"]


def test_b30_side_data_and_prompt_of_another_tokenisation():
    verdict = validate(response([5], per_token={"routing": [[0.0]]}, engine_prompt_tokens=[3]))
    assert verdict.status == "reject"
    assert verdict.codes == ["length_mismatch", "prompt_mismatch"]
    by_field = {f.field: f.message for f in verdict.findings}
    assert "1 entries for 3 tokens" in by_field["per_token.routing"]
    assert "engine_prompt_tokens[0]: [3] was read, the record says [1]" in by_field["engine_prompt_tokens"]


@pytest.mark.parametrize(("engine", "at"), [([1, 3], 1), ([1], 1), ([1, 2, 9], 2), ([], 0)])
def test_b30_the_first_index_that_differs_is_named(engine, at):
    verdict = validate(response([5], engine_prompt_tokens=engine))
    assert verdict.codes == ["prompt_mismatch"]
    assert f"engine_prompt_tokens[{at}]" in verdict.findings[0].message
    assert codes(response([5], engine_prompt_tokens=engine)) == ["prompt_mismatch"]


def test_b30_side_data_that_lines_up():
    side = {"routing": [[0.0, 4.0]] * 3, "entropy": [0.1, 0.2, 0.3]}
    data = response([5], per_token=side, engine_prompt_tokens=[1, 2])
    assert codes(data) == []
    assert Rollout(**data).per_token["entropy"] == [[0.1], [0.2], [0.3]]
    for name in side:
        longer = {**side, name: [*side[name], side[name][0]]}
        assert codes({**data, "per_token": longer}) == ["length_mismatch"]


# B32: the mask is the engine's count, not token values.


@pytest.mark.parametrize(
    ("mask", "length", "wanted"),
    [
        ([1, 1, 1, 0, 0], 3, []),
        ([1, 1, 0, 0, 0], 3, ["mask_drops_token", "eos_outside_mask"]),
        ([1, 1, 1, 1, 1], 3, ["mask_past_length"]),
        ([1, 1, 1, 1, 1], 5, []),
        ([1, 1, 1, 0, 0], None, ["mask_zero_ambiguous"]),
        ([1, 1, 0, 0, 0], None, ["eos_outside_mask", "mask_zero_ambiguous"]),
    ],
)
def test_b32_pad_is_eos(mask, length, wanted):
    data = response([5, 6, 2, 2, 2], mask, eos_token_id=2, stop_reason="stop", response_length=length)
    assert codes(data) == wanted


def test_b32_cut_off_without_eos_all_real_tokens_count():
    cut = {"eos_token_id": 2, "stop_reason": "length"}
    assert codes(response([5, 6, 7, 2, 2], [1, 1, 1, 0, 0], response_length=3, **cut)) == []
    assert codes(response([5, 6, 7, 2, 2], [1, 1, 0, 0, 0], response_length=3, **cut)) == ["mask_drops_token"]


def test_b32_a_stop_string_is_no_eos():
    """The policy stopped at a string; what follows is padding by the eos id."""
    data = response([5, 6, 2], [1, 1, 0], stop_reason="stop", decoding=decoding(stop=["###"]))
    assert codes(data) == ["mask_zero_ambiguous"]
    assert codes({**data, "response_length": 2}) == []


def test_b32_a_dropped_pad_id_in_the_middle():
    mask, env = [1, 0, 1], [0, 0, 0, 0, 0]
    assert codes(response([5, 2, 6], mask, env_mask=env, stop_reason="length")) == ["mask_drops_token"]
    assert codes(response([5, 6, 2], [1, 1, 0], env_mask=env, stop_reason="length")) == []


# B34: truncation is what the engine says.


@pytest.mark.parametrize(
    ("tokens", "reason", "truncated", "wanted"),
    [
        (8, "stop", False, []),
        (8, "stop", True, ["truncation_contradiction"]),
        (6, "length", True, []),
        (6, "length", False, ["truncation_contradiction"]),
        (6, None, None, ["missing_field"]),
        (8, None, True, ["missing_field"]),
    ],
)
def test_b34_truncation_and_batch_width(tokens, reason, truncated, wanted):
    data = response([5] * tokens + [0] * (8 - tokens), [1] * tokens + [0] * (8 - tokens), response_length=tokens)
    assert codes({**data, "stop_reason": reason, "truncated": truncated}) == wanted
    if reason:
        assert rollouts.is_truncated(reason) == (reason == "length")


# B36: zero in the mask is not the end.


def test_b36_environment_or_padding():
    data = response([7, 8, 9], [1, 0, 1])
    assert codes(data) == ["mask_zero_ambiguous"]
    env = {"env_mask": [0, 0, 0, 1, 0], "environment_version": "shell-v1"}
    assert codes({**data, **env}) == []
    assert codes({**data, **env, "response_length": 3}) == []
    assert codes({**data, "response_length": 3}) == ["mask_drops_token"]
    assert codes({**data, **env, "policy_mask": [0, 0, 1, 1, 1]}) == ["mask_overlap"]


# B38: what the lag counts.


@pytest.mark.parametrize(
    ("versions", "current", "max_lag", "fresh"),
    [
        ([10], 14, 4, True),
        ([10], 14, 3, False),
        ([10, 13], 14, 4, True),
        ([10, 13], 14, 3, False),
        ([10, 13], 14, 1, False),
        ([5, 6], 6, 0, False),
        ([5, 6], 6, 1, True),
        ([6], 6, 0, True),
    ],
)
def test_b38_the_oldest_token_counts_and_the_limit_is_included(versions, current, max_lag, fresh):
    spans = [{"start": i, "end": i + 1, "version": v} for i, v in enumerate(versions)]
    data = response([5] * len(versions), policy_version=None, version_spans=spans)
    keywords = {"current_version": current, "max_lag": max_lag, "partial_rollouts": True}
    assert codes(data, **keywords) == ([] if fresh else ["stale"])
    if len(versions) == 1:
        assert codes(response([5], policy_version=versions[0]), **keywords) == ([] if fresh else ["stale"])


# B44: one rollout, two versions.

SPANS = [{"start": 0, "end": 57, "version": 7}, {"start": 57, "end": 128, "version": 8}]


def straddling(**changes):
    return response([5] * 128, **{"policy_version": None, "version_spans": SPANS, **changes})


def test_b44_lag_by_token():
    versions = Rollout(**straddling()).versions()
    lags = [9 - v for v in versions]
    assert len(versions) == 128
    assert (lags.count(2), lags.count(1), max(lags)) == (57, 71, 2)
    assert sum(lags) / 128 == pytest.approx(185 / 128)


def test_b44_verdicts():
    declared = {"current_version": 9, "partial_rollouts": True}
    assert codes(straddling(), **declared, max_lag=2) == []
    assert codes(straddling(), **declared, max_lag=1) == ["stale"]
    assert codes(straddling(), current_version=9) == ["partial_not_declared"]
    for scalar in (7, 8):
        assert codes(straddling(policy_version=scalar), **declared) == ["scalar_version_on_span"]
    one = [{"start": 0, "end": 128, "version": 7}]
    assert codes(straddling(version_spans=one, policy_version=7)) == []
    assert codes(straddling(version_spans=one, policy_version=8)) == ["scalar_version_on_span"]
    assert codes(straddling(), current_version=7, partial_rollouts=True) == ["version_in_future"]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(1, 128, 7)],
        [(0, 57, 7), (58, 128, 8)],
        [(0, 57, 7), (56, 128, 8)],
        [(57, 128, 7), (0, 57, 8)],
        [(0, 57, 7), (57, 57, 7), (57, 128, 8)],
        [(0, 57, 8), (57, 128, 7)],
        [(0, 57, 7), (57, 127, 8)],
        [(0, 57, 7), (57, 129, 8)],
        [(-1, 57, 7), (57, 128, 8)],
    ],
)
def test_b44_spans_that_do_not_cover_the_response_in_order(spans):
    spans = [dict(zip(("start", "end", "version"), span)) for span in spans]
    assert codes(straddling(version_spans=spans), partial_rollouts=True) == ["bad_spans"]


def test_b44_spans_may_leave_padding_out():
    data = straddling(policy_mask=[0, 0] + [1] * 100 + [0] * 28, response_length=100)
    spans = [VersionSpan(start=0, end=57, version=7), VersionSpan(start=57, end=100, version=8)]
    assert codes({**data, "version_spans": spans}, partial_rollouts=True) == []


def test_the_chain_ends_in_later_weights():
    trained = {"training_batch_id": "b1", "optimizer_step": 4}
    assert codes(record(resulting_policy_version=128, **trained)) == []
    assert codes(record(resulting_policy_version=127, **trained)) == ["version_order"]
    assert codes(straddling(resulting_policy_version=8), partial_rollouts=True) == ["version_order"]
    assert codes(record(optimizer_step=-1)) == ["version_order"]


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", [0.0, 2.5], [-0.1, math.nan, math.inf]),
        ("top_p", [1.0, 1e-9], [0.0, 1.0001, -1.0, math.nan]),
        ("top_k", [-1, 0, 50], [-2]),
        ("min_p", [0.0, 0.999], [1.0, -0.1, math.nan]),
        ("logprobs_mode", ["processed"], ["cooked", "RAW"]),
        ("repetition_penalty", [0.5, 1.2], [0.0, -1.0, math.nan, math.inf]),
        ("max_new_tokens", [1, None], [0, -5]),
    ],
)
def test_decoding_ranges(name, inside, outside):
    for value in inside:
        assert codes(record(decoding=decoding(**{name: value}))) == []
    for value in outside:
        verdict = validate(record(decoding=decoding(**{name: value})))
        assert ("decoding_out_of_range", f"decoding.{name}") in [(f.code, f.field) for f in verdict.findings]
        assert "decoding_out_of_range" in codes(record(decoding=decoding(**{name: value})))


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({"started_s": 1.0, "finished_s": 1.0}, []),
        ({"started_s": -1.0}, ["negative_time"]),
        ({"finished_s": math.nan}, ["negative_time"]),
        ({"started_s": math.inf}, ["negative_time"]),
        ({"started_s": 2.0, "finished_s": 1.0}, ["negative_time"]),
        ({"num_retries": -1}, ["negative_time"]),
        ({"num_retries": 3}, []),
    ],
)
def test_times(times, wanted):
    assert codes(record(**times)) == wanted
