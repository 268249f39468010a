"""What to do about stale data: every measure of lesson step 12.4.4 on the tiny policy at lag 0, 2 and 8, by seed.

Each run goes on for the same updates; rewards are compared after equal updates, equal rollouts and equal time of the
overlapped loop, as far as every run got. Measures that change nothing at lag 0 are not run there. One thread.
Leaves out measures combined. It resumes from build/, and stores results/staleness_grid.json. About 8 s a run on one
core, 24 runs a seed. Run: python -m benchmarks.staleness_grid [--small | --seeds N]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rlinfra_utils import levels, policy
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.timers import Trace

ROOT = Path(__file__).parent.parent
LR = 3e-4
SETTINGS = {"prompts_per_step": 16, "group_size": 8, "num_epochs": 2, "minibatches": 2}
NUM_UPDATES = 40
#: Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def conditions(small: bool) -> list[tuple[int, str, bool]]:
    """(lag, measure, whether long answers come back late)."""
    if small:
        return [(0, "none", False), (2, "none", False), (2, "discard", True)]
    grid = [(0, "none", False), (0, "fewer steps", False)]
    grid += [(lag, name, False) for lag in (8, 2) for name in policy.measures(lag)]
    return grid + [(8, name, True) for name in ("none", "discard")]


def label(lag: int, measure: str, long_late: bool) -> str:
    """A condition's name in the stored result."""
    return f"lag {lag}, {measure}" + (", long answers late" if long_late else "")


def start() -> tuple[HFEngine, policy.Trainer, object]:
    """Engine, trainer and tokenizer at the warm start."""
    model, tokenizer = policy.load_warm_start()
    return HFEngine(policy.load_warm_start()[0], tokenizer), policy.Trainer(model, lr=LR), tokenizer


def measure_costs(num_steps: int) -> policy.StageCosts:
    """Stage costs of the sequential loop with the grid's settings."""
    engine, trainer, tokenizer = start()
    trace = Trace()
    loop = policy.SequentialLoop(engine, trainer, tokenizer, trace, **SETTINGS)
    for _ in range(num_steps):
        loop.step()
    return policy.StageCosts.measured(trace)


def run(lag: int, name: str, long_late: bool, seed: int, costs: policy.StageCosts, num_updates: int) -> dict:
    """One run, as plain values, once its books are found in balance."""
    engine, trainer, tokenizer = start()
    measure = policy.measures(lag, SETTINGS["num_epochs"])[name]
    done = policy.run_with_lag(
        engine, trainer, tokenizer, lag, measure, costs, num_updates, long_late=long_late, seed=seed, **SETTINGS
    )
    assert done.num_sampled == done.trained.total() + done.discarded.total() + done.num_in_flight
    assert long_late or done.updates["max_lag"].max() <= lag
    means = done.updates[["mean_lag", "token_ess", "sequence_ess", "clip_share", "loss_clip_share", "k3", "grad_norm"]]
    counts = {kind: sorted(getattr(done, kind).items()) for kind in ("trained", "masked", "discarded")}
    return {
        "curve": done.curve.to_dict("list"),
        "updates": means.mean().to_dict() | {"lowest_sequence_ess": float(done.updates["sequence_ess"].min())},
        "max_abs_log": float(done.updates["max_abs_log"].max()),
        "dropped_share": done.dropped_share,
        "lengths": {kind: {str(length): num for length, num in pairs} for kind, pairs in counts.items()},
    }


def interval(values: list[float]) -> dict[str, float]:
    """Mean and 95 % t interval over seeds; no interval for one seed."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return {"mean": mean}
    half = T_975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def row_of(of_seed: list[dict], budgets: dict[str, float]) -> dict:
    """One condition: rewards at the budgets, the mean curve, means and extremes of what was measured on the way."""
    row = {}
    for budget, value in budgets.items():
        done = [policy.LagRun(curve=pd.DataFrame(run["curve"])) for run in of_seed]
        ends, means = ([getattr(run, way)(budget, value) for run in done] for way in ("at", "mean_until"))
        row[budget] = {"end": interval(ends), "on the way": interval(means), "ends": ends, "means": means}
    curves = {column: [run["curve"][column] for run in of_seed] for column in (*budgets, "correctness")}
    row["curve"] = {column: [statistics.fmean(v) for v in zip(*values)] for column, values in curves.items()}
    row |= {key: statistics.fmean(run["updates"][key] for run in of_seed) for key in of_seed[0]["updates"]}
    row["max_abs_log"] = max(run["max_abs_log"] for run in of_seed)
    row["dropped_share"] = statistics.fmean(run["dropped_share"] for run in of_seed)
    row["lengths"] = {kind: total([run["lengths"][kind] for run in of_seed]) for kind in of_seed[0]["lengths"]}
    return row


def summarise(runs: dict[str, dict[int, dict]]) -> dict:
    """Every condition, at the budgets that each run reached."""
    everything = [run for by_seed in runs.values() for run in by_seed.values()]
    budgets = {budget: float(min(run["curve"][budget][-1] for run in everything)) for budget in policy.BUDGETS}
    rows = {name: row_of([by_seed[seed] for seed in sorted(by_seed)], budgets) for name, by_seed in runs.items()}
    for row in rows.values():
        for budget in budgets:  # seeds are paired: the same prompts, the same draws at version 0
            pairs = zip(rows["lag 0, none"][budget]["means"], row[budget]["means"], strict=True)
            row[budget]["loss to lag 0"] = interval([fresh - stale for fresh, stale in pairs])
    return {"budgets": budgets} | rows


def rounded(value: Any) -> Any:
    """Numbers with five digits, in lists and dicts of any depth: more would be noise in a file that people read."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def total(counts: list[dict[str, int]]) -> dict[str, int]:
    """Sum of counts by length."""
    lengths = sorted({length for count in counts for length in count}, key=int)
    return {length: sum(count.get(length, 0) for count in counts) for length in lengths}


