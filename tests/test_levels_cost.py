"""What a level cell costs: the clock by name, and memory of this process and of those it started."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlinfra_utils import levels
from rlinfra_utils.levels import cost

HOLD = "import sys; held = bytearray(b'x') * (1 << 28); print('up', flush=True); sys.stdin.read()"
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_the_clock_is_of_the_last_start_under_that_name(monkeypatch):
    times_s = iter([10.0, 17.0, 18.0, 20.0, 24.0])
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: next(times_s)))
    for name in ("a", "a", "b"):
        cost.begin(name)
    assert (cost.spent("a").seconds, cost.spent("b").seconds) == (20.0 - 17.0, 24.0 - 18.0)
    assert cost.spent("never begun") is None


@linux
def test_a_process_that_still_runs_is_counted_and_so_is_its_own_child():
    # In an interpreter of its own, which no earlier test has given children. The child holds nothing: its child does.
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"
    grow = f"""
import subprocess, sys
from rlinfra_utils.levels import cost
cost.begin("x")
before = cost.spent("x").peak_memory_bytes
with subprocess.Popen([sys.executable, "-c", {nested!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(cost.spent("x").peak_memory_bytes - before)
"""
    found = subprocess.run([sys.executable, "-c", grow], capture_output=True, text=True, check=True)
    assert 2**28 < int(found.stdout) < 2**29


@linux
def test_a_process_that_has_ended_is_counted():
    subprocess.run([sys.executable, "-c", HOLD], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    cost.begin("x")
    assert cost.spent("x").peak_memory_bytes > 2**28


def test_elsewhere_memory_is_not_known(monkeypatch):
    monkeypatch.setattr(cost.sys, "platform", "darwin")
    cost.begin("x")
    assert cost.spent("x").peak_memory_bytes is None
    assert str(cost.Cost(61.7, None)) == "62 s"
    assert str(cost.Cost(0.02, 1_500_000_000)) == "1 s and 1.5 GB of memory"


def test_the_memory_of_processes_that_are_not_ours_is_told_to_the_record(tmp_path):
    cost.begin("far")
    for told, expected in ((None, cost.spent("far").peak_memory_bytes), (12_345, 12_345)):
        path = levels.store("far", {"x": 1}, tmp_path, peak_memory_bytes=told)
        assert json.loads(path.read_text())["cost"]["peak_memory_bytes"] == pytest.approx(expected, rel=0.5)
    with pytest.raises(ValueError, match="peak_memory_bytes"):
        levels.store("far", {"x": 1}, tmp_path, peak_memory_bytes=1.5)
