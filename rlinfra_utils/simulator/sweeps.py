"""Many configurations, each run to its end: a table with a row for each.

Models nothing of its own. Leaves out a search: the caller makes the grid. Use:
`sweep([replace(config, sync_interval=k, controller=AReaL(lag)) for k in (1, 2, 4) for lag in range(8)], workers=2)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import pandas as pd

from rlinfra_utils.doors import listed, number, short, whole
from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.loop import simulate


def sweep(configs: Iterable[LoopConfig], workers: int = 1, warm_up: float = 0.0, progress: bool = True) -> pd.DataFrame:
    """A row a configuration, in order: what differs from the defaults, then `Run.summary` and `reason`.

    `workers` processes; `warm_up` is the share of each run that its summary leaves out. `progress` writes a line to
    stderr. With several workers, a controller's class has to be importable. Raises ValueError for what is no config.
    """
    configs = listed("configs", configs, "LoopConfig")
    for i, config in enumerate(configs):
        if not isinstance(config, LoopConfig):
            raise ValueError(f"configs[{i}]={short(config)}: needs a LoopConfig")
    whole("workers", workers)
    number("warm_up", warm_up, 0, 0.99)
    tasks = [(config, warm_up) for config in configs]
    if workers == 1:
        return _table(map(_row, tasks), len(tasks), progress)
    with ProcessPoolExecutor(workers) as pool:
        chunk = max(1, min(32, len(tasks) // (4 * workers)))
        return _table(pool.map(_row, tasks, chunksize=chunk), len(tasks), progress)


def _row(task: tuple[LoopConfig, float]) -> dict[str, object]:
    config, warm_up = task
    run = simulate(config)
    return {**config.describe(), **run.summary(after_s=warm_up * run.end_s), "reason": run.reason}


def _table(rows: Iterable[dict[str, object]], total: int, progress: bool) -> pd.DataFrame:
    done = []
    for row in rows:
        done.append(row)
        if progress and (len(done) % max(1, total // 100) == 0 or len(done) == total):
            print(f"\rsimulated {len(done)} of {total}", end="" if len(done) < total else "\n", file=sys.stderr)
    return pd.DataFrame(done)
