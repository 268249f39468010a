"""Write a run folder while the run goes on: `RunLog`.

Models: rollouts, training batches and events of one branch, by any number of writers. Leaves out reading them back
(`reading.py`), spans (`timers`) and checkpoints. Use: `log = RunLog("out/run", "run7", "main", config)`.

Life: made (the folder's branch begun or found) -> rollouts, batches and events in any order, from any number of
processes and threads, each with a RunLog of its own or a copy -> nothing to close. Invariant: what a call returned
from is seen by every reader, whatever is killed after it; batches, rollouts and the events of `lines.DURABLE` survive
a power cut too. Trap: a kill between two calls leaves the first without the second; write the rollouts before the
batch that trains on them, and the batch before the event of its checkpoint.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from rlinfra_utils.doors import complaint, is_number, short
from rlinfra_utils.rollouts import Rollout, to_table, write
from rlinfra_utils.tracing.folder import BATCHES, EVENTS, ROLLOUTS, RunFolderError, enter
from rlinfra_utils.tracing.lines import DURABLE, BatchLine, EventLine, append

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class RunLog:
    """The log of one branch of one run, in `folder`.

    A folder that is there already is reopened: a resume goes on in the same branch and must bring the same `config`
    (a mapping that JSON holds). Another configuration, or weights that depart from an earlier checkpoint on purpose,
    need a `branch_id` that the folder has not seen. Every line carries the branch and the hash of its configuration.

    Raises ValueError for a bad argument; RunFolderError for another run's folder, for a configuration that is not the
    branch's, and where the folder cannot be written.
    """

    def __init__(self, folder: str | Path, run_id: str, branch_id: str, config: Mapping[str, Any]) -> None:
        for name, value in (("run_id", run_id), ("branch_id", branch_id)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}={short(value)}: needs a text that names it")
        self.folder, self.run_id, self.branch_id = Path(folder), run_id, branch_id
        try:
            description = enter(self.folder, run_id, branch_id, config, time.time())
        except OSError as error:
            raise RunFolderError(f"{folder}: cannot be written: {error.strerror or error}") from error
        branch = description.branches[branch_id]
        self.config, self.config_hash, self.started_unix_s = branch.config, branch.config_hash, branch.started_unix_s

    def rollouts(
        self,
        records: pa.Table | Iterable[Rollout | Mapping],
        name: str | None = None,
        time_unix_s: float | None = None,
    ) -> Path:
        """Store rollouts as one Parquet file, whole or not at all, and say so in an event; returns its path.

        `name` without suffix: a second call with it replaces the file, so that work repeated after a crash is not
        there twice. None makes a name that nobody else has. `time_unix_s` as for `event`. Raises ValueError for a
        record of another run, one without sample_id, one that the schema cannot hold, and a name that is no plain
        file name.
        """
        table = records if isinstance(records, pa.Table) else to_table(records)
        self._check_identity(table)
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}" if name is None else name
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"name={short(name)}: needs letters, digits, '.', '_' or '-', no folder")
        path = self.folder / ROLLOUTS / f"{name}.parquet"
        write(table, path)
        self.event("rollouts", time_unix_s=time_unix_s, file=path.name, num_rollouts=table.num_rows)
        return path

    def batch(
        self,
        training_batch_id: str,
        optimizer_step: int,
        rollout_ids: Iterable[str],
        trained_policy_version: int,
        resulting_policy_version: int,
        stats: Mapping[str, float] | None = None,
        time_unix_s: float | None = None,
    ) -> None:
        """Log a training batch once its update is done; on the disk when this returns. Fields: see `BatchLine`.

        `time_unix_s`: when it was done; None is this moment. Raises ValueError for a field of another type, an empty
        batch or a rollout that is in it twice.
        """
        listed = isinstance(rollout_ids, Iterable) and not isinstance(rollout_ids, str)
        ids = list(rollout_ids) if listed else []
        are_texts = all(isinstance(name, str) for name in ids)
        twice = [name for name, count in Counter(ids).items() if count > 1] if are_texts else []
        if not ids or not are_texts or twice:
            raise ValueError(f"rollout_ids={short(twice or rollout_ids)}: needs a list of ids, texts, none twice")
        if not isinstance(stats or {}, Mapping):
            raise ValueError(f"stats={short(stats)}: needs numbers by name")
        fields = {
            "training_batch_id": training_batch_id,
            "optimizer_step": optimizer_step,
            "rollout_ids": ids,
            "trained_policy_version": trained_policy_version,
            "resulting_policy_version": resulting_policy_version,
            "stats": dict(stats or {}),
        }
        append(self.folder / BATCHES, self._line(BatchLine, time_unix_s, fields), durable=True)

    def event(self, kind: str, worker: str | None = None, time_unix_s: float | None = None, **fields: Any) -> None:
        """Log that something happened to `worker`, at `time_unix_s` (None: this moment). Kinds: `lines.REQUIRED`.

        Raises ValueError for a kind without name, a field that its kind must carry and lacks, or a value that JSON
        cannot hold.
        """
        taken = [name for name in ("branch_id", "config_hash") if name in fields]
        if taken:
            raise ValueError(f"{taken[0]}={short(fields[taken[0]])}: is this log's to say; use another name")
        line = self._line(EventLine, time_unix_s, {"kind": kind, "worker": worker, **fields})
        append(self.folder / EVENTS, line, durable=kind in DURABLE)

    def _line(self, model: type, time_unix_s: float | None, fields: dict[str, Any]) -> Any:
        stamp = time.time() if time_unix_s is None else time_unix_s
        if not is_number(stamp) or not math.isfinite(stamp):
            raise ValueError(f"time_unix_s={short(stamp)}: needs seconds since 1970")
        common = {"time_unix_s": float(stamp), "branch_id": self.branch_id, "config_hash": self.config_hash}
        try:
            return model(**common, **fields)
        except ValidationError as error:
            raise ValueError(complaint(error)) from None

    def _check_identity(self, table: pa.Table) -> None:
        for name in ("sample_id", "run_id"):
            if name not in table.column_names or table.column(name).null_count:
                raise ValueError(f"{name}: a record has none; without it no rollout can be followed")
        others = pc.filter(table.column("run_id"), pc.not_equal(table.column("run_id"), self.run_id))
        if len(others):
            raise ValueError(f"run_id={short(others[0].as_py())}: a record of another run; this log is {self.run_id!r}")
