"""Triage keeps all that arrives; recovery fills from the log of the time, and from nothing else."""

import json
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import CODES, Decoding, Rollout, example, intake, recover, triage, validate


def stored(folder):
    """What lies in a triage folder: accepted Rollouts, and the lines of the others by status."""
    accepted = [r for path in sorted(folder.glob("accept/*.parquet")) for r in rollouts.from_table(rollouts.read(path))]
    lines = {
        status: [json.loads(line) for path in sorted(folder.glob(f"{status}/*.jsonl")) for line in path.open()]
        for status in ("quarantine", "reject")
    }
    return accepted, lines


def adds_up(folder, counts):
    accepted, lines = stored(folder)
    on_disk = {"accept": len(accepted), **{status: len(found) for status, found in lines.items()}}
    files = [path.name for path in folder.rglob("*") if path.is_file()]
    return on_disk == counts and all(name.startswith("part-") for name in files)


def named(i, code=None):
    return {**example(code)[0], "sample_id": f"s{i}"}


def test_each_status_has_its_place(tmp_path):
    records = [named(0), named(1, "missing_field"), named(2, "logprob_positive"), Rollout(**named(3)), "junk", named(0)]
    counts = triage(iter(records), tmp_path / "run" / "parts")
    assert counts == {"accept": 2, "quarantine": 1, "reject": 3}
    accepted, lines = stored(tmp_path / "run" / "parts")
    assert accepted == [Rollout(**named(0)), Rollout(**named(3))]
    (held,) = lines["quarantine"]
    assert held["status"] == "quarantine"
    assert held["record"] == records[1]
    assert [(f["code"], f["field"]) for f in held["findings"]] == [("missing_field", "verifier_version")]
    assert all(set(f) == {"code", "field", "message"} and f["message"] for f in held["findings"])
    assert [line["record"] for line in lines["reject"]] == [records[2], "junk", records[5]]
    assert [f["code"] for f in lines["reject"][2]["findings"]] == ["duplicate_id"]


def test_keywords_reach_the_verdict(tmp_path):
    record, keywords = example("stale")
    assert triage([record], tmp_path / "a")["accept"] == 1
    assert triage([record], tmp_path / "b", **keywords)["reject"] == 1


def test_a_table_is_sorted_like_its_records(tmp_path):
    codes = [code for code in CODES if code not in ("not_a_record", "duplicate_id")]
    records = [named(i, code) for i, code in enumerate(codes)] + [named("good"), named("good")]
    schema = pa.schema([*rollouts.SCHEMA, ("advantage", pa.float64())])
    table = pa.Table.from_pylist(records, schema=schema)
    keywords = {"current_version": 130, "max_lag": 2}
    by_table = triage(table, tmp_path / "table", **keywords)
    assert by_table == triage(records, tmp_path / "records", **keywords)
    assert adds_up(tmp_path / "table", by_table)
    (one, lines), (same, others) = stored(tmp_path / "table"), stored(tmp_path / "records")
    assert one == same
    for status in lines:
        assert [line["findings"] for line in lines[status]] == [line["findings"] for line in others[status]]


def test_what_only_a_table_can_hold_is_kept(tmp_path):
    reward = pa.array([[("a", 1.0), ("a", 2.0)]], rollouts.SCHEMA.field("reward").type)
    table = pa.table({"reward": reward, "blob": [b"\xff"], "sample_id": ["s"]})
    assert triage(table, tmp_path) == {"accept": 0, "quarantine": 0, "reject": 1}
    (line,) = stored(tmp_path)[1]["reject"]
    pairs = [{"__repr__": f"('a', {value})", "__type__": "tuple"} for value in (1.0, 2.0)]
    assert line["record"]["reward"] == pairs
    assert line["record"]["blob"] == {"__repr__": r"b'\xff'", "__type__": "bytes"}


