"""What a span costs: enter and exit of a block with two attributes, in `wall` mode, on this machine's CPU.

Each figure is the smallest of several medians, so that other load on the machine raises it as little as
possible. Leaves out: `cuda_sync` and `cuda_events`, whose cost is the device's. Run: python -m benchmarks.bench_spans
"""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks import report
from rlinfra_utils.timers import Trace

NUM_SPANS = 200  # in one timing
NUM_TIMINGS = 51  # in one median
NUM_MEDIANS = 9


def bare_pairs() -> None:
    clock = time.perf_counter
    for _ in range(NUM_SPANS):
        clock()
        clock()


def flat_spans(trace: Trace) -> None:
    for version in range(NUM_SPANS):
        with trace.span("decode", tokens=128, policy_version=version):
            pass


def nested_spans(trace: Trace) -> None:
    with trace.span("step", track="trainer", warmup=False):
        flat_spans(trace)


def smallest_median_us(run, *args) -> float:
    medians = []
    for _ in range(NUM_MEDIANS):
        timings = []
        for _ in range(NUM_TIMINGS):
            begin = time.perf_counter()
            run(*args)
            timings.append((time.perf_counter() - begin) / NUM_SPANS * 1e6)
        medians.append(statistics.median(timings))
    return min(medians)


def check(trace: Trace, num_outer: int) -> None:
    rows = trace.frame()
    inner = rows[rows["stage"] == "decode"]
    num_runs = NUM_TIMINGS * NUM_MEDIANS
    assert len(inner) == num_runs * NUM_SPANS
    assert len(rows) - len(inner) == num_runs * num_outer
    assert inner["tokens"].sum() == 128 * len(inner)
    assert inner["policy_version"].sum() == num_runs * sum(range(NUM_SPANS))
    assert inner["parent"].notna().all() == bool(num_outer)
    assert (rows["dur_s"] >= 0).all()


def main() -> int:
    bare_us = smallest_median_us(bare_pairs)
    flat, nested = Trace(), Trace()
    flat_us, nested_us = smallest_median_us(flat_spans, flat), smallest_median_us(nested_spans, nested)
    check(flat, 0)
    check(nested, 1)
    measured = {
        "us a span with two attributes": flat_us,
        "us a span within a span": nested_us,
        "us a bare pair of perf_counter calls": bare_us,
    }
    return report("spans", measured, {"num_spans": NUM_SPANS, "num_timings": NUM_TIMINGS, "num_medians": NUM_MEDIANS})


if __name__ == "__main__":
    sys.exit(main())
