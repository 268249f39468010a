"""Arrow columns as flat numpy arrays with offsets, and a table brought to the record's schema.

Models: slices, chunks, null lists and offsets that start anywhere; casts that keep every value. Leaves out
what the values mean (`table_tokens.py`, `table_policy.py`).
Use: `table, unknown = conform(table)`; `Lists(batch.column("prompt_tokens")).values`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils.rollouts.record import SCHEMA
from rlinfra_utils.rollouts.structure import DECODING_SCHEMA


def conform(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """The table in the record's schema, and for each row whether it fills a field outside it.

    A column that is missing is null throughout. Raises TypeError for no table, ValueError for a column that
    is there twice or whose type does not cast to the schema's with every value kept.
    """
    if not isinstance(table, pa.Table):
        raise TypeError(f"table: {type(table).__name__} is no pyarrow.Table; build one with rollouts.to_table")
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise ValueError(f"table: column {twice[0]!r} is there twice; keep one")
    unknown = np.zeros(table.num_rows, bool)
    for name in set(table.column_names) - set(SCHEMA.names):
        unknown |= is_present(table.column(name))
    columns = []
    for field in SCHEMA:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table.column(field.name)
        if field.name == "decoding" and pa.types.is_struct(column.type):
            for child in column.type:
                if child.name not in DECODING_SCHEMA.names:
                    unknown |= is_present(pc.struct_field(column, child.name))
        columns.append(_cast(column, field))
    return pa.Table.from_arrays(columns, schema=SCHEMA), unknown


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    problem = "is another kind of data"
    if _same_kind(column.type, field.type, extra_children=field.name == "decoding"):
        try:
            return column.cast(field.type)
        except pa.ArrowException as error:
            problem = str(error).splitlines()[0]
    raise ValueError(f"{field.name}: a column of {column.type} where {field.type} is due: {problem}; convert it first")


def _same_kind(source: pa.DataType, target: pa.DataType, extra_children: bool = False) -> bool:
    """Whether a cast changes width or layout alone, and neither parses text nor makes it."""
    t = pa.types
    if t.is_null(source):
        return True
    if t.is_dictionary(source):
        return _same_kind(source.value_type, target)
    if t.is_map(target):
        same_keys = t.is_map(source) and _same_kind(source.key_type, target.key_type)
        return same_keys and _same_kind(source.item_type, target.item_type)
    if t.is_list(target):
        listed = (t.is_list, t.is_large_list, t.is_fixed_size_list)
        return any(is_list(source) for is_list in listed) and _same_kind(source.value_type, target.value_type)
    if t.is_struct(target):
        names = {f.name: f.type for f in target}
        return t.is_struct(source) and all(
            _same_kind(f.type, names[f.name]) if f.name in names else extra_children for f in source
        )
    if t.is_string(target):
        return t.is_string(source) or t.is_large_string(source) or t.is_string_view(source)
    if t.is_floating(target):
        return t.is_floating(source) or t.is_integer(source)
    if t.is_int8(target):  # a mask, which may come as booleans
        return t.is_integer(source) or t.is_boolean(source)
    return t.is_boolean(source) if t.is_boolean(target) else t.is_integer(source)


def is_present(array: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Which entries are not null, shape (rows,)."""
    if array.null_count == 0:
        return np.ones(len(array), bool)
    return np.asarray(array.is_valid())


class Numbers(NamedTuple):
    """A scalar column: values (0 where null) and which are present, both of shape (rows,)."""

    values: np.ndarray
    present: np.ndarray


def numbers(array: pa.Array) -> Numbers:
    """A column of integers, floats or booleans as numpy arrays."""
    present = is_present(array)
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    return Numbers(array.to_numpy(zero_copy_only=False), present)


def text_bytes(array: pa.Array) -> np.ndarray:
    """UTF-8 bytes of each text, 0 where null."""
    return pc.binary_length(array).fill_null(0).to_numpy()


class Lists:
    """A list column: row i holds `flat[offsets[i]:offsets[i + 1]]`; a null row holds nothing.

    present and lengths have shape (rows,), offsets (rows + 1,); flat is the Arrow array of all entries.
    """

    def __init__(self, array: pa.Array) -> None:
        if pa.types.is_map(array.type):  # a map is a list of (key, value) pairs
            pair = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
            array = array.cast(pa.list_(pair))
        self.present = is_present(array)
        self.lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.flat = array.flatten()
        self.values = np.empty(0)
        if pa.types.is_primitive(self.flat.type):
            self.values = numbers(self.flat).values

    def rows(self, at: np.ndarray) -> np.ndarray:
        """The row of each entry: `at` is a boolean array over the entries, or their positions."""
        positions = np.flatnonzero(at) if at.dtype == bool else at
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def placed(self, rows: np.ndarray, lengths: np.ndarray, fill: float) -> np.ndarray:
        """The values on an axis of `lengths` entries a row: those of `rows`, which fit it, and else `fill`."""
        return place(self.values, self.lengths, rows, lengths, fill)


def place(values: np.ndarray, own: np.ndarray, rows: np.ndarray, lengths: np.ndarray, fill: float) -> np.ndarray:
    """Values with `own` entries a row, moved to an axis with `lengths` entries a row; see `Lists.placed`."""
    if rows.all():
        return values
    placed = np.full(lengths.sum(), fill, values.dtype)
    placed[np.repeat(rows, lengths)] = values[np.repeat(rows, own)]
    return placed


def null_inside(array: pa.Array) -> np.ndarray:
    """For each entry, whether a list or map in it holds a null, at any depth. Nulls of the entry itself are fine."""
    t = pa.types
    if t.is_list(array.type) or t.is_map(array.type):
        lists = Lists(array)
        child = lists.flat
        if not t.is_nested(child.type):
            inside = ~is_present(child) if child.null_count else np.zeros(0, bool)
        else:
            inside = ~is_present(child) | null_inside(child)
        found = np.zeros(len(array), bool)
        found[lists.rows(inside)] = True
        return found
    found = np.zeros(len(array), bool)
    if t.is_struct(array.type):
        for field in array.type:
            child = pc.struct_field(array, field.name)
            found |= ~is_present(child) | null_inside(child)
    return found
