"""Parquet and JSON: a round trip loses nothing, a damaged file says so, a file is there whole or not at all."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import Decoding, Rollout, RolloutFileError, VersionSpan, example

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
integer = st.integers(-(2**63), 2**63 - 1)
number = st.floats()
tokens = st.lists(integer, max_size=4)
bits = st.lists(st.integers(-128, 127), max_size=4)


def maybe(strategy):
    return st.none() | strategy


any_decoding = st.builds(
    Decoding,
    temperature=maybe(number),
    top_p=maybe(number),
    top_k=maybe(integer),
    logprobs_mode=maybe(text),
    min_p=number,
    repetition_penalty=number,
    max_new_tokens=maybe(integer),
    ignore_eos=st.booleans(),
    banned_token_ids=tokens,
    stop=st.lists(text, max_size=2),
)
FIELDS = {
    **dict.fromkeys(["run_id", "branch_id", "prompt_id", "group_id", "sample_id", "tokenizer_version"], maybe(text)),
    **dict.fromkeys(["chat_template_version", "engine", "verifier_version", "environment_version"], maybe(text)),
    **dict.fromkeys(["stop_reason", "training_batch_id"], maybe(text)),
    **dict.fromkeys(["prompt_tokens", "response_tokens", "engine_prompt_tokens", "sampled_tokens"], maybe(tokens)),
    **dict.fromkeys(["policy_mask", "env_mask"], maybe(bits)),
    "behavior_logprobs": maybe(st.lists(maybe(number), max_size=4)),
    **dict.fromkeys(["response_length", "eos_token_id", "policy_version", "optimizer_step"], maybe(integer)),
    "resulting_policy_version": maybe(integer),
    "num_retries": integer,
    "per_token": st.dictionaries(text, st.lists(st.lists(number, max_size=2), max_size=3), max_size=2),
    "version_spans": maybe(st.lists(st.builds(VersionSpan, start=integer, end=integer, version=integer), max_size=2)),
    "decoding": maybe(any_decoding),
    "reward": maybe(st.dictionaries(text, number, max_size=2)),
    "truncated": maybe(st.booleans()),
    **dict.fromkeys(["started_s", "finished_s"], maybe(number)),
    "extra": st.dictionaries(text, text, max_size=2),
}
any_rollout = st.builds(Rollout, **FIELDS)


def test_the_strategy_draws_every_field():
    assert set(FIELDS) == set(Rollout.model_fields) - {"schema_version"}


@settings(max_examples=200, deadline=None)
@given(st.lists(any_rollout, max_size=3))
def test_table_round_trip_loses_nothing(records):
    table = rollouts.to_table(records)
    assert table.schema == rollouts.SCHEMA
    assert repr(rollouts.from_table(table)) == repr(records)  # repr tells NaN, -0.0, null and empty apart


@settings(max_examples=200, deadline=None)
@given(any_rollout)
def test_json_round_trip_loses_nothing(record):
    line = rollouts.to_json(record)
    assert "\n" not in line
    assert repr(rollouts.from_json(line)) == repr(record)


@settings(max_examples=50, deadline=None)
@given(records=st.lists(any_rollout, max_size=3))
def test_parquet_round_trip_loses_nothing(records, tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "rollouts.parquet"
    rollouts.write(records, path)
    assert repr(rollouts.from_table(rollouts.read(path))) == repr(records)
    rollouts.write(rollouts.read(path), path)
    assert repr(rollouts.from_table(rollouts.read(path))) == repr(records)
    assert os.listdir(path.parent) == [path.name]


def test_null_and_empty_stay_apart():
    pairs = [Rollout(), Rollout(prompt_tokens=[], reward={}, version_spans=[], run_id="", decoding=Decoding())]
    for back in (
        rollouts.from_table(rollouts.to_table(pairs)),
        [rollouts.from_json(rollouts.to_json(r)) for r in pairs],
    ):
        assert back == pairs
        assert back[0].reward is None
        assert back[1].reward == {}


def test_a_rollout_of_numpy_arrays_is_one_of_lists():
    arrays = {"prompt_tokens": np.array([1, 2]), "per_token": {"h": np.ones((2, 3), np.float32), "e": np.zeros(2)}}
    assert rollouts.from_table(rollouts.to_table([arrays])) == [
        Rollout(prompt_tokens=[1, 2], per_token={"h": [[1.0] * 3] * 2, "e": [[0.0], [0.0]]})
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rollouts.parquet"
    rollouts.write([example()[0], example("stale")[0]], path)
    return path


def one_line(error, *parts):
    assert "\n" not in str(error.value)
    assert all(str(part) in str(error.value) for part in parts)


def test_every_truncation_is_noticed(file):
    whole = file.read_bytes()
    for size in sorted({*range(0, 40), *range(40, len(whole), 97), *range(len(whole) - 20, len(whole))}):
        file.write_bytes(whole[:size])
        with pytest.raises(RolloutFileError) as error:
            rollouts.read(file)
        one_line(error, file, "is no whole Parquet file")


def test_damaged_bytes_end_in_one_line_or_in_a_table_of_the_schema(file):
    """Page bodies carry checksums; page headers and the footer do not, so that a few flips go unnoticed."""
    whole, messages = file.read_bytes(), []
    for at in range(0, len(whole), 23):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        file.write_bytes(damaged)
        try:
            assert rollouts.read(file).schema == rollouts.SCHEMA
        except RolloutFileError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)


def test_a_damaged_page_is_noticed_by_its_checksum(tmp_path):
    """Bytes of the ids themselves, stored plainly, are changed: the values would read as good ones."""
    path = tmp_path / "plain.parquet"
    ids = list(range(1_000_000_000, 1_000_000_100))
    table = rollouts.to_table([{**example()[0], "prompt_tokens": ids}])
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
    at = whole.index(ids[50].to_bytes(8, "little"))
    path.write_bytes(whole[:at] + (7).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(RolloutFileError) as error:
        rollouts.read(path)
    one_line(error, path, "is no whole Parquet file")


def test_paths_that_hold_no_rollouts(tmp_path):
    empty = tmp_path / "empty.parquet"
    empty.touch()
    words = tmp_path / "words.parquet"
    words.write_text("not a Parquet file, but long enough to be one")
    for path, cause in (
        (empty, "is no whole Parquet file"),
        (words, "is no whole Parquet file"),
        (tmp_path, "is a folder"),
        (tmp_path / "absent.parquet", "is no file"),
        (tmp_path / ("n" * 5000), ""),
        (str(tmp_path / "nul\0"), "is no file"),
    ):
        with pytest.raises(RolloutFileError) as error:
            rollouts.read(path)
        one_line(error, path, cause)


def test_a_file_of_another_schema_names_the_column(tmp_path):
    good = rollouts.to_table([example()[0]])
    at = good.schema.get_field_index("policy_version")
    tables = {
        "'schema_version' is missing": pa.table({"a": [1]}),
        "'policy_version' is int32, the schema has int64": good.set_column(
            at, "policy_version", good.column(at).cast(pa.int32())
        ),
        "'advantage' is double, the schema has no such column": good.append_column("advantage", pa.array([0.5])),
        "'reward' is missing": good.drop_columns(["reward"]),
        "order": good.select(good.column_names[::-1]),
    }
    for cause, table in tables.items():
        pq.write_table(table, tmp_path / "other.parquet")
        with pytest.raises(RolloutFileError) as error:
            rollouts.read(tmp_path / "other.parquet")
        one_line(error, cause, tmp_path)


def test_write_replaces_whole_files_or_leaves_the_old_one(file, monkeypatch):
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"record 1: prompt_tokens\[0\]"):
        rollouts.write([example()[0], {"prompt_tokens": ["x"]}], file)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RolloutFileError) as error:
        rollouts.write([example()[0]], file)
    one_line(error, file, "No space left on device")
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_places_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "r.parquet"):
        with pytest.raises(RolloutFileError) as error:
            rollouts.write([example()[0]], path)
        one_line(error, path, "cannot be written")
    assert os.listdir(tmp_path) == []


def test_what_a_table_cannot_hold_is_named():
    for bad, message in (
        ({"prompt_tokens": [2**63]}, "record 1: prompt_tokens: 9223372036854775808 does not fit 64 bits"),
        ({"run_id": "\ud800"}, "record 1: run_id: "),
        ({"advantage": 1.0}, "record 1: advantage: is no field"),
        ({"policy_mask": [300]}, "policy_mask: "),
        (7, "record 1: record: 7 is a int"),
    ):
        with pytest.raises(ValueError, match=f"^{message}") as error:
            rollouts.to_table([example()[0], bad])
        one_line(error)
    for single in (example()[0], Rollout(), "text", 7):
        with pytest.raises(TypeError, match="put a single one in a list"):
            rollouts.to_table(single)


def test_rows_that_are_no_records_are_named():
    reward = pa.array([[("a", 1.0)], [("a", 1.0), ("a", 2.0)]], rollouts.SCHEMA.field("reward").type)
    for table, message in (
        (pa.table({"prompt_tokens": [[1], [None]]}), r"row 1: prompt_tokens\[0\]: None"),
        (pa.table({"reward": reward}), "row 1: reward: "),
        (pa.table({"advantage": [None, 0.5]}), "row 1: fills a column outside the schema"),
        (pa.table({"schema_version": [1, 2]}), "row 1: schema_version: 2 is not 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}") as error:
            rollouts.from_table(table)
        one_line(error)
    with pytest.raises(ValueError, match="outside the schema"):
        rollouts.write(pa.table({"advantage": [0.5]}), "nowhere.parquet")


@pytest.mark.parametrize(
    "broken",
    [
        *("", "{", "[]", "null", '"text"', '{"run_id": 3}', '{"advantage": 1.0}', "[" * 100_000, b"\xff", None, 3),
        *('{"run_id": "a", "run_id": "b"}', '{"policy_version": 1e400}', '{"run_id": "a"} {"run_id": "b"}'),
        '{"policy_version": ' + "9" * 5000 + "}",
    ],
    ids=lambda value: repr(value)[:20],
)
def test_json_that_holds_no_record(broken):
    with pytest.raises(ValueError, match=r"^JSON: ") as error:
        rollouts.from_json(broken)
    one_line(error)
    assert len(str(error.value)) < 300


def test_json_is_readable_by_others():
    record = json.loads(rollouts.to_json(example()[0]))
    assert record["sample_id"] == "run42-p008-g03"
    assert record["decoding"]["temperature"] == 0.8