def test_later_calls_add_parts_and_touch_none(tmp_path):
    for i in range(3):
        triage([named(i), named(f"lacks{i}", "missing_field")], tmp_path)
    for status, suffix in (("accept", "parquet"), ("quarantine", "jsonl")):
        names = sorted(path.name for path in (tmp_path / status).iterdir())
        assert names == [f"part-0000{i}.{suffix}" for i in range(3)]
    (tmp_path / "accept" / "part-00000.parquet").unlink()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("part-*")}
    triage([named(9)], tmp_path)
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert {r.sample_id for r in stored(tmp_path)[0]} == {"s1", "s2", "s9"}


def test_writers_side_by_side_lose_nothing(tmp_path):
    def work(i):
        for j in range(10):
            triage([named(f"{i}-{j}"), "junk"], tmp_path)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adds_up(tmp_path, {"accept": 40, "quarantine": 0, "reject": 40})


def test_parts_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(intake, "PART_RECORDS", 4)
    counts = triage([named(i, None if i % 2 else "missing_field") for i in range(20)], tmp_path)
    assert counts == {"accept": 10, "quarantine": 10, "reject": 0}
    assert adds_up(tmp_path, counts)
    assert len(list(tmp_path.glob("accept/*"))) > 1


def test_a_source_that_breaks_off_leaves_what_came(tmp_path):
    def source():
        record = named(0)
        yield record
        record["sample_id"] = "changed"  # the caller's dict may be used again
        yield named(1, "missing_field")
        raise ConnectionError("collector is gone")

    with pytest.raises(ConnectionError):
        triage(source(), tmp_path)
    assert adds_up(tmp_path, {"accept": 1, "quarantine": 1, "reject": 0})
    assert stored(tmp_path)[0][0].sample_id == "s0"


def test_places_and_arguments_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(rollouts.RolloutFileError, match=r"file: cannot hold parts"):
        triage([named(0)], tmp_path / "file")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "accept").touch()
    with pytest.raises(rollouts.RolloutFileError, match="a part cannot be written"):
        triage([named(0)], tmp_path / "parts")
    for single in (named(0), Rollout(), "text", 5):
        with pytest.raises(TypeError, match="put a single one in a list"):
            triage(single, tmp_path / "none")
    with pytest.raises(ValueError, match=r"^run_id: a column of int64"):
        triage(pa.table({"run_id": [1]}), tmp_path / "none")


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


leaf = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)),
    *(st.just(2**70), st.just(10**400), st.just("\ud800\n"), st.builds(object), st.sets(st.integers(), max_size=2)),
    *(st.builds(Unprintable), st.just(np.arange(3)), st.just(Decoding(top_k=3)), st.just((1, 2))),
)
hashable = st.one_of(st.none(), st.integers(), st.text(max_size=2))
junk = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hashable, inner, max_size=3))
known = st.dictionaries(st.sampled_from([*Rollout.model_fields, "other"]), junk, max_size=3)
anything = st.one_of(
    junk,
    known,
    known.map(lambda changes: {**example()[0], **changes}),
    st.sampled_from(sorted(CODES)).map(lambda code: example(code)[0]),
    st.just(Rollout(**example()[0])),
)


@settings(max_examples=150, deadline=None)
@given(records=st.lists(anything, max_size=8))
def test_what_is_on_disk_adds_up_to_what_came_in(records, tmp_path_factory):
    folder = tmp_path_factory.mktemp("triage")
    counts = triage(records, folder, partial_rollouts=True)
    assert sum(counts.values()) == len(records)
    assert adds_up(folder, counts)
    for line in (line for found in stored(folder)[1].values() for line in found):
        assert line["findings"]
        assert {f["code"] for f in line["findings"]} <= set(CODES)


