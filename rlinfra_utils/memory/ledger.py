"""A ledger: named lines that add up, in one unit, shown with GB and GiB side by side.

Models sums only; what a line means is said by the function that made it, in `notes`. Leaves out time
(see `phases`). Use `Ledger({"weights": 14e9})`, then `+`, `* n`, `print`, `.total`, `.gib`, `.to_csv(path)`.
"""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import Any

from rlinfra_utils.doors import amount, instance, short

GB, GIB = 10**9, 2**30


@dataclass(frozen=True, repr=False)
class Ledger:
    """Lines (name -> amount) in one unit, "bytes" unless said otherwise, and the conventions behind them.

    Ledgers of one unit add (lines of one name are summed) and scale by a number of at least zero.
    Adding a number raises TypeError, adding another unit ValueError, as does an amount that is negative or not
    finite. `.gb` (10^9) and `.gib` (2^30) exist for bytes alone.
    """

    items: Mapping[str, float]
    unit: str = "bytes"
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self):
        if not isinstance(self.items, Mapping):
            raise ValueError(f"items={self.items!r}: needs a mapping from a line's name to its amount")
        object.__setattr__(self, "items", {name: amount(str(name), value) for name, value in self.items.items()})

    @property
    def total(self) -> float:
        """Sum of the lines, in `unit`."""
        return sum(self.items.values())

    @property
    def gb(self) -> float:
        """Total in GB of 10^9 bytes."""
        return self._bytes() / GB

    @property
    def gib(self) -> float:
        """Total in GiB of 2^30 bytes."""
        return self._bytes() / GIB

    def _bytes(self) -> float:
        if self.unit != "bytes":
            raise ValueError(f"unit={self.unit!r}: GB and GiB are for bytes; multiply by bytes first (`times_bytes`)")
        return self.total

    def __add__(self, other: Any) -> Ledger:
        if not isinstance(other, Ledger):
            raise TypeError(f"cannot add {other!r} to a Ledger: give the amount a name, Ledger({{name: amount}})")
        if other.unit != self.unit:
            raise ValueError(f"unit={other.unit!r}: cannot be added to a Ledger in {self.unit!r}")
        names = dict.fromkeys((*self.items, *other.items))
        lines = {name: self.items.get(name, 0) + other.items.get(name, 0) for name in names}
        return Ledger(lines, self.unit, tuple(dict.fromkeys(self.notes + other.notes)))

    __radd__ = __add__

    def __mul__(self, n: Any) -> Ledger:
        if not isinstance(n, Real):
            raise TypeError(f"cannot multiply a Ledger by {n!r}: a number is needed")
        amount("n", n)
        return Ledger({name: value * n for name, value in self.items.items()}, self.unit, self.notes)

    __rmul__ = __mul__

    def times_bytes(self, bytes_each: float) -> Ledger:
        """The same lines in bytes, at `bytes_each` for one of what this ledger counts.

        Raises ValueError for a ledger that is in bytes.
        """
        amount("bytes_each", bytes_each, above=True)
        if self.unit == "bytes":
            raise ValueError("unit='bytes': already in bytes, scale it with `*`")
        return Ledger((self * bytes_each).items, "bytes", self.notes)

    def _rows(self) -> list[tuple[str, ...]]:
        """Header, one row a line, total: as text cells."""
        in_bytes = self.unit == "bytes"
        header = ("", self.unit, "GB", "GiB") if in_bytes else ("", self.unit)
        lines = [*self.items.items(), ("total", self.total)]
        scales = (f"{value / GB:,.3f}|{value / GIB:,.3f}".split("|") if in_bytes else () for _, value in lines)
        return [header, *((name, f"{value:,.0f}", *more) for (name, value), more in zip(lines, scales))]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows)]
        text = [
            "  ".join([name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:]))])
            for name, *cells in rows
        ]
        text.insert(len(text) - 1, "-" * len(text[0]))
        return "\n".join([*text, *(f"* {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *lines = ([html.escape(cell) for cell in row] for row in self._rows())
        head = "".join(f"<th>{cell}</th>" for cell in header)
        body = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>" for name, *cells in lines)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + (notes and f"<ul>{notes}</ul>")

    def to_csv(self, path: str | PathLike) -> None:
        """Write one row a line: item, amount, unit. The total is left to the reader's sheet."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("item", "amount", "unit"), *((name, value, self.unit) for name, value in self.items.items())]
            )


def explain(measured_bytes: float, candidates: Mapping[str, Ledger], tolerance: float = 0.05) -> list[str]:
    """Names of the `candidates` whose total lies within `tolerance` of a measurement, nearest first.

    Several names mean that the measurement alone cannot tell them apart; an empty list, that none fits.
    Raises ValueError for `measured_bytes` that are not above 0, and for a ledger that is not in bytes.
    """
    amount("measured_bytes", measured_bytes, above=True)
    amount("tolerance", tolerance)
    if not isinstance(candidates, Mapping):
        raise ValueError(f"candidates={short(candidates)}: needs a mapping from a name to a Ledger")
    for name, ledger in candidates.items():
        instance(f"candidates[{short(name)}]", ledger, Ledger, "such as model_state gives")
    gaps = {name: abs(ledger._bytes() - measured_bytes) / measured_bytes for name, ledger in candidates.items()}
    return sorted((name for name, gap in gaps.items() if gap <= tolerance), key=gaps.__getitem__)
