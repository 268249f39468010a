"""Writes docs/MEASURED.md: every bar of the project, what was last measured against it, when and on which machine.

Measures nothing itself. Runs leave records in build/bars/; this takes those that are not older into results/bars/ and
writes the page, and the README's table of levels, from results/ alone. A bar without a record says so. Use:
`python -m ci.measured [FOLDER]`, FOLDER being another checkout's build/bars; `--took make_check UNIX_S` only notes the
minutes since then, as the Makefile does.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import RECORDS, number
from benchmarks.bars import HELD, RUNS, WITHOUT_BARS, Bar, Run, run_named
from ci import readme
from ci.records import NOT_MEASURED, RESULTS, ROOT, machine_of, read, table
from rlinfra_utils import levels

PAGE = ROOT / "docs" / "MEASURED.md"


class Row(NamedTuple):
    """A bar and its figure; `measured` is None, and date and machine are empty, where there is no record."""

    run: Run
    bar: Bar
    measured: float | None = None
    date: str = ""
    machine: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """yes, NO, or that there is no figure."""
        if self.measured is None:
            return NOT_MEASURED
        return "yes" if self.bar.is_met(self.measured) else "NO"


def of_record(result: dict, run: Run) -> dict[str, tuple[float, str]]:
    """What a benchmark stored: a figure by each bar's name."""
    return {what: (value, "") for what, value in result.items()}


def of_twin(result: dict, run: Run) -> dict[str, tuple[float, str]]:
    """The worst of the twin's configurations by each figure, with all that are outside the bar."""
    rows = result["configurations"]
    off = {
        "throughput, share off": {row["configuration"]: abs(row["tokens_per_s"] - 1) for row in rows},
        "mean lag, versions off": {row["configuration"]: abs(row["lag_mean"]) for row in rows},
        "lag distribution, total variation": {row["configuration"]: row["lag_variation"] for row in rows},
        "queue's 95th percentile, batches off": {row["configuration"]: abs(row["queue_p95_batches"]) for row in rows},
    }
    figures = {"held-out configurations": (len(rows), "")}
    for bar in run.bars:
        if bar.what in off:
            missed = [f"{name} ({number(value)})" for name, value in off[bar.what].items() if not bar.is_met(value)]
            figures[bar.what] = max(off[bar.what].values()), f"missed by: {', '.join(missed)}" if missed else ""
    return figures


def of_training_peak(result: dict, run: Run) -> dict[str, tuple[float, str]]:
    """How far the predicted peak of level B's training step is from the tracked one."""
    return {run.bars[0].what: (abs(result["ratio"] - 1), "")}


#: Records that a lesson or a level stores for its own use.
ELSEWHERE = {"twin": ("twin.json", of_twin), "training_peak": ("small_model_memory.json", of_training_peak)}


def source(run: Run) -> tuple[str, Callable[[dict, Run], dict[str, tuple[float, str]]]]:
    """The file of a run's record within results/, and how to read its figures."""
    return ELSEWHERE.get(run.name, (f"bars/{run.name}.json", of_record))


