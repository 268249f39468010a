"""Does the diagnoser name the cause? A confusion matrix of injected faults, and false alarms on clean pairs.

Each trial draws a cause, a vocabulary, a logit scale, lengths and the engine's number format, injects the fault and
asks `mismatch.diagnose`. A fault that changes the log-probs by less than three times the engine's noise cannot be named
by anyone and is drawn again; the count is printed. Run: python -m benchmarks.bench_diagnose [NUM_TRIALS [FIRST_SEED]]
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from benchmarks.diagnose_faults import CAUSES, Trial, draw, none
from rlinfra_utils import mismatch

NUM_TRIALS = 500
NUM_CLEAN = 500
HIT_BAR, FALSE_ALARM_BAR = 0.95, 0.01


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
    hits, false_alarms = sum(counts[n, n] for n in names) / num_trials, alarms / NUM_CLEAN
    print(f"{'what':<44}{'measured':>10}{'bar':>8}  ok")
    hit_ok, alarm_ok = hits >= HIT_BAR, false_alarms < FALSE_ALARM_BAR
    print(f"{f'cause named first, {num_trials} trials':<44}{hits:>10.4f}{HIT_BAR:>8}  {hit_ok}")
    print(f"{f'false alarms, {NUM_CLEAN} clean pairs':<44}{false_alarms:>10.4f}{FALSE_ALARM_BAR:>8}  {alarm_ok}")
    print(f"{redrawn} draws stayed within the noise and were drawn again; {time.perf_counter() - start_s:.0f} s")
    return 0 if hit_ok and alarm_ok else 1


if __name__ == "__main__":
    sys.exit(main())
