"""The twin against real runs: configurations that it has not seen, from calibration runs among them.

Every figure is the median of several runs, real and simulated. A shared machine is faster in one minute than in the
next, so the runs go in rounds, each configuration once a round and the calibration's, on which all predictions hang,
twice; no prediction sees a run of its own configuration. There are two twins, of workers that share a core and of one
that has a core to itself. Processes are pinned, so it needs Linux, two idle cores and nothing beside it. It also says
which of the calibrated times had moved in a run: a machine that is not itself is told from a model that is wrong; and
what the prediction would be if one side were a tenth slower and the other a tenth faster than calibrated.
Stores results/twin.json. About 25 minutes; --small takes 5, stores nothing. --runs names a folder to leave the runs in;
those that it has are read and not made again.
Run: python -m benchmarks.bench_twin [--small] [--runs FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ci.records import commit
from rlinfra_utils import levels
from rlinfra_utils.cluster import ClusterConfig, run, twin
from rlinfra_utils.cluster.session import STORE_BYTES, import_ray

ROOT = Path(__file__).parent.parent
NUM_UPDATES, NUM_RUNS, NUM_SIMULATED = 28, 3, 9
BASE = ClusterConfig(
    controller="bounded_queue",
    controller_options={"max_rollouts": 128},
    prompts_per_step=8,
    group_size=8,
    num_updates=NUM_UPDATES,
    forced_tokens=24,
    forced_sigma=0.6,
    max_new_tokens=96,
    save_every=10,
    pin_cores=True,
)
IN_TURNS: dict[str, Any] = {"controller": "synchronous", "controller_options": {}}
ALONE: dict[str, Any] = {"num_workers": 1}
#: By twin, what it is calibrated on: runs with both sides at work at once, and runs in turns.
CALIBRATION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared core": ({}, IN_TURNS),
    "own core": (ALONE, ALONE | IN_TURNS),
}
HELD_OUT: dict[str, dict[str, Any]] = {
    "weights every 4 steps": {"sync_interval": 4},
    "half the queue": {"controller_options": {"max_rollouts": 64}},
    "one step off": {"controller": "one_step_off", "controller_options": {}},
    "synchronous, batch halved": {**IN_TURNS, "prompts_per_step": 4},
    "1 worker, lengths x 1.5": ALONE | {"forced_tokens": 36},
    "3 workers": {"num_workers": 3},
    "lengths x 1.5": {"forced_tokens": 36},
    "batch halved": {"prompts_per_step": 4},
}
#: How far a time may be from what the twin takes it for at the overlap of a run, before it is said to have moved.
MOVED = 0.15
#: How much slower one side, and faster the other, is made to see how much a prediction hangs on the calibration.
SHIFT = 0.1
SHIFTED = ("tokens_per_s", "lag_mean")


def real_run(path: Path, seed: int, changes: dict[str, Any]) -> None:
    outcome = run(replace(BASE, seed=seed, **changes), path)
    assert outcome.status == "done", outcome
    assert outcome.restarts == 0, outcome


def predicted(made: twin.Twin, **changes: Any) -> twin.Figures:
    return twin.median([made.figures(made.predict(seed=seed, **changes)) for seed in range(NUM_SIMULATED)])


def moved(made: twin.Twin, paths: list[Path]) -> str:
    """Which times of real runs are not what the twin has for the runs' own overlap, with the ratio of the means."""
    runs = [twin.read_times(path) for path in paths]
    found = twin.Times.median([run.times for run in runs])
    expected = made.times(twin.Overlap(*np.median([run.overlap for run in runs], axis=0)))
    ratios = {name: mean(found, name) / mean(expected, name) for name in asdict(found)}
    return ", ".join(f"{name} x {ratio:.2f}" for name, ratio in ratios.items() if abs(ratio - 1) > MOVED)


def mean(times: twin.Times, name: str) -> float:
    return float(np.mean(getattr(times, name)))


