"""Peak memory of the processes below this one, against processes that take a known number of bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HELD_BYTES = 200_000_000
HOLD = f"import os, time\nheld = bytearray(os.urandom(1)) * {HELD_BYTES}\n"
FORKS = "for _ in range(3):\n    if os.fork() == 0:\n        time.sleep(2)\n        os._exit(0)\n"


WATCHED = """
import subprocess, sys
from ci.peak_memory import Watch
with Watch() as watch:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
    watch.sample()
print(watch.peak_bytes)
"""


def peak_bytes(code: str) -> int:
    """Watched from a process of its own: this one may have children from other tests."""
    return int(subprocess.run([sys.executable, "-c", WATCHED, code], check=True, capture_output=True, cwd=ROOT).stdout)


def test_a_process_counts_with_what_it_holds_and_its_child_too():
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {HOLD + 'time.sleep(2)'!r}])"
    for code in (HOLD + "time.sleep(2)", child):
        assert HELD_BYTES <= peak_bytes(code) < 1.4 * HELD_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how pages are shared")
def test_pages_that_forks_share_count_once():
    assert peak_bytes(HOLD + FORKS + "time.sleep(2)") < 1.4 * HELD_BYTES


def test_memory_given_back_still_counts():
    freed = HOLD + "time.sleep(2)\ndel held\ntime.sleep(1)"
    assert peak_bytes(freed) >= HELD_BYTES


def test_nothing_below_is_no_memory():
    code = "from ci.peak_memory import Watch\nwatch = Watch()\nwatch.sample()\nprint(watch.peak_bytes)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT).stdout == b"0\n"
