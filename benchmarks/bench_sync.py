"""What a sync costs: bytes and seconds of each path for the tiny policy, and what the checks add to a publish.

Each figure is the smallest of several runs, each bar a ratio within one run. Checks that every path brings the same
weights. Leaves out transfer between GPUs. Run: python -m benchmarks.bench_sync
"""

from __future__ import annotations

import copy
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import load_file, save_file

from benchmarks import report
from rlinfra_utils import sync
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.policy import load_warm_start

NUM_RUNS = 7
RANK = 4
#: Weights for the bars: large enough that bytes, not calls, are what costs.
NUM_TENSORS, TENSOR_BYTES = 16, 4 * 2**20


def adapter_for(model: torch.nn.Module) -> sync.Adapter:
    state = model.state_dict()
    names = [name for name in state if name.endswith(("q_proj.weight", "v_proj.weight"))]
    a = {name: torch.randn(RANK, state[name].shape[1]) / 8 for name in names}
    b = {name: torch.randn(state[name].shape[0], RANK) / 8 for name in names}
    return sync.Adapter(a, b, alpha=RANK)


def paths_table(model: torch.nn.Module) -> pd.DataFrame:
    """The fastest run of each path, after which engine and trainer have the same weights."""
    state, engine, adapter = model.state_dict(), HFEngine(copy.deepcopy(model)), adapter_for(model)
    base, expected = {name: tensor.clone() for name, tensor in state.items()}, sync.fingerprint(state)
    merged = sync.fingerprint(sync.merge(base, adapter))
    with tempfile.TemporaryDirectory() as folder:
        paths: list[tuple[Callable[[int], sync.Transfer], sync.Fingerprint]] = [
            (lambda version: sync.adapter_only(adapter, base, engine, version, f"{folder}/adapter"), merged),
            (lambda version: sync.through_folder(state, engine, version, folder), expected),
            (lambda version: sync.through_shared_memory(state, engine, version), expected),
            (lambda version: sync.in_memory_copy(model, engine, version), expected),
            (lambda version: sync.in_memory_pointers(model, engine, version), expected),
        ]
        rows = []
        for path, fingerprint in paths:
            rows.append(min((path(version) for version in range(NUM_RUNS)), key=lambda transfer: transfer.total_s))
            assert not sync.differences(sync.fingerprint(engine.model.state_dict()), fingerprint)
    assert rows[0].num_bytes == sum(4 * RANK * sum(base[name].shape) for name in adapter.a)
    return sync.table(rows)


def smallest_s(run: Callable[[int], object]) -> float:
    seconds = []
    for version in range(NUM_RUNS):
        begin_s = time.perf_counter()
        run(version)
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)


def check_costs() -> dict[str, float]:
    """Ratios: a fingerprint against a bare hash, a publish against the passes that it consists of."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=TENSOR_BYTES // 4).astype("f4") for i in range(NUM_TENSORS)}
    joined = b"".join(tensor.tobytes() for tensor in weights.values())
    hash_s = smallest_s(lambda _: hashlib.sha256(joined))
    print_s = smallest_s(lambda _: sync.fingerprint(weights))
    assert sync.fingerprint(weights).num_bytes == len(joined)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_s = smallest_s(lambda _: save_file(weights, f"{folder}/bare.safetensors"))
        read_s = smallest_s(lambda _: load_file(f"{folder}/bare.safetensors"))
        with sync.Publisher(f"{folder}/w") as publisher:
            publish_s = smallest_s(lambda version: publisher.publish(weights, version))
        assert not sync.differences(sync.read(f"{folder}/w").fingerprint, sync.fingerprint(weights))
    return {
        "fingerprint, ratio to one bare SHA-256": print_s / hash_s,
        "publish, ratio to a write, a read and two hashes": publish_s / (write_s + read_s + 2 * hash_s),
    }


def main() -> int:
    torch.set_num_threads(1)
    shown = paths_table(load_warm_start()[0])
    in_ms = shown.drop(columns=["bytes", "reset_s", "cache_loss_s"]).mul(1e3).round(2)
    in_ms.columns = in_ms.columns.str.replace("_s", "_ms")
    print(pd.concat([shown[["bytes"]], in_ms], axis=1).to_string(na_rep=""), end="\n\n")
    return report("sync", check_costs(), {"num_tensors": NUM_TENSORS, "tensor_bytes": TENSOR_BYTES})


if __name__ == "__main__":
    sys.exit(main())
