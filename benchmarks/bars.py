"""Every bar of the project: those that a run is measured against, with their limits, and those that tests hold.

Leaves out how anything is measured. A benchmark hands its figures to `benchmarks.report`, by the names that its bars
have here; `python -m ci.measured` writes all bars, with what was last measured, to docs/MEASURED.md.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

SIGNS = {"at most": operator.le, "at least": operator.ge, "under": operator.lt, "exactly": operator.eq}


class Bar(NamedTuple):
    """`what` is measured, with its unit, and may be `sign` `limit`."""

    what: str
    sign: str
    limit: float

    def is_met(self, measured: float) -> bool:
        """Whether `measured` is within the limit."""
        return SIGNS[self.sign](measured, self.limit)


class Run(NamedTuple):
    """What is measured together: the record's name, what it is about, the file that measures it, and the bars."""

    name: str
    subject: str
    program: str
    bars: tuple[Bar, ...]


class Held(NamedTuple):
    """A bar without a figure: it holds where its test passes."""

    subject: str
    what: str
    test: str


RUNS = (
    Run(
        "series",
        "level-A series",
        "ci/run_series.py",
        (
            Bar("seconds in all", "at most", 300),
            Bar("seconds of the slowest lesson", "at most", 60),
            Bar("seconds of the capstone", "at most", 120),
            Bar("peak memory of a notebook, GB", "at most", 3),
        ),
    ),
    Run("make_check", "`make check`", "Makefile", (Bar("minutes", "under", 3),)),
    Run("make_test", "`make test`, fresh clone", "Makefile", (Bar("minutes", "at most", 40),)),
    Run(
        "simulator",
        "simulator",
        "benchmarks/bench_simulator.py",
        (
            Bar("rollouts/s, times SimPy's on the same events", "at least", 8),
            Bar("time for 10 times the rollouts, ratio", "at most", 11),
            Bar("sweep of 1,000 configurations, s", "under", 30),
        ),
    ),
    Run(
        "contract",
        "rollout contract",
        "benchmarks/bench_contract.py",
        (
            Bar("rollouts/s by validate_table, one core", "at least", 200_000),
            Bar("rollouts/s, times the record-by-record path", "at least", 30),
        ),
    ),
    Run(
        "logprobs",
        "teacher-forced log-probs",
        "benchmarks/bench_logprobs.py",
        (
            Bar("extra memory, share of full log-softmax's", "at most", 0.15),
            Bar("time, ratio to full log-softmax's", "at most", 1.25),
        ),
    ),
    Run(
        "training_peak",
        "memory",
        "notebooks/02_memory_and_throughput.ipynb",
        (Bar("training peak, 135M model, share off MemTracker's", "at most", 0.05),),
    ),
    Run(
        "twin",
        "fidelity, worst held-out run",
        "benchmarks/bench_twin.py",
        (
            Bar("throughput, share off", "at most", 0.10),
            Bar("mean lag, versions off", "at most", 0.25),
            Bar("lag distribution, total variation", "at most", 0.15),
            Bar("queue's 95th percentile, batches off", "at most", 1),
            Bar("held-out configurations", "at least", 6),
        ),
    ),
    Run(
        "recovery",
        "recovery",
        "benchmarks/bench_recovery.py",
        (
            Bar("kills at random instants", "at least", 200),
            Bar("kinds of accident that did not come", "exactly", 0),
            Bar("rollouts lost, trained twice, or events that differ", "exactly", 0),
            Bar("restart, share of a cold start", "at most", 0.25),
            Bar("seconds a kill, with its check", "at most", 1.5),
        ),
    ),
    Run(
        "diagnose",
        "mismatch diagnoser",
        "benchmarks/bench_diagnose.py",
        (
            Bar("trials", "at least", 500),
            Bar("share of trials whose cause is named first", "at least", 0.95),
            Bar("share of false alarms on clean pairs", "under", 0.01),
        ),
    ),
    Run(
        "grpo",
        "tiny policy, worst seed",
        "benchmarks/bench_grpo.py",
        (
            Bar("correctness at the start", "at most", 0.6),
            Bar("correctness at the end", "at least", 0.9),
            Bar("seconds of training", "at most", 60),
        ),
    ),
    Run(
        "sync",
        "weight sync",
        "benchmarks/bench_sync.py",
        (
            Bar("fingerprint, ratio to one bare SHA-256", "at most", 1.25),
            Bar("publish, ratio to a write, a read and two hashes", "at most", 1.25),
        ),
    ),
    Run(
        "spans",
        "timers",
        "benchmarks/bench_spans.py",
        (Bar("us a span with two attributes", "under", 5), Bar("us a span within a span", "under", 5)),
    ),
    Run(
        "synthetic",
        "synthetic rollouts",
        "benchmarks/bench_synthetic.py",
        (Bar("seconds a million rollouts", "at most", 20), Bar("peak memory, times the table", "at most", 2)),
    ),
    Run("fit", "fit finder", "benchmarks/bench_fit.py", (Bar("seconds for a map of 144 cells", "under", 2),)),
)

