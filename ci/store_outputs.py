"""Runs notebooks at their own defaults and stores the outputs back into them: what is committed.

It takes no parameter and shows no accelerator to the kernel, so that LEVEL = "auto" means level A on every machine.
A notebook that fails, or writes to stderr, stays as it was. Use: `python -m ci.store_outputs [NAMES...]`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import nbformat

from ci import execute
from ci import notebook as nbk
from ci.run_series import positive

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
# What a run leaves in the metadata: times, papermill's records, the state of widgets.
NOTEBOOK_NOISE = ("papermill", "widgets", "signature")
CELL_NOISE = ("papermill", "execution", "ExecuteTime", "collapsed", "scrolled")


def cleaned(executed, original) -> nbformat.NotebookNode:
    """Return `executed` with the metadata of `original` and counts 1 to n: the same run gives the same file.

    Raises NotebookError when a cell wrote to stderr: such output differs from machine to machine.
    """
    for cell in nbk.code_cells(executed):
        if any(output.get("name") == "stderr" for output in cell.outputs):
            raise nbk.NotebookError(f"{nbk.label(cell)}: wrote to stderr, which is not stored{execute.complaint(cell)}")
    executed.metadata = _without(original.metadata, NOTEBOOK_NOISE)
    executed.metadata.kernelspec = KERNELSPEC
    executed.metadata.language_info = {"name": "python"}
    for cell, before in zip(executed.cells, original.cells, strict=True):
        cell.metadata = _without(before.metadata, CELL_NOISE)
    for count, cell in enumerate((cell for cell in nbk.code_cells(executed) if cell.source.strip()), start=1):
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return executed


def _without(metadata, noise: tuple[str, ...]) -> nbformat.NotebookNode:
    return nbformat.from_dict({name: value for name, value in metadata.items() if name not in noise})


def store(path: Path, cell_timeout_s: int) -> None:
    """Run one notebook and write its outputs into it.

    Raises NotebookError, and leaves the file alone, when the run fails.
    """
    original = nbk.read(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        with execute.environment(Path(folder) / "kernel", CUDA_VISIBLE_DEVICES=""):
            failure, _ = execute.execute(path.resolve(), copy, {}, cell_timeout_s)
        if failure:
            raise nbk.NotebookError(failure)
        text = nbformat.v4.writes(cleaned(nbk.read(copy), original)) + "\n"
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Store the outputs of the notebooks named, or of all: 0, 1 when one failed, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m ci.store_outputs", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks by name or its beginning; all when left out")
    parser.add_argument("--notebooks", type=Path, default=nbk.NOTEBOOKS, help="folder of the notebooks (notebooks)")
    parser.add_argument(
        "--cell-timeout", type=positive, default=300, metavar="S", help="limit for a cell in seconds (300)"
    )
    options = parser.parse_args(arguments)
    try:
        paths = nbk.find(options.names, options.notebooks)
    except nbk.NotebookError as error:
        print(f"store_outputs: {error}", file=sys.stderr)
        return 2
    failed = False
    for path in paths:
        try:
            store(path, options.cell_timeout)
            print(f"{path.stem}: stored", flush=True)
        except nbk.NotebookError as error:
            failed = True
            print(f"{path.stem}: FAILED, left as it was: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
