"""validate_table against validate: same status and same codes for every row, however the table is laid out."""

import copy
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import CODES, SCHEMA, example, validate, validate_table

RAW_SCHEMA = pa.schema([*SCHEMA, ("advantage", pa.float64())])
NAN, INF = math.nan, math.inf


def raw_table(records):
    """The records as an Arrow table, unchecked."""
    return pa.Table.from_pylist(records, schema=RAW_SCHEMA)


def verdicts(table, **keywords):
    return [(row["status"], row["codes"]) for row in validate_table(table, **keywords).to_pylist()]


def expected(records, **keywords):
    """The record path, with duplicate_id by a set."""
    seen, result = set(), []
    for record in records:
        verdict = validate(record, **keywords)
        status, codes = verdict.status, set(verdict.codes)
        if record.get("sample_id") and record["sample_id"] in seen:
            status, codes = "reject", codes | {"duplicate_id"}
        seen.add(record.get("sample_id"))
        result.append((status, [code for code in CODES if code in codes]))
    return result


def multi_turn():
    """Two policy turns around a tool's answer, then padding."""
    return {
        **example()[0],
        "sample_id": "run42-p009-g00",
        "prompt_tokens": [1, 2],
        "response_tokens": [5, 6, 9, 9, 7, 2, 0],
        "policy_mask": [0, 0, 1, 1, 0, 0, 1, 1, 0],
        "env_mask": [0, 0, 0, 0, 1, 1, 0, 0, 0],
        "behavior_logprobs": [-0.1, -0.2, None, None, -0.3, -0.4, None],
        "response_length": 6,
        "environment_version": "shell-v1",
        "per_token": {"experts": [[0.0, 1.0]] * 9},
        "policy_version": None,
        "version_spans": [{"start": 0, "end": 4, "version": 7}, {"start": 4, "end": 6, "version": 8}],
        "sampled_tokens": [5, 6, 7, 2],
        "engine_prompt_tokens": [1, 2],
        "started_s": 1.0,
        "finished_s": 2.0,
        "optimizer_step": 3,
        "resulting_policy_version": 200,
    }


token = st.integers(-1, 3)
bits = st.lists(st.sampled_from([0, 0, 0, 1, 1, 1, 2, -1, None]), max_size=10)
logprob = st.sampled_from([0.0, -0.5, -1e-9, 1e-7, 2e-6, 123.7, -9998.0, -9999.0, -1e9, NAN, INF, -INF, None])
span = st.fixed_dictionaries({"start": st.integers(-1, 7), "end": st.integers(-1, 8), "version": st.integers(-1, 9)})
text = st.sampled_from([None, "", "a", "x" * 1024, "x" * 1025, "é" * 513])
number = st.sampled_from([None, 0.0, 0.5, 1.0, 1.5, -0.1, 0.4999, NAN, INF, -INF])
count = st.sampled_from([None, -2, -1, 0, 1, 3, 7, 2**63 - 1, -(2**63)])
decoding = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": number,
            "top_p": number,
            "top_k": count,
            "min_p": number,
            "repetition_penalty": number,
            "logprobs_mode": st.sampled_from([None, "", "raw", "processed", "cooked"]),
            "max_new_tokens": count,
            "banned_token_ids": st.lists(st.sampled_from([1, -1, None]), max_size=2),
            "stop": st.lists(st.sampled_from(["a", None, "s" * 65_536, "s" * 65_537]), max_size=2),
        },
    ),
)
FIELDS = {
    "schema_version": st.sampled_from([None, 1, 2]),
    **dict.fromkeys(("run_id", "branch_id", "prompt_id", "group_id", "tokenizer_version", "environment_version"), text),
    "sample_id": st.one_of(text, st.sampled_from(["one", "two"])),
    **dict.fromkeys(
        ("prompt_tokens", "response_tokens", "engine_prompt_tokens", "sampled_tokens"),
        st.one_of(st.none(), st.lists(token, max_size=8), st.lists(st.sampled_from([1, None]), max_size=2)),
    ),
    **dict.fromkeys(("policy_mask", "env_mask"), st.one_of(st.none(), bits)),
    "behavior_logprobs": st.one_of(st.none(), st.lists(logprob, max_size=10)),
    **dict.fromkeys(("response_length", "eos_token_id", "policy_version", "num_retries"), count),
    **dict.fromkeys(("optimizer_step", "resulting_policy_version"), count),
    "per_token": st.dictionaries(
        st.sampled_from(["a", "k" * 1025]),
        st.lists(st.one_of(st.none(), st.lists(st.sampled_from([0.0, NAN, None]), max_size=2)), max_size=9),
        max_size=2,
    ),
    "version_spans": st.one_of(st.none(), st.lists(span, max_size=3)),
    "decoding": decoding,
    "reward": st.one_of(st.none(), st.dictionaries(text.filter(bool), number, max_size=2)),
    "stop_reason": st.sampled_from([None, "", "finished", *rollouts.STOP_REASONS]),
    "truncated": st.sampled_from([None, True, False]),
    **dict.fromkeys(("started_s", "finished_s"), number),
    "extra": st.dictionaries(text.filter(bool), st.sampled_from(["", "v" * 65_536, "v" * 65_537, None]), max_size=1),
    "advantage": st.sampled_from([None, 0.5]),
}


