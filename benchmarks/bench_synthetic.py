"""How fast synthetic rollouts are made, and how much memory that takes: `python -m benchmarks.bench_synthetic [num]`.

Measures one table of a million rollouts of the default workload. Leaves out: records, writing to disk.
"""

import resource
import sys
import time

import numpy as np

from rlinfra_utils import synthetic


def main(num: int = 1_000_000) -> int:
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start_s = time.perf_counter()
    table = synthetic.rollout_table(num, seed=0)
    took_s = time.perf_counter() - start_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes

    lengths = table["response_length"].to_numpy()
    tokens = table["response_tokens"].combine_chunks().flatten()
    assert table.num_rows == num
    assert len(tokens) == lengths.sum()
    stops = np.array(table["stop_reason"].to_pylist()) == "eos"
    assert (tokens.to_numpy() == synthetic.EOS).sum() == stops.sum(), "one end-of-sequence token for each response"

    print(f"{num:,} rollouts, {lengths.mean():.1f} response tokens each: {num / took_s:,.0f} rollouts/s")
    rows = [
        ("time for the table, s per million", took_s * 1e6 / num, 20.0),
        ("peak memory, times the table", peak_bytes / table.nbytes, 2.0),
    ]
    print(f"{'what':36}{'measured':>10}{'bar':>8}  ok")
    for what, measured, bar in rows:
        print(f"{what:36}{measured:10.2f}{bar:8.1f}  {'yes' if measured <= bar else 'NO'}")
    return int(any(measured > bar for _, measured, bar in rows))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
