"""Synchronous, one step off, asynchronous: real runs of one policy on two cores, by seed; then one with vLLM.

Trainer on one core, both workers on the other, so that taking turns leaves one idle. Reward over time, rollouts and
updates with 95 % t intervals over seeds, time to a reward paired by seed, and from the traces what each core did.
Linux, two idle cores, nothing beside it. Stores results/level_c_compare.json in about 10 minutes; --small takes one and
stores nothing. --vllm: SmolLM2-135M with a real server as engine, stores results/level_c_vllm.json in about 4.
Run: python -m benchmarks.bench_level_c [--small | --vllm]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.staleness_grid import interval, rounded
from ci.records import commit
from rlinfra_utils import levels, policy, sync
from rlinfra_utils.cluster import ClusterConfig, comparison, run
from rlinfra_utils.cluster.session import STORE_BYTES, available_bytes, import_ray
from rlinfra_utils.engines import HFEngine, load_small_model
from rlinfra_utils.levels import cost
from rlinfra_utils.tracing import RunData, read_run

ROOT = Path(__file__).parent.parent
NUM_UPDATES, NUM_SEEDS = 56, 5
#: Reward that a run is timed to: well above the warm start's, below what all arrangements reach.
GOAL = 0.70
NUM_PROMPTS, EVAL_SEED = 500, 10_000
BASE = ClusterConfig(prompts_per_step=16, group_size=8, num_updates=NUM_UPDATES, save_every=NUM_UPDATES, pin_cores=True)
#: One batch may wait, and nothing older than four versions is trained on.
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "synchronous": {"controller": "synchronous"},
    "one step off": {"controller": "one_step_off"},
    "asynchronous": {"controller": "bounded_queue", "controller_options": {"max_rollouts": 128, "drop_lag": 4}},
}
MOST_LAG = {"synchronous": 0, "one_step_off": 1, "bounded_queue": 4}
AXES = ("time_s", "num_rollouts", "update")
NUM_POINTS = 40
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
FIGURES = ("update_s", "wall_s", "lag_mean", "normalized_ess", "clip_share", "correctness")
PARTS = ("cores", "path")
VLLM = ClusterConfig(
    engine="vllm",
    num_workers=1,
    groups_at_once=4,
    controller="bounded_queue",
    controller_options={"max_rollouts": 16, "drop_lag": 4},
    prompts_per_step=4,
    group_size=4,
    num_updates=6,
    save_every=6,
    max_new_tokens=8,
    lr=1e-5,
)
SUPERVISED: dict[str, Any] = {"num_steps": 40, "batch_size": 16, "lr": 5e-5}


def correctness(folder: Path, seed: int) -> float:
    """Share of right answers to prompts drawn apart, by the weights that were published last."""
    model, tokenizer = policy.load_warm_start()
    engine = HFEngine(model, tokenizer)
    with sync.hold(folder / "weights" / "main") as held:
        engine.load(held.path, held.version)
    return policy.evaluate(engine, tokenizer, NUM_PROMPTS, EVAL_SEED + seed)["correctness"]


def measured(folder: Path, config: ClusterConfig) -> dict[str, Any]:
    """One run, checked: its summary after the third update, its curve, its time to the goal, its weights in the end."""
    outcome = run(config, folder)
    assert outcome.status == "done", outcome
    assert outcome.restarts == 0, outcome
    found = read_run(folder)
    assert found.problems == [], found.problems
    rows = comparison.curve(found)
    assert rows["lag_max"].max() <= MOST_LAG[config.controller], rows["lag_max"].max()
    trained = {name for names in found.batches["rollout_ids"] for name in names}
    assert len(trained) == config.num_updates * config.batch_rollouts, len(trained)
    own = {"curve": rows, "time_to_goal_s": comparison.time_to(rows, GOAL), "wall_s": outcome.seconds}
    own["peak_bytes"] = sum(peaks_bytes(found).values())
    return comparison.summary(folder) | own | {"correctness": correctness(folder, config.seed)}


def peaks_bytes(found: RunData) -> dict[str, int]:
    """The most memory that each process of a run held at a time; pages that several share count for each."""
    memory = found.events[found.events["kind"] == "memory"]
    return dict(zip(memory["worker"], (int(peak) for peak in memory["peak_bytes"]), strict=True))


def mean_curve(curves: list[pd.DataFrame], axis: str) -> dict[str, list[float]]:
    """The smoothed reward at points of an axis that all seeds have: mean and 95 % t interval over seeds."""
    known = [rows.dropna(subset="smoothed") for rows in curves]
    low, high = max(rows[axis].iloc[0] for rows in known), min(rows[axis].iloc[-1] for rows in known)
    points = np.linspace(low, high, NUM_POINTS)
    values = np.array([np.interp(points, rows[axis], rows["smoothed"]) for rows in known])
    bands = [interval(list(column)) for column in values.T]
    return {"at": points.tolist()} | {key: [band[key] for band in bands] for key in bands[0]}


def of_seeds(runs: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """One arrangement: means and intervals over its seeds; how much faster than `first`, seed by seed."""
    row: dict[str, Any] = {"reward": {axis: mean_curve([one["curve"] for one in runs], axis) for axis in AXES}}
    row |= {name: interval([one[name] for one in runs]) for name in FIGURES}
    row |= {name: {part: interval([one[name][part] for one in runs]) for part in runs[0][name]} for name in PARTS}
    row |= {name: max(one[name] for one in runs) for name in ("lag_max", "peak_bytes")}
    row["time_to_goal_s"] = [one["time_to_goal_s"] for one in runs]
    for name in ("time_to_goal_s", "update_s"):
        before, after = ([one[name] for one in of] for of in (first, runs))
        row[f"times_faster_{name.removesuffix('_s')}"] = times_faster(before, after)
    return row


def times_faster(before: list[float | None], after: list[float | None]) -> dict[str, float]:
    """Geometric mean of before / after over the seeds that have both, with its t interval, and how many those are."""
    logs = [math.log(a / b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    found = {name: math.exp(value) for name, value in interval(logs).items()} if logs else {}
    return {"num_seeds": len(logs), **found}


def compare(folder: Path, base: ClusterConfig, num_seeds: int) -> dict[str, Any]:
    """All arrangements, seed after seed, so that a machine that changes in an hour changes for all of them."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARRANGEMENTS}
    for seed in range(num_seeds):
        for name, changes in ARRANGEMENTS.items():
            done = measured(folder / f"{name} {seed}", replace(base, seed=seed, **changes))
            runs[name].append(done)
            print(
                f"seed {seed}  {name:14s} {done['wall_s']:5.1f} s, {done['update_s']:.3f} s an update, "
                f"reward {done['curve']['smoothed'].iloc[-1]:.3f}, correct {done['correctness']:.3f}, "
                f"to {GOAL}: {done['time_to_goal_s']}",
                flush=True,
            )
    return {name: of_seeds(found, runs["synchronous"]) for name, found in runs.items()}


