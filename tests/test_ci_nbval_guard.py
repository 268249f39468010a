"""nbval over stored outputs: what it passes alone although the cell broke, and what the guard makes of it.

Each notebook has the bootstrap and the parameters cell (0 and 1), a body (2, 3, ...), and the sentinel.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_output
from series_samples import as_if_run, cell, good, write

ROOT = Path(__file__).parent.parent
LIMIT_S = 12
pytestmark = pytest.mark.slow

VOLATILE = "import time, sys\nprint(time.time())\nprint('warning', file=sys.stderr)"
DEFAULTS = 'import os, sys\nprint(LEVEL, STEPS, os.environ["HF_HUB_OFFLINE"], sys.executable)'


def checked(source: str, stored: str):
    """A notebook whose body has a stored output and is tagged for strict comparison."""
    notebook = as_if_run(good("x", source))
    cell(notebook, "body-0").outputs = [new_output("stream", name="stdout", text=stored)]
    cell(notebook, "body-0").metadata["tags"] = ["nbval-check-output"]
    return notebook


def ending(source: str):
    """A notebook whose sentinel is `source`."""
    notebook = as_if_run(good("x"))
    cell(notebook, "end").source = source
    return notebook


def untagged(notebook):
    del cell(notebook, "body-0").metadata["tags"]
    return notebook


NOTEBOOKS = {
    "hang": as_if_run(good("x", "!sleep 120", "x = 1")),
    "hang_at_the_end": ending("print('lesson ok')\n!sleep 120"),
    "unknown_magic": as_if_run(good("x", "%no_such_magic\nraise ValueError")),
    "silent_sentinel": ending("assert SEED == 3"),
    "skipped": as_if_run(good("x", "# NBVAL_SKIP\nx = 1")),
    "defaults": checked(DEFAULTS, f"auto 10 1 {sys.executable}\n"),
    "volatile_checked": checked(VOLATILE, "1.0\n"),
    "volatile": untagged(checked(VOLATILE, "1.0\n")),
    "same_output": checked("print(STEPS)", "10\n"),
    "changed_output": checked("print(STEPS)", "11\n"),
    "error": as_if_run(good("x", "1 / 0")),
}


def nbval(folder: Path, names: list[str], *options: str) -> tuple[int, dict[str, list[str]], str]:
    """Run nbval: exit code, what pytest says of each notebook's cells in order, and all it printed."""
    paths = [write(folder, name, NOTEBOOKS[name]) for name in names]
    command = [sys.executable, "-m", "pytest", "-vv", *options]
    command += ["--nbval-lax", f"--nbval-cell-timeout={LIMIT_S}", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    verdicts = {name: [] for name in names}
    for name, verdict in re.findall(r"(\w+)\W+ipynb::Cell \d+ ([A-Z]+)", done.stdout):
        verdicts[name].append(verdict)
    return done.returncode, verdicts, done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """nbval without the guard over what it passes wrongly: the traps are real."""
    return nbval(tmp_path_factory.mktemp("alone"), ["hang", "unknown_magic", "silent_sentinel", "skipped"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    return nbval(tmp_path_factory.mktemp("guarded"), list(NOTEBOOKS), "-p", "ci.nbval_guard")


def test_trap_1_a_hang_passes_alone_and_fails_with_the_guard(alone, guarded):
    assert alone[0] == 0
    assert alone[1]["hang"] == ["PASSED", "PASSED", "PASSED", "XPASS", "XPASS"]
    assert guarded[0] == 1
    assert guarded[1]["hang"] == ["PASSED", "PASSED", "FAILED", "FAILED", "FAILED"]
    assert f"ran over the limit of {LIMIT_S} s" in guarded[2]


def test_trap_1_a_hang_in_the_last_cell_leaves_no_xfail_and_still_fails(guarded):
    assert guarded[1]["hang_at_the_end"] == ["PASSED", "PASSED", "FAILED"]


def test_trap_2_and_field_case_b62_an_unknown_magic_passes_alone_and_fails_with_the_guard(alone, guarded):
    assert alone[1]["unknown_magic"] == ["PASSED"] * 4
    assert guarded[1]["unknown_magic"] == ["PASSED", "PASSED", "FAILED", "PASSED"]
    assert "UsageError: Line magic function `%no_such_magic` not found." in guarded[2]


def test_trap_2_a_sentinel_that_prints_nothing_fails(alone, guarded):
    assert alone[1]["silent_sentinel"] == ["PASSED"] * 3
    assert guarded[1]["silent_sentinel"] == ["PASSED", "PASSED", "FAILED"]
    assert "the sentinel printed nothing" in guarded[2]


def test_trap_4_a_cell_that_nbval_skips_fails(alone, guarded):
    assert alone[1]["skipped"] == ["PASSED", "PASSED", "SKIPPED", "PASSED"]
    assert guarded[1]["skipped"] == ["PASSED", "PASSED", "FAILED", "PASSED"]


def test_trap_5_nbval_runs_the_defaults_in_the_quiet_environment(guarded):
    assert guarded[1]["defaults"] == ["PASSED"] * 4


def test_trap_6_and_field_case_b63_only_tagged_cells_are_compared(guarded):
    assert guarded[1]["volatile_checked"] == ["PASSED", "PASSED", "FAILED", "PASSED"]
    assert guarded[1]["volatile"] == ["PASSED"] * 4


def test_trap_6_a_changed_output_of_a_tagged_cell_fails(guarded):
    assert guarded[1]["same_output"] == ["PASSED"] * 4
    assert guarded[1]["changed_output"] == ["PASSED", "PASSED", "FAILED", "PASSED"]


def test_an_ordinary_error_still_fails(guarded):
    assert guarded[1]["error"] == ["PASSED", "PASSED", "FAILED", "PASSED"]
