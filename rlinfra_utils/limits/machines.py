"""What a machine can do at most: a card from its data sheet, or this machine, measured.

Models: memory, bandwidth, and the dense rate by dtype. Leaves out what a step needs of them (`roofline.py`), sparsity,
and links between devices. Use: `device("H100").rate("bfloat16")`; `measure("torch")`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from rlinfra_utils.doors import amount, choice, short

BACKENDS = ("numpy", "torch", "cuda")


@dataclass(frozen=True)
class Device:
    """What a machine can do at most: memory (bytes), bandwidth (bytes/s), rate by dtype (FLOP/s, dense)."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    source: str

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`; raises ValueError for one that the device has no figure for."""
        if dtype not in self.flops_per_s:
            raise ValueError(f"dtype={dtype!r}: {self.name} has figures for {', '.join(self.flops_per_s)}")
        return self.flops_per_s[dtype]


def known_devices() -> list[str]:
    """Names that `device` knows."""
    return list(_table()["devices"])


def device(name: str) -> Device:
    """A device of `data/devices.json` (data sheets, dense figures); raises ValueError for an unknown name."""
    table = _table()["devices"]
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"name={short(name)}: known devices are {', '.join(table)}; this machine: measure()")
    return Device(name, **table[name])


def measure(backend: str = "numpy", seconds: float = 0.5, dtype: str = "float32") -> Device:
    """This machine's bandwidth and its rate in `dtype`, measured: reading a block larger than the caches, and a
    square matrix product; the best of the repetitions that fit into `seconds` for each of the two. So it is what
    this library's kernels reach, and better ones may pass it.

    `backend`: "numpy", "torch" (its threads and kernels, on the CPU) or "cuda" (the current CUDA device; its
    memory_bytes is filled in). Raises ValueError for another one, a dtype that it lacks, or `seconds` <= 0.
    """
    amount("seconds", seconds, above=True)
    choice("backend", backend, BACKENDS)
    if dtype not in ("float32", "bfloat16", "float16") or (backend == "numpy" and dtype != "float32"):
        raise ValueError(f"dtype={dtype!r}: numpy measures float32; torch and cuda also bfloat16 and float16")
    block, square, wait, memory_bytes = _numpy_work() if backend == "numpy" else _torch_work(backend, dtype)
    side, num_bytes = square.shape[0], block.nbytes
    read_s = _best_s(lambda: (block.max(), wait()), seconds)
    product_s = _best_s(lambda: (square @ square, wait()), seconds)
    return Device(
        "this machine", memory_bytes, num_bytes / read_s, {dtype: 2 * side**3 / product_s}, f"measured with {backend}"
    )


def _numpy_work() -> tuple:
    return np.ones(2**26, np.float32), np.ones((1024, 1024), np.float32), lambda: None, math.nan


def _torch_work(backend: str, dtype: str) -> tuple:
    import torch

    if backend == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend='cuda': torch finds no CUDA device here; use 'torch'")
    cuda = backend == "cuda"
    options = {"dtype": getattr(torch, dtype), "device": backend if cuda else "cpu"}
    num_bytes, side = (2**30, 4096) if cuda else (2**28, 1024)
    block = torch.ones(num_bytes // options["dtype"].itemsize, **options)
    memory_bytes = torch.cuda.get_device_properties(0).total_memory if cuda else math.nan
    return block, torch.ones(side, side, **options), torch.cuda.synchronize if cuda else (lambda: None), memory_bytes


def _best_s(work: Callable[[], object], seconds: float) -> float:
    work()  # the first call pays for pages and threads
    best_s, until_s = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        start_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


def _table() -> dict:
    return json.loads((files("rlinfra_utils") / "data" / "devices.json").read_text(encoding="utf-8"))