def with_vllm(folder: Path) -> dict[str, Any]:
    """A few updates of SmolLM2-135M, answered by a real vLLM server; and the memory that all of it took.

    Supervised steps come first: as it is, the model does not stop after a number, and no answer earns a reward.
    """
    model = folder / "model"
    small = load_small_model()
    losses = policy.supervise(small.model, small.tokenizer, **SUPERVISED)
    small.save(model)
    provenance = small.provenance
    del small
    free_bytes = [available_bytes()]
    config = replace(VLLM, model=str(model))
    outcome = run(config, folder / "run", show=print, watch=lambda loop: free_bytes.append(available_bytes()))
    assert outcome.status == "done", outcome
    found = read_run(folder / "run")
    assert found.problems == [], found.problems
    syncs = found.events[found.events["kind"] == "weight_sync"]
    figures = comparison.summary(folder / "run", first=2)
    assert figures["lag_max"] <= 4, figures["lag_max"]
    return figures | {
        "wall_s": outcome.seconds,
        "num_updates": outcome.num_updates,
        "zero_lag_gap_nats": [max(gaps) for gaps in syncs["zero_lag_gap_nats"]],
        "sync_s": [float(seconds) for seconds in syncs["seconds"]],
        "peak_bytes": peaks_bytes(found),
        "machine_took_bytes": int(free_bytes[0] - min(free_bytes)),
        "supervised_loss": [losses[0], losses[-1]],
        "rewards": comparison.curve(found)["reward"].tolist(),
        "provenance": provenance,
    }


def show(rows: dict[str, Any]) -> None:
    """A line an arrangement, each figure with its interval."""
    for name, row in rows.items():
        print(name)
        for figure in (*FIGURES, "times_faster_time_to_goal", "times_faster_update"):
            values = {key: f"{value:.3g}" for key, value in row[figure].items()}
            print(f"    {figure:28s}{values}")
        for part in PARTS:
            print(f"    {part:28s}" + ", ".join(f"{key} {value['mean']:.0%}" for key, value in row[part].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one seed, twelve updates, nothing stored")
    parser.add_argument("--vllm", action="store_true", help="the run with SmolLM2 and a vLLM server instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.vllm:
            parameters = VLLM.to_json() | {"model": "SmolLM2-135M-Instruct", "supervised": SUPERVISED}
            parameters["commit"] = commit()
            cost.begin("level_c_vllm")
            result = rounded(with_vllm(Path(folder)))
            print(result)
            store = {"level": "C", "parameters": parameters, "peak_memory_bytes": result["machine_took_bytes"]}
            print(levels.store("level_c_vllm", result, ROOT / "results", **store))
            return 0
        import_ray().init(num_cpus=5, address="local", **QUIET, object_store_memory=STORE_BYTES)
        size = {"num_updates": 12, "save_every": 12, "prompts_per_step": 8} if options.small else {}
        base, start_s = replace(BASE, **size), time.perf_counter()
        rows = compare(Path(folder), base, 1 if options.small else NUM_SEEDS)
        seconds = time.perf_counter() - start_s
    show(rows)
    faster = rows["asynchronous"]["times_faster_time_to_goal"].get("low")
    print(f"{seconds:.0f} s; asynchronous reaches {GOAL} sooner, by the interval's low end: {faster and faster > 1}")
    if not options.small:
        parameters = base.to_json() | {"num_seeds": NUM_SEEDS, "goal": GOAL, "smoothed_updates": comparison.WINDOW}
        parameters |= {"arrangements": ARRANGEMENTS, "num_prompts_drawn_apart": NUM_PROMPTS, "seconds": seconds}
        parameters["commit"] = commit()
        print(
            levels.store("level_c_compare", rounded(rows), ROOT / "results", level="C", parameters=rounded(parameters))
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
