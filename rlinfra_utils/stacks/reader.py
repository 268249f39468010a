"""One row of a stack's record, read with checks: the door for data that another program wrote.

Models: nested mappings by dotted name, batches (one entry a row), numpy arrays, torch tensors and lists alike.
Leaves out what the fields mean (`adapters.py`). A field that is absent or null reads as None; one that is there with
another length or type than its neighbours raises ValueError, in one line with its name.
Use: `Reader("verl", payload, row=0).ints("batch.prompts")`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from rlinfra_utils.doors import is_number, short


class Reader:
    """Row `row` of `payload`; `rows` names the column whose length is the number of rows, None for a single record."""

    def __init__(self, stack: str, payload: Any, row: int, rows: str | None) -> None:
        self.stack, self.payload = stack, payload
        if not isinstance(payload, Mapping):
            raise ValueError(f"payload: {short(payload)} is no mapping; send the {stack} record's fields by name")
        if type(row) is not int or row < 0:
            raise ValueError(f"row={short(row)}: needs a count from 0")
        self.row, self.num_rows = row, None
        if rows is not None:
            self.num_rows = len(self._list(rows, self._required(rows)))
        if row >= (1 if self.num_rows is None else self.num_rows):
            raise ValueError(f"row={row}: the {stack} payload has {self.num_rows or 1} rows, counted from 0")

    def _field(self, name: str) -> Any:
        """The value at dotted `name`, not cut to the row; None where it, or a mapping above it, is absent."""
        value = self.payload
        for i, part in enumerate(name.split(".")):
            if value is None:
                return None
            if not isinstance(value, Mapping):
                above = ".".join(name.split(".")[:i])
                raise ValueError(f"{above}: {short(value)} is no mapping; send the {self.stack} record's fields")
            value = value.get(part)
        return value

    def get(self, name: str) -> Any:
        """The row's entry of field `name` as plain Python; None where absent."""
        value = self._field(name)
        if value is None or self.num_rows is None:
            return _plain(value)
        column = self._list(name, value)
        if len(column) != self.num_rows:
            raise ValueError(f"{name}: {len(column)} rows where the {self.stack} payload has {self.num_rows}")
        return _plain(column[self.row])

    def ints(self, name: str, size: int | None = None, required: bool = False) -> list[int] | None:
        """A list of whole numbers; `size`, where given, is the length that it must have."""
        return self._numbers(name, size, required, Integral, "whole numbers")

    def floats(self, name: str, size: int | None = None) -> list[float | None] | None:
        """A list of numbers, null entries allowed (NaN and infinities too: `rollouts.validate` judges these)."""
        values = self._numbers(name, size, False, (Real, type(None)), "numbers")
        return None if values is None else [None if v is None else float(v) for v in values]

    def total(self, name: str, size: int | None = None) -> float | None:
        """The sum of a list of numbers, none of them null; what is not finite comes through: `validate` judges it."""
        values = self.floats(name, size)
        if values and None in values:
            raise ValueError(f"{name}: null at {values.index(None)} of {len(values)}; a sum needs every number")
        try:
            return None if values is None else math.fsum(values)
        except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
            return sum(values)

    def bits(self, name: str, size: int | None = None, required: bool = False) -> list[int] | None:
        """A mask as a list of 0 and 1."""
        if required:
            self._required(name)
        value = self.get(name)
        if value is None:
            return None
        bits = self._sized(name, value, size)
        odd = [b for b in bits if not isinstance(b, Integral) or b not in (0, 1)]
        if odd:
            raise ValueError(f"{name}: {short(odd[0])} is neither 0 nor 1; send one bit a token")
        return [int(b) for b in bits]

    def integer(self, name: str, required: bool = False) -> int | None:
        """One whole number."""
        if required:
            self._required(name)
        return self._scalar(name, Integral, "a whole number")

    def number(self, name: str) -> float | None:
        """One number."""
        value = self._scalar(name, Real, "a number")
        return None if value is None else float(value)

    def flag(self, name: str) -> bool | None:
        """One truth value."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise ValueError(f"{name}: {short(value)} is no bool; send the flag itself")
        return value

    def text(self, name: str) -> str | None:
        """One string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name}: {short(value)} is no text; send the {self.stack} record's own value")
        return value

    def _required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{name}: is missing from the {self.stack} payload, and without it there is no rollout")
        return value

    def _scalar(self, name: str, kind: type, words: str) -> Any:
        value = self.get(name)
        if value is not None and not (is_number(value) and isinstance(value, kind)):
            raise ValueError(f"{name}: {short(value)} is not {words}; send the {self.stack} record's own value")
        return value

    def _numbers(self, name: str, size: int | None, required: bool, kind: Any, words: str) -> list | None:
        if required:
            self._required(name)
        value = self.get(name)
        if value is None:
            return None
        values = self._sized(name, value, size)
        odd = [v for v in values if not isinstance(v, kind) or not (v is None or is_number(v))]
        if odd:
            raise ValueError(f"{name}: {short(odd[0])} among {words}; send the {self.stack} record's own values")
        return values

    def _sized(self, name: str, value: Any, size: int | None) -> list:
        values = self._list(name, value)
        if size is not None and len(values) != size:
            raise ValueError(f"{name}: {len(values)} entries where {size} are due, one a token; cut nothing")
        return values

    def _list(self, name: str, value: Any) -> list:
        value = _plain(value)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"{name}: {short(value)} is no list or array; send the {self.stack} record's own field")
        return list(value)


def _plain(value: Any) -> Any:
    """Numpy arrays, numpy scalars and torch tensors as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
