"""How fast synthetic rollouts are made, and how much memory that takes: `python -m benchmarks.bench_synthetic [num]`.

Measures one table of a million rollouts of the default workload. Leaves out: records, writing to disk.
"""

import resource
import sys
import time

import numpy as np

from benchmarks import report
from rlinfra_utils import synthetic

NUM_ROLLOUTS = 1_000_000


def main(num: int = NUM_ROLLOUTS) -> int:
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
    measured = {
        "seconds a million rollouts": took_s * 1e6 / num,
        "peak memory, times the table": peak_bytes / table.nbytes,
    }
    return report("synthetic", measured, {"num_rollouts": num}, keep=num >= NUM_ROLLOUTS)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
