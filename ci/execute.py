"""Executes one notebook by papermill in this interpreter, quietly and the same way each time.

It leaves out what to run and what to show: `run_series` and `store_outputs` do that. A notebook passes when each code
cell ran and the cell tagged `sentinel` printed something, since papermill alone also passes a cell that calls
`sys.exit()` and skips the rest. Use: `with environment(folder): failure, count = execute(source, copy, {}, 300)`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from nbclient.exceptions import CellTimeoutError
from papermill.exceptions import PapermillExecutionError

from ci import notebook as nbk

# What papermill and the kernel log about a failure, `execute` returns; on stderr it would break the progress lines.
logging.getLogger("papermill").addHandler(logging.NullHandler())

QUIET = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # a reader's MPLBACKEND=Agg would lose every picture
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the kernel's debugger warns on stderr without it
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@contextlib.contextmanager
def environment(folder: Path, *, offline: bool = True, **more: str):
    """Set the process environment that a kernel inherits, and put the former one back at the end.

    `folder` (emptied first) takes the answers of the exercises, IPython's profile, and a kernel named `python3` that
    is this interpreter: the reader's answers and profile take no part, nor does a `python3` kernel from elsewhere.
    `offline` keeps the Hugging Face hub out of reach; `more` are further variables.
    """
    folder = Path(folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = json.dumps(get_kernel_dict(extra_arguments=["--log-level=50"]))
    (kernel / "kernel.json").write_text(spec, encoding="utf-8")
    ours = {
        "RLINFRA_ANSWERS": str(folder / "answers.json"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PATH": str(folder / "jupyter"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    before = dict(os.environ)
    os.environ.update(QUIET | (OFFLINE if offline else {}) | ours | more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def execute(source: Path, copy: Path, parameters: dict, cell_timeout_s: int) -> tuple[str | None, int]:
    """Run `source` in its own folder and write the executed notebook to `copy`.

    Returns what failed in one line (None when all is well) and the number of code cells that ran.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    reason = None
    try:
        papermill.execute_notebook(
            _unformatted(source),
            _unformatted(copy),
            parameters,
            kernel_name="python3",
            language="python",
            cwd=source.parent,
            progress_bar=False,
            execution_timeout=cell_timeout_s,
        )
    except PapermillExecutionError as error:
        reason = one_line(f"{error.ename}: {error.evalue}")
    except CellTimeoutError:
        reason = f"over the limit of {cell_timeout_s} s a cell"
    except RuntimeError as error:
        reason = one_line(f"the kernel died or did not start: {error}")
    executed = nbformat.read(copy, as_version=4)
    ran = [cell for cell in nbk.code_cells(executed) if cell.metadata.get("papermill", {}).get("start_time")]
    if reason:
        return (f"{nbk.label(ran[-1])}: {reason}{complaint(ran[-1])}" if ran else reason), len(ran)
    return _unfinished(executed, ran), len(ran)


def _unfinished(executed, ran: list) -> str | None:
    """Say where a run without an error stopped short of the notebook's end; None when it did not."""
    if len(ran) < len(nbk.code_cells(executed)):
        return f"{nbk.label(ran[-1])}: the run stopped here without an error; later cells did not run"
    if not any(cell.outputs for cell in nbk.tagged(executed, "sentinel")):
        return "no cell tagged `sentinel` printed anything, so nothing proves that the notebook reached its end"
    return None


def complaint(cell) -> str:
    """Return the last line that the cell wrote to stderr: an unknown magic says only there what is wrong."""
    written = "".join(output.text for output in cell.outputs if output.get("name") == "stderr").strip()
    return f" ({one_line(written.splitlines()[-1])})" if written else ""


def one_line(text: str) -> str:
    """Return an error's text as one line of at most 200 characters, without terminal colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[:200]


def _unformatted(path: Path) -> str:
    """Escape braces: papermill reads a path as a format string."""
    return str(path).replace("{", "{{").replace("}", "}}")
