"""The simulator beside SimPy on one scenario, how its time grows, and a sweep: `python -m benchmarks.bench_simulator`.

Measures CPU time in one process for the first two, and wall time of the sweep, tables and summaries included.
Leaves out continuous batching. The SimPy model is the tests' independent oracle.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import report
from rlinfra_utils.simulator import CONTROLLERS, Exponential, LogNormal, LoopConfig, Measured, Tools, simulate, sweep
from rlinfra_utils.simulator.workload import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from simulator_oracle import SimpyLoop

#: Rollouts in groups of 8 with up to three tool calls, four verifiers, a bounded queue, versions every second step.
SCENARIO = LoopConfig(
    controller=CONTROLLERS["bounded_queue"](max_rollouts=128),
    slots_per_replica=64,
    lengths_tokens=LogNormal(300, 0.8),
    prefill_s_per_token=0.0004,
    tools=Tools(calls=Measured([0, 1, 2, 3]), call_s=Exponential(0.5)),
    group_size=8,
    num_verifiers=4,
    verify_s=Exponential(0.05),
    batch_rollouts=64,
    train_s=2.0,
    train_s_per_token=1e-4,
    sync_interval=2,
    num_steps=250,
)
NUM_REPEATS = 5
SWEEP_PROCESSES = 2
MAX_QUEUED = 128


def needs(config: LoopConfig, num: int):
    """What the first `num` rollouts need, stage by stage: prefill, then decode and tools in turn."""
    rows, stages_s, verify_s, tokens = Workload(config).rows, [], [], []
    prefill_s = config.prefill_s_per_token * config.prompt_tokens
    for _ in range(num):
        length, _, check_s, calls, tool_s = next(rows)
        decode_s = length * config.token_s / (calls + 1)
        stages_s.append((prefill_s, *(decode_s, tool_s / max(calls, 1)) * calls, decode_s))
        verify_s.append(check_s)
        tokens.append(length)
    return stages_s, verify_s, tokens


def cpu_s(work):
    gc.collect()
    start_s = time.process_time()
    done = work()
    return time.process_time() - start_s, done


def check_same(run, model) -> None:
    ours, theirs = run.rollouts, model.rows
    trained = ours[ours["outcome"] == "trained"]
    for name in ("start_s", "end_s", "verified_s", "ready_s", "taken_s"):
        np.testing.assert_allclose(trained[name], [theirs[index][name] for index in trained["rollout"]], rtol=1e-9)
    for name in ("start_version", "end_version", "taken_version", "taken_step"):
        assert trained[name].tolist() == [theirs[index][name] for index in trained["rollout"]], name


def against_simpy() -> float:
    run = simulate(SCENARIO)
    stages_s, verify_s, tokens = needs(SCENARIO, run.counts.offered + 1024)
    ours_s, simpy_s = [], []
    for _ in range(NUM_REPEATS):
        took_s, run = cpu_s(lambda: simulate(SCENARIO))
        ours_s.append(took_s)
        took_s, model = cpu_s(lambda: SimpyLoop(SCENARIO, stages_s, verify_s, tokens, MAX_QUEUED).run())
        simpy_s.append(took_s)
        check_same(run, model)
    rates = run.counts.offered / min(ours_s), len(model.rows) / min(simpy_s)
    print(f"{rates[0]:,.0f} rollouts/s, SimPy {rates[1]:,.0f} rollouts/s, same events")
    return rates[0] / rates[1]


def scaling() -> float:
    took_s = {10_000: [], 1_000: []}
    for _ in range(NUM_REPEATS):
        for num_steps, times_s in took_s.items():
            config = replace(SCENARIO, num_steps=num_steps)
            times_s.append(cpu_s(lambda config=config: simulate(config))[0])
    long_s, short_s = min(took_s[10_000]), min(took_s[1_000])
    print(f"{64 * 10_000:,} rollouts in {long_s:.3f} s, {64 * 1_000:,} in {short_s:.3f} s")
    return long_s / short_s


def sweep_s() -> float:
    names = ("areal", "skyrl", "verl_v1", "openrlhf")
    rules = [SCENARIO.controller, *(CONTROLLERS[name]() for name in names)]
    base = replace(SCENARIO, num_steps=20)
    configs = [
        replace(base, controller=rule, slots_per_replica=slots, sync_interval=interval, train_s=train_s)
        for rule in rules
        for slots in (16, 32, 64, 128, 256)
        for interval in (1, 2, 4, 8)
        for train_s in np.linspace(1, 30, 10).tolist()
    ]
    start_s = time.perf_counter()
    table = sweep(configs, workers=SWEEP_PROCESSES, warm_up=0.2)
    took_s = time.perf_counter() - start_s
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"sweep: {spent.ru_utime + spent.ru_stime:.1f} s of CPU time in the processes")
    assert len(table) == len(configs) == 1000
    assert (table["status"] == "done").all()
    print(f"{len(configs)} configurations of {base.num_steps} steps: {took_s:.1f} s, best", end=" ")
    print(f"{table['tokens_per_s'].max():,.0f} tokens/s")
    return took_s


def main() -> int:
    measured = {
        "rollouts/s, times SimPy's on the same events": against_simpy(),
        "time for 10 times the rollouts, ratio": scaling(),
        "sweep of 1,000 configurations, s": sweep_s(),
    }
    return report("simulator", measured, {"num_repeats": NUM_REPEATS, "sweep_processes": SWEEP_PROCESSES})


if __name__ == "__main__":
    sys.exit(main())
