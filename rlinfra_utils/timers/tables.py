"""Spans as tables: one row a span, one row a stage.

Models: shares of the working time that each stage spent itself, tails by quantiles, waiting apart.
Leaves out: which stage decides the total when tracks overlap (`critical` does).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from rlinfra_utils.timers.spans import Source, Span, self_pieces

COLUMNS = ["span", "parent", "stage", "track", "process", "thread", "start_s", "end_s", "dur_s", "self_s"]
COLUMNS += ["wait", "warmup", "tokens", "error", "mode"]
QUANTILE_METHOD = "linear"  # numpy's default, type 7 of Hyndman and Fan (1996)


def mode_of(sources: dict[str, Source]) -> str:
    """What the times mean: the mode, or the modes of the merged traces."""
    return ", ".join(sorted({source.mode for source in sources.values()}))


def frame(sources: dict[str, Source], spans: list[Span]) -> pd.DataFrame:
    """One row a span: `COLUMNS`, then the other attributes by name (absent: missing value)."""
    own_ns = [sum(end - start for start, end in pieces) for pieces in self_pieces(spans)]
    rows = [
        {
            **span.attrs,
            "span": span.id,
            "parent": None if span.parent is None else f"{span.source}-{span.parent}",
            "stage": span.stage,
            "thread": span.thread,
            "process": f"{sources[span.source].process}:{sources[span.source].pid}@{sources[span.source].host}",
            "start_s": span.start_ns / 1e9,
            "end_s": span.end_ns / 1e9,
            "dur_s": (span.end_ns - span.start_ns) / 1e9,
            "self_s": own / 1e9,
            "mode": sources[span.source].mode,
            "wait": span.waits,
            "warmup": span.warmup,
        }
        for span, own in zip(spans, own_ns)
    ]
    others = dict.fromkeys(name for span in spans for name in span.attrs if name not in COLUMNS)
    table = pd.DataFrame(rows, columns=[*COLUMNS, *others])
    table = table.astype({"wait": bool, "warmup": bool, "tokens": "Int64"})
    table.attrs["mode"] = mode_of(sources)
    return table


def summary(spans: pd.DataFrame) -> pd.DataFrame:
    """Stages in order of their first start, from `frame`; warm-up spans are left out and counted in `.attrs`.

    count; total_s with children; self_s of working spans without children; share = self_s over the sum of
    all self_s, so that shares add up to 1; p50_s, p95_s, p99_s of durations with children, interpolated
    linearly; tokens; tokens_per_s over the spans that state tokens (of concurrent spans the seconds add
    up, so this is the rate of one); wait_s of waiting spans without children.
    """
    counted = spans[~spans["warmup"]]
    stages = {stage: _stage_row(rows) for stage, rows in counted.groupby("stage", sort=False)}
    columns = ["count", "total_s", "self_s", "share", "p50_s", "p95_s", "p99_s", "tokens", "tokens_per_s", "wait_s"]
    table = pd.DataFrame.from_dict(stages, orient="index", columns=columns).rename_axis("stage")
    table = table.astype({name: "int64" if name in ("count", "tokens") else "float64" for name in columns})
    work_s = table["self_s"].sum()
    table["share"] = table["self_s"] / work_s if work_s > 0 else np.nan
    table.attrs = {
        "mode": spans.attrs["mode"],
        "quantile_method": QUANTILE_METHOD,
        "num_warmup_spans": int(spans["warmup"].sum()),
    }
    return table


def _stage_row(rows: pd.DataFrame) -> list[float]:
    p50_s, p95_s, p99_s = np.quantile(rows["dur_s"].to_numpy(), [0.5, 0.95, 0.99], method=QUANTILE_METHOD)
    stating = rows[rows["tokens"].notna()]
    tokens, stating_s = int(stating["tokens"].sum()), stating["dur_s"].sum()
    work_s, wait_s = rows.loc[~rows["wait"], "self_s"].sum(), rows.loc[rows["wait"], "self_s"].sum()
    rate = tokens / stating_s if stating_s > 0 else np.nan
    return [len(rows), rows["dur_s"].sum(), work_s, np.nan, p50_s, p95_s, p99_s, tokens, rate, wait_s]
