"""Synthetic rollouts as an Arrow table or as records: a plan, its tokens, and the log-probs these really had.

Models: one policy, one environment and one collector, which runs group after group (all of a group at once).
Leaves out: padding, prompts with a meaning, several rewards; what an environment writes is uniform noise.
Use: `rollout_table(num, seed)` (Arrow, `rollouts.SCHEMA`) or `rollouts(num, seed)` (the same data as records).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils.rollouts import SCHEMA, SCHEMA_VERSION, Decoding, Rollout, from_table
from rlinfra_utils.synthetic.behaviour import EOS, Policy, policy
from rlinfra_utils.synthetic.plan import ENVIRONMENT, POLICY, PROMPT, Plan, draw_plan, ramp
from rlinfra_utils.synthetic.workload import DEFAULT, Workload, check_request

CHUNK_TOKENS = 2**19  # working set of the generator, whatever the size of the table


def _lists(values: pa.Array | np.ndarray, lengths: np.ndarray, name: str) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=SCHEMA.field(name).type)


def _token_columns(rng, plan: Plan, behaviour: Policy, rows: slice) -> dict[str, pa.Array]:
    """The columns with one value a token, for some rows."""
    pieces = slice(plan.first_piece[rows.start], plan.first_piece[rows.stop])
    author = np.repeat(plan.piece_author[pieces].astype(np.int8), plan.piece_tokens[pieces])  # token axis
    by_policy = author[author != PROMPT] == POLICY  # response axis
    lengths, policy_tokens = plan.response_tokens[rows], plan.policy_tokens[rows]

    before_update = ramp(lengths) < np.repeat(plan.update_at[rows], lengths)
    versions = (np.repeat(plan.version[rows], lengths) - before_update)[by_policy]
    positions = 1 + ramp(policy_tokens)
    drawn = behaviour.draw(rng, versions, positions)
    drawn[(np.cumsum(policy_tokens) - 1)[plan.stop_reason[rows] == "eos"]] = EOS

    tokens = rng.integers(1, behaviour.vocab_size, by_policy.size)  # what the environment writes is not modelled
    tokens[by_policy] = drawn
    logprobs = np.zeros(by_policy.size)
    logprobs[by_policy] = behaviour.logprobs(versions, positions, drawn)
    both = plan.prompt_tokens[rows] + lengths
    return {
        "response_tokens": _lists(tokens, lengths, "response_tokens"),
        "behavior_logprobs": _lists(pa.array(logprobs, mask=~by_policy), lengths, "behavior_logprobs"),
        "policy_mask": _lists((author == POLICY).view(np.int8), both, "policy_mask"),
        "env_mask": _lists((author == ENVIRONMENT).view(np.int8), both, "env_mask"),
    }


def _version_columns(plan: Plan) -> dict[str, pa.Array]:
    """One version, or two spans where an update came in the middle."""
    straddles = plan.update_at > 0
    at, end, version = plan.update_at[straddles], plan.response_tokens[straddles], plan.version[straddles]
    columns = {"start": (0 * at, at), "end": (at, end), "version": (version - 1, version)}
    kind = SCHEMA.field("version_spans").type
    spans = pa.StructArray.from_arrays([np.stack(c, axis=1).ravel() for c in columns.values()], list(columns))
    offsets = np.concatenate([[0], np.cumsum(2 * straddles)]).astype(np.int32)
    return {
        "policy_version": pa.array(plan.version, mask=straddles),
        "version_spans": pa.ListArray.from_arrays(pa.array(offsets), spans, type=kind, mask=pa.array(~straddles)),
    }


def _times(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """When each rollout starts and ends, if a group starts once all rollouts of the one before have ended."""
    first = np.flatnonzero(plan.member == 0)
    duration_s = plan.decode_s + plan.tool_s
    group_ends_s = np.cumsum(np.maximum.reduceat(duration_s, first))
    started_s = np.concatenate([[0.0], group_ends_s])[plan.group]
    return started_s, started_s + duration_s


def _joined(*parts: str | np.ndarray) -> pa.Array:
    """Strings made of constant parts and of a number a row."""
    texts = [part if isinstance(part, str) else pa.array(part).cast(pa.string()) for part in parts]
    return pc.binary_join_element_wise(*texts, "")


def _row_columns(plan: Plan, seed: int, workload: Workload) -> dict[str, pa.Array]:
    """The columns with one value a rollout."""
    num = len(plan.group)
    started_s, finished_s = _times(plan)
    has_observations = plan.response_tokens > plan.policy_tokens
    decoding = Decoding(
        temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=workload.max_tokens
    )
    constants = {
        "schema_version": SCHEMA_VERSION,
        "run_id": f"synthetic-{seed}",
        "branch_id": "main",
        "eos_token_id": EOS,
        "decoding": decoding.model_dump(),
        "tokenizer_version": "synthetic-tokenizer-v1",
        "chat_template_version": "synthetic-template-v1",
        "engine": "synthetic",
        "verifier_version": "synthetic-verifier-v1",
        "per_token": [],
        "extra": [],
    }
    same = pa.array(np.zeros(num, np.int32))
    ones = pa.array(np.arange(num + 1, dtype=np.int32))
    return {name: pa.array([value], SCHEMA.field(name).type).take(same) for name, value in constants.items()} | {
        "prompt_id": _joined("p", plan.group),
        "group_id": _joined("g", plan.group),
        "sample_id": _joined(f"synthetic-{seed}-p", plan.group, "-s", plan.member),
        "response_length": pa.array(plan.response_tokens),
        "reward": pa.MapArray.from_arrays(ones, pa.repeat("correctness", num), pa.array(plan.correctness)),
        "environment_version": pc.if_else(pa.array(has_observations), "synthetic-environment-v1", None),
        "stop_reason": pa.array(plan.stop_reason, pa.string()),
        "truncated": pa.array(plan.stop_reason != "eos"),
        "num_retries": pa.array(plan.num_retries),
        "started_s": pa.array(started_s),
        "finished_s": pa.array(finished_s),
    }


def _chunks(plan: Plan) -> list[slice]:
    """Runs of rows of about CHUNK_TOKENS tokens (more only where one rollout alone is longer)."""
    ends = np.cumsum(plan.prompt_tokens + plan.response_tokens)
    edges = np.searchsorted(ends, np.arange(CHUNK_TOKENS, ends[-1], CHUNK_TOKENS))
    edges = np.unique([0, *edges, len(ends)])
    return [slice(*edge) for edge in pairwise(edges)]


def rollout_table(num: int, seed: int, workload: Workload = DEFAULT) -> pa.Table:
    """`num` rollouts as an Arrow table of `rollouts.SCHEMA`; the same seed and workload give the same table.

    Raises ValueError for a `num` below 1, a negative `seed`, or rollouts that would not fit in memory.
    """
    check_request(seed, workload, num)
    behaviour = policy(seed, workload)
    rng = np.random.default_rng([seed, 1])
    plan = draw_plan(num, rng, workload)

    lengths = plan.prompt_tokens[plan.member == 0]
    prompts = _lists(rng.integers(1, workload.vocab_size, lengths.sum()), lengths, "prompt_tokens")
    chunks = [_token_columns(rng, plan, behaviour, rows) for rows in _chunks(plan)]
    columns = _row_columns(plan, seed, workload) | _version_columns(plan)
    columns["prompt_tokens"] = prompts.take(pa.array(plan.group))
    columns |= {name: pa.chunked_array([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return pa.table([columns.get(f.name, pa.nulls(num, f.type)) for f in SCHEMA], schema=SCHEMA)


def rollouts(num: int, seed: int, workload: Workload = DEFAULT) -> list[Rollout]:
    """The rows of `rollout_table(num, seed, workload)` as records. Raises ValueError as it does."""
    return from_table(rollout_table(num, seed, workload))