def test_values_that_json_cannot_hold_are_marked(tmp_path):
    loop = []
    loop.append(loop)
    values = {"set": {3}, "huge": 10**5000, "bytes": b"\x00", "loop": loop, "keys": {1: 2}, "bad": Unprintable()}
    triage([{**named(0), **values, "array": np.arange(2), "surrogate": "\ud800", "nan": float("nan")}], tmp_path)
    (line,) = stored(tmp_path)[1]["quarantine"]
    record = line["record"]
    assert record["set"] == {"__repr__": "{3}", "__type__": "set"}
    assert int(record["huge"]["__repr__"], 16) == 10**5000
    assert record["keys"]["__repr__"] == "{1: 2}"
    assert "repr failed" in record["bad"]["__repr__"]
    assert record["array"] == [0, 1]
    assert record["surrogate"] == "\ud800"
    assert record["nan"] != record["nan"]
    assert "__repr__" in json.dumps(record["loop"])


# Recovery.

LOGGED = {"tokenizer_version": "bpe-v2", "verifier_version": "arith-v4", "decoding": example()[0]["decoding"]}
LOG = {example()[0]["sample_id"]: LOGGED}


def lacking(*names):
    return {name: value for name, value in example()[0].items() if name not in names}


def test_absent_fields_come_from_the_log():
    for record in (
        lacking("tokenizer_version", "decoding"),
        {**example()[0], "verifier_version": "", "decoding": None},
        {**example()[0], "decoding": {"temperature": 0.8}},
        {**example()[0], "decoding": Decoding(temperature=0.8)},
        Rollout(**lacking("tokenizer_version", "verifier_version")),
    ):
        before = repr(record)
        assert validate(record).status == "quarantine"
        recovered = recover(record, LOG)
        assert validate(recovered) == validate(example()[0])
        assert Rollout(**recovered) == Rollout(**example()[0])
        assert repr(record) == before


def test_recovery_fills_and_changes_nothing_else():
    record = {**lacking("verifier_version", "branch_id"), "advantage": 1.0}
    assert recover(record, LOG) == {**record, "verifier_version": "arith-v4"} | {
        "tokenizer_version": "bpe-v2",
        "decoding": record["decoding"],
    }
    assert validate(recover(record, LOG)).codes == ["missing_field", "unknown_field"]


def test_equal_values_of_another_make_agree():
    log = {
        example()[0]["sample_id"]: {"prompt_tokens": np.array([101, 42, 17]), "reward": {"correctness": 1, "format": 0}}
    }
    assert validate(recover(example()[0], log)).status == "accept"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tokenizer_version": "bpe-v3"}, "tokenizer_version: the record says 'bpe-v2', the log 'bpe-v3'"),
        ({"decoding": {"temperature": 1.0}}, "decoding.temperature: the record says 0.8, the log 1.0"),
        ({"response_tokens": [314, 159, 3]}, "response_tokens: the record says"),
        ({"verifier_version": 4}, "verifier_version: 4: "),
        ({"advantage": 1.0}, "advantage: 1.0: "),
        ({"decoding": {"seed": 1}}, "decoding.seed: 1: "),
        ({"sample_id": "other"}, "sample_id: the record says"),
    ],
)
def test_contradictions_and_foreign_entries_are_refused(entry, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        recover(example()[0], {example()[0]["sample_id"]: entry})
    assert "\n" not in str(error.value)


def test_without_an_entry_nothing_is_recovered():
    with pytest.raises(ValueError, match="the log has no entry for 'run42-p008-g03'; keep the record in quarantine"):
        recover(example()[0], {})
    for sample_id in (None, "", 7):
        with pytest.raises(ValueError, match=r"^sample_id: .* names no entry"):
            recover({**example()[0], "sample_id": sample_id}, LOG)
    for record, log in (("text", LOG), (example()[0], [LOGGED]), (None, None)):
        with pytest.raises(TypeError, match="pass a record and a mapping"):
            recover(record, log)


def test_quarantined_lines_can_be_recovered_and_sorted_again(tmp_path):
    triage([lacking("decoding")], tmp_path / "first")
    held = [json.loads(line) for line in (tmp_path / "first" / "quarantine" / "part-00000.jsonl").open()]
    counts = triage((recover(line["record"], LOG) for line in held), tmp_path / "second")
    assert counts == {"accept": 1, "quarantine": 0, "reject": 0}
