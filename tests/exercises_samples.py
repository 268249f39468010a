"""Right answers to every problem, each worked out with plain arithmetic by another path than its solution's."""

import math

import numpy as np

from rlinfra_utils.exercises import PROBLEMS

WORDS = "some words of my own"

# Every number worked out here with plain arithmetic, by another path than the solution's where there is one.
durations = [4, 4, 4, 12]
weights = [1, 1, 1, 5]
lags = [112 - version for version in (108, 109, 110, 110)]
stages = {"prepare": 0.4, "prefill": 1.6, "decode": 17.8, "verifier": 3.0, "recompute": 2.2, "update": 8.0}
stages |= {"optimizer": 0.6, "sync": 1.4}
token_lags = [44 - 41] * 60 + [44 - 42] * 36
whole_units = sum(num_params * 2 for num_params in (250e6, 250e6, 250e6, 50e6))


engine_logps, recomputed_logps = [-0.10, -1.60, -0.70, -0.25], [-0.12, -1.62, -0.71, -0.25]
trainer_logps = [-0.08, -1.40, -0.75, -0.20]
dispatched, trained_ids = set(range(18)), {*range(10), 11, 12, 14}
cosine_rate = 2 * math.cos(0.3 * math.pi / 2) ** 2  # the half-angle form


def lost_share(interval_s, restart_s=0):
    """Writing, half an interval done twice a failure, and restarts, over 5 hours."""
    per_failure_s = 5 * 3600 / interval_s * 90 + interval_s / 2 + restart_s
    return per_failure_s / (5 * 3600)


def adam_update(moment1, moment2, gradient, num_steps):
    """Update over learning rate after one more gradient; fresh moments are corrected for their start at zero."""
    moment1, moment2 = moment1 + 0.1 * (gradient - moment1), moment2 + 0.001 * (gradient**2 - moment2)
    return moment1 / (1 - 0.9**num_steps) / math.sqrt(moment2 / (1 - 0.999**num_steps))


def rank_gb(num_ranks):
    """Bytes a rank, line by line: bf16 weight and gradient, float32 master and two moments, and the units."""
    return (sum(3e9 / num_ranks * num_bytes for num_bytes in (2, 2, 4, 4, 4)) + whole_units) / 1e9


def pipeline_s(generate_s, train_s, num_batches):
    """Two stages simulated batch by batch."""
    generated = trained = 0.0
    for _ in range(num_batches):
        generated += generate_s
        trained = max(trained, generated) + train_s
    return trained


def mean_lag_of(in_flight, queued, batch, num_versions=200):
    """First in, first out: at each version the oldest batch is taken, and a batch starts; lags counted one by one."""
    outstanding, lags = [0] * (in_flight + queued), []
    for version in range(1, num_versions):
        taken, outstanding = outstanding[:batch], outstanding[batch:] + [version] * batch
        lags += [version - started for started in taken]
    return np.mean(lags[-batch:])


RIGHT = {
    "P01": {"choice": "B"},
    "P02": {"gb": 7 * (2 + 2 + 8), "gib": 7e9 * (2 + 2 + 8) / 1024**3},
    "P03": {"gib": sum(2 * 8 * 128 * 2 for _ in range(32)) * 16 * 8192 / 1024**3},
    "P04": {"pairs": "ABCD"},
    "P05": {
        "sequential_s": sum(45 + 30 for _ in range(8)),
        "pipeline_s": pipeline_s(45, 30, 8),
        "speedup": 8 * 75 / pipeline_s(45, 30, 8),
    },
    "P06": {"utilization": 1 - sum(12 - s for s in durations) / (4 * 12)},
    "P07": {"rho": 8000 / 10000, "why": WORDS},
    "P08": {
        "ess": 1 / sum((w / sum(weights)) ** 2 for w in weights),
        "normalized_ess": np.mean(weights) ** 2 / np.mean(np.square(weights)),
    },
    "P09": {"mean_lag": np.mean(lags), "max_lag": max(lags)},
    "P10": {"interval_s": math.sqrt(2 * 120 * 8 * 3600), "interval_min": math.sqrt(2 * 2 * 8 * 60)},
    "P11": {"answer": "templates, masks, kernels, precision; tokens first"},
    "P12": {"answer": WORDS},
    "L12.1-a": {
        "t_seq_s": sum(stages.values()),
        "largest_share": max(stages.values()) / sum(stages.values()),
        "best_speedup": 1 / (1 - max(stages.values()) / sum(stages.values())),
    },
    "L12.1-b": {"mean_lag": np.mean(token_lags), "max_lag": max(token_lags), "scalar": "C"},
    "L12.2-a": {
        "state_gb": rank_gb(12) - whole_units / 1e9,
        "rank_gb": rank_gb(12),
        "shrink": rank_gb(12) / rank_gb(48),
    },
    "L12.3-a": {
        "staleness": mean_lag_of(96, 32, batch=32),
        "in_flight": next(n for n in range(1, 200) if mean_lag_of(n, 32, batch=32) >= 2.5),
        "wait_s": sum(12_000 for _ in range(32)) / 6_000,
    },
    "L12.4-a": {
        "mismatch": sum(recomputed_logps) - sum(engine_logps),
        "drift": sum(trainer_logps) - sum(recomputed_logps),
        "ratio": math.prod(math.exp(t) / math.exp(e) for t, e in zip(trainer_logps, engine_logps)),
        "recomputed": math.prod(math.exp(t) / math.exp(r) for t, r in zip(trainer_logps, recomputed_logps)),
    },
    "L12.5-a": {
        "hour": lost_share(3600),
        "best": min(lost_share(interval_s) for interval_s in range(60, 18_000, 60)),
        "with_restart": min(lost_share(interval_s, restart_s=180) for interval_s in range(60, 18_000, 60)),
        "moves": "B",
    },
    "L12.5-b": {
        "frontier": min(set(range(100)) - trained_ids),
        "again": len(dispatched - trained_ids),
        "lost": len(set(range(18)) - trained_ids),
        "twice": sum(prompt >= 10 for prompt in trained_ids),
    },
    "L12.5-c": {
        "rate": cosine_rate,
        "update": adam_update(0.001, 1e-4, 0.02, num_steps=10**6),
        "jump": 2
        * adam_update(0, 0, 0.02, num_steps=1)
        / (cosine_rate * adam_update(0.001, 1e-4, 0.02, num_steps=10**6)),
    },
    "L12.5-d": {"choice": "C"},
    "L12.5-e": {"matching": "BDAEC"},
    "L12.5-f": {"choice": "B"},
    "L12.5-g": {
        "verl": sum(128 for _ in range(2)) * 3 / 2,
        "areal": sum([128] * (4 + 10 + 1)) - sum([128] * 10),
        "compare": "C",
    },
}
OPEN = {"P11", "P12"}
TOTAL = len(RIGHT)
ALL_ASKS = [(problem.id, name) for problem in PROBLEMS.values() for name in problem.ask]
NUMBERS = [(i, n) for i, n in ALL_ASKS if PROBLEMS[i].ask[n].kind == "number"]


def line(result, name):
    (found,) = [line for line in result.lines if line.startswith(f"{name}: ")]
    return found.removeprefix(f"{name}: ")
