"""What arrives is sorted by verdict and stored: `triage`.

Models: accepted rollouts in Parquet parts; the others as JSON lines, raw record and findings side by side,
never dropped. Leaves out deletion and retention, which are the run's owner's to decide.
Use: `counts = triage(records, folder, current_version=9, max_lag=2)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.codes import STATUSES
from rlinfra_utils.rollouts.convert import checked_table, refuse_single, row_dicts, schema_table
from rlinfra_utils.rollouts.record import Rollout
from rlinfra_utils.rollouts.storage import RolloutFileError, flush, flush_folder, write_parquet
from rlinfra_utils.rollouts.table import validate_table
from rlinfra_utils.rollouts.validate import judge, validate
from rlinfra_utils.rollouts.verdict import Demands, Finding, Verdict

#: A part is written once so many records of one status wait, and at the end of the call.
PART_RECORDS = 10_000
#: JSON nests no deeper than this here; what does is kept as its repr.
_MAX_DEPTH = 20


def triage(
    records: pa.Table | Iterable[Any],
    folder: str | os.PathLike,
    *,
    current_version: int | None = None,
    max_lag: int | None = None,
    partial_rollouts: bool = False,
) -> dict[str, int]:
    """Validate each record and store it by status; {"accept": n, "quarantine": n, "reject": n}.

    Records are dicts, Rollouts or whatever else arrives, or the rows of a table. Keywords as for `validate`; a
    sample_id that comes again within the call has duplicate_id. On disk:

        accept/part-00000.parquet       for `read`
        quarantine/part-00000.jsonl     a line: {"status", "findings": [{"code", "field", "message"}], "record"}
        reject/part-00000.jsonl         likewise

    Each call adds parts under numbers of its own, also beside other processes. In a record, a value that JSON
    cannot hold is kept as {"__repr__": text, "__type__": name}. If `records` raises midway, what came before is
    stored first. Raises ValueError or TypeError for senseless arguments before anything is read.
    """
    demands = Demands(current_version, max_lag, partial_rollouts)
    if isinstance(records, pa.Table):
        arrivals = _table_arrivals(records, validate_table(records, **vars(demands)), demands)
    else:
        refuse_single(records)
        arrivals = _record_arrivals(records, demands)
    parts = _Parts(Path(folder))
    try:
        for verdict, record in arrivals:
            parts.add(verdict, record)
    finally:
        parts.flush()
    return parts.counts


def _record_arrivals(records: Iterable[Any], demands: Demands) -> Iterator[tuple[Verdict, Any]]:
    """Each record's verdict, and the record: typed if it is accepted, raw if it is not."""
    seen: set[str] = set()
    for record in records:
        rollout, verdict = judge(record, demands)
        sample_id = _sample_id(record)
        if sample_id in seen:
            verdict = _repeated(verdict, sample_id)
        seen |= {sample_id} - {None}
        yield verdict, rollout if verdict.status == "accept" else record


def _table_arrivals(table: pa.Table, verdicts: pa.Table, demands: Demands) -> Iterator[tuple[Verdict, Any]]:
    """The accepted rows as one table in the schema, then the others as dicts."""
    accepted = pc.equal(verdicts["status"], "accept")
    yield Verdict("accept"), schema_table(table.filter(accepted))
    others = pc.invert(accepted)
    for row, codes in zip(row_dicts(table.filter(others)), verdicts["codes"].filter(others).to_pylist()):
        verdict = validate(row, **vars(demands))
        yield _repeated(verdict, row["sample_id"]) if "duplicate_id" in codes else verdict, row


def _sample_id(record: Any) -> str | None:
    try:
        value = record.sample_id if isinstance(record, Rollout) else record["sample_id"]
        return value if type(value) is str and value else None
    except Exception:  # whatever the foreign object raises, it names no sample
        return None


