"""What one state of a run has and another lacks, component by component: `explain`.

Models: two sets of checkpoint components, leaf by leaf; an array by the mean of its magnitudes. Leaves out what the
difference does to the numbers (`branches.py`). Use: `print(explain(load(path), fresh.components()))`.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils.checkpoint import COMPONENTS
from rlinfra_utils.doors import short

ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """A component that differs: how many of its values do, the first of them, and what follows."""

    component: str
    num_values: int
    first: str
    was: str
    found: str
    effect: str

    @property
    def value(self) -> str:
        """The first value that differs, and how many more do."""
        return self.first + (f" and {self.num_values - 1} more" if self.num_values > 1 else "")


@dataclass(frozen=True)
class Explanation:
    """The components that differ, in the order of COMPONENTS; none where the states are equal."""

    differences: tuple[Difference, ...]

    @property
    def components(self) -> list[str]:
        """Names of the components that differ."""
        return [difference.component for difference in self.differences]

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(component, value, was, is, what follows) of each."""
        return [(d.component, d.value, d.was, d.found, d.effect) for d in self.differences]

    def __str__(self) -> str:
        rows = [f"{name}: {value}: {was} -> {found}; {effect}" for name, value, was, found, effect in self.rows()]
        return "\n".join(rows) or "no component differs"

    def _repr_html_(self) -> str:
        head = "<tr><th>component</th><th>value</th><th>was</th><th>is</th><th>what follows</th></tr>"
        cells = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self.rows())
        return f"<table>{head}{cells}</table>" if cells else "<p>no component differs</p>"


def explain(full: Mapping[str, Any], other: Mapping[str, Any]) -> Explanation:
    """What `other` says otherwise than `full`; both map names of COMPONENTS to their values, as `load` gives them.

    Raises ValueError for a name that is no component.
    """
    for argument, value in (("full", full), ("other", other)):
        unknown = [name for name in value if name not in COMPONENTS]
        if unknown:
            raise ValueError(f"{argument}: {short(unknown[0])} is no component; the names are {', '.join(COMPONENTS)}")
    found = []
    for name, part in COMPONENTS.items():
        was, is_ = dict(_leaves("", full.get(name))), dict(_leaves("", other.get(name)))
        moved = [place for place in {**was, **is_} if not _equal(was.get(place, ABSENT), is_.get(place, ABSENT))]
        if moved:
            first = moved[0]
            shown = _shown(was.get(first, ABSENT)), _shown(is_.get(first, ABSENT))
            found.append(Difference(name, len(moved), first or name, *shown, part.without))
    return Explanation(tuple(found))


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values by their place; None, and what is empty, have none."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{place}.{key}" if place else str(key), entry)
    elif isinstance(value, list | tuple):
        yield f"number of {place}", len(value)
        for index, entry in enumerate(value):
            yield from _leaves(f"{place}[{index}]", entry)
    elif value is not None:
        yield place, value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and a == b


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"mean |x| {np.abs(value).mean():.3g}"
    text = f"{value:.6g}" if isinstance(value, float) else value if value == ABSENT else short(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-6:]}"  # the state of a generator has 38 digits
