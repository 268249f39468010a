"""The page of bars: made from the records alone, with a row for every bar, and what is missed said."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks
from benchmarks.bars import HELD, RUNS, Bar, run_named
from ci import measured, run_series
from rlinfra_utils import levels
from rlinfra_utils.cluster import twin

ROOT = Path(__file__).parent.parent
IN_RECORDS = [run for run in RUNS if run.name not in measured.ELSEWHERE]


@pytest.fixture(scope="module")
def at_their_limits(tmp_path_factory):
    """A folder of results in which every bar of every run stands exactly at its limit."""
    folder = tmp_path_factory.mktemp("results")
    for run in IN_RECORDS:
        levels.store(run.name, {bar.what: float(bar.limit) for bar in run.bars}, folder / "bars", level="A")
    twin = {"tokens_per_s": 1.1, "lag_mean": -0.25, "lag_variation": 0.15, "queue_p95_batches": 1.0}
    twins = [{"configuration": f"c{number}", **twin} for number in range(6)]
    levels.store("twin", {"configurations": twins}, folder, level="C")
    levels.store("small_model_memory", {"ratio": 0.96}, folder, level="B")
    return folder


@pytest.fixture
def results(tmp_path, at_their_limits):
    """A copy to damage."""
    return shutil.copytree(at_their_limits, tmp_path / "results")


def change(path: Path, edit) -> None:
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def lines_of(page: str, heading: str) -> list[str]:
    return page.split(f"## {heading}\n\n")[1].split("\n\n## ")[0].strip().splitlines()


# The page in the repository.


def test_the_page_is_what_the_records_say():
    said = "docs/MEASURED.md is not what the records in results/ say: run `make measured`"
    assert measured.PAGE.read_text(encoding="utf-8") == measured.page(), said


def test_every_bar_has_one_row():
    page = measured.PAGE.read_text(encoding="utf-8")
    cells = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in page.splitlines() if line[:2] == "| "]
    found = [cell[:2] for cell in cells]
    for wanted in [(run.subject, bar.what) for run in RUNS for bar in run.bars] + [held[:2] for held in HELD]:
        assert found.count(wanted) == 1, wanted


#: The project's own bars, written down apart from `benchmarks/bars.py`.
PROMISED = {
    "series": [300, 60, 120, 3],
    "make_check": [3],
    "make_test": [40],
    "simulator": [8, 11, 30],
    "contract": [200_000, 30],
    "logprobs": [0.15, 1.25],
    "training_peak": [0.05],
    "twin": [0.10, 0.25],
    "recovery": [200, 0],
}


@pytest.mark.parametrize("name", PROMISED)
def test_no_promised_limit_was_moved_or_dropped(name):
    assert set(PROMISED[name]) <= {bar.limit for bar in run_named(name).bars}


def test_the_twins_limits_are_those_it_was_run_with():
    limits = json.loads((ROOT / "results" / "twin.json").read_text())["parameters"]["bars"]
    assert sorted(limits.values()) == sorted(bar.limit for bar in run_named("twin").bars[:4])


def test_each_run_names_a_program_that_is_there_and_speaks_of_its_bars():
    for run in RUNS:
        text = (ROOT / run.program).read_text(encoding="utf-8")
        if run.program.startswith("benchmarks") and run.name != "twin":
            assert f'report("{run.name}"' in text, run.program
            assert [bar.what for bar in run.bars if f'"{bar.what}' not in text] == []
        elif run.program == "Makefile":
            assert f"--took {run.name} " in text


def test_the_twins_bars_are_those_that_it_is_compared_with():
    by_figure = {
        "tokens_per_s": "throughput, share off",
        "lag_mean": "mean lag, versions off",
        "lag_variation": "lag distribution, total variation",
        "queue_p95_batches": "queue's 95th percentile, batches off",
    }
    limits = {bar.what: bar.limit for bar in run_named("twin").bars}
    assert {name: limits[what] for name, what in by_figure.items()} == twin.BARS


def test_every_benchmark_has_bars():
    programs = {run.program for run in RUNS}
    own = {"bench_level_c"}  # a comparison, without bars
    for path in (ROOT / "benchmarks").glob("bench_*.py"):
        assert f"benchmarks/{path.name}" in programs or path.stem in own, path.name


# What the page says.


def test_a_figure_at_its_limit_is_met_unless_the_bar_is_under(results):
    lines = lines_of(measured.page(results), "What falls short")
    under = [(run.subject, bar.what) for run in RUNS for bar in run.bars if bar.sign == "under"]
    # 1.1 - 1 is above 0.1 in binary: the twin's throughput is the one more.
    wanted = {*under, ("fidelity, worst held-out run", "throughput, share off")}
    assert {tuple(line.removeprefix("- ").split(": ")[:2]) for line in lines} == wanted


@pytest.mark.parametrize(
    ("sign", "good", "bad"),
    [("at most", (5, 4), (5.1,)), ("at least", (5, 6), (4.9,)), ("under", (4.9,), (5, 6)), ("exactly", (5,), (4, 6))],
)
def test_signs(sign, good, bad):
    bar = Bar("x", sign, 5)
    assert all(bar.is_met(value) for value in good)
    assert not any(bar.is_met(value) for value in bad)


def test_a_missed_bar_is_counted_marked_and_listed(results):
    before = measured.page(results)
    what = "rollouts/s, times SimPy's on the same events"
    change(results / "bars" / "simulator.json", lambda record: record["result"].update({what: 7.5}))
    after = measured.page(results)
    assert f"- simulator: {what}: 7.5, the bar is at least 8." in lines_of(after, "What falls short")
    row = next(line for line in after.splitlines() if line.startswith(f"| simulator | {what} "))
    assert "| at least 8 | 7.5 | NO |" in row
    counts = [re.search(r"(\d+) are met, (\d+) are missed", page).groups() for page in (before, after)]
    assert [int(b) - int(a) for a, b in zip(*counts)] == [-1, 1]


def test_the_twins_row_is_the_worst_and_names_all_that_miss(results):
    def edit(record):
        rows = record["result"]["configurations"]
        for row in rows:
            row["tokens_per_s"] = 1.0
        rows[2]["tokens_per_s"], rows[4]["tokens_per_s"] = 0.8, 1.125

    change(results / "twin.json", edit)
    (line,) = [line for line in lines_of(measured.page(results), "What falls short") if "throughput" in line]
    assert line.endswith("throughput, share off: 0.2, the bar is at most 0.1; missed by: c2 (0.2), c4 (0.125).")


def test_what_has_no_record_says_so(results):
    (results / "bars" / "grpo.json").unlink()
    page = measured.page(results)
    assert page.count("| not measured |") == len(run_named("grpo").bars)
    assert lines_of(page, "What falls short").count("- tiny policy, worst seed: not measured.") == 1


def test_two_machines_are_told_apart(results):
    change(results / "bars" / "fit.json", lambda record: record["hardware"].update(cpu_model="Other", cpu_count=64))
    page = measured.page(results)
    assert lines_of(page, "Machines")[1].startswith("2. 64 CPU cores (Other)")
    row = next(line for line in page.splitlines() if line.startswith("| fit finder"))
    assert [cell.strip() for cell in row.split("|")][7] == "2"


def test_a_test_that_is_gone_stops_the_page(results, monkeypatch):
    gone = HELD[0]._replace(test="tests/test_simulator_simpy.py::test_that_is_gone")
    monkeypatch.setattr(measured, "HELD", (*HELD, gone))
    with pytest.raises(ValueError, match=r"test_that_is_gone is not there"):
        measured.page(results)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "fit.json is no record"),
        ("[]", "fit.json is no record: it has no 'name'"),
        ("3", "fit.json is no record"),
        ('{"name": "fit"}', "it has no 'date'"),
    ],
)
def test_a_file_that_is_no_record_is_one_line(results, text, said):
    (results / "bars" / "fit.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        measured.page(results)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, "fast", True, [1.0], float("nan")])
def test_a_figure_that_is_none_is_named(results, value):
    what = "seconds for a map of 144 cells"
    change(results / "bars" / "fit.json", lambda record: record["result"].update({what: value}))
    with pytest.raises(ValueError, match=f"fit.json has .* for '{what}', not a figure; run benchmarks/bench_fit.py"):
        measured.page(results)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("twin", "result", {"configurations": [{"configuration": "c"}]}),
        ("twin", "result", {"configurations": 3}),
        ("small_model_memory", "result", {"ratio": "1.0"}),
        ("bars/fit", "result", []),
        ("bars/fit", "hardware", {}),
        ("bars/fit", "versions", None),
    ],
)
def test_a_record_of_another_shape_is_one_line(results, name, field, value):
    change(results / f"{name}.json", lambda record: record.update({field: value}))
    with pytest.raises(ValueError, match=f"{name}.json is not as .* stores it") as error:
        measured.page(results)
    assert "\n" not in str(error.value)


# From a run to the page.


def test_a_report_prints_keeps_and_says_what_was_missed(tmp_path, capsys):
    figures = {"minutes": 3.0, "minutes of lint": 0.25}
    assert benchmarks.report("make_test", figures, {"num": 2}, folder=tmp_path) == 0
    assert benchmarks.report("make_check", figures, folder=tmp_path) == 1  # 3 is not under 3
    assert re.search(r"^minutes +3  under 3 +NO$", capsys.readouterr().out, re.MULTILINE)
    record = json.loads((tmp_path / "make_test.json").read_text())
    assert (record["result"], record["parameters"]) == (figures, {"num": 2})


def test_a_small_run_keeps_nothing(tmp_path):
    benchmarks.report("make_test", {"minutes": 1}, keep=False, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_lacks_a_bar_or_has_no_bars_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"measured of 'make_test' lacks minutes"):
        benchmarks.report("make_test", {"hours": 1.0}, folder=tmp_path)
    with pytest.raises(ValueError, match=r"name = 'tests' is no run with bars; there are series, "):
        benchmarks.report("tests", {"minutes": 1.0}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_records_are_taken_but_none_over_a_later_one(tmp_path, results):
    build = tmp_path / "build"
    for name, date in (("fit", "2026-01-01"), ("spans", "2099-01-01")):
        figures = {bar.what: 0.5 for bar in run_named(name).bars}
        change(levels.store(name, figures, build, level="A"), lambda record, date=date: record.update(date=date))
    assert measured.take(build, results) == ["spans"]
    assert (results / "bars" / "spans.json").read_bytes() == (build / "spans.json").read_bytes()
    assert json.loads((results / "bars" / "fit.json").read_text())["date"] != "2026-01-01"


def test_a_file_of_no_run_is_not_taken(tmp_path, results):
    levels.store("twin2", {"x": 1.0}, tmp_path / "build", level="A")
    with pytest.raises(ValueError, match=r"'twin2' is no run"):
        measured.take(tmp_path / "build", results)
    assert not (results / "bars" / "twin2.json").exists()


def test_minutes_since_a_moment(tmp_path):
    assert measured.main([str(tmp_path), "--took", "make_check", str(time.time() - 90)]) == 0
    assert json.loads((tmp_path / "make_check.json").read_text())["result"]["minutes"] == pytest.approx(1.5, abs=0.5)


@pytest.mark.parametrize(("name", "moment"), [("fit", "0"), ("lunch", "0"), ("make_check", "noon")])
def test_a_time_that_makes_no_sense_is_one_line(tmp_path, capsys, name, moment):
    assert measured.main([str(tmp_path), "--took", name, moment]) == 2
    said = capsys.readouterr().err
    assert said.startswith("measured: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def outcome(name: str, seconds: float, peak_bytes: int) -> run_series.Outcome:
    return run_series.Outcome(name, "", "", "A", seconds, 1, None, peak_bytes)


def test_the_series_figures_by_hand():
    found = run_series.figures(
        [
            outcome("01_a", 10.0, 2_000_000_000),
            outcome("02_b", 30.0, 500_000_000),
            outcome("06_capstone_x", 80.0, 1_000_000_000),
        ]
    )
    assert {bar.what: found[bar.what] for bar in run_named("series").bars} == {
        "seconds in all": 120.0,
        "seconds of the slowest lesson": 30.0,
        "seconds of the capstone": 80.0,
        "peak memory of a notebook, GB": 2.0,
    }
    assert found["seconds of 02_b"] == 30.0


@pytest.mark.parametrize(
    ("arguments", "failure", "is_kept"),
    [([], None, True), (["--level", "B"], None, False), (["01"], None, False), ([], "cell 3: KeyError", False)],
)
def test_only_a_whole_level_a_series_that_passed_leaves_a_record(tmp_path, monkeypatch, arguments, failure, is_kept):
    done = [outcome("01_a", 10.0, 1), outcome("06_capstone_x", 80.0, 1)]
    done[0] = replace(done[0], failure=failure)
    monkeypatch.setattr(run_series, "run", lambda *_: done)
    monkeypatch.setattr(run_series, "RECORDS", tmp_path / "bars")
    run_series.main([*arguments, "--no-html", "--out", str(tmp_path / "lab")])
    assert (tmp_path / "bars" / "series.json").exists() == is_kept
