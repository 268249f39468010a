"""Which rows of a batch have which codes, and the table that says so.

Models: one boolean array a code, made when a row first needs it. Leaves out the rules that mark the rows.
Use: `hits.mark("stale", lag > max_lag)`; `hits.table(batch.column("sample_id"))`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rlinfra_utils.rollouts.codes import CODES, STATUSES


class Hits:
    """Which rows have which codes."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.by_code: dict[str, np.ndarray] = {}

    def mark(self, code: str, rows: np.ndarray) -> None:
        """Give `code` to rows: a boolean array over all rows, or row numbers."""
        if rows.any() if rows.dtype == bool else len(rows):
            hit = self.by_code.setdefault(code, np.zeros(self.num_rows, bool))
            if rows.dtype == bool:
                hit |= rows
            else:
                hit[rows] = True

    def get(self, code: str) -> np.ndarray:
        """The rows with `code`, as a boolean array."""
        return self.by_code.get(code, np.zeros(self.num_rows, bool))

    def keep_structural(self) -> None:
        """A row that is broken in structure has its structural codes alone, as in `structure.parse`."""
        too_large, wrong_type = self.get("too_large"), self.get("wrong_type")
        broken = too_large | wrong_type | self.get("schema_version")
        for code, rows in self.by_code.items():
            if code == "schema_version":
                rows &= ~(too_large | wrong_type)
            elif code in ("wrong_type", "unknown_field"):
                rows &= ~too_large
            elif code != "too_large":
                rows &= ~broken

    def table(self, sample_id: pa.Array) -> pa.Table:
        """The verdicts beside their ids: columns sample_id, status, codes, in row order."""
        found = [code for code in CODES if code in self.by_code]
        matrix = np.array([self.by_code[code] for code in found], bool).reshape(len(found), self.num_rows).T
        _, which = np.nonzero(matrix)
        offsets = np.concatenate([[0], np.cumsum(matrix.sum(axis=1))]).astype(np.int32)
        severity = np.array([STATUSES.index(CODES[code].status) for code in found], np.int8)
        worst = (matrix * severity).max(axis=1, initial=0)
        codes = pa.ListArray.from_arrays(pa.array(offsets), pa.array(found, pa.string()).take(pa.array(which)))
        return pa.table({"sample_id": sample_id, "status": pa.array(STATUSES).take(pa.array(worst)), "codes": codes})
