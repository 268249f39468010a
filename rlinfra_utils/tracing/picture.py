"""Small pictures as inline SVG: the chain of identifiers, and a line of values with its marks.

Models: text and lines in the page's own colour (`currentColor`), so that a picture fits a dark page and a light one.
Leaves out axes with ticks (`plots` has them). Use: `chains_svg(followed)`; `sparkline(values, "reward", marks=[12])`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlinfra_utils.tracing.chain import Followed

#: Okabe and Ito's blue and vermilion, told apart by colour-blind eyes on light and on dark.
BLUE, RED = "#3a8fc8", "#e0692a"
#: The links that a training batch adds.
AFTER_TRAINING = ("training_batch_id", "optimizer_step", "resulting_policy_version")
_COLUMN, _ROW, _BOX, _HEAD, _MOST = 178, 30, 158, 34, 16
_LINE_WIDTH, _LINE_HEIGHT = 260, 48


def chains_svg(followed: Followed) -> str:
    """The first 16 chains as columns of boxes joined by lines; a missing link is a dashed red box of its own."""
    drawn = followed.chains[:_MOST]
    names = list(drawn[0].links)
    rows = [_nodes(chain, index) for index, chain in enumerate(drawn)]
    columns = [_ordered([row[column] for row in rows]) for column in range(len(names))]
    tallest = max(map(len, columns))
    middle = {
        node: _HEAD + (place + 0.5) * _ROW * tallest / len(nodes)
        for nodes in columns
        for place, node in enumerate(nodes)
    }
    parts = [_label(column * _COLUMN + _BOX / 2, 18, name, bold=True) for column, name in enumerate(names)]
    for start, end in dict.fromkeys(edge for row in rows for edge in pairwise(row)):
        path = f"M{start.column * _COLUMN + _BOX} {middle[start]:g}L{end.column * _COLUMN} {middle[end]:g}"
        parts.append(f'<path d="{path}" stroke="currentColor" stroke-opacity=".45" fill="none"/>')
    parts += [_box(node, y) for node, y in middle.items()]
    more = len(followed.chains) - len(drawn)
    caption = f"{followed.asked}: {len(followed.chains)} chain(s)" + (f", {more} more not drawn" if more else "")
    picture = _svg(len(names) * _COLUMN, _HEAD + tallest * _ROW + 6, caption, parts)
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in _notes(drawn))
    text = f"<figcaption>{html.escape(caption)}<ul>{listed}</ul></figcaption>"
    return f'<figure style="margin:0;overflow-x:auto">{picture}{text}</figure>'


class _Node(NamedTuple):
    """A box. Chains share it where they agree; a missing link belongs to its chain alone (`owner`)."""

    column: int
    text: str
    owner: int | None


def _nodes(chain: Any, index: int) -> list[_Node]:
    undone = " (undone)" if chain.rolled_back else ""
    return [
        _Node(column, "missing", index)
        if value is None
        else _Node(column, f"{value}{undone}" if name in AFTER_TRAINING else str(value), None)
        for column, (name, value) in enumerate(chain.links.items())
    ]


def _ordered(nodes: list[_Node]) -> list[_Node]:
    """Each node once, by the mean place of its chains: fewer lines cross."""
    places: dict[_Node, list[int]] = {}
    for place, node in enumerate(nodes):
        places.setdefault(node, []).append(place)
    return sorted(places, key=lambda node: sum(places[node]) / len(places[node]))


def _notes(chains: Sequence[Any]) -> dict[str, None]:
    notes = [f"missing {name}: {why}" for chain in chains for name, why in chain.missing.items()]
    notes += ["undone: a later restore went back behind this batch" for chain in chains if chain.rolled_back]
    return dict.fromkeys([*notes, *(note for chain in chains for note in chain.notes)])


def _box(node: _Node, y: float) -> str:
    style = f'stroke="{BLUE}"' if node.owner is None else f'stroke="{RED}" stroke-dasharray="4 3"'
    x = node.column * _COLUMN
    place = f'x="{x + 1}" y="{y - 11:g}" width="{_BOX - 2}" height="22" rx="4"'
    box = f'<rect {place} fill="none" stroke-width="1.5" {style}/>'
    return f"<g><title>{html.escape(node.text)}</title>{box}{_label(x + _BOX / 2, y + 4, node.text)}</g>"


def _label(x: float, y: float, text: str, bold: bool = False) -> str:
    shown = html.escape(text if len(text) <= 24 else text[:11] + "…" + text[-12:])
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="currentColor"{weight}>{shown}</text>'


def sparkline(values: Sequence[float], label: str, marks: Sequence[int] = ()) -> str:
    """A line through `values` in order; NaN breaks it. `marks`: indices at which a vertical red line stands.

    Only finite values are drawn; without any the picture says so.
    """
    width, height = _LINE_WIDTH, _LINE_HEIGHT
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _svg(width, height, f"{label}: no value", [_label(width / 2, height / 2, "no value")])
    low, high = min(finite), max(finite)
    step, span = (width - 8) / max(len(values) - 1, 1), (high - low) or 1.0
    points = [(4 + i * step, height - 4 - (v - low) / span * (height - 8)) for i, v in enumerate(values)]
    lines = [
        f'<path d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" stroke="{BLUE}" stroke-width="1.6" fill="none"/>'
        for a, b in pairwise(points)
        if math.isfinite(a[1]) and math.isfinite(b[1])
    ]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{BLUE}"/>' for x, y in points if math.isfinite(y)]
    bars = [
        f'<path d="M{4 + i * step:.1f} 0V{height}" stroke="{RED}" stroke-dasharray="3 2" fill="none"/>' for i in marks
    ]
    return _svg(width, height, f"{label}: {len(finite)} values from {low:.4g} to {high:.4g}", [*bars, *lines, *dots])


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    name = html.escape(title, quote=True)
    return (
        f'<svg role="img" aria-label="{name}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"><title>{name}</title>'
        f"{''.join(parts)}</svg>"
    )
