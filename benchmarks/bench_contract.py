"""How fast the rollout contract is checked: a table against records one by one, on one core.

Measures `validate_table` on 64-token rollouts, a few percent of them broken, and `validate` on a sample of the
same rows as dicts, in turns within one run; asserts that both give the same verdicts. Leaves out disk.
Run: `python -m benchmarks.bench_contract`.
"""

import itertools
import sys
import time

import numpy as np
import pyarrow as pa

from benchmarks import report
from rlinfra_utils import rollouts
from rlinfra_utils.rollouts import SCHEMA, example, validate, validate_table

NUM_ROLLOUTS, NUM_SAMPLED = 100_000, 1_000
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48
ROUNDS = 5
PLANTED = {"logprob_positive", "logprob_not_finite", "mask_on_prompt", "mask_drops_token", "stale", "missing_field"}
DEMANDS = {"current_version": 128, "max_lag": 4}


def lists(values: np.ndarray) -> pa.Array:
    """(rows, width) -> a list column."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.ravel())


def constant(name: str, num_rows: int) -> pa.Array:
    """The good example's value of a field, for each row."""
    return pa.array([example()[0].get(name)], SCHEMA.field(name).type).take(pa.array(np.zeros(num_rows, np.int64)))


def build_table(num_rows: int, seed: int = 0) -> pa.Table:
    """Rollouts of 16 + 48 tokens; in about one of 25 rows a log-prob, a mask, a version or a text is wrong."""
    rng = np.random.default_rng(seed)
    num_tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    mask = np.zeros((num_rows, num_tokens), np.int8)
    mask[:, PROMPT_TOKENS:] = 1
    logprobs = -rng.exponential(size=(num_rows, RESPONSE_TOKENS))
    version = rng.integers(124, 129, num_rows)
    fault = rng.integers(0, 150, num_rows)  # six values are faults: 4 % of the rows
    logprobs[fault == 0, 3] = 123.7357
    logprobs[fault == 1, 5] = np.nan
    mask[fault == 2, 2] = 1
    mask[fault == 3, -1] = 0
    version[fault == 4] = 120
    columns = {
        "sample_id": pa.array(np.char.add("run42-", np.arange(num_rows).astype(str))),
        "prompt_tokens": lists(rng.integers(0, 49_152, (num_rows, PROMPT_TOKENS))),
        "response_tokens": lists(rng.integers(3, 49_152, (num_rows, RESPONSE_TOKENS))),
        "policy_mask": lists(mask),
        "behavior_logprobs": lists(logprobs),
        "response_length": pa.array(np.full(num_rows, RESPONSE_TOKENS)),
        "policy_version": pa.array(version),
        "verifier_version": pa.array(np.where(fault == 5, "", "arith-v4")),
    }
    return pa.table([columns.get(name, constant(name, num_rows)) for name in SCHEMA.names], schema=SCHEMA)


def seconds(call) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def main() -> int:
    pa.set_cpu_count(1)
    table = build_table(NUM_ROLLOUTS)
    sample = table.slice(0, NUM_SAMPLED)
    records = [r.model_dump() for r in rollouts.from_table(sample)]
    table_s, record_s = [], []
    for _ in range(ROUNDS):
        table_s.append(seconds(lambda: validate_table(table, **DEMANDS)))
        record_s.append(seconds(lambda: [validate(record, **DEMANDS) for record in records]))
    verdicts = table_s[0][1].slice(0, NUM_SAMPLED)
    assert verdicts["status"].to_pylist() == [v.status for v in record_s[0][1]]
    assert verdicts["codes"].to_pylist() == [v.codes for v in record_s[0][1]]
    codes = set(itertools.chain.from_iterable(verdicts["codes"].to_pylist()))
    assert codes >= PLANTED

    rate = NUM_ROLLOUTS / min(s for s, _ in table_s)
    one_by_one = NUM_SAMPLED / min(s for s, _ in record_s)
    measured = {
        "rollouts/s by validate_table, one core": rate,
        "rollouts/s by validate, record by record": one_by_one,
        "rollouts/s, times the record-by-record path": rate / one_by_one,
    }
    return report("contract", measured, {"num_rollouts": NUM_ROLLOUTS, "num_tokens": PROMPT_TOKENS + RESPONSE_TOKENS})


if __name__ == "__main__":
    sys.exit(main())