def row(name: str, made: twin.Twin, paths: list[Path], changes: dict[str, Any]) -> dict[str, Any]:
    """One configuration, predicted and measured."""
    before, after = predicted(made, **changes), twin.median([twin.measure(path) for path in paths])
    found = {"configuration": name, **twin.compare(before, after), "moved": moved(made, paths)}
    figures = {"predicted": asdict(before), "measured": asdict(after)}
    sides = [(1 + SHIFT, 1 - SHIFT), (1 - SHIFT, 1 + SHIFT)]
    shifted = [predicted(made.slower(*each), **changes) for each in sides]
    found |= {f"shifted_{figure}": sorted(getattr(each, figure) for each in shifted) for figure in SHIFTED}
    return found | {
        f"{kind}_{figure}": list(value) if isinstance(value, tuple) else value
        for kind, values in figures.items()
        for figure, value in values.items()
    }


def means(made: twin.Twin) -> dict[str, Any]:
    """The twin's overlap, and the mean of each of its times in turns and at once."""
    regimes = {"in turns": made.alone, "at once": made.beside}
    found = {kind: {name: mean(times, name) for name in asdict(times)} for kind, times in regimes.items()}
    return {"overlap": made.overlap._asdict()} | found


def real_runs(folder: Path, held_out: dict[str, dict[str, Any]], num_rounds: int) -> dict[str, list[Path]]:
    """The runs' folders by name; in a round the calibration's runs come before the held-out ones, and among them."""
    calibration = {
        f"{name}, {kind}": changes
        for name, pair in CALIBRATION.items()
        for kind, changes in zip(("at once", "in turns"), pair, strict=True)
    }
    held, start_s = list(held_out.items()), time.perf_counter()
    half = len(held) // 2
    order = [*calibration.items(), *held[:half], *calibration.items(), *held[half:]]
    paths: dict[str, list[Path]] = {}
    for number, (name, changes) in enumerate(order * num_rounds):
        path = folder / f"{number:02d} {name}"
        paths.setdefault(name, []).append(path)
        if not path.exists():
            real_run(path, number // len(order), changes)
        print(f"{time.perf_counter() - start_s:5.0f} s  {number + 1} of {len(order) * num_rounds}  {name}", flush=True)
    return paths


def of(twins: dict[str, twin.Twin], changes: dict[str, Any]) -> twin.Twin:
    """The twin of a configuration: does its worker share a core?"""
    return twins["own core" if changes.get("num_workers") == 1 else "shared core"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two configurations, one run each, nothing stored")
    parser.add_argument("--runs", type=Path, help="folder of the runs; a temporary one if not given")
    options, start_s = parser.parse_args(), time.perf_counter()
    small = options.small
    num_runs, held_out = (1, dict(list(HELD_OUT.items())[:2])) if small else (NUM_RUNS, HELD_OUT)
    import_ray().init(
        num_cpus=len(HELD_OUT) + 2,
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=STORE_BYTES,
    )
    with tempfile.TemporaryDirectory() as temporary:
        paths = real_runs(options.runs or Path(temporary), held_out, num_runs)
        twins = {name: twin.calibrate(paths[f"{name}, at once"], paths[f"{name}, in turns"]) for name in CALIBRATION}
        rows = [row(name, of(twins, changes), paths[name], changes) for name, changes in held_out.items()]
    shown = pd.DataFrame(rows)[["configuration", *twin.BARS, "missed", "moved"]]
    print(f"bars {twin.BARS}; {time.perf_counter() - start_s:.0f} s; milliseconds a step:")
    for name, made in twins.items():
        print(f"{name:12s} in turns {1e3 * made.alone.step_s:.2f}, at once {1e3 * made.beside.step_s:.2f}")
    print(shown.to_string(index=False, float_format="{:.3f}".format))
    if not small:
        parameters = BASE.to_json() | {"num_runs": num_runs, "num_simulated": NUM_SIMULATED, "bars": twin.BARS}
        parameters |= {"shift": SHIFT, "commit": commit()}
        result = {"calibration": {name: means(made) for name, made in twins.items()}, "configurations": rows}
        print(levels.store("twin", result, ROOT / "results", level="C", parameters=parameters))
    return int(any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