@st.composite
def mutated(draw):
    """A good record with up to four fields drawn anew, a list element flipped, or an example's changes."""
    record = draw(st.sampled_from([example()[0], multi_turn()]))
    record = copy.deepcopy(record)
    if draw(st.booleans()):
        changes = CODES[draw(st.sampled_from(sorted(CODES)))].changes
        record.update(copy.deepcopy(changes) if isinstance(changes, dict) else {})
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4)):
        record[name] = draw(FIELDS[name])
    lists = [name for name in ("policy_mask", "env_mask", "behavior_logprobs", "response_tokens") if record.get(name)]
    for name in draw(st.lists(st.sampled_from(lists), max_size=2)) if lists else ():
        at = draw(st.integers(0, len(record[name]) - 1))
        record[name][at] = draw({"behavior_logprobs": logprob, "response_tokens": token}.get(name, st.integers(0, 1)))
    return record


@st.composite
def small_episode(draw):
    """Any masks, lengths, ids and spans over a response of at most five tokens; the rest is in order."""
    n, m = draw(st.integers(0, 2)), draw(st.integers(0, 5))
    bit = st.integers(0, 1)
    fields = {
        "prompt_tokens": [1] * n,
        "response_tokens": draw(st.lists(st.integers(2, 4), min_size=m, max_size=m)),
        "policy_mask": [0] * n + draw(st.lists(bit, min_size=m, max_size=m)),
        "env_mask": draw(st.one_of(st.none(), st.lists(bit, min_size=n + m, max_size=n + m))),
        "behavior_logprobs": draw(st.one_of(st.just([-1.0] * m), st.lists(st.sampled_from([None, -1.0]), max_size=5))),
        "response_length": draw(st.one_of(st.none(), st.integers(-1, m + 1))),
        "eos_token_id": draw(st.sampled_from([None, 2])),
        "stop_reason": draw(st.sampled_from(["eos", "stop", "length"])),
        "decoding": {**example()[0]["decoding"], "stop": draw(st.sampled_from([[], ["###"]]))},
        "truncated": None,
        "sampled_tokens": draw(st.one_of(st.none(), st.lists(st.integers(2, 4), max_size=4))),
        "version_spans": draw(st.one_of(st.none(), st.lists(span, max_size=2))),
        "environment_version": "shell-v1",
    }
    return {**example()[0], **fields}


keywords = st.sampled_from(
    [
        {},
        {"partial_rollouts": True},
        {"current_version": 127, "partial_rollouts": True},
        {"current_version": 8},
        {"current_version": 9, "max_lag": 1, "partial_rollouts": True},
        {"current_version": 130, "max_lag": 3},
        {"current_version": 2**63 - 1, "max_lag": 0},
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(mutated(), min_size=1, max_size=6), keywords)
def test_same_verdicts_as_the_record_path_on_mutated_records(records, kw):
    assert verdicts(raw_table(records), **kw) == expected(records, **kw)


@settings(max_examples=150, deadline=None)
@given(st.lists(small_episode(), min_size=1, max_size=8), keywords)
def test_same_verdicts_as_the_record_path_on_small_episodes(records, kw):
    assert verdicts(raw_table(records), **kw) == expected(records, **kw)


@settings(max_examples=40, deadline=None)
@given(st.lists(mutated(), min_size=2, max_size=6), st.data())
def test_layout_changes_no_verdict(records, data):
    cut = data.draw(st.integers(0, len(records)))
    whole = raw_table(records)
    chunked = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    padded = raw_table([multi_turn(), *records, multi_turn()]).slice(1, len(records))
    assert verdicts(whole) == verdicts(chunked) == verdicts(padded)


@pytest.mark.parametrize("code", sorted(CODES))
def test_examples_have_their_code_in_a_table(code):
    record, kw = example(code)
    if not isinstance(record, dict):
        pytest.skip("a table holds records alone")
    rows = [record, record] if code == "duplicate_id" else [record]
    assert code in verdicts(raw_table(rows), **kw)[-1][1]
    assert verdicts(raw_table(rows), **kw) == expected(rows, **kw)


def test_more_rows_than_a_block():
    good, bad = example()[0], example("logprob_positive")[0]
    records = [{**(bad if i % 1000 == 7 else good), "sample_id": f"s{i % 19_000}"} for i in range(20_000)]
    result = validate_table(raw_table(records))
    assert result["sample_id"].to_pylist() == [r["sample_id"] for r in records]
    for i, codes in enumerate(result["codes"].to_pylist()):
        wanted = ["duplicate_id"] * (i >= 19_000) + ["logprob_positive"] * (i % 1000 == 7)
        assert codes == wanted, i


def test_null_lists_with_entries_behind_them():
    table = raw_table([example()[0], multi_turn()])
    mask = table.column("env_mask").combine_chunks()
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 6, 15], pa.int32()), pa.array([1] * 15, pa.int8()), mask=pa.array([True, True])
    )
    assert mask.null_count == 1
    at = table.schema.get_field_index("env_mask")
    got = verdicts(table.set_column(at, RAW_SCHEMA.field("env_mask"), hidden), partial_rollouts=True)
    assert got == expected([example()[0], {**multi_turn(), "env_mask": None}], partial_rollouts=True)


