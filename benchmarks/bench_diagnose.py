"""Does the diagnoser name the cause? A confusion matrix of injected faults, and false alarms on clean pairs.

Each trial draws a cause, a vocabulary, a logit scale, lengths and the engine's number format, injects the fault and
asks `mismatch.diagnose`. A fault that changes the log-probs by less than three times the engine's noise cannot be named
by anyone and is drawn again; the count is printed. Leaves out two faults at once.
Run: python -m benchmarks.bench_diagnose [NUM_TRIALS [FIRST_SEED]]
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from benchmarks import report
from benchmarks.diagnose_faults import CAUSES, draw, none
from benchmarks.diagnose_trials import Trial
from rlinfra_utils import mismatch

NUM_TRIALS = 500
NUM_CLEAN = 500


def answer(trial: Trial) -> str:
    return mismatch.diagnose(**trial.arguments())[0].cause


def main() -> int:
    num_trials = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_TRIALS
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start_s = time.perf_counter()
    counts: Counter = Counter()
    misses, redrawn = [], 0
    for seed in range(first_seed, first_seed + num_trials):
        cause = CAUSES[seed % len(CAUSES)]
        trial, attempts = draw(cause, seed)
        redrawn += attempts
        named = answer(trial)
        counts[cause.__name__, named] += 1
        if named != cause.__name__:
            misses.append(
                f"seed {seed} {cause.__name__} -> {named} ({len(trial.model.embed)} ids, {trial.number_format})"
            )
    alarms = sum(answer(draw(none, first_seed + num_trials + i)[0]) != "none" for i in range(NUM_CLEAN))
    names = [cause.__name__ for cause in CAUSES]
    width = max(map(len, names)) + 1
    print("injected \\ named first".ljust(width + 6) + "".join(f"{i:>4}" for i in range(len(names))))
    for i, name in enumerate(names):
        print(f"{i:>4}  {name:<{width}}" + "".join(f"{counts[name, other] or '.':>4}" for other in names))
    print(*misses, sep="\n")
    print(f"{redrawn} draws stayed within the noise and were drawn again; {time.perf_counter() - start_s:.0f} s")
    measured = {
        "trials": num_trials,
        "share of trials whose cause is named first": sum(counts[name, name] for name in names) / num_trials,
        "share of false alarms on clean pairs": alarms / NUM_CLEAN,
    }
    parameters = {"num_clean": NUM_CLEAN, "num_causes": len(CAUSES), "first_seed": first_seed}
    return report("diagnose", measured, parameters, keep=num_trials >= NUM_TRIALS)


if __name__ == "__main__":
    sys.exit(main())
