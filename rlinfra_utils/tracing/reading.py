"""Read a run folder back, whatever state a crash left it in: `read_run`.

Models: rows as pandas frames, and everything that is wrong with them as a list of sentences; nothing is repaired and
nothing raises but a folder that is no run. Leaves out judging records (`rollouts.validate_table(run.table)`).
Use: `run = read_run("out/run")`; `run.batches`, `run.problems`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rlinfra_utils.doors import instance
from rlinfra_utils.rollouts import SCHEMA, RolloutFileError, read
from rlinfra_utils.timers import Trace
from rlinfra_utils.tracing.folder import BATCHES, DESCRIPTION, EVENTS, ROLLOUTS, TRACE, Description, describe
from rlinfra_utils.tracing.lines import BatchLine, EventLine, parse


@dataclass(frozen=True)
class RunData:
    """What a run folder holds. Frames, a row each:

    rollouts: the record's columns, with `rollout_id` (its sample_id) and `file`. batches: the fields of `BatchLine`
    in order of writing, and `rolled_back`: a later restore of its branch began at an earlier optimizer step, so the
    weights that go on never saw it. events: the fields of `EventLine`, then all others by name (absent: missing).
    table: the rollouts in Arrow, row by row as in the frame. spans: `timers.Trace.frame()` of trace.json, or None.
    problems: one sentence each, the file first.
    """

    folder: Path
    description: Description
    table: pa.Table
    rollouts: pd.DataFrame
    batches: pd.DataFrame
    events: pd.DataFrame
    spans: pd.DataFrame | None
    problems: list[str]

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.description.run_id

    @property
    def config_hash(self) -> str:
        """Hash of the configuration of the last branch."""
        return self.description.config_hash

    @property
    def last_unix_s(self) -> float | None:
        """The latest stamp in the files; None where there is none."""
        stamps = [*self.batches["time_unix_s"], *self.events["time_unix_s"]]
        return max(stamps) if stamps else None


def read_run(folder: str | os.PathLike) -> RunData:
    """The run in `folder`. Raises RunFolderError, in one line, where `run.json` is missing or broken."""
    folder = Path(folder)
    description = describe(folder)
    table, files, problems = _read_rollouts(folder / ROLLOUTS)
    batch_lines, batch_problems = parse(folder / BATCHES, BatchLine)
    event_lines, event_problems = parse(folder / EVENTS, EventLine)
    rollouts = table.to_pandas(maps_as_pydicts="lossy", integer_object_nulls=True)
    rollouts.insert(0, "rollout_id", rollouts["sample_id"])
    rollouts["file"] = files
    batches = _frame(batch_lines, BatchLine)
    events = _frame(event_lines, EventLine)
    batches["rolled_back"] = _rolled_back(batches, events)
    spans, trace_problems = _read_trace(folder / TRACE)
    problems += batch_problems + event_problems + trace_problems + _contradictions(description, rollouts, batches)
    problems += _missing_files(folder / ROLLOUTS, events)
    return RunData(folder, description, table, rollouts, batches, events, spans, problems)


def require_run(run: Any) -> RunData:
    """`run` itself. Raises ValueError for anything else, such as the folder's path."""
    return instance("run", run, RunData, "as read_run(folder) gives")


def _read_rollouts(folder: Path) -> tuple[pa.Table, list[str], list[str]]:
    """All rows, the file of each, and the files that cannot be read; names beginning with a dot are unfinished."""
    tables, files, problems = [SCHEMA.empty_table()], [], []
    for path in sorted(path for path in folder.glob("*.parquet") if not path.name.startswith(".")):
        try:
            table = read(path)
        except RolloutFileError as error:
            problems.append(f"{ROLLOUTS}/{path.name}: {error}")
            continue
        tables.append(table)
        files += [path.name] * table.num_rows
    return pa.concat_tables(tables), files, problems


def _read_trace(path: Path) -> tuple[pd.DataFrame | None, list[str]]:
    if not path.exists():
        return None, []
    try:
        return Trace.merge([path]).frame(), []
    except (ValueError, OSError) as error:
        return None, [f"{path.name}: {' '.join(str(error).split())}"]


def _frame(lines: list[Any], model: type) -> pd.DataFrame:
    rows = [line.model_dump() for line in lines]
    others = dict.fromkeys(name for row in rows for name in row if name not in model.model_fields)
    return pd.DataFrame(rows, columns=[*model.model_fields, *others])


def _rolled_back(batches: pd.DataFrame, events: pd.DataFrame) -> list[bool]:
    """Whether each batch was undone: restored later, in its branch, from a step before it."""
    restores = events[events["kind"] == "restored"]
    if restores.empty:
        return [False] * len(batches)
    return [
        bool(
            (
                (restores["branch_id"] == batch.branch_id)
                & (restores["time_unix_s"] >= batch.time_unix_s)
                & (restores["step"] < batch.optimizer_step)
            ).any()
        )
        for batch in batches.itertuples()
    ]


def _contradictions(description: Description, rollouts: pd.DataFrame, batches: pd.DataFrame) -> list[str]:
    """What the files say against one another."""
    found = []
    for rollout_id, count in Counter(rollouts["rollout_id"]).items():
        if count > 1:
            files = sorted(set(rollouts.loc[rollouts["rollout_id"] == rollout_id, "file"]))
            found.append(f"{ROLLOUTS}: {rollout_id!r} is there {count} times, in {', '.join(files)}; keep one")
    for run_id in sorted(set(rollouts["run_id"].dropna()) - {description.run_id}):
        found.append(f"{ROLLOUTS}: records of run {run_id!r} lie in the folder of run {description.run_id!r}")
    for branch_id, hash_ in sorted(set(zip(batches["branch_id"], batches["config_hash"]))):
        branch = description.branches.get(branch_id)
        if branch is None or branch.config_hash != hash_:
            found.append(f"{BATCHES}: branch {branch_id!r} with config_hash {hash_} is not in {DESCRIPTION}")
    return found + _trained_wrongly(set(rollouts["rollout_id"]), batches[~batches["rolled_back"].astype(bool)])


def _trained_wrongly(known: set[str], standing: pd.DataFrame) -> list[str]:
    """Batches and rollouts that count twice, and rollouts that nobody stored, among batches that were not undone."""
    found = []
    for name in ("training_batch_id", "optimizer_step"):
        for (branch_id, value), count in Counter(zip(standing["branch_id"], standing[name])).items():
            if count > 1:
                found.append(f"{BATCHES}: {name} {value!r} of branch {branch_id!r} stands {count} times, none undone")
    trained: Counter[tuple[str, str]] = Counter()
    for batch in standing.itertuples():
        trained.update((batch.branch_id, rollout_id) for rollout_id in batch.rollout_ids)
        absent = [rollout_id for rollout_id in batch.rollout_ids if rollout_id not in known]
        if absent:
            of = f"{len(absent)} rollouts of {batch.training_batch_id!r}"
            found.append(f"{BATCHES}: {of} are stored nowhere, {absent[0]!r} first")
    for (branch_id, rollout_id), count in trained.items():
        if count > 1:
            found.append(f"{BATCHES}: {rollout_id!r} was trained on {count} times in branch {branch_id!r}")
    return found


def _missing_files(folder: Path, events: pd.DataFrame) -> list[str]:
    """Files of rollouts that an event says were written and that are not there."""
    named = {str(name) for name in events.loc[events["kind"] == "rollouts", "file"]} if "file" in events else set()
    missing = sorted(named - {path.name for path in folder.glob("*")})
    return [f"{ROLLOUTS}/{name}: was written and is not there" for name in missing]
