"""Kills at seeded instants, what they cost, and how fast a worker is back: the recovery of the real loop.

Every kill is followed by a look at the whole run folder; the bars are on what was lost (nothing) and on the time of a
restart against a start from nothing. Leaves out other machines. Run: python -m benchmarks.bench_recovery [KILLS [SEED]]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import report
from rlinfra_utils.recovery import KINDS, RunConfig, Supervisor, storm
from rlinfra_utils.tracing import read_run

NUM_KILLS = 200
NUM_RESTARTS = 10


def cold_start_s() -> float:
    """Seconds of a Python that starts and loads what a worker needs."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rlinfra_utils.recovery.workers"], check=True)
    return time.perf_counter() - start_s


def restart_s(folder: Path) -> float:
    """Median seconds from the kill of a collector to its successor's first turn, its model loaded."""
    with Supervisor(folder, RunConfig(num_updates=1000, save_every=1000)) as run:
        return float(np.median([_restart_s(run) for _ in range(NUM_RESTARTS)]))


def _restart_s(run: Supervisor) -> float:
    def beats() -> list[float]:
        events = read_run(run.folder).events
        return list(events.loc[(events["kind"] == "heartbeat") & (events["worker"] == "collector0"), "time_unix_s"])

    while not beats():
        time.sleep(0.01)
    run.kill("collector0")
    killed_unix_s = time.time()
    run.tend()
    while beats()[-1] < killed_unix_s:
        time.sleep(0.01)
    return next(stamp for stamp in beats() if stamp > killed_unix_s) - killed_unix_s


def main() -> int:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as name:
        found = storm(Path(name) / "storm", RunConfig(), num_kills, seed)
        warm_s, cold_s = restart_s(Path(name) / "restarts"), cold_start_s()
    print(found)
    for problem in found.problems[:10]:
        print(problem)
    assert found.num_kills == num_kills
    measured = {
        "kills at random instants": num_kills,
        "kinds of accident that did not come": len(set(KINDS) - {accident.kind for accident in found.accidents}),
        "rollouts lost, trained twice, or events that differ": len(found.problems),
        # A fork with torch loaded, against a Python that has to load it.
        "restart, share of a cold start": warm_s / cold_s,
        "seconds a kill, with its check": found.wall_s / num_kills,
        "restart, s": warm_s,
        "share of the updates trained again after a restore": found.num_repeated / (found.num_runs * found.num_updates),
    }
    return report("recovery", measured, {"seed": seed}, keep=num_kills >= NUM_KILLS)


if __name__ == "__main__":
    sys.exit(main())
