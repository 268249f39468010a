"""How fast the tiny policy learns: the loop with its defaults from the shipped warm start, for several seeds.

Correctness is measured on prompts of its own at temperature 1, every few updates. The time is that of the loop's steps.
One torch thread: these tensors are too small to share out, and on a busy machine threads that wait for one another
cost many times the work. Leaves out: loading, measuring. Run: python -m benchmarks.bench_grpo [SEED ...]
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks import report
from rlinfra_utils import policy
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.timers import Trace

TARGET = 0.9
SEEDS = [0, 1, 2, 3, 4]
EVERY = 5  # updates between two measurements
MAX_UPDATES = 300
NUM_EVAL_PROMPTS = 1000
EVAL_SEED = 2_000_000


def run(seed: int) -> tuple[dict[str, float], Trace]:
    model, tokenizer = policy.load_warm_start()
    engine, trace = HFEngine(policy.load_warm_start()[0], tokenizer), Trace()
    loop = policy.SequentialLoop(engine, policy.Trainer(model), tokenizer, trace, seed=seed)

    def measure() -> float:
        return policy.evaluate(engine, tokenizer, NUM_EVAL_PROMPTS, EVAL_SEED)["correctness"]

    before = after = measure()
    wall_s = cpu_s = num_rollouts = 0
    while after < TARGET and loop.trainer.version < MAX_UPDATES:
        cpu_start_s = time.process_time()
        results = [loop.step() for _ in range(EVERY)]
        cpu_s += time.process_time() - cpu_start_s
        wall_s += sum(result.wall_s for result in results)
        num_rollouts += sum(len(result.records) for result in results)
        for result in results:
            check(result)
        assert engine.version == loop.trainer.version
        after = measure()
    row = {
        "seed": seed,
        "before": before,
        "after": after,
        "updates": loop.trainer.version,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }
    row |= {"updates/s": loop.trainer.version / wall_s, "rollouts/s": num_rollouts / wall_s}
    return row, trace


def check(result: policy.StepResult) -> None:
    """Each rollout is of the weights before the update, names those after it, and engine and trainer agree."""
    versions = {(record.policy_version, record.resulting_policy_version) for record in result.records}
    assert versions == {(result.step, result.step + 1)}
    assert result.update.gap < 1e-5, f"trainer and engine differ by {result.update.gap} nats at zero lag"


def main() -> int:
    seeds = [int(text) for text in sys.argv[1:]] or SEEDS
    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        row, trace = run(seed)
        rows.append(row)
        if seed == seeds[0]:
            print("".join(f"{name:>12}" for name in row))
        cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        print("".join(f"{cell:>12}" for cell in cells), flush=True)
    stages = trace.summary()[["count", "self_s", "share"]]
    print(f"\nstages of seed {seeds[-1]}\n{stages.to_string(float_format='{:.3f}'.format)}")
    measured = {
        "correctness at the start": max(row["before"] for row in rows),
        "correctness at the end": min(row["after"] for row in rows),
        "seconds of training": max(row["wall_s"] for row in rows),
        "updates": max(row["updates"] for row in rows),
    }
    return report("grpo", measured, {"seeds": seeds, "num_eval_prompts": NUM_EVAL_PROMPTS}, keep=seeds == SEEDS)


if __name__ == "__main__":
    sys.exit(main())