HELD = (
    Held("simulator", "the same events as SimPy", "tests/test_simulator_simpy.py::test_every_event_is_simpys"),
    Held(
        "rollout contract",
        "the table path gives the record path's verdicts",
        "tests/test_rollouts_table.py::test_same_verdicts_as_the_record_path_on_mutated_records",
    ),
    Held(
        "memory",
        "model state: torch's own bytes",
        "tests/test_memory_training.py::test_model_state_equals_a_live_model_after_one_step",
    ),
    Held(
        "memory",
        "KV cache: transformers' own bytes",
        "tests/test_memory_inference.py::test_a_cache_equals_transformers_byte_for_byte",
    ),
    Held(
        "memory",
        "KV capacity: the token count that vLLM printed",
        "tests/test_memory_inference.py::test_capacity_equals_what_a_real_vllm_server_reported",
    ),
    Held(
        "memory",
        "training peak within 5 % of MemTracker's",
        "tests/test_memory_activations.py::test_the_peak_of_a_step_is_within_5_percent_of_memtracker",
    ),
    Held(
        "recovery",
        "resumed events equal the uninterrupted ones",
        "tests/test_recovery.py::test_a_run_that_loses_all_its_workers_every_few_turns_is_the_same",
    ),
    Held(
        "weight sync",
        "no torn read in 1,000 publishes with kills",
        "tests/test_sync_torn.py::test_a_thousand_publishes_with_readers_and_kills",
    ),
    Held(
        "bad input",
        "records: named findings",
        "tests/test_rollouts_bad_input.py::test_junk_in_any_field_ends_in_findings_of_the_list",
    ),
    Held(
        "bad input",
        "model configs: a spec or one line",
        "tests/test_memory_spec.py::test_any_damage_to_a_config_ends_in_a_spec_or_one_line",
    ),
    Held(
        "bad input",
        "run configs: one line by field",
        "tests/test_cluster_config.py::test_bad_settings_end_in_one_line_by_field",
    ),
    Held(
        "bad input",
        "checkpoints: each damage is named",
        "tests/test_checkpoint_audit.py::test_each_damage_is_named",
    ),
    Held(
        "bad input",
        "traces: one line or a sound trace",
        "tests/test_timers_perfetto.py::test_any_value_anywhere_is_refused_in_one_line_or_gives_a_sound_trace",
    ),
    Held(
        "bad input",
        "run folders: a problem or one line",
        "tests/test_tracing_folder.py::test_whatever_lies_in_the_folder_ends_in_a_problem_or_one_line",
    ),
)

#: Records of runs that have no bar: of the series at level B and in Colab's packages, for the README's table of levels.
WITHOUT_BARS = ("series_b", "colab")


def run_named(name: str) -> Run:
    """The run whose record is `name`. Raises ValueError listing the names there are."""
    for run in RUNS:
        if run.name == name:
            return run
    raise ValueError(f"name = {name!r} is no run with bars; there are {', '.join(run.name for run in RUNS)}")