class Log:
    """Finished runs, one JSON line each, so that a grid that was stopped goes on; the first line holds the costs."""

    def __init__(self, path: Path) -> None:
        self.path, self.runs = path, {}
        path.parent.mkdir(exist_ok=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.costs = policy.StageCosts(**lines[0]["costs"]) if lines else measure_costs(num_steps=20)
        if not lines:
            path.write_text(json.dumps({"costs": asdict(self.costs)}) + "\n")
        for line in lines[1:]:
            self.runs.setdefault(line["name"], {})[line["seed"]] = line["run"]

    def add(self, name: str, seed: int, done: dict) -> None:
        """Keep a run, here and on disk."""
        self.runs.setdefault(name, {})[seed] = done
        with self.path.open("a") as file:
            file.write(json.dumps({"name": name, "seed": seed, "run": done}) + "\n")


def show(rows: dict[str, dict]) -> None:
    """A line a condition: mean correctness on the way to each budget with its interval, and how stale the data were."""
    print(f"{'':40s}" + "".join(f"{budget:>22s}" for budget in policy.BUDGETS) + "   lag   ESS  clip  dropped")
    for name, row in rows.items():
        cells = ""
        for budget in policy.BUDGETS:
            score = row[budget]["on the way"]
            cells += f"{score['mean']:7.3f}" + (f" [{score['low']:.3f}, {score['high']:.3f}]" if "low" in score else "")
        columns = (("mean_lag", 6), ("sequence_ess", 6), ("clip_share", 6), ("dropped_share", 9))
        print(f"{name:40s}{cells}" + "".join(f"{row[figure]:{width}.2f}" for figure, width in columns))


def main() -> None:
    """Run what is missing, then compare and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="three conditions, one seed, ten updates, nothing stored")
    parser.add_argument("--seeds", type=int, default=5, help="2 to 10; an interval over fewer seeds is wider")
    arguments = parser.parse_args()
    if not 2 <= arguments.seeds <= len(T_975) + 1:
        parser.error(f"--seeds {arguments.seeds}: needs 2 to {len(T_975) + 1}")
    small = arguments.small
    num_seeds, num_updates = (1, 10) if small else (arguments.seeds, NUM_UPDATES)
    torch.set_num_threads(1)
    log = Log(ROOT / "build" / ("staleness_grid_small.jsonl" if small else "staleness_grid.jsonl"))
    wanted = [(seed, condition) for seed in range(num_seeds) for condition in conditions(small)]
    for number, (seed, condition) in enumerate(wanted, 1):
        name, start_s = label(*condition), time.perf_counter()
        if seed in log.runs.get(name, {}):
            continue
        log.add(name, seed, run(*condition, seed, log.costs, num_updates))
        score, taken_s = log.runs[name][seed]["curve"]["correctness"][-1], time.perf_counter() - start_s
        print(f"{number:3d}/{len(wanted)}  seed {seed}  {name:36s} correct {score:.3f}  {taken_s:.1f} s", flush=True)
    result = summarise({name: {seed: by_seed[seed] for seed in range(num_seeds)} for name, by_seed in log.runs.items()})
    show({name: row for name, row in result.items() if name != "budgets"})
    if not small:
        parameters = SETTINGS | {
            "lr": LR,
            "num_updates": num_updates,
            "num_seeds": num_seeds,
            "stage_costs": asdict(log.costs),
        }
        print(levels.store("staleness_grid", rounded(result), ROOT / "results", level="A", parameters=parameters))


if __name__ == "__main__":
    main()
