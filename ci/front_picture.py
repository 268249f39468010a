"""Draws the README's picture: one loop under three rules, from the simulator, on a light and on a dark page.

Models eight slots and a trainer that meet the same rollouts under each rule; a colour is the version of the weights
that sampled a token. Leaves out the network and the verifier. Use: `python -m ci.front_picture [FOLDER]` writes
loop-light.svg and loop-dark.svg into docs/ or FOLDER; the same matplotlib makes the same bytes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlinfra_utils import plots
from rlinfra_utils.simulator import CONTROLLERS, LogNormal, LoopConfig, Run, simulate

FOLDER = Path(__file__).parent.parent / "docs"
SHOWN_S = 120.0
CONFIG = LoopConfig(
    slots_per_replica=8,
    lengths_tokens=LogNormal(300, 0.7),
    batch_rollouts=16,
    train_s=12.0,
    sync_s=1.0,
    duration_s=SHOWN_S,
    seed=3,
)
RULES = {
    "Synchronous": CONTROLLERS["synchronous"](),
    "One step off": CONTROLLERS["one_step_off"](),
    "Asynchronous": CONTROLLERS["bounded_queue"](max_rollouts=16),
}
#: Background, ink and faint ink of a page.
PAGES = {"light": ("#ffffff", "#1f2328", "#8c959f"), "dark": ("#0d1117", "#e6edf3", "#7d8590")}
VERSIONS = tuple(plots.PALETTE[n] for n in (4, 1, 2, 5, 6, 3, 0))
TRAINER = CONFIG.num_slots + 0.6  # the trainer's row, below the slots


def config_of(name: str) -> LoopConfig:
    """The loop under the rule of this name in RULES."""
    return replace(CONFIG, controller=RULES[name])


@cache
def finding(name: str) -> str:
    """What a rule yields in a run a hundred times as long as the picture, its beginning left out."""
    run = simulate(replace(config_of(name), duration_s=100 * SHOWN_S))
    long = run.summary(after_s=SHOWN_S)
    return f"{name}: {long['tokens_per_s']:.0f} tokens/s, mean lag {long['lag_mean']:.1f} versions"


def in_slots(run: Run) -> list[tuple[int, float, float]]:
    """(slot, start_s, end_s) of each rollout that has begun; a slot is the first that is free."""
    bars, free_s = [], [0.0] * run.config.num_slots
    begun = run.rollouts[run.rollouts["start_s"].notna()].sort_values(["start_s", "rollout"])
    for start_s, end_s in zip(begun["start_s"], begun["end_s"].fillna(run.end_s), strict=True):
        slot = next(n for n, time_s in enumerate(free_s) if time_s <= start_s + 1e-9)
        free_s[slot] = end_s
        bars.append((slot, start_s, end_s))
    return bars


def by_version(run: Run, start_s: float, end_s: float) -> list[tuple[int, float, float]]:
    """(version, from_s, to_s): the stretches of [start_s, end_s] in which the engine held each version."""
    synced = run.steps.dropna(subset="sync_end_s")
    begins = np.r_[-np.inf, synced["sync_end_s"]]
    ends = np.r_[synced["sync_start_s"], np.inf]
    pieces = [(n, max(start_s, a), min(end_s, b)) for n, (a, b) in enumerate(zip(begins, ends, strict=True))]
    return [piece for piece in pieces if piece[2] > piece[1]]


def trained_on(run: Run, step: int) -> dict[int, float]:
    """{version: its share of the tokens that optimizer step `step` trains on}."""
    of_step = run.rollouts.loc[run.rollouts["taken_step"] == step, "rollout"]
    tokens = run.spans[run.spans["rollout"].isin(of_step)].groupby("version")["tokens"].sum()
    return (tokens / tokens.sum()).to_dict()


def draw_rule(ax: Axes, run: Run, ink: str, faint: str) -> None:
    """One rule's slots and trainer over time."""
    for slot, start_s, end_s in in_slots(run):
        for version, a_s, b_s in by_version(run, start_s, end_s):
            ax.barh(
                slot, max(b_s - a_s - 0.25, 0.05), left=a_s, height=0.8, color=VERSIONS[version % len(VERSIONS)], lw=0
            )
    for row in run.steps.itertuples():
        end_s, top = np.nanmin([row.trained_s, run.end_s]), TRAINER - 0.4
        for version, share in trained_on(run, row.step).items():
            color = VERSIONS[version % len(VERSIONS)]
            ax.barh(top + share, end_s - row.taken_s, left=row.taken_s, height=2 * share, color=color, lw=0)
            top += 2 * share
        if row.sync_end_s == row.sync_end_s:
            ax.barh(TRAINER + 0.6, row.sync_end_s - row.sync_start_s, left=row.sync_start_s, height=2, color=ink, lw=0)
    ax.set_yticks([3.5, TRAINER + 0.6], ["8 slots\ngenerate", "trainer"])
    ax.tick_params(colors=ink, length=0, labelsize=12)
    ax.set(xlim=(0, SHOWN_S), ylim=(TRAINER + 1.8, -0.6))
    for side in ax.spines.values():
        side.set_color(faint)


def draw(page: str) -> Figure:
    """The picture for a "light" or a "dark" page: three rules over one clock."""
    ground, ink, faint = PAGES[page]
    fig, axes = plots.figure(7, 6, nrows=len(RULES), sharex=True)
    fig.set_facecolor(ground)
    for ax, name in zip(axes, RULES, strict=True):
        ax.set_facecolor(ground)
        draw_rule(ax, simulate(config_of(name)), ink, faint)
        ax.set_title(finding(name), loc="left", fontsize=14, fontweight="bold", color=ink)
    axes[-1].set_xlabel("time, s (simulated)", color=ink, fontsize=12)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (*VERSIONS, ink)]
    legend = fig.legend(
        handles,
        [*map(str, range(len(VERSIONS))), "weight sync"],
        title="version of the weights that sampled the token",
        ncols=len(handles),
        loc="outside lower left",
        alignment="left",
        frameon=False,
        fontsize=12,
        handlelength=1,
        columnspacing=0.9,
        labelcolor=ink,
        title_fontsize=12,
    )
    legend.get_title().set_color(ink)
    return fig


def main(arguments: list[str] | None = None) -> int:
    """Write both files and name them; return 0."""
    given = sys.argv[1:] if arguments is None else arguments
    folder = Path(given[0]) if given else FOLDER
    with plt.rc_context({"svg.hashsalt": "rlinfra", "svg.fonttype": "path", "font.size": 12}):
        for page in PAGES:
            fig = draw(page)
            path = folder / f"loop-{page}.svg"
            fig.savefig(path, metadata={"Date": None})
            plt.close(fig)
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
