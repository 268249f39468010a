"""An imitation of Colab: its Python packages, its bootstrap, every notebook at level A, nothing moved.

Leaves out: the GPU, Colab's Python 3.12 and its front end. It builds `.venv-colab` from requirements-colab.txt,
runs each notebook in a kernel of that environment, outside the checkout, so that only the bootstrap cell
can bring the package, and compares `pip freeze` before and after. A whole series that passed leaves its time in
`build/bars`. Use: `python -m ci.colab`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell

from ci import notebook as nbk
from ci.bootstrap import ROOT

PACKAGE = "rlinfra-utils"
REQUIREMENTS = ROOT / "requirements-colab.txt"
CELL_TIMEOUT_S = 300
#: The caller's own settings, which would lead the kernel back to the caller's environment.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "JUPYTER_PATH", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")


class ColabError(RuntimeError):
    """The imitation could not be built or was changed; the message says by what."""


def build(venv: Path) -> Path:
    """Make `venv` hold requirements-colab.txt, without our package; return its interpreter."""
    python, stamp = venv / "bin" / "python", venv / REQUIREMENTS.name
    if not (python.exists() and stamp.exists() and stamp.read_bytes() == REQUIREMENTS.read_bytes()):
        print(f"building {venv.name} from {REQUIREMENTS.name}: a minute or more", flush=True)
        _call(sys.executable, "-m", "venv", "--clear", venv)
        _call(python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS)
        stamp.write_bytes(REQUIREMENTS.read_bytes())
    _call(python, "-m", "pip", "uninstall", "--quiet", "--yes", PACKAGE)
    return python


def freeze(python: Path) -> dict[str, str]:
    """`pip freeze --all` of an interpreter, as {distribution: its line}."""
    lines = _call(python, "-m", "pip", "freeze", "--all").splitlines()
    return {line.replace("==", " ").split()[0].lower(): line for line in lines if line and line[0] not in "#-"}


def require_only_ours(before: dict[str, str], after: dict[str, str]) -> None:
    """Raise ColabError unless our package, and nothing else, came between the two freezes."""
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    if PACKAGE not in changed:
        raise ColabError(f"the bootstrap cells did not install {PACKAGE}")
    if others := sorted(changed - {PACKAGE}):
        moves = "; ".join(f"{before.get(name, 'absent')} -> {after.get(name, 'absent')}" for name in others)
        raise ColabError(f"the bootstrap moved what Colab brings: {moves}")


def at_level_a(notebook):
    """Set LEVEL to "A" in a cell after the parameters, as papermill (which Colab lacks) would."""
    for position, cell in enumerate(notebook.cells, start=1):
        if "parameters" in cell.metadata.get("tags", []):
            notebook.cells.insert(position, new_code_cell('LEVEL = "A"'))
            break
    return notebook


def run_notebook(notebook, folder: Path) -> str | None:
    """Execute `notebook` in this interpreter's kernel with `folder` as its working directory.

    Returns None, or one line with the failing cell and its error.
    """
    started = []
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=lambda cell, cell_index: started.append(cell),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        reason = f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        reason = f"over the limit of {CELL_TIMEOUT_S} s a cell"
    except DeadKernelError:
        reason = "the kernel died"
    else:
        idle = [cell for cell in nbk.code_cells(notebook) if cell.source.strip() and cell.execution_count is None]
        return f"{nbk.label(idle[0])} was not reached: a cell above ended the kernel" if idle else None
    return f"{nbk.label(started[-1])}: {' '.join(reason.split())}" if started else reason


def run_inside(notebooks: Path) -> int:
    """Run every notebook of a folder in this environment, one line each; the number that failed."""
    failures = 0
    for path in nbk.find([], notebooks):
        notebook = nbk.read(path)
        num_cells, start_s = len(nbk.code_cells(notebook)), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            failure = run_notebook(at_level_a(notebook), Path(folder))
        seconds = time.perf_counter() - start_s
        print(f"{path.stem:<40} {seconds:8.1f} s   {num_cells:3d} cells   {failure or 'ok'}", flush=True)
        failures += failure is not None
    return failures


def colab_environment(python: Path, folder: Path) -> dict[str, str]:
    """The environment variables of the imitation: Colab's mark, this checkout as the source, no network for models."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return kept | {
        "COLAB_RELEASE_TAG": "imitation",
        "RLINFRA_SOURCE": str(ROOT),
        "RLINFRA_ANSWERS": str(folder / "answers.json"),
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else the debugger of an old ipykernel warns on stderr
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
    }


def keep_figures(notebooks: Path, seconds: float, before: dict[str, str]) -> None:
    """Leave the record of a whole series that passed, with the packages that it met."""
    from benchmarks import RECORDS  # not there inside the imitation
    from ci.records import commit
    from rlinfra_utils import levels

    packages = [before[name] for name in ("torch", "numpy", "pandas", "transformers") if name in before]
    found = {"notebooks": float(len(nbk.find([], notebooks))), "seconds in all": seconds}
    levels.store("colab", found, RECORDS, level="A", parameters={"commit": commit(), "packages": packages})


def _call(*command) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise ColabError(f"{' '.join(words[1:4])} failed:\n" + "\n".join(done.stdout.splitlines()[-8:]))
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Build the imitation, run the series in it, compare; the exit code is 0 only where all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m ci.colab", description="Run the series as Colab would.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-colab")
    parser.add_argument("--notebooks", type=Path, default=nbk.NOTEBOOKS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.inside:
            return min(run_inside(chosen.notebooks), 1)
        python = build(chosen.venv.resolve())
        before = freeze(python)
        inside = [str(python), "-m", "ci.colab", "--inside", "--notebooks", str(chosen.notebooks.resolve())]
        start_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            code = subprocess.run(inside, cwd=ROOT, env=colab_environment(python, Path(folder))).returncode
        seconds = time.perf_counter() - start_s
        require_only_ours(before, freeze(python))
    except nbk.NotebookError as error:
        print(error, file=sys.stderr)
        return 1
    except ColabError as error:
        print(error, file=sys.stderr)
        (chosen.venv / REQUIREMENTS.name).unlink(missing_ok=True)  # spoilt: build it anew next time
        return 1
    if code == 0 and chosen.notebooks == nbk.NOTEBOOKS:
        keep_figures(chosen.notebooks, seconds, before)
    print(f"{len(before)} distributions stayed as they were; {PACKAGE} came")
    return code


if __name__ == "__main__":
    sys.exit(main())
