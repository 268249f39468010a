"""What every picture has in common: colours, fonts, legend, title, and the way into a notebook.

Models: one colour a stage wherever it is drawn, sizes in inches, PNGs of few colours with alt text. Leaves out what is
drawn (`charts.py`). Use: `fig, ax = figure(8, 3)`; `title(ax, "Decode sets the pace")`; `show(fig, alt="...")`.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

#: Okabe and Ito's palette (2008): eight colours that stay apart under the common colour-blindnesses.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
WAITING = "#D0D0D0"

#: One colour a stage, everywhere in the series.
STAGE_COLORS = {
    "prepare": PALETTE[7],
    "prefill": PALETTE[4],
    "decode": PALETTE[0],
    "rollout": PALETTE[0],
    "verifier": PALETTE[6],
    "logprob_recompute": PALETTE[5],
    "forward_backward": PALETTE[3],
    "optimizer_step": PALETTE[1],
    "train": PALETTE[3],
    "weight_sync": PALETTE[2],
    "records": "#777777",
    "queue_wait": WAITING,
}

STYLE = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 10,
    "axes.prop_cycle": plt.cycler(color=PALETTE),
    "legend.frameon": False,
    "font.size": 9,
    "svg.hashsalt": "rlinfra",
}


def styled(draw):
    """Run a drawing function in the series' style, without touching the reader's own settings."""

    @functools.wraps(draw)
    def in_style(*args, **kwargs):
        with plt.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


@styled
def figure(width: float = 8.0, height: float = 3.0, **grid) -> tuple[Figure, object]:
    """A figure in the series' style; `grid` goes to `plt.subplots`. Sizes in inches."""
    return plt.subplots(figsize=(width, height), **grid)


def title(ax, finding: str) -> None:
    """Set the title of `ax`: the finding, not the names of the axes."""
    ax.set_title(finding, loc="left", fontsize=11, fontweight="bold")


def legend_below(fig: Figure, colors: Mapping[str, str]) -> None:
    """A legend below the picture: a box of each colour, by name, in as many columns as the width holds."""
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colors.values()]
    widest_inches = 0.7 + 0.075 * max(map(len, colors))
    ncols = max(1, min(len(colors), int(fig.get_figwidth() / widest_inches)))
    fig.legend(handles, colors, ncols=ncols, loc="outside lower left")


def color_of(stage: str, known: dict[str, str]) -> str:
    """The colour of a stage, or of anything else: its own, else the first that `known` does not use; kept there."""
    spare = [c for c in PALETTE if c not in known.values()] or list(PALETTE)
    return known.setdefault(stage, STAGE_COLORS.get(stage, spare[0]))


def show(fig: Figure, alt: str) -> None:
    """Display `fig` once, with `alt` as its description for those who do not see it.

    128 colours keep thin lines apart, which 64 do not, and still make a chart's PNG half as large.
    Closes `fig`. Raises ValueError for an `alt` that says nothing.
    """
    from IPython.display import display

    if not alt.strip():
        raise ValueError(f"alt={alt!r}: describes nothing; say in a sentence what the figure shows")
    full, small = io.BytesIO(), io.BytesIO()
    fig.savefig(full, format="png", dpi=100)
    plt.close(fig)
    Image.open(full).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    data = {"image/png": base64.b64encode(small.getvalue()).decode(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
