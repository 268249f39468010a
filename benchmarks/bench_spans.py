"""What a span costs: enter and exit of a block with two attributes, in `wall` mode, on this machine's CPU.

Each figure is the smallest of several medians, so that other load on the machine raises it as little as
possible. Leaves out: `cuda_sync` and `cuda_events`, whose cost is the device's. Run: python -m benchmarks.bench_spans
"""

from __future__ import annotations

import statistics
import sys
import time

from rlinfra_utils.timers import Trace

BAR_US = 5.0
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
    print(f"{'what':<34}{'us a span':>10}{'x bare':>9}{'bar':>7}  ok")
    print(f"{'perf_counter pair, bare':<34}{bare_us:>10.3f}{1:>9.1f}{'':>7}")
    ok = True
    for what, cost_us in (("block, two attributes", flat_us), ("block within a block", nested_us)):
        ok &= cost_us < BAR_US
        print(
            f"{what:<34}{cost_us:>10.3f}{cost_us / bare_us:>9.1f}{BAR_US:>7.1f}  {'yes' if cost_us < BAR_US else 'NO'}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
