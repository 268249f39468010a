"""Runs the notebooks of the series in name order and says one line about each.

Parameters are checked before anything runs: a name that a notebook lacks or a value of another type is refused. It
executes copies: the notebooks and the reader's answers stay as they are. Executed copies go to `build/lab/notebooks`,
what the notebooks write to `build/lab/out/NAME`, pages to `build/lab`. A whole series that passed at level A or B also
leaves its times and memory in `build/bars`. Use: `python -m ci.run_series [NAMES...]`.
"""

import argparse
import ast
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RECORDS
from ci import notebook as nbk
from ci.records import commit
from rlinfra_utils import levels

ROOT = nbk.NOTEBOOKS.parent
LEVELS = ("A", "B", "C", "auto")
#: Names of what a whole series leaves, by its level.
RECORD_OF = {"A": "series", "B": "series_b"}


@dataclass(frozen=True)
class Outcome:
    """One notebook's run: what the progress line and the index say about it."""

    name: str
    title: str
    sentence: str
    level: str
    seconds: float
    num_cells: int
    failure: str | None  # one line: cell, its first line, the error
    peak_bytes: int = 0  # of the kernel and the processes below it

    def line(self) -> str:
        """Return the progress line, without the name that `run` prints before the notebook starts."""
        verdict = "FAILED" if self.failure else "ok"
        return f"{self.seconds:8.1f} s   {self.num_cells:3d} cells   level {self.level}   {verdict}"


def typed(name: str, value, default):
    """Return `value` as the type of the parameter's default; a string counts as Python source unless `default` is one.

    An int is taken for a float. A default of None says nothing about the type, so any literal is taken.

    Raises ValueError when the value is of another type or does not read as that type exactly.
    """
    kind = type(default)
    if isinstance(value, str) and kind is not str:
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise ValueError(f"{name} = {value!r} does not read as {kind.__name__} (default {default!r})") from None
    if kind is float and type(value) is int:
        return float(value)
    if default is not None and type(value) is not kind:
        raise ValueError(f"{name} = {value!r} is {type(value).__name__}, not {kind.__name__} (default {default!r})")
    return value


def plan(paths: list[Path], given: dict, level: str, out: Path) -> dict[Path, dict]:
    """Return the parameters of each notebook: `given`, and LEVEL and OUT_DIR where the notebook has them.

    Raises NotebookError, before anything runs, for a name that one of the notebooks lacks, a value of another type,
    and a notebook that asks for a kernel of its own.
    """
    if "OUT_DIR" in given:
        raise nbk.NotebookError("OUT_DIR is not a parameter of the series: name the output folder by --out")
    plans = {}
    for path in paths:
        notebook = nbk.read(path)
        ours = {"LEVEL": level, "OUT_DIR": os.path.relpath(out / "out" / path.stem, path.resolve().parent)}
        try:
            if (kernel := nbk.kernel(notebook)) != "python3":
                raise ValueError(f"kernelspec is {kernel!r}, not 'python3'")
            defaults = nbk.parameters(notebook)
            if unknown := sorted(given.keys() - defaults.keys()):
                raise ValueError(f"no parameter {', '.join(unknown)}; it has {', '.join(defaults) or 'none'}")
            values = {name: value for name, value in ours.items() if name in defaults} | given
            plans[path] = {name: typed(name, value, defaults[name]) for name, value in values.items()}
        except ValueError as error:
            raise nbk.NotebookError(f"{path.name}: {error}") from None
    return plans


def with_level_b(paths: list[Path]) -> list[Path]:
    """Those that have level-B cells, or all where none has: the others do at level B what they do at level A."""
    having = [p for p in paths if any(nbk.first_line(c).startswith("%%level B ") for c in nbk.code_cells(nbk.read(p)))]
    return having or paths


def run(plans: dict[Path, dict], out: Path, cell_timeout_s: int) -> list[Outcome]:
    """Run each notebook with its parameters, print a line for each, and return their outcomes.

    The hubs are out of reach (offline switches) when every notebook runs at level A.
    """
    # papermill takes a second to import; a refused parameter should not wait for it
    from ci import execute, peak_memory

    outcomes = []
    width = max(len(path.stem) for path in plans)
    offline = {parameters.get("LEVEL", "A") for parameters in plans.values()} == {"A"}
    with execute.environment(out / "kernel", offline=offline):
        for path, parameters in plans.items():
            print(f"{path.stem:<{width}}", end=" ", flush=True)
            folder = out / "out" / path.stem
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            start_s = time.perf_counter()
            with peak_memory.Watch() as watch:
                failure, num_cells = execute.execute(path, out / "notebooks" / path.name, parameters, cell_timeout_s)
            seconds = time.perf_counter() - start_s
            title, sentence = nbk.heading(nbk.read(path))
            level = level_of(folder, parameters)
            outcomes.append(Outcome(path.stem, title, sentence, level, seconds, num_cells, failure, watch.peak_bytes))
            print(outcomes[-1].line(), flush=True)
    return outcomes


