"""The three modes on a device with known answers (field case B65), and the doors to CUDA."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from rlinfra_utils.timers import Trace

LAUNCH_MS, WORK_MS = 2, 50


class FakeDevice:
    """A host and one in-order device. Launching keeps the host busy for `LAUNCH_MS`; what it sends reaches the
    device `LAUNCH_MS` after sending began, events after `event_ms`. An event is stamped when all before is done."""

    def __init__(self, event_ms=LAUNCH_MS, digits=np.float64):
        self.host_ms, self.done_ms = 0.0, 0.0
        self.event_ms, self.digits = event_ms, digits
        self.num_synchronized = 0

    def host_ns(self):
        return round(self.host_ms * 1e6)

    def launch(self, work_ms):
        self.done_ms = max(self.done_ms, self.host_ms + LAUNCH_MS) + work_ms
        self.host_ms += LAUNCH_MS

    def synchronize(self):
        self.num_synchronized += 1
        self.host_ms = max(self.host_ms, self.done_ms)

    def record(self):
        self.done_ms = max(self.done_ms, self.host_ms + self.event_ms)
        return self.done_ms

    def elapsed_ms(self, first, second):
        assert max(first, second) <= self.host_ms, "asked for an event that has not passed"
        return float(self.digits(second - first))


def four_steps(mode, device):
    trace = Trace(mode, device=device)
    for _ in range(4):
        with trace.span("step"):
            device.launch(WORK_MS)
    with trace.span("drain", wait=True):
        device.synchronize()
    wall_ms = device.host_ms
    rows = trace.frame()
    assert set(rows["mode"]) == {mode}
    assert trace.summary().attrs["mode"] == mode
    dur_ms = rows["dur_s"] * 1e3
    steps, drain = dur_ms[rows["stage"] == "step"].tolist(), dur_ms[rows["stage"] == "drain"].item()
    return steps, drain, wall_ms


@pytest.mark.parametrize(
    ("mode", "event_ms", "steps", "drain", "wall"),
    [
        ("wall", LAUNCH_MS, [2, 2, 2, 2], 194, 202),
        ("cuda_sync", LAUNCH_MS, [52, 52, 52, 52], 0, 208),
        ("cuda_events", LAUNCH_MS, [50, 50, 50, 50], 2, 202),
        # An event that overtakes the launch is stamped by the idle device: the first step holds the launch too.
        ("cuda_events", 0, [52, 50, 50, 50], 0, 202),
    ],
)
def test_b65_each_mode_gives_its_known_answer_and_stages_plus_drain_are_the_wall(mode, event_ms, steps, drain, wall):
    got_steps, got_drain, got_wall = four_steps(mode, FakeDevice(event_ms))
    assert got_steps == pytest.approx(steps)
    assert got_drain == pytest.approx(drain)
    assert got_wall == wall
    assert sum(got_steps) + got_drain == pytest.approx(wall)


def test_only_cuda_sync_stops_the_device_at_each_end():
    stops = {}
    for mode in ("wall", "cuda_sync", "cuda_events"):
        device = FakeDevice()
        trace = Trace(mode, device=device)
        before = device.num_synchronized
        for _ in range(3):
            with trace.span("step"):
                device.launch(WORK_MS)
        stops[mode] = device.num_synchronized - before
    assert stops == {"wall": 0, "cuda_sync": 6, "cuda_events": 0}


def test_events_of_a_long_run_keep_their_precision_through_cuda_s_float32():
    device = FakeDevice(event_ms=0, digits=np.float32)
    trace = Trace("cuda_events", device=device)
    for _ in range(5000):
        with trace.span("step"):
            device.done_ms += 0.123
        device.host_ms = device.done_ms + 400.0
    rows = trace.frame()
    assert float(np.float32(2e6) + np.float32(0.123) - np.float32(2e6)) == 0.125  # what one anchor would leave
    assert (rows["dur_s"] - 0.123e-3).abs().max() < 1e-6
    assert rows["end_s"].iloc[-1] - rows["start_s"].iloc[0] == pytest.approx(4999 * 0.400123 + 0.123e-3, abs=1e-4)


def test_events_resolve_once_and_spans_may_follow():
    device = FakeDevice()
    trace = Trace("cuda_events", device=device)
    with trace.span("outer"):
        with trace.span("first"):
            device.launch(WORK_MS)
        assert trace.frame()["stage"].tolist() == ["first"]
        with trace.span("second"):
            device.launch(WORK_MS)
        trace.add("on_the_host", 0.001, 0.002)
    again = trace.frame().set_index("stage")["dur_s"] * 1e3
    assert again.drop("outer").to_dict() == pytest.approx({"first": 50, "second": 50, "on_the_host": 1})
    assert trace.frame().set_index("stage")["dur_s"].mul(1e3).equals(again)


def test_an_end_event_before_its_start_is_refused():
    device = FakeDevice()
    trace = Trace("cuda_events", device=device)
    with trace.span("decode"):
        device.done_ms = -5.0  # as if the block ended on another, idle stream
        device.event_ms = -10.0
    device.host_ms = 100.0
    with pytest.raises(ValueError, match=r"stage: 'decode' ends .* before it starts; use one stream"):
        trace.frame()


@pytest.mark.parametrize("mode", ["cuda_sync", "cuda_events"])
def test_cuda_modes_need_torch_and_a_device(mode, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` raise ImportError
    with pytest.raises(RuntimeError, match=f"mode: '{mode}' needs torch"):
        Trace(mode)
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match=f"mode: '{mode}' needs a CUDA device, and torch sees none; use 'wall'"):
        Trace(mode)


def test_cuda_device_speaks_torch_s_names(monkeypatch):
    device = FakeDevice()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = device.record()

        def elapsed_time(self, other):
            return other.ms - self.ms

    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: True, synchronize=device.synchronize, Event=Event)
    monkeypatch.setitem(sys.modules, "torch", torch)
    trace = Trace("cuda_events")
    for _ in range(4):
        with trace.span("step"):
            device.launch(WORK_MS)
    assert (trace.frame()["dur_s"] * 1e3).tolist() == pytest.approx([50, 50, 50, 50])


def test_on_a_real_gpu_events_and_synchronised_times_agree():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    matrix = torch.randn(8192, 8192, device="cuda")
    medians = {}
    for mode in ("cuda_sync", "cuda_events"):
        trace = Trace(mode)
        for index in range(12):
            with trace.span("matmul", warmup=index < 4):
                matrix @ matrix
        medians[mode] = trace.summary().loc["matmul", "p50_s"]
    assert medians["cuda_events"] == pytest.approx(medians["cuda_sync"], rel=0.2)
