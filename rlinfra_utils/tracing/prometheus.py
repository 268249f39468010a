"""Metrics in Prometheus' text format, for the textfile collector or any scraper: `to_prometheus`.

Models: text format 0.0.4 (prometheus.io, "Exposition formats"): HELP and TYPE once a family, labels escaped, a line
feed at the end; every family a gauge, as it is one reading of a finished window. Leaves out a server and timestamps.
Use: `Path("run.prom").write_text(to_prometheus(metrics(run)))`. An absent metric has no line.
"""

from __future__ import annotations

import re
from collections import defaultdict

from rlinfra_utils.tracing.sheet import Metric, Metrics

#: Our unit -> suffix of the name, in Prometheus' base units.
_SUFFIX = {"s": "_seconds", "bytes": "_bytes", "tokens": "_tokens", "rollouts": "_rollouts", "versions": "_versions"}
_SUFFIX |= {"tokens/s": "_tokens_per_second", "nats/token": "_nats_per_token"}


def to_prometheus(metrics: Metrics) -> str:
    """One line a value: rlinfra_GROUP_NAME_UNIT{run_id, branch_id, config_hash, labels} value."""
    families: dict[str, list[Metric]] = defaultdict(list)
    for row in metrics.rows:
        if row.value is not None:
            families[_name(row)].append(row)
    lines = []
    for name, rows in families.items():
        lines += [f"# HELP {name} {_help(rows[0])}", f"# TYPE {name} gauge"]
        for row in rows:
            identity = {"run_id": metrics.run_id, "branch_id": metrics.branch_id, "config_hash": row.config_hash}
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in (identity | row.labels).items())
            lines.append(f"{name}{{{labels}}} {_number(row.value)}")
    return "".join(line + "\n" for line in lines)


def _name(row: Metric) -> str:
    suffix = _SUFFIX.get(row.unit, "")
    name = row.name if row.name.endswith(suffix) else row.name + suffix
    return "rlinfra_" + re.sub(r"[^a-zA-Z0-9_]", "_", f"{row.group}_{name}")


def _help(row: Metric) -> str:
    text = f"{row.name.replace('_', ' ')}, {row.unit if row.unit != '1' else 'number'}; {row.window}"
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(value))
