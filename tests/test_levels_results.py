"""Stored results: what is written comes back, names no machine, and what is malformed is named."""

import json
import os
import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinfra_utils import levels
from rlinfra_utils.levels import results

MACHINE = levels.Machine("CPU", 2, 8 * 2**30, 1, "Tesla T4", (7, 5), 15637086208, vllm_python="/home/me/python")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "_folder", lambda: tmp_path)
    monkeypatch.setattr(results, "detect", lambda: MACHINE)
    return tmp_path


def test_what_is_stored_comes_back_with_its_provenance(folder):
    path = levels.store("decode_135m", {"tokens_per_s": 41.5}, folder, parameters={"num_prompts": 16})
    assert [path] == list(folder.iterdir())
    record = levels.stored("decode_135m")
    assert record["result"] == {"tokens_per_s": 41.5}
    assert record["parameters"] == {"num_prompts": 16}
    assert record["level"] == "B"
    assert record["hardware"]["capability"] == [7, 5]
    assert {"python", "numpy"} <= set(record["versions"])
    assert record["date"] == json.loads(path.read_text())["date"]


def test_a_stored_file_names_no_host_and_no_path(folder):
    text = levels.store("x", {"a": 1}, folder).read_text()
    hidden = (socket.gethostname(), str(folder), os.getcwd(), "/home", "vllm_python")
    assert not [word for word in hidden if word in text]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab é\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text("ab", min_size=1), plain, min_size=1, max_size=3), plain)
def test_any_plain_result_survives_the_file(folder, result, more):
    levels.store("any", result, folder, parameters={"more": more})
    record = levels.stored("any")
    assert record["result"] == result
    assert record["parameters"] == {"more": more}


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, r"result\.a\.b\[1\] is nan"),
        ({"a": float("-inf")}, r"result\.a is -inf"),
        ({"a": np.float32(1)}, r"result\.a is a float32"),
        ({"a": np.arange(3)}, r"result\.a is a ndarray"),
        ({1: 2}, "key 1"),
        ({"a": {None: 2}}, "key None"),
        ({}, "result={}: "),
        ([1], r"result=\[1\]: "),
        (None, "result=None: "),
        ({"a": b"x"}, r"result\.a is a bytes"),
    ],
)
def test_a_result_that_is_not_plain_is_refused_and_nothing_is_written(folder, result, named):
    with pytest.raises(ValueError, match=named) as caught:
        levels.store("x", result, folder)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "x.json", "x\n", "é", "a" * 81, 7, None])
def test_a_name_outside_the_alphabet_is_refused(folder, name):
    with pytest.raises(ValueError, match="name"):
        levels.store(name, {"a": 1}, folder)
    assert list(folder.iterdir()) == []


def test_a_level_outside_the_three_is_refused(folder):
    with pytest.raises(ValueError, match="level='auto': "):
        levels.store("x", {"a": 1}, folder, level="auto")


def test_a_failed_write_leaves_the_former_file(folder, monkeypatch):
    before = levels.store("x", {"a": 1}, folder).read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(results.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        levels.store("x", {"a": 2}, folder)
    assert (folder / "x.json").read_bytes() == before


def test_no_such_result(folder):
    with pytest.raises(FileNotFoundError, match="no stored result 'nothing'"):
        levels.stored("nothing")


@pytest.mark.parametrize("name", ["../x", "A", None])
def test_a_name_that_cannot_be_one_is_refused_before_any_file_is_opened(name):
    with pytest.raises(ValueError, match="name="):
        levels.stored(name)


GOOD = {
    "name": "x",
    "date": "2026-11-29",
    "level": "B",
    "hardware": {
        "cpu_model": "CPU",
        "cpu_count": 2,
        "memory_bytes": None,
        "num_accelerators": 0,
        "gpu_name": None,
        "capability": None,
        "gpu_memory_bytes": None,
    },
    "versions": {"python": "3.11.7"},
    "parameters": {},
    "result": {"a": 1},
}


def test_the_good_file_of_the_next_test_is_good(folder):
    (folder / "x.json").write_text(json.dumps(GOOD))
    assert levels.stored("x") == GOOD | {"cost": None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"date": "29.11.2026"}, "date="),
        ({"date": None}, "date="),
        ({"level": "D"}, "level="),
        ({"hardware": {}}, "hardware.cpu_model="),
        ({"hardware": GOOD["hardware"] | {"host": "me"}}, "hardware.host="),
        ({"hardware": GOOD["hardware"] | {"capability": [7]}}, "hardware.capability"),
        ({"versions": {"torch": 2.13}}, "versions.torch="),
        ({"result": []}, r"result=\[\]: "),
        ({"result": {}}, "result={}: "),
        ({"result": {"a": float("nan")}}, r"result\.a is nan"),
        ({"parameters": {"a": [float("inf")]}}, r"parameters\.a\[0\] is inf"),
        ({"name": "y"}, "name is 'y'"),
        ({"more": 1}, "more=1: "),
        ({"cost": {"seconds": -1.0, "peak_memory_bytes": None}}, r"cost\.seconds=-1.0: "),
        ({"cost": {"seconds": 1.0}}, r"cost\.peak_memory_bytes=.*: Field required"),
    ],
)
def test_a_malformed_file_is_named_with_its_field(folder, change, named):
    (folder / "x.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=rf"results/x\.json: .*{named}") as caught:
        levels.stored("x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, b'{"name": "x"}'])
def test_a_file_that_is_no_record_is_named(folder, text):
    (folder / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"results/x\.json: ") as caught:
        levels.stored("x")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_every_result_of_the_repository_can_be_shown(monkeypatch):
    monkeypatch.undo()
    for path in results._folder().glob("*.json"):
        line, table = results.describe(path.stem)
        assert levels.stored(path.stem)["date"] in line
        assert "versions" in repr(table)


def test_what_contains_itself_is_refused_by_field(tmp_path):
    endless = {}
    endless["again"] = endless
    with pytest.raises(ValueError, match=r"^result contains itself, or nests too deeply"):
        levels.store("endless", endless, tmp_path, level="A")
    assert list(tmp_path.iterdir()) == []


def test_a_name_too_long_for_a_file_is_refused():
    with pytest.raises(ValueError, match="name"):
        levels.stored("x" * 300)
