"""The README's table of levels: what each needs, what runs, what it took, and when, where and at which commit.

Says what a stored record says and nothing else; a level without a record is "not measured".
Use: `rewritten(text)`; `python -m ci.measured` writes the README with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ci.records import NOT_MEASURED, RESULTS, ROOT, machine_of, read, table

README = ROOT / "README.md"
BEGIN, END = "<!-- Written by `python -m ci.measured`: edits by hand fail a test. -->\n", "<!-- End. -->\n"


def of_series(record: dict) -> str:
    """What the series took: in all, its longest notebook, its most memory."""
    found = record["result"]
    longest_s = max(found["seconds of the slowest lesson"], found.get("seconds of the capstone", 0.0))
    each = f"each at most {longest_s:.0f} s and {found['peak memory of a notebook, GB']:.1f} GB"
    return f"{found['notebooks']:.0f} notebooks in {found['seconds in all']:.0f} s, {each}"


def of_colab(record: dict) -> str:
    """What the imitation of Colab took."""
    return f"{record['result']['notebooks']:.0f} notebooks in {record['result']['seconds in all']:.0f} s"


def of_cluster(record: dict) -> str:
    """What one run of the loop took, from the fastest arrangement to the slowest, and the most memory of any."""
    walls_s = [row["wall_s"]["mean"] for row in record["result"].values()]
    most_gb = max(row["peak_bytes"] for row in record["result"].values()) / 1e9
    updates = record["parameters"]["num_updates"]
    return f"{updates} updates in {min(walls_s):.0f} to {max(walls_s):.0f} s, each at most {most_gb:.1f} GB"


class Level(NamedTuple):
    """One row: a level, and the record within results/ that says what it took."""

    level: str
    needs: str
    runs: str
    record: str
    took: Callable[[dict], str]


LEVELS = (
    Level("A", "any CPU, no network", "a tiny real policy, trained by GRPO", "bars/series.json", of_series),
    Level("A", "Colab's packages", "the same, torch for the CPU", "bars/colab.json", of_colab),
    Level("B", "one accelerator, or patience", "SmolLM2-135M, a vLLM server", "bars/series_b.json", of_series),
    Level("C", "Ray; several GPUs if there are", "the loop as processes", "level_c_compare.json", of_cluster),
)


def row_of(level: Level, results: Path) -> tuple[tuple[str, ...], str]:
    """A row of the table, and the machine; empty where nothing is stored. Raises ValueError for a broken record."""
    path = results / level.record
    if not path.exists():
        return (*level[:3], NOT_MEASURED, "-", "-"), ""
    record = read(path)
    try:
        took, machine = level.took(record), machine_of(record)
        return (*level[:3], took, record["date"], record.get("parameters", {}).get("commit", "-")), machine
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{level.record} is not as its run stores it ({error!r}); run that again") from None


def on_gpus(results: Path) -> str:
    """A sentence on the accelerators that any stored record is of."""
    records = [read(path) for path in sorted(results.rglob("*.json"))]
    names = {record["hardware"].get("gpu_name") for record in records} - {None}
    return f"Stored from GPUs: {', '.join(sorted(names))}." if names else "No run on a GPU is stored."


def block(results: Path = RESULTS) -> str:
    """The text between the README's marks. Raises ValueError for a broken record."""
    rows, machines = zip(*(row_of(level, results) for level in LEVELS), strict=True)
    columns = ("level", "needs", "what runs", "took", "date", "commit")
    known = " and ".join(dict.fromkeys(filter(None, machines))) or "no machine yet"
    return f"{table(columns, list(rows))}\n\nMeasured on {known}. {on_gpus(results)}\n"


def rewritten(text: str, results: Path = RESULTS) -> str:
    """`text` with the table as the records have it. Raises ValueError unless each mark stands in it once, in order."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in tail:
        raise ValueError(f"README.md: needs the lines {BEGIN.strip()} and {END.strip()}, once each and in this order")
    return f"{head}{BEGIN}{block(results)}{END}{tail}"
