"""What happens to each synthetic rollout, before any token is drawn: lengths, turns, ends, versions, times, rewards.

Models: everything in `Workload`, one array a property, so that a million rollouts are a few array operations.
Leaves out: the tokens (`table`), who runs what when (`spans`).
Use: `draw_plan(num, rng, workload)`; the table and the trace of one seed share one plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinfra_utils.synthetic.workload import LogNormal, Pareto, Workload

MAX_TOKENS = 2**28  # about 6 GB of table
PROMPT, POLICY, ENVIRONMENT = 0, 1, 2  # who wrote a piece


@dataclass(frozen=True)
class Plan:
    """What happens to each rollout, before its tokens are drawn; arrays of shape (num_rollouts,) but for the pieces.

    A rollout is a prompt, then policy and environment pieces in turn, the policy first and last; the pieces of
    rollout i are [first_piece[i], first_piece[i + 1]). Response tokens before `update_at` are of version - 1.
    """

    group: np.ndarray
    member: np.ndarray
    prompt_tokens: np.ndarray
    policy_tokens: np.ndarray
    response_tokens: np.ndarray
    first_piece: np.ndarray
    piece_author: np.ndarray
    piece_tokens: np.ndarray
    stop_reason: np.ndarray
    version: np.ndarray
    update_at: np.ndarray
    num_retries: np.ndarray
    decode_s: np.ndarray  # failed attempts included
    tool_s: np.ndarray
    correctness: np.ndarray


def ramp(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ..., length - 1 for each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _lengths(law: LogNormal | Pareto, rng: np.random.Generator, num: int, limit: np.ndarray | float) -> np.ndarray:
    return np.minimum(np.floor(law.draw(rng, num)) + 1, limit)


def _pieces(rng, prompt_tokens, policy_tokens, tool_calls, workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where pieces begin, who wrote them, how long they are. The calls cut the policy's tokens into even parts."""
    num_pieces = 2 * tool_calls + 2
    row, piece = np.repeat(np.arange(len(tool_calls)), num_pieces), ramp(num_pieces)
    author = np.where(piece % 2 == 1, POLICY, np.where(piece == 0, PROMPT, ENVIRONMENT))
    turn, turns, whole = (piece - 1) // 2, tool_calls[row] + 1, policy_tokens[row]
    tokens = whole * (turn + 1) // turns - whole * turn // turns
    tokens[author == PROMPT] = prompt_tokens
    tokens[author == ENVIRONMENT] = rng.geometric(1 / workload.mean_observation_tokens, tool_calls.sum())
    return np.concatenate([[0], np.cumsum(num_pieces)]), author, tokens


def _correctness(rng, num_groups: int, workload: Workload) -> np.ndarray:
    """0 or 1 for each rollout: all equal in a degenerate group, never all equal in another."""
    size = workload.group_size
    num_correct = rng.integers(1, size, num_groups)
    degenerate = rng.random(num_groups) < workload.degenerate_share
    num_correct[degenerate] = size * rng.integers(0, 2, degenerate.sum())
    rank = rng.random((num_groups, size)).argsort(axis=1)
    return (rank < num_correct[:, None]).ravel().astype(float)


def _ends(rng, num: int, workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Policy tokens (as floats: they may be infinite), why they end there, and seconds a token."""
    s_per_token = workload.decode_s_per_token * rng.lognormal(0, workload.speed_sigma, num)
    max_tokens, time_limit_s = workload.max_tokens or np.inf, workload.time_limit_s or np.inf
    in_time = np.maximum(np.floor(time_limit_s / s_per_token), 1)
    limit = np.minimum(in_time, max_tokens)
    wanted = _lengths(workload.lengths, rng, num, np.inf)
    stop_reason = np.select([wanted <= limit, in_time < max_tokens], ["eos", "timeout"], "length")
    return np.minimum(wanted, limit), stop_reason, s_per_token


def draw_plan(num: int, rng: np.random.Generator, workload: Workload) -> Plan:
    """Draw `num` rollouts, without tokens. Raises ValueError where they would not fit in memory."""
    num_groups = -(-num // workload.group_size)
    group, member = np.divmod(np.arange(num), workload.group_size)
    prompt_tokens = _lengths(workload.prompt_lengths, rng, num_groups, MAX_TOKENS).astype(np.int64)[group]
    policy_tokens, stop_reason, s_per_token = _ends(rng, num, workload)

    tool_calls = rng.integers(1, workload.max_tool_calls + 1, num) * (rng.random(num) < workload.tool_share)
    tool_calls = np.minimum(tool_calls, policy_tokens - 1)  # the policy speaks before and after each call
    tokens = prompt_tokens.sum() + policy_tokens.sum() + tool_calls.sum() * workload.mean_observation_tokens
    if tokens > MAX_TOKENS:
        raise ValueError(
            f"num: {num} such rollouts hold {tokens:.3g} tokens, more than {MAX_TOKENS:.3g}; cap max_tokens"
        )
    policy_tokens, tool_calls = policy_tokens.astype(np.int64), tool_calls.astype(np.int64)
    first_piece, author, piece_tokens = _pieces(rng, prompt_tokens, policy_tokens, tool_calls, workload)
    response_tokens = np.add.reduceat(piece_tokens, first_piece[:-1]) - prompt_tokens

    straddles = (rng.random(num) < workload.straddle_share) & (response_tokens > 1)
    num_retries = rng.geometric(1 - workload.retry_share, num) - 1
    return Plan(
        group=group,
        member=member,
        prompt_tokens=prompt_tokens,
        policy_tokens=policy_tokens,
        response_tokens=response_tokens,
        first_piece=first_piece,
        piece_author=author,
        piece_tokens=piece_tokens,
        stop_reason=stop_reason,
        version=workload.current_version - rng.choice(len(workload.lag_shares), num, p=workload.lag_shares),
        update_at=np.where(straddles, 1 + np.floor(rng.random(num) * (response_tokens - 1)).astype(np.int64), 0),
        num_retries=num_retries,
        decode_s=(1 + num_retries) * policy_tokens * s_per_token,
        tool_s=rng.gamma(tool_calls, workload.mean_tool_s),  # a sum of exponentials; 0 without a call
        correctness=_correctness(rng, num_groups, workload)[:num],
    )
