"""May these rows be trained on? `validate` for a whole Arrow table, by array operations.

Models: the same rules and the same codes a row as `validate`, and duplicate_id. Leaves out messages: for a
row that is not accepted, `validate(row)` has them.
Use: `validate_table(table, current_version=9, max_lag=2)["status"]`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils.rollouts.columns import Lists, conform, null_inside, numbers, text_bytes
from rlinfra_utils.rollouts.hits import Hits
from rlinfra_utils.rollouts.record import SCHEMA_VERSION
from rlinfra_utils.rollouts.structure import IDENTIFIER_BYTES, LIST_ENTRIES, LISTS, MAPS, TEXT_BYTES, TEXTS
from rlinfra_utils.rollouts.table_policy import mark_policy
from rlinfra_utils.rollouts.table_tokens import TableAxes, mark_tokens
from rlinfra_utils.rollouts.verdict import Demands

#: Rows looked at together: few enough that their token columns stay near the processor.
BLOCK_ROWS = 16_384


def validate_table(
    table: pa.Table, *, current_version: int | None = None, max_lag: int | None = None, partial_rollouts: bool = False
) -> pa.Table:
    """The verdict on each row, in row order: columns sample_id, status, codes (list of string, order of `CODES`).

    Keywords as for `validate`. A column that is missing counts as null; a filled column outside the schema
    gives its rows unknown_field. The second and later rows of one sample_id get duplicate_id.
    Raises TypeError for no table; ValueError for keywords that make no sense, or for a column whose type
    does not cast to the schema's with every value kept.
    """
    demands = Demands(current_version, max_lag, partial_rollouts)
    table, unknown = conform(table)
    repeated = _repeated(table.column("sample_id"))
    blocks = []
    for start in range(0, table.num_rows, BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        batch = table.slice(start, BLOCK_ROWS).combine_chunks().to_batches()[0]
        hits = Hits(batch.num_rows)
        _mark_structure(batch, hits)
        axes = TableAxes(batch, hits)
        mark_tokens(batch, axes, hits)
        mark_policy(batch, axes, demands, hits)
        hits.mark("unknown_field", unknown[block])
        hits.keep_structural()
        hits.mark("duplicate_id", repeated[block])
        blocks.append(hits.table(batch.column("sample_id")))
    return pa.concat_tables(blocks) if blocks else Hits(0).table(pa.array([], pa.string()))


def _repeated(sample_id: pa.ChunkedArray) -> np.ndarray:
    """Whether an earlier row has the same id; an absent id repeats nothing."""
    if not len(sample_id):
        return np.zeros(0, bool)
    # Dictionary indices count up at each first occurrence.
    index = sample_id.dictionary_encode().combine_chunks().indices.fill_null(-1).to_numpy()
    highest_before = np.concatenate([[-1], np.maximum.accumulate(index)[:-1]])
    filled = pc.fill_null(pc.binary_length(sample_id), 0).to_numpy() > 0
    return (index <= highest_before) & filled


def _mark_structure(batch: pa.RecordBatch, hits: Hits) -> None:
    decoding = batch.column("decoding")
    lists = {name: batch.column(name) for name in LISTS}
    lists |= {name: pc.struct_field(decoding, name) for name in ("banned_token_ids", "stop")}
    for array in [batch.column(name) for name in TEXTS] + [pc.struct_field(decoding, "logprobs_mode")]:
        hits.mark("too_large", text_bytes(array) > IDENTIFIER_BYTES)
    for name, array in lists.items():
        column = Lists(array)
        hits.mark("too_large", column.lengths > LIST_ENTRIES)
        if name == "stop":
            hits.mark("too_large", column.rows(text_bytes(column.flat) > TEXT_BYTES))
        if name != "behavior_logprobs":  # null off the mask
            hits.mark("wrong_type", null_inside(array))
    for name in MAPS:
        column = Lists(batch.column(name))
        keys, values = (pc.struct_field(column.flat, part) for part in ("key", "value"))
        hits.mark("too_large", column.rows(text_bytes(keys) > IDENTIFIER_BYTES))
        if pa.types.is_string(values.type):
            hits.mark("too_large", column.rows(text_bytes(values) > TEXT_BYTES))
        if pa.types.is_list(values.type):
            hits.mark("too_large", column.rows(Lists(values).lengths > LIST_ENTRIES))
        hits.mark("wrong_type", null_inside(batch.column(name)))
        hits.mark("wrong_type", _keys_twice(column, keys))
    version = numbers(batch.column("schema_version"))
    hits.mark("schema_version", version.present & (version.values != SCHEMA_VERSION))


def _keys_twice(column: Lists, keys: pa.Array) -> np.ndarray:
    """Row numbers of the maps that hold a key more than once, which a mapping cannot."""
    index = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
    owner = np.repeat(np.arange(len(column.lengths)), column.lengths)
    pairs, counts = np.unique(owner * (index.max(initial=0) + 1) + index, return_counts=True)
    return pairs[counts > 1] // (index.max(initial=0) + 1)