def level_of(folder: Path, parameters: dict) -> str:
    """Return the level that ran: `level` in the notebook's result.json, else the LEVEL it was given, else "-"."""
    try:
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))["level"]
    except (OSError, ValueError, KeyError, TypeError):
        return parameters.get("LEVEL", "-")


def keep_results(outcomes: list[Outcome], out: Path, results: Path) -> list[Path]:
    """Copy OUT_DIR/results/*.json of the notebooks that passed to `results` and return the copies."""
    results.mkdir(parents=True, exist_ok=True)
    passed = [outcome.name for outcome in outcomes if not outcome.failure]
    found = [path for name in passed for path in sorted((out / "out" / name / "results").glob("*.json"))]
    return [Path(shutil.copy(path, results / path.name)) for path in found]


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """What the series took, by the names of its bars in `benchmarks/bars.py`, and each notebook's part."""
    found = {
        "notebooks": float(len(outcomes)),
        "seconds in all": sum(outcome.seconds for outcome in outcomes),
        "peak memory of a notebook, GB": max(outcome.peak_bytes for outcome in outcomes) / 1e9,
    }
    for outcome in outcomes:
        kind = "seconds of the capstone" if "capstone" in outcome.name else "seconds of the slowest lesson"
        found[kind] = max(found.get(kind, 0.0), outcome.seconds)
        found[f"seconds of {outcome.name}"] = outcome.seconds
        found[f"peak memory of {outcome.name}, GB"] = outcome.peak_bytes / 1e9
    return found


def keep_figures(outcomes: list[Outcome], level: str) -> None:
    """Leave the record of a whole series that passed; at level B only where the model and a vLLM server took part."""
    machine = levels.detect()
    if level == "A" or (level == "B" and machine.small_model and machine.vllm_python):
        levels.store(RECORD_OF[level], figures(outcomes), RECORDS, level=level, parameters={"commit": commit()})


def write_pages(outcomes: list[Outcome], out: Path) -> Path:
    """Write an HTML page for each executed copy and the index over them; return the index."""
    from ci import index, page

    for outcome in outcomes:
        plain = page.write(out / "notebooks" / f"{outcome.name}.ipynb", out / f"{outcome.name}.html")
        for formula in plain:
            print(f"{outcome.name}: the page shows this formula as its TeX source: {formula}")
    return index.write(outcomes, out / "index.html")


def write_reference(out: Path) -> None:
    """Write what stands beside the whole series: the recipes and the package's API."""
    from ci import api, recipes

    recipes.write(out / "recipes.html")
    api.write(out / "api")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; wrong use ends in one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m ci.run_series", description=__doc__.splitlines()[0])
    every = "all when left out, at level B all that have level-B cells"
    parser.add_argument("names", nargs="*", help=f"notebooks by name or its beginning, such as 01; {every}")
    parser.add_argument("--level", choices=LEVELS, default="A", help="LEVEL for notebooks that have it (A)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "lab", help="output folder (build/lab)")
    parser.add_argument("--notebooks", type=Path, default=nbk.NOTEBOOKS, help="folder of the notebooks (notebooks)")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
    parser.add_argument(
        "--cell-timeout", type=positive, default=300, metavar="S", help="limit for a cell in seconds (300)"
    )
    parser.add_argument("--html", action=argparse.BooleanOptionalAction, default=True, help="write pages and the index")
    parser.add_argument("--keep-results", action="store_true", help="copy OUT_DIR/results/*.json to results/")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Read a whole number above 0: papermill takes 0 for no limit at all."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the series: 0 when every notebook passed, 1 when one failed, 2 for wrong use."""
    options = parse(arguments)
    out = options.out.resolve()
    try:
        found = nbk.find(options.names, options.notebooks)
        chosen = found if options.names or options.level != "B" else with_level_b(found)
        plans = plan(chosen, dict(options.p), options.level, out)
    except nbk.NotebookError as error:
        print(f"run_series: {error}", file=sys.stderr)
        return 2
    outcomes = run(plans, out, options.cell_timeout)
    if options.keep_results:
        for path in keep_results(outcomes, out, ROOT / "results"):
            print(f"kept {path.relative_to(ROOT)}")
    if options.html:
        if not options.names and options.notebooks == nbk.NOTEBOOKS:
            write_reference(out)  # before the index, which links to it
        print(f"pages: {write_pages(outcomes, out)}")
    failed = [outcome for outcome in outcomes if outcome.failure]
    if not (failed or options.names or options.p or options.notebooks != nbk.NOTEBOOKS):
        keep_figures(outcomes, options.level)
    for outcome in failed:
        print(f"FAILED {outcome.name}: {outcome.failure}", file=sys.stderr)
    total_s = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} notebooks passed in {total_s:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
