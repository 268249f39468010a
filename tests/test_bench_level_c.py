"""The arithmetic of the comparison of arrangements, on made-up runs; the runs themselves are the benchmark's."""

import math

import numpy as np
import pandas as pd
import pytest

from benchmarks import bench_level_c as bench


def made_up(slope, update_s, goal_s, peak_bytes=10**9):
    """A run whose reward is `slope` times its time."""
    time_s = np.arange(1, 21) * update_s
    rows = pd.DataFrame({"update": range(1, 21), "time_s": time_s, "num_rollouts": range(8, 168, 8)})
    rows["smoothed"] = (slope * rows["time_s"]).where(rows["update"] > 7)
    figures = dict.fromkeys(bench.FIGURES, 0.5) | {"update_s": update_s, "lag_max": 1.0, "time_to_goal_s": goal_s}
    figures["peak_bytes"] = peak_bytes
    return figures | {"curve": rows, "cores": {"trainers": 0.5}, "path": {"wait": 0.25}}


def test_a_mean_curve_stands_on_time_that_all_seeds_have():
    runs = [made_up(0.1, 1.0, 3.0), made_up(0.3, 0.5, 3.0)]
    band = bench.mean_curve([run["curve"] for run in runs], "time_s")
    assert (band["at"][0], band["at"][-1]) == (8.0, 10.0)  # they begin at 8 and 4 s, and end at 20 and 10 s
    assert band["mean"] == pytest.approx([0.2 * at for at in band["at"]])
    half = 12.706 * 0.1 * np.array(band["at"])  # t of one degree of freedom x (0.1 sqrt 2) / sqrt 2
    assert band["high"] == pytest.approx(list(0.2 * np.array(band["at"]) + half))


def test_times_faster_is_by_pairs_and_leaves_out_seeds_that_never_arrive():
    found = bench.times_faster([8.0, 2.0, 5.0, None], [2.0, 2.0, None, 1.0])
    assert found["num_seeds"] == 2
    assert found["mean"] == pytest.approx(2.0)  # the geometric mean of 4 and 1
    assert found["low"] * found["high"] == pytest.approx(4.0)
    assert bench.times_faster([None], [1.0]) == {"num_seeds": 0}


def test_an_arrangement_compares_with_the_first_seed_by_seed(capsys):
    first, other = (
        [made_up(0.1, 1.0, 6.0), made_up(0.1, 1.2, 9.0)],
        [made_up(0.2, 0.5, 3.0, 3 * 10**9), made_up(0.2, 0.4, 3.0)],
    )
    row = bench.of_seeds(other, first)
    assert row["times_faster_time_to_goal"]["mean"] == pytest.approx(math.sqrt(2 * 3))
    assert row["times_faster_update"]["mean"] == pytest.approx(math.sqrt(2 * 3))
    assert row["time_to_goal_s"] == [3.0, 3.0]
    assert row["peak_bytes"] == 3 * 10**9
    assert row["cores"]["trainers"]["mean"] == 0.5
    bench.show({"asynchronous": row})
    assert "times_faster_update" in capsys.readouterr().out


def test_the_arrangements_are_bound_in_their_lag():
    for changes in bench.ARRANGEMENTS.values():
        limit = changes.get("controller_options", {}).get("drop_lag")
        assert limit in (None, bench.MOST_LAG[changes["controller"]])
