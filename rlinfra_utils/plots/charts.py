"""The pictures themselves, each from a table that another module made.

Models: spans over time, shares of a total, the loop as roles and actions, bars by token, memory by phase, what limits
a grid of cells. Leaves out the style (`style.py`) and charts that one lesson alone draws.
Use: `timeline(trace.frame(), "Decode sets the pace")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from rlinfra_utils.plots.style import PALETTE, WAITING, color_of, figure, legend_below, styled, title


@styled
def timeline(frame: pd.DataFrame, finding: str = "", ax=None, legend: bool = True) -> Figure:
    """Spans as bars over time, one row a track; waits in grey.

    `frame` has columns track, stage, start_s, end_s and, where it has them, wait and depth (only the
    deepest spans are readable, so parents are left to the caller to drop).
    """
    legend_rows = -(-frame["stage"].nunique() // 4) if legend else 0
    height = 0.8 + 0.5 * frame["track"].nunique() + 0.22 * legend_rows
    fig, ax = (ax.figure, ax) if ax is not None else figure(8, height)
    tracks = list(dict.fromkeys(frame["track"]))
    origin_s, known = frame["start_s"].min(), {}
    waits = frame["wait"] if "wait" in frame else pd.Series(False, index=frame.index)
    for (_, row), wait in zip(frame.iterrows(), waits, strict=True):
        shade = WAITING if wait else color_of(row["stage"], known)
        y = tracks.index(row["track"])
        ax.barh(y, row["end_s"] - row["start_s"], left=row["start_s"] - origin_s, height=0.7, color=shade, lw=0)
    ax.set_yticks(range(len(tracks)), tracks)
    ax.invert_yaxis()
    ax.set_xlabel("time, s")
    title(ax, finding)
    if legend:
        legend_below(fig, known)
    return fig


@styled
def shares(rows: Mapping[str, Mapping[str, float]], unit: str, finding: str = "", normalise: bool = False) -> Figure:
    """One stacked bar a row of `rows` ({row: {part: value}}, values in `unit`), parts labelled where they fit.

    `normalise` makes each bar as long as the others, so that it shows shares of `unit`.
    """
    fig, ax = figure(8, 1.0 + 0.5 * len(rows))
    known: dict[str, str] = {}
    largest = max(sum(parts.values()) for parts in rows.values())
    for y, parts in enumerate(rows.values()):
        total, left = sum(parts.values()), 0.0
        scale = 1 / total if normalise else 1.0
        for part, value in parts.items():
            width = value * scale
            ax.barh(y, width, left=left, color=color_of(part, known), height=0.65, lw=0)
            if width > 0.06 * (1.0 if normalise else largest):
                dark = known[part] in (PALETTE[0], PALETTE[2], PALETTE[3], PALETTE[7])
                text = f"{value / total:.0%}"
                ax.text(left + width / 2, y, text, ha="center", va="center", color="white" if dark else "black")
            left += width
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.set_xlabel(f"share of {unit}" if normalise else unit)
    title(ax, finding)
    legend_below(fig, known)
    return fig


#: Six roles of an online-RL loop (x, y of a box's centre) and eight actions between them.
ROLES = {
    "planner": (0.12, 0.75),
    "engine": (0.5, 0.75),
    "verifier": (0.88, 0.75),
    "weight sync": (0.12, 0.2),
    "trainer": (0.5, 0.2),
    "store": (0.88, 0.2),
}
ACTIONS = (
    ("1 choose prompts", "planner", "engine"),
    ("2 generate", "engine", "verifier"),
    ("3 reward", "verifier", "store"),
    ("4 masks, log-probs · 5 batch", "store", "trainer"),
    ("6 gradient · 7 update", "trainer", "weight sync"),
    ("8 publish weights", "weight sync", "engine"),
)


@styled
def dataflow(busy_s: Mapping[str, float], carried: Mapping[str, str], finding: str = "") -> Figure:
    """The loop as roles and actions: a role is shaded by its share of `busy_s` (seconds a role), and an
    action carries what `carried` says under its number ("1": "32 prompts").
    """
    fig, ax = figure(9, 3.8)
    total_s, boxes = sum(busy_s.values()), {}
    for role, (x, y) in ROLES.items():
        share = busy_s.get(role, 0.0) / total_s
        box = FancyBboxPatch((x - 0.09, y - 0.1), 0.18, 0.2, boxstyle="round,pad=0.01", ec=PALETTE[0], lw=1.2)
        box.set_facecolor((*to_rgb(PALETTE[4]), 0.08 + 0.8 * share))
        boxes[role] = ax.add_patch(box)
        ax.text(x, y, f"{role}\n{1e3 * busy_s.get(role, 0.0):.1f} ms · {share:.0%}", ha="center", va="center")
    for action, source, target in ACTIONS:
        (x0, y0), (x1, y1) = ROLES[source], ROLES[target]
        ends = {"patchA": boxes[source], "patchB": boxes[target], "shrinkA": 3, "shrinkB": 3}  # from edge to edge
        ax.add_patch(FancyArrowPatch((x0, y0), (x1, y1), arrowstyle="-|>", mutation_scale=12, color="#444444", **ends))
        words = [action] + [carried[n] for n in carried if n in action.split()]
        shift = 0.17 if y0 == y1 == 0.75 else -0.17 if y0 == y1 else 0.0
        ax.text((x0 + x1) / 2, (y0 + y1) / 2 + shift, "\n".join(words), ha="center", va="center", fontsize=8,
                bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip
    ax.set(xlim=(0, 1), ylim=(-0.1, 1.02))
    ax.set_axis_off()
    title(ax, finding)
    return fig


@styled
def token_bars(labels: Sequence[str], series: Mapping[str, Sequence[float]], ylabel: str, finding: str = "") -> Figure:
    """Grouped bars, one group a label: what several policies say of the same tokens, {policy: one value a label}."""
    fig, ax = figure(8, 2.8)
    width = 0.8 / len(series)
    for k, (name, values) in enumerate(series.items()):
        ax.bar(np.arange(len(labels)) + (k - (len(series) - 1) / 2) * width, values, width, label=name)
    ax.set_xticks(range(len(labels)), labels)
    ax.set_ylabel(ylabel)
    title(ax, finding)
    fig.legend(ncols=len(series), loc="outside lower left")
    return fig


@styled
def stacked(frame: pd.DataFrame, unit: str, limit: float, finding: str = "", ax=None, legend: bool = True) -> Figure:
    """One column a row of `frame`, its parts (columns, in `unit`) stacked; the fullest is marked, `limit` a line."""
    fig, ax = (ax.figure, ax) if ax is not None else figure(7, 3.4)
    totals, known = frame.sum(axis=1), {}
    base = np.zeros(len(frame))
    for part in frame:
        ax.bar(range(len(frame)), frame[part], bottom=base, color=color_of(part, known), width=0.7, lw=0)
        base += frame[part].to_numpy()
    ax.axhline(limit, color="black", ls="--", lw=1)
    ax.text(-0.55, limit, f"limit {limit:g}", va="bottom", fontsize=8)
    peak = int(np.argmax(totals))
    for x, total in enumerate(totals):
        words, weight = (f"peak {total:.1f}", "bold") if x == peak else (f"{total:.1f}", "normal")
        if abs(total - limit) < 0.08 * limit:  # beside the line, not across it
            ax.text(x, max(total, limit) * 1.07, words, ha="center", fontsize=8, fontweight=weight)
        else:
            ax.text(x, total, words, ha="center", va="bottom", fontsize=8, fontweight=weight)
    ax.set_xticks(range(len(frame)), frame.index, va="baseline")
    ax.tick_params(axis="x", pad=12)
    ax.set(ylabel=unit, xlim=(-0.6, len(frame) - 0.4), ylim=(0, 1.25 * max(limit, totals.max())))
    title(ax, finding)
    if legend:
        legend_below(fig, known)
    return fig


@styled
def verdict_map(share: pd.DataFrame, limited_by: pd.DataFrame, finding: str = "") -> Figure:
    """Cells coloured by what limits them; "fits" is green with its share inside, the darker the fuller.

    `share` (of the limit, from 0 to 1 where it fits) and `limited_by` have one shape; their axes' names become labels
    (`index.name`, `columns.name`).
    """
    fig, ax = figure(1.4 + 0.75 * len(share.columns), 1.3 + 0.3 * len(share))
    known = {"fits": PALETTE[2]}
    for y, row in enumerate(share.index):
        for x, column in enumerate(share.columns):
            limit, value = limited_by.loc[row, column], share.loc[row, column]
            alpha = 0.1 + 0.6 * value if limit == "fits" else 1.0
            ax.add_patch(plt.Rectangle((x, y), 1, 1, fc=color_of(limit, known), alpha=alpha, ec="white", lw=1.5))
            if limit == "fits":
                ax.text(x + 0.5, y + 0.5, f"{value:.0%}", ha="center", va="center")
    ax.set(xlim=(0, len(share.columns)), ylim=(0, len(share)), xlabel=share.columns.name, ylabel=share.index.name)
    for axis, names in ((ax.xaxis, share.columns), (ax.yaxis, share.index)):
        axis.set_ticks(np.arange(len(names)) + 0.5, [f"{name:,}" for name in names])
    title(ax, finding)
    legend_below(fig, known)
    return fig
