"""Records of runs as `levels.store` writes them: read one, name its machine, say which commit a run is of.

Leaves out what the records mean: `measured.py` holds them against the bars, `readme.py` says what the levels took.
Use: `record = read(RESULTS / "bars" / "series.json")`; `machine_of(record)`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
NOT_MEASURED = "not measured"


def read(path: Path) -> dict:
    """A record, as `levels.store` wrote it. Raises ValueError naming the file and what it lacks."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no record: {error}") from None
    for field in ("name", "date", "hardware", "versions", "result"):
        if not isinstance(record, dict) or field not in record:
            raise ValueError(f"{path.name} is no record: it has no {field!r}; run its benchmark again")
    return record


def machine_of(record: dict) -> str:
    """The machine and the versions that speed depends on, in one line."""
    hardware, versions = record["hardware"], record["versions"]
    memory = "" if hardware["memory_bytes"] is None else f", {hardware['memory_bytes'] / 2**30:.1f} GiB"
    gpu = "" if hardware["gpu_name"] is None else f", {hardware['num_accelerators']} x {hardware['gpu_name']}"
    named = ", ".join(f"{name} {versions[name]}" for name in ("python", "numpy", "torch") if name in versions)
    return f"{hardware['cpu_count']} CPU cores ({hardware['cpu_model']}){memory}{gpu}; {named}"


def commit() -> str:
    """The commit of this checkout, "-dirty" behind it where a file differs; "-" where git knows none."""
    if shutil.which("git") is None:
        return "-"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "-"


def table(names: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [names, ("---",) * len(names), *lines])
