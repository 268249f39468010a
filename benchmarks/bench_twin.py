"""The twin against real runs: configurations that it has not seen, from calibration runs among them.

Every figure is the median of several runs, real and simulated. A shared machine is faster in one minute than in the
next, so the runs go in rounds, each configuration once a round, the two of the calibration too; no prediction sees a
run of its own configuration. Processes are pinned, so it needs Linux, two idle cores and nothing beside it. Beside the
bars it says which of the calibrated times had moved in a run: a machine that is not itself is told from a model that is
wrong. Stores results/twin.json. About 15 minutes; --small takes 2, stores nothing.
Run: python -m benchmarks.bench_twin [--small]
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
CALIBRATION: dict[str, dict[str, Any]] = {"calibration, at once": {}, "calibration, in turns": IN_TURNS}
HELD_OUT: dict[str, dict[str, Any]] = {
    "weights every 4 steps": {"sync_interval": 4},
    "half the queue": {"controller_options": {"max_rollouts": 64}},
    "one step off": {"controller": "one_step_off", "controller_options": {}},
    "synchronous, batch halved": {**IN_TURNS, "prompts_per_step": 4},
    "1 worker": {"num_workers": 1},
    "3 workers": {"num_workers": 3},
    "lengths x 1.5": {"forced_tokens": 36},
    "batch halved": {"prompts_per_step": 4},
}
#: How far a time may be from what the twin takes it for at the overlap of a run, before it is said to have moved.
MOVED = 0.15


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
    return found | {
        f"{kind}_{figure}": list(value) if isinstance(value, tuple) else value
        for kind, values in figures.items()
        for figure, value in values.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two configurations, one run each, nothing stored")
    small, start_s = parser.parse_args().small, time.perf_counter()
    num_runs, held_out = (1, dict(list(HELD_OUT.items())[:2])) if small else (NUM_RUNS, HELD_OUT)
    import_ray().init(
        num_cpus=len(HELD_OUT) + 2,
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=STORE_BYTES,
    )
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, list[Path]] = {name: [] for name in (*CALIBRATION, *held_out)}
        for seed in range(num_runs):
            for number, (name, changes) in enumerate((CALIBRATION | held_out).items()):
                paths[name].append(Path(folder) / f"{number}-{seed}")
                real_run(paths[name][-1], seed, changes)
                print(f"{time.perf_counter() - start_s:5.0f} s  round {seed + 1} of {num_runs}  {name}", flush=True)
        made = twin.calibrate(*(paths[name] for name in CALIBRATION))
        rows = [row(name, made, paths[name], changes) for name, changes in held_out.items()]
    shown = pd.DataFrame(rows)[["configuration", *twin.BARS, "missed", "moved"]]
    slower = {name: mean(made.beside, name) / mean(made.alone, name) for name in ("step_s", "train_s_per_padded_token")}
    print(f"beside over alone {slower}; bars {twin.BARS}; {time.perf_counter() - start_s:.0f} s")
    print(shown.to_string(index=False, float_format="{:.3f}".format))
    if not small:
        regimes = {"alone": made.alone, "beside": made.beside}
        parameters = BASE.to_json() | {"num_runs": num_runs, "num_simulated": NUM_SIMULATED, "bars": twin.BARS}
        calibration = {
            "overlap": made.overlap._asdict(),
            **{kind: {name: mean(times, name) for name in asdict(times)} for kind, times in regimes.items()},
        }
        result = {"calibration": calibration, "configurations": rows}
        print(levels.store("twin", result, ROOT / "results", level="C", parameters=parameters))
    return int(any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
