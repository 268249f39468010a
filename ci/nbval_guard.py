"""A pytest plugin that fails the notebook cells which nbval passes although they broke.

nbval 0.11 passes a cell that ran over the time limit (and marks the rest as expected failures), a cell that an unknown
magic stopped, and a skipped cell. It also runs the notebooks in the same quiet environment as `run_series`. It leaves
out what nbval finds itself.
Use: `python -m pytest -p ci.nbval_guard --nbval-lax --nbval-cell-timeout=300 notebooks/`.
"""

import contextlib
import tempfile
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell

from ci import execute

_ENVIRONMENT = pytest.StashKey()


def timed_out(cell: IPyNbCell) -> str | None:
    """Find a cell that was interrupted at the limit, and every cell after it."""
    limit_s = cell.config.option.nbval_cell_timeout
    return f"this cell, or one before it, ran over the limit of {limit_s:g} s" if cell.parent.timed_out else None


def unknown_magic(cell: IPyNbCell) -> str | None:
    """Find a cell that IPython refused to run: it says so on stderr and sends no error."""
    written = [output.text for output in cell.test_outputs or [] if output.get("name") == "stderr"]
    usage = [line for text in written for line in text.splitlines() if line.startswith("UsageError")]
    return usage[0] if usage else None


def skipped(cell: IPyNbCell) -> str | None:
    """Find a cell that nbval was told to skip: papermill runs it all the same."""
    return "nbval skipped this cell and papermill would run it" if cell.options["skip"] else None


def silent_sentinel(cell: IPyNbCell) -> str | None:
    """Find a cell tagged `sentinel` that printed nothing."""
    is_sentinel = "sentinel" in cell.cell.metadata.get("tags", [])
    return "the sentinel printed nothing" if is_sentinel and not cell.test_outputs else None


CHECKS = (timed_out, unknown_magic, skipped, silent_sentinel)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Turn nbval's report on a cell into a failure when one of CHECKS finds something."""
    report = yield
    if isinstance(item, IPyNbCell) and report.when == "call" and not report.failed:
        findings = [finding for check in CHECKS if (finding := check(item))]
        if findings:
            report.outcome = "failed"
            report.longrepr = f"{item.cell.source}\n\n{findings[0]}"
            vars(report).pop("wasxfail", None)  # pytest counts a report that has it as expected
    return report


def pytest_configure(config):
    """Enter the environment of a run before the first kernel starts."""
    stack = config.stash[_ENVIRONMENT] = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(execute.environment(Path(folder) / "kernel"))


def pytest_unconfigure(config):
    """Leave it again."""
    config.stash[_ENVIRONMENT].close()
