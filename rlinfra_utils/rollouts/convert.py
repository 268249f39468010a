"""Rollouts to and from an Arrow table and JSON, with nothing lost either way.

Models: null, empty, NaN and infinity as four different things; null means absent. Leaves out whether a record
may be trained on: only its structure is checked, and a broken one raises.
Use: `table = to_table(rollouts)`; `from_table(table)`; `text = to_json(rollout)`; `from_json(text)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.columns import conform
from rlinfra_utils.rollouts.record import SCHEMA, Rollout
from rlinfra_utils.rollouts.structure import MAPS, parse


def to_table(records: Iterable[Rollout | Mapping]) -> pa.Table:
    """The records as a table in `SCHEMA`, a row each, in order.

    Raises ValueError for a record that the schema cannot hold, with its number, field and value.
    """
    refuse_single(records)
    return checked_table([_checked(record, f"record {i}") for i, record in enumerate(records)])


def refuse_single(records: Any) -> None:
    """Raise TypeError for one record, or something else, where several are due."""
    if isinstance(records, str | bytes | Mapping | BaseModel) or not isinstance(records, Iterable):
        raise TypeError(f"records: {type(records).__name__} is no sequence of records; put a single one in a list")


def checked_table(rows: list[Rollout]) -> pa.Table:
    """`to_table` for Rollouts whose structure is known to be sound."""
    columns = []
    for field in SCHEMA:
        values = [_plain(getattr(row, field.name)) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (pa.ArrowException, OverflowError) as error:
            cause = " ".join(str(error).split())
            raise ValueError(f"{field.name}: {cause}; rollouts.validate says which record") from None
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def from_table(table: pa.Table) -> list[Rollout]:
    """The rows of a table as Rollouts, in order. A missing column is null, and null is absent.

    Raises TypeError for no table; ValueError for a column or a row that does not fit the schema, and for a
    filled column outside it, which would be lost.
    """
    return [_checked(row, f"row {i}") for i, row in enumerate(row_dicts(schema_table(table)))]


def schema_table(table: pa.Table) -> pa.Table:
    """The table in `SCHEMA`; ValueError for a column that does not fit, or a filled one that would be lost."""
    conformed, unknown = conform(table)
    if unknown.any():
        raise ValueError(f"row {int(unknown.argmax())}: fills a column outside the schema; put it in extra as text")
    return conformed


def to_json(record: Rollout | Mapping) -> str:
    """One record as a line of JSON; NaN and infinity as Python's json writes them. Raises ValueError if ill-typed."""
    return _checked(record, "record").model_dump_json()


def from_json(text: str | bytes) -> Rollout:
    """The record that `to_json` wrote. Raises ValueError, in one line, for text that holds none."""
    try:
        data = json.loads(text, object_pairs_hook=_each_name_once)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"JSON: {short(text)} holds no record: {str(error).splitlines()[0]}") from None
    return _checked(data, "JSON")


def row_dicts(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as dicts for `validate`. A map with a key twice stays a list of pairs, which is no mapping."""
    rows = table.to_pylist()
    for row in rows:
        for name in MAPS:
            pairs = row.get(name)
            if pairs is not None and len(dict(pairs)) == len(pairs):
                row[name] = dict(pairs)
    return rows


def _checked(record: Any, what: str) -> Rollout:
    rollout, findings = parse(record)
    if findings:
        raise ValueError(f"{what}: {findings[0].message}")
    return rollout


def _plain(value: Any) -> Any:
    """A field's value as Arrow takes it: models as dicts, mappings as pairs."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list) and value and hasattr(value[0], "model_dump"):
        return [span.model_dump() for span in value]
    return value.model_dump() if hasattr(value, "model_dump") else value


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {short(twice)} is there twice")
    return dict(pairs)
