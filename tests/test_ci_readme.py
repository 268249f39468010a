"""The README's table of levels: made from the records alone, and silent about what none of them says."""

import json

import pytest

from ci import readme, run_series
from rlinfra_utils import levels

SERIES = {
    "notebooks": 8.0,
    "seconds in all": 211.4,
    "seconds of the slowest lesson": 31.0,
    "seconds of the capstone": 81.6,
    "peak memory of a notebook, GB": 1.26,
}
CLUSTER = {
    name: {"wall_s": {"mean": seconds}, "peak_bytes": gigabytes * 10**9}
    for name, seconds, gigabytes in [("a", 36.7, 2), ("b", 31.3, 3), ("c", 33.0, 1)]
}


@pytest.fixture
def results(tmp_path):
    commit = {"commit": "0123456789"}
    levels.store("series", SERIES, tmp_path / "bars", level="A", parameters=commit)
    levels.store("level_c_compare", CLUSTER, tmp_path, level="C", parameters={"num_updates": 56})
    return tmp_path


def change(path, edit):
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def cells(block):
    lines = [line.strip("|").split("|") for line in block.splitlines() if line[:2] == "| "]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_the_readme_says_what_the_records_say():
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.rewritten(text), "README.md is not what the records in results/ say: run `make measured`"


def test_figures_by_hand(results):
    rows = cells(readme.block(results))
    assert rows[0][3] == "8 notebooks in 211 s, each at most 82 s and 1.3 GB"
    assert rows[0][5] == "0123456789"
    assert rows[3][3] == "56 updates in 31 to 37 s, each at most 3.0 GB"


def test_what_has_no_record_is_not_measured(results):
    assert [row[3:] for row in cells(readme.block(results))[1:3]] == [["not measured", "-", "-"]] * 2
    assert "no machine yet" in readme.block(results / "elsewhere")


def test_a_gpu_is_named_only_where_a_record_is_of_one(results):
    assert "No run on a GPU is stored." in readme.block(results)
    change(results / "level_c_compare.json", lambda record: record["hardware"].update(gpu_name="T4"))
    assert "Stored from GPUs: T4." in readme.block(results)


@pytest.mark.parametrize("damage", [{"result": {}}, {"result": {"notebooks": "8"}}, {"hardware": {}}, {"result": 3}])
def test_a_record_of_another_shape_is_one_line(results, damage):
    change(results / "bars" / "series.json", lambda record: record.update(damage))
    with pytest.raises(ValueError, match=r"bars/series\.json is not as its run stores it") as caught:
        readme.block(results)
    assert "\n" not in str(caught.value)


def test_nothing_but_the_table_is_touched(results):
    text = f"before\n{readme.BEGIN}typed by hand\n{readme.END}after\n"
    found = readme.rewritten(text, results)
    assert found.startswith(f"before\n{readme.BEGIN}| level |")
    assert found.endswith(f"\n{readme.END}after\n")
    assert "by hand\n" not in found.replace(readme.BEGIN, "")
    assert readme.rewritten(found, results) == found


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END + readme.BEGIN, 2 * (readme.BEGIN + readme.END)])
def test_marks_that_are_not_there_once_stop_it(results, text):
    with pytest.raises(ValueError, match=r"README\.md: needs the lines"):
        readme.rewritten(text, results)


@pytest.mark.parametrize("has_vllm", [True, False])
def test_level_b_leaves_a_record_only_where_all_of_it_ran(tmp_path, monkeypatch, has_vllm):
    machine = levels.Machine("cpu", 2, None, small_model="package", vllm_python="python" if has_vllm else None)
    monkeypatch.setattr(run_series.levels, "detect", lambda: machine)
    monkeypatch.setattr(run_series, "RECORDS", tmp_path)
    outcomes = [run_series.Outcome(name, "", "", "B", 60.0, 1, None, 10**9) for name in ("01_a", "02_b")]
    run_series.keep_figures(outcomes, "B")
    assert (tmp_path / "series_b.json").exists() == has_vllm
    if has_vllm:
        record = json.loads((tmp_path / "series_b.json").read_text())
        assert readme.of_series(record) == "2 notebooks in 120 s, each at most 60 s and 1.0 GB"
