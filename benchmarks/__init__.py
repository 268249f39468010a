"""Benchmarks: each measures one part against its bars (`benchmarks/bars.py`) and asserts what it computed.

Leaves out plots and history: a record is the last run's. Use: `return report("fit", {"seconds ...": 0.1})` at the end
of a benchmark; the record in build/bars/ is taken into results/bars/ by `python -m ci.measured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bars import run_named
from rlinfra_utils import levels

#: Records of this machine's last runs.
RECORDS = Path(__file__).parent.parent / "build" / "bars"


def report(
    name: str,
    measured: Mapping[str, float],
    parameters: dict[str, Any] | None = None,
    *,
    keep: bool = True,
    folder: Path = RECORDS,
) -> int:
    """Print each figure of run `name` beside its bar, keep them all as a dated record, and return the exit code.

    `measured` has every bar's `what`, and may have figures without a bar; `keep=False` is for a run of another size
    than the bars are for. Returns 1 where a bar is missed, else 0.
    Raises ValueError for an unknown run or a bar without a figure.
    """
    bars = {bar.what: bar for bar in run_named(name).bars}
    if lacking := bars.keys() - measured.keys():
        raise ValueError(f"measured of {name!r} lacks {', '.join(sorted(lacking))}")
    width = max(map(len, measured))
    print(f"{'what':<{width}}{'measured':>12}  {'bar':<18}ok")
    for what, value in measured.items():
        bar = bars.get(what)
        limit = "-" if bar is None else f"{bar.sign} {number(bar.limit)}"
        verdict = "" if bar is None else "yes" if bar.is_met(value) else "NO"
        print(f"{what:<{width}}{number(value):>12}  {limit:<18}{verdict}")
    if keep:
        figures = {what: float(value) for what, value in measured.items()}
        print(f"kept as {levels.store(name, figures, folder, level='A', parameters=parameters).name}")
    else:
        print("not kept: another size than the bars are for")
    return int(not all(bar.is_met(measured[what]) for what, bar in bars.items()))


def number(value: float) -> str:
    """A figure for people: whole with commas from 1,000 on, else four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
