"""What a metric is, and where the rows of a branch are kept: `Metric`, `Metrics`, `Sheet`.

Models: one value with group, name, labels, unit, window and configuration hash, or the reason why it is absent. Leaves
out where values come from (`groups.py`). Use: `metrics(run)["truncation_share"]`; `metrics(run).frame()`.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field

import pandas as pd

GROUPS = ("data", "policy", "system", "reliability")


@dataclass(frozen=True)
class Metric:
    """One number of one branch. `labels` tell rows of one name apart; `value` None: absent, and `reason` says why."""

    group: str
    name: str
    value: float | None
    unit: str
    window: str
    config_hash: str
    labels: dict[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Metrics:
    """All metrics of one branch of a run, in order of the groups."""

    run_id: str
    branch_id: str
    rows: tuple[Metric, ...] = field(repr=False)

    def frame(self) -> pd.DataFrame:
        """One row a metric: the fields of `Metric`, labels as text "name=value"."""
        labelled = [vars(row) | {"labels": ",".join(f"{k}={v}" for k, v in row.labels.items())} for row in self.rows]
        table = pd.DataFrame(labelled, columns=list(Metric.__dataclass_fields__))
        return table.astype({"value": float})

    def __getitem__(self, name: str) -> float | dict[str, float]:
        """The value by name; of a name with labels a dict by label value. Raises KeyError with the reason if absent."""
        rows = [row for row in self.rows if row.name == name]
        if not rows:
            raise KeyError(f"{name}: is no metric; the names are {', '.join(dict.fromkeys(r.name for r in self.rows))}")
        if rows[0].value is None:
            raise KeyError(f"{name}: is absent: {rows[0].reason}")
        if rows[0].labels:
            return {"/".join(row.labels.values()): row.value for row in rows}
        return rows[0].value

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{group}</h4>{_table(self.rows, group)}" for group in GROUPS)


def _table(rows: tuple[Metric, ...], group: str) -> str:
    """One row a name; values of one name that labels tell apart stand in one cell."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.group == group:
            value = f"absent: {row.reason}" if row.value is None else f"{row.value:.4g}"
            unit = "" if row.unit == "1" else row.unit
            shown = names.setdefault((row.name, unit, row.window, row.config_hash), [])
            shown.append(" ".join([*row.labels.values(), value]))
    cells = [(name, " · ".join(shown), *rest) for (name, *rest), shown in names.items()]
    head = "".join(f"<th>{name}</th>" for name in ("metric", "value", "unit", "window", "config_hash"))
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"


class Sheet:
    """Where one group's rows are collected; `window` says over what they were taken."""

    def __init__(self, group: str, window: str, config_hash: str) -> None:
        self.group, self.window, self.config_hash = group, window, config_hash
        self.rows: list[Metric] = []

    def put(self, name: str, value: float | None, unit: str, reason: str, **labels: str) -> None:
        """Add a value; None and NaN are absent for `reason`. "unit" 1 is a share or a ratio."""
        absent = value is None or math.isnan(value)
        self.rows.append(
            Metric(
                self.group,
                name,
                None if absent else float(value),
                unit,
                self.window,
                self.config_hash,
                {} if absent else labels,
                reason if absent else "",
            )
        )

    def spread(self, name: str, values: pd.Series, unit: str, reason: str) -> None:
        """Range, mean, median and tail of `values` without those that are missing; quantiles are interpolated."""
        values = values.dropna()
        if values.empty:
            return self.put(name, None, unit, reason)
        shown = {"min": values.min(), "mean": values.mean()}
        shown |= {f"p{share}": values.quantile(share / 100) for share in (50, 95, 99)} | {"max": values.max()}
        for stat, value in shown.items():
            self.put(name, value, unit, reason, stat=stat)