def _repeated(verdict: Verdict, sample_id: str) -> Verdict:
    message = f"sample_id: {short(sample_id)} came before in this call; give each sample its own id"
    return Verdict.of([*verdict.findings, Finding("duplicate_id", "sample_id", message)])


class _Parts:
    """What waits to be stored, by status, and the part files that it goes to."""

    def __init__(self, folder: Path) -> None:
        self.counts = dict.fromkeys(STATUSES, 0)
        self.folder = folder
        self._rollouts: list[Rollout] = []
        self._lines: dict[str, list[bytes]] = {"quarantine": [], "reject": []}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RolloutFileError(f"{folder}: cannot hold parts: {error.strerror or error}") from error

    def add(self, verdict: Verdict, record: Any) -> None:
        """Take one record, or a table of accepted ones; what is text becomes so at once: its owner may change it."""
        if isinstance(record, pa.Table):
            self._store_accepted(record)
        elif verdict.status == "accept":
            self._rollouts.append(record)
        else:
            findings = [{"code": f.code, "field": f.field, "message": f.message} for f in verdict.findings]
            line = {"status": verdict.status, "findings": findings, "record": jsonable(record)}
            self._lines[verdict.status].append(json.dumps(line).encode() + b"\n")
        self.counts[verdict.status] += record.num_rows if isinstance(record, pa.Table) else 1
        if max(len(self._rollouts), *map(len, self._lines.values())) >= PART_RECORDS:
            self.flush()

    def _store_accepted(self, table: pa.Table) -> None:
        if table.num_rows:
            with _part(self.folder / "accept", ".parquet") as file:
                write_parquet(table, file)

    def flush(self) -> None:
        """Store all that waits."""
        self._store_accepted(checked_table(self._rollouts))
        self._rollouts = []
        for status, lines in self._lines.items():
            if lines:
                with _part(self.folder / status, ".jsonl") as file:
                    file.writelines(lines)
                self._lines[status] = []


@contextmanager
def _part(folder: Path, suffix: str) -> Iterator[BinaryIO]:
    """The next part file of `folder`: written aside and flushed, then renamed to a number that nobody else has."""
    try:
        folder.mkdir(exist_ok=True)
        number = len(list(folder.glob("part-*")))
        while True:
            path = folder / f"part-{number:05d}{suffix}"
            aside = folder / f".{path.name}.aside"
            number += 1
            try:
                file = open(aside, "xb")  # whoever creates it owns the number  # noqa: SIM115
            except FileExistsError:
                continue
            if not path.exists():
                break
            file.close()
            aside.unlink()
        try:
            with file:
                yield file
                flush(file)
            os.replace(aside, path)
        except BaseException:  # once renamed, the name aside may be another writer's
            aside.unlink(missing_ok=True)
            raise
        flush_folder(folder)
    except OSError as error:
        raise RolloutFileError(f"{folder}: a part cannot be written: {error.strerror or error}") from error


def jsonable(value: Any, depth: int = 0) -> Any:
    """`value` as JSON holds it; what JSON cannot hold becomes {"__repr__": text, "__type__": name}. Never raises."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= 64):
        return value
    try:
        if depth < _MAX_DEPTH:
            if isinstance(value, BaseModel):
                return jsonable(value.model_dump(warnings=False), depth + 1)
            if hasattr(value, "tolist"):
                return jsonable(value.tolist(), depth + 1)
            if kind is list:
                return [jsonable(entry, depth + 1) for entry in value]
            if isinstance(value, Mapping) and all(type(key) is str for key in value):
                return {key: jsonable(entry, depth + 1) for key, entry in value.items()}
        text = hex(value) if kind is int else repr(value)  # repr refuses an integer of many thousand digits
        return {"__repr__": str(text), "__type__": kind.__name__}
    except Exception:  # a foreign object may raise anything when it is looked at
        return {"__repr__": f"<{kind.__name__} whose repr failed>", "__type__": kind.__name__}