def rows_of(run: Run, results: Path = RESULTS) -> list[Row]:
    """A row for each bar of `run`. Raises ValueError for a record that lacks the figure of a bar."""
    name, figures_of = source(run)
    path = results / name
    if not path.exists():
        return [Row(run, bar) for bar in run.bars]
    record = read(path)
    try:
        figures, machine = figures_of(record["result"], run), machine_of(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not as {run.program} stores it ({error}); run that again") from None
    rows = []
    for bar in run.bars:
        value, note = figures.get(bar.what, (None, ""))
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{name} has {value!r} for {bar.what!r}, not a figure; run {run.program} again")
        rows.append(Row(run, bar, value, record["date"], machine, note))
    return rows


def check_held() -> None:
    """Raise ValueError for a bar whose test is not there."""
    for held in HELD:
        file, _, name = held.test.partition("::")
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            raise ValueError(f"{held.test} is not there, and has to hold {held.what!r}")


def measured_table(rows: list[Row], machines: list[str]) -> str:
    """Every bar of a run with its figure; machines by their number in the list at the end of the page."""
    lines = []
    for row in rows:
        figure = date = machine = "-"
        links = f"[{Path(row.run.program).stem}](../{row.run.program})"
        if row.measured is not None:
            figure, date, machine = number(row.measured), row.date, str(machines.index(row.machine) + 1)
            links += f", [record](../results/{source(row.run)[0]})"
        bar = f"{row.bar.sign} {number(row.bar.limit)}"
        lines.append((row.run.subject, row.bar.what, bar, figure, row.verdict, date, machine, links))
    return table(("subject", "what", "bar", "measured", "met", "date", "machine", "measured by"), lines)


def short_list(rows: list[Row]) -> str:
    """What falls short: bars that are missed, with what is known of where, then runs without a record."""
    missed = [row for row in rows if row.verdict == "NO"]
    lines = [
        f"- {row.run.subject}: {row.bar.what}: {number(row.measured)}, the bar is {row.bar.sign} "
        f"{number(row.bar.limit)}{'; ' + row.note if row.note else ''}."
        for row in missed
    ]
    lines += dict.fromkeys(f"- {row.run.subject}: {NOT_MEASURED}." for row in rows if row.measured is None)
    return "\n".join(lines) or "No bar is missed, and none is without a record."


def page(results: Path = RESULTS) -> str:
    """The text of docs/MEASURED.md. Raises ValueError for a broken record and for a test that is not there."""
    check_held()
    rows = [row for run in RUNS for row in rows_of(run, results)]
    machines = list(dict.fromkeys(row.machine for row in rows if row.measured is not None))
    counts = [sum(row.verdict == verdict for row in rows) for verdict in ("yes", "NO", NOT_MEASURED)]
    held = [(held.subject, held.what, f"`{held.test}`") for held in HELD]
    parts = [
        "# What was measured",
        "Written by `python -m ci.measured` from the records in `results/`; edits by hand fail a test. `make bench` "
        "measures what the benchmarks measure, `make lab`, `make check` and `make test` note their own time.",
        f"Of {len(rows)} bars that runs measure {counts[0]} are met, {counts[1]} are missed, {counts[2]} have no "
        f"record. {len(HELD)} more are held by tests.",
        "## Bars that runs measure",
        measured_table(rows, machines),
        "## Bars that tests hold",
        "Each holds where its test passes; `make test` runs them all.",
        table(("subject", "what", "test"), held),
        "## What falls short",
        short_list(rows),
        "## Machines",
        "\n".join(f"{index}. {machine}" for index, machine in enumerate(machines, 1)) or "None yet.",
    ]
    return "\n\n".join(parts) + "\n"


def take(folder: Path, results: Path = RESULTS) -> list[str]:
    """Copy the records of `folder` to `results`/bars, but none over a later one; return their names.

    Raises ValueError for a file that is no record of a run with bars or of a level.
    """
    taken = []
    for path in sorted(folder.glob("*.json")):
        record, kept = read(path), results / "bars" / path.name
        if path.stem not in WITHOUT_BARS:
            run_named(path.stem)
        if kept.exists() and read(kept)["date"] > record["date"]:
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(path.read_bytes())
        taken.append(path.stem)
    return taken


def note_time(name: str, start_unix_s: float, folder: Path) -> None:
    """Record the minutes since `start_unix_s` for a run whose bar is in minutes. Raises ValueError for another run."""
    if [bar.what for bar in run_named(name).bars] != ["minutes"]:
        raise ValueError(f"--took {name}: its bars are not in minutes")
    levels.store(name, {"minutes": (time.time() - start_unix_s) / 60}, folder, level="A")


def main(arguments: list[str] | None = None) -> int:
    """Write page and table, or note a time: 0 when done, 2 for a broken record or wrong use."""
    parser = argparse.ArgumentParser(prog="python -m ci.measured", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=RECORDS, help="where runs left records (build/bars)")
    parser.add_argument("--took", nargs=2, metavar=("NAME", "UNIX_S"), help="note the minutes since UNIX_S, no more")
    options = parser.parse_args(arguments)
    try:
        if options.took:
            note_time(options.took[0], float(options.took[1]), options.folder)
            return 0
        print(f"records taken: {', '.join(take(options.folder)) or 'none'}")
        texts = {PAGE: page(), readme.README: readme.rewritten(readme.README.read_text(encoding="utf-8"))}
    except ValueError as error:
        print(f"measured: {error}", file=sys.stderr)
        return 2
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