def test_empty_table():
    result = validate_table(SCHEMA.empty_table())
    assert result.num_rows == 0
    assert result.column_names == ["sample_id", "status", "codes"]


def test_a_missing_column_is_null_throughout():
    table = raw_table([example()[0]]).drop_columns(["verifier_version", "sample_id", "num_retries", "extra"])
    assert validate_table(table).to_pylist() == [
        {"sample_id": None, "status": "quarantine", "codes": ["missing_field"]}
    ]
    assert verdicts(pa.table({"run_id": ["a"]})) == expected([{"run_id": "a"}])


def test_other_widths_and_layouts_of_a_type_are_read():
    table = raw_table([example()[0], multi_turn()])
    types = {
        "prompt_tokens": pa.large_list(pa.int32()),
        "policy_mask": pa.list_(pa.bool_()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "run_id": pa.dictionary(pa.int32(), pa.string()),
        "policy_version": pa.uint16(),
    }
    for name, kind in types.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table.column(name).cast(kind))
    assert [status for status, _ in verdicts(table, partial_rollouts=True)] == ["accept", "accept"]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("prompt_tokens", pa.array([["101"]])),
        ("prompt_tokens", pa.array([[1.0]])),
        ("prompt_tokens", pa.array([2**63], pa.uint64())),
        ("prompt_tokens", pa.array([[2**63]], pa.list_(pa.uint64()))),
        ("run_id", pa.array([42])),
        ("policy_version", pa.array(["127"])),
        ("policy_mask", pa.array([[300]])),
        ("reward", pa.array([{"correctness": 1.0}])),
        ("decoding", pa.array(["greedy"])),
        ("version_spans", pa.array([[{"start": 0, "end": 1, "version": 1, "note": "x"}]])),
        ("truncated", pa.array([1])),
    ],
)
def test_a_column_of_another_type_is_named(name, column):
    with pytest.raises(ValueError, match=rf"^{name}: a column of .* where .* is due") as error:
        validate_table(pa.table({name: column}))
    assert "\n" not in str(error.value)


def test_decoding_children_go_by_name():
    kind = pa.struct([("top_k", pa.int32()), ("seed", pa.int64()), ("temperature", pa.float32())])
    rows = [{"top_k": 0, "temperature": 1.0}, {"top_k": 0, "temperature": 1.0, "seed": 3}]
    got = verdicts(pa.table({"decoding": pa.array(rows, kind)}))
    assert got == expected([{"decoding": row} for row in rows])
    assert ["unknown_field" in codes for _, codes in got] == [False, True]


def test_a_map_with_a_key_twice_is_no_mapping():
    reward = pa.array([[("a", 1.0), ("b", 1.0)], [("a", 1.0), ("a", 2.0)]], SCHEMA.field("reward").type)
    assert [codes == ["wrong_type"] for _, codes in verdicts(pa.table({"reward": reward}))] == [False, True]


def test_no_table_and_a_column_twice_are_refused():
    with pytest.raises(TypeError, match=r"rollouts\.to_table"):
        validate_table([example()[0]])
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["run_id", "run_id"])
    with pytest.raises(ValueError, match="'run_id' is there twice"):
        validate_table(twice)


def test_numpy_arrays_in_a_record_read_like_lists():
    record = example()[0]
    record["response_tokens"] = np.array(record["response_tokens"], np.int32)
    record["policy_mask"] = np.array(record["policy_mask"], bool)
    assert validate(record).status == "accept"


@pytest.mark.parametrize("name", [*rollouts.structure.LISTS, "per_token", "banned_token_ids", "stop"])
def test_lists_are_too_large_from_the_same_length_on(name, monkeypatch):
    for module in (rollouts.structure, rollouts.table):
        monkeypatch.setattr(module, "LIST_ENTRIES", 20)
    entry = {"version_spans": {"start": 0, "end": 1, "version": 7}, "stop": "#", "per_token": [0.5]}.get(name, 1)
    for length, wanted in ((20, False), (21, True)):
        field = {name: [entry] * length} if name != "per_token" else {name: {"a": [entry] * length}}
        record = {"decoding": field} if name in ("banned_token_ids", "stop") else field
        ((_, codes),) = verdicts(raw_table([record]))
        assert (codes == ["too_large"]) == wanted
        assert [codes] == [codes for _, codes in expected([record])]
