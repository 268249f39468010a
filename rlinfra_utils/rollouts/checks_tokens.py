"""The rules on the token axes: lengths, masks, padding, the engine's own ids, log-probs, version spans.

Models: prompt, policy, environment and padding as four different things; lengths and masks come from the
engine's counts, never from token values. Leaves out what has no token axis (`checks_policy.py`).
Use: `axes = Axes(rollout)`; `list(token_findings(rollout, axes))`. `validate` is the door.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rlinfra_utils.doors import LOGPROB_TOLERANCE, short
from rlinfra_utils.rollouts.record import Decoding, Rollout
from rlinfra_utils.rollouts.structure import TOKEN_LISTS
from rlinfra_utils.rollouts.verdict import Finding

LOGPROB_SENTINEL = -9999.0  # vLLM writes it for -inf, which JSON cannot hold
# Exactly 0.0 in float32 takes a gap of 16.6 nats after the temperature. A confident model has it on a token here
# and there, and on all of them once a low temperature stretches the gaps.
FILLER_TOKENS = 8
FILLER_TEMPERATURE = 0.5


class Axes:
    """The record's axes: None for a part that is absent or unsound. Masks are over the response alone."""

    def __init__(self, r: Rollout) -> None:
        self.num_response = None if r.response_tokens is None else len(r.response_tokens)
        known = r.prompt_tokens is not None and r.response_tokens is not None
        self.num_prompt = len(r.prompt_tokens) if known else None
        self.num_tokens = self.num_prompt + self.num_response if known else None
        self.policy = self._sound(r.policy_mask)
        self.env = self._sound(r.env_mask)
        self.env_unsound = r.env_mask is not None and self.env is None
        self.sampled = None if self.policy is None else [t for t, bit in zip(r.response_tokens, self.policy) if bit]
        self.retokenised = self.policy is not None and r.sampled_tokens not in (None, self.sampled)
        in_range = r.response_length is not None and 0 <= r.response_length <= (self.num_response or 0)
        # A count of the sampled tokens says nothing on the axis that a second tokenisation made.
        is_of_sampled = self.retokenised and r.response_length == len(r.sampled_tokens) != len(self.sampled)
        self.length = r.response_length if in_range and not is_of_sampled else None
        one_each = self.policy is not None and r.behavior_logprobs is not None
        self.logprobs = None
        if one_each and len(r.behavior_logprobs) == self.num_response:
            self.logprobs = [(i, x) for i, (x, bit) in enumerate(zip(r.behavior_logprobs, self.policy)) if bit]
        self.end = max((i + 1 for i, bit in enumerate(self.policy or []) if bit), default=0)

    def _sound(self, mask: list[int] | None) -> list[int] | None:
        sound = mask is not None and len(mask) == self.num_tokens and set(mask) <= {0, 1}
        return mask[self.num_prompt :] if sound else None

    def marked(self) -> list[int]:
        """1 for each response token that the policy or the environment wrote."""
        return [p | e for p, e in zip(self.policy, self.env or [0] * self.num_response)]


def token_findings(r: Rollout, axes: Axes) -> Iterator[Finding]:
    """Every finding on a token axis of `r`."""
    yield from _lengths(r, axes)
    yield from _token_ids(r)
    yield from _masks(r, axes)
    yield from _engine(r, axes)
    yield from _logprobs(r, axes)
    yield from _spans(r, axes)


def _first(flags: Sequence[Any]) -> int | None:
    return next((i for i, flag in enumerate(flags) if flag), None)


def _lengths(r: Rollout, axes: Axes) -> Iterator[Finding]:
    lengths = [("policy_mask", r.policy_mask, axes.num_tokens), ("env_mask", r.env_mask, axes.num_tokens)]
    lengths += [(f"per_token.{name}", rows, axes.num_tokens) for name, rows in r.per_token.items()]
    lengths.append(("behavior_logprobs", r.behavior_logprobs, axes.num_response))
    # Log-probs and a length that count the sampled tokens are right; a second tokenisation moved the ids.
    sampled = len(r.sampled_tokens) if axes.retokenised else None
    for field, values, expected in lengths:
        if values is None or expected is None or len(values) == expected:
            continue
        if field != "behavior_logprobs" or len(values) != sampled:
            axis = "response tokens" if field == "behavior_logprobs" else "tokens of prompt + response"
            message = f"{field}: {len(values)} entries for {expected} {axis}; send one for each, cut nothing"
            yield Finding("length_mismatch", field, message)
    out_of_range = r.response_length is not None and axes.num_response is not None and axes.length is None
    if out_of_range and r.response_length != sampled:
        message = f"response_length: {r.response_length} is outside 0..{axes.num_response}; send the engine's own count"
        yield Finding("length_mismatch", "response_length", message)


def _token_ids(r: Rollout) -> Iterator[Finding]:
    fields = [(name, getattr(r, name) or []) for name in TOKEN_LISTS]
    fields.append(("eos_token_id", [] if r.eos_token_id is None else [r.eos_token_id]))
    fields.append(("decoding.banned_token_ids", r.decoding.banned_token_ids if r.decoding else []))
    for field, ids in fields:
        if ids and min(ids) < 0:
            message = f"{field}: token id {min(ids)} is negative; send ids of the tokenizer, not loss labels"
            yield Finding("token_out_of_range", field, message)


def _masks(r: Rollout, axes: Axes) -> Iterator[Finding]:
    for name in ("policy_mask", "env_mask"):
        odd = [bit for bit in getattr(r, name) or [] if bit not in (0, 1)]
        if odd:
            yield Finding("mask_not_binary", name, f"{name}: {short(odd[0])} is neither 0 nor 1; send one bit a token")
    if axes.num_response == 0:
        yield Finding("no_policy_tokens", "response_tokens", "response_tokens: is empty; leave the record out")
    elif r.policy_mask is not None and not any(r.policy_mask):
        message = "policy_mask: has no 1; mark the sampled tokens or leave the record out"
        yield Finding("no_policy_tokens", "policy_mask", message)
    if axes.policy is None:
        return
    if 1 in r.policy_mask[: axes.num_prompt]:
        at = r.policy_mask.index(1)
        message = f"policy_mask[{at}]: is 1 on the prompt of {axes.num_prompt} tokens; the policy sampled none of these"
        yield Finding("mask_on_prompt", "policy_mask", message)
    if axes.env and (at := _first([p and e for p, e in zip(axes.policy, axes.env)])) is not None:
        message = f"env_mask: response token {at} is on both masks; give it to the one that wrote it"
        yield Finding("mask_overlap", "env_mask", message)
    if not axes.env_unsound:
        yield from _padding(r, axes)


def _padding(r: Rollout, axes: Axes) -> Iterator[Finding]:
    """Padding is what comes after the last real token: by the engine's count, or else by the masks."""
    marked = axes.marked()
    if axes.length is not None and 1 in marked[axes.length :]:
        at = axes.length + marked[axes.length :].index(1)
        message = (
            f"policy_mask or env_mask: response token {at} is padding, response_length is {axes.length}; unmark it"
        )
        yield Finding("mask_past_length", "policy_mask", message)
    length = axes.length
    if length is None and axes.env is not None:
        length = max((i + 1 for i, bit in enumerate(marked) if bit), default=0)
    if length is not None and 0 in marked[:length]:
        message = (
            f"policy_mask: response token {marked.index(0)} of {length} is on neither mask; mark it in policy_mask "
            "(an eos is an action) or in env_mask; never infer a mask from token values"
        )
        yield Finding("mask_drops_token", "policy_mask", message)
    if r.env_mask is None and r.response_length is None and 0 in axes.policy:
        message = (
            f"policy_mask: response token {axes.policy.index(0)} is off it; say by env_mask or response_length why"
        )
        yield Finding("mask_zero_ambiguous", "policy_mask", message)
    ended = r.stop_reason == "eos" or (r.stop_reason == "stop" and not (r.decoding and r.decoding.stop))
    before_padding = axes.end < (axes.num_response if axes.length is None else axes.length)
    if ended and r.eos_token_id is not None and before_padding and r.response_length in (None, axes.length):
        follows = r.response_tokens[axes.end] == r.eos_token_id and not marked[axes.end]
        if follows and axes.end and r.response_tokens[axes.end - 1] != r.eos_token_id:
            message = f"policy_mask: response token {axes.end} is the eos that the policy sampled; mark it"
            yield Finding("eos_outside_mask", "policy_mask", message)


def _engine(r: Rollout, axes: Axes) -> Iterator[Finding]:
    ours, theirs = r.prompt_tokens, r.engine_prompt_tokens
    if ours is not None and theirs is not None and ours != theirs:
        at = _first([a != b for a, b in zip(ours, theirs)])
        at = min(len(ours), len(theirs)) if at is None else at
        message = (
            f"engine_prompt_tokens[{at}]: {short(theirs[at : at + 1])} was read, the record says "
            f"{short(ours[at : at + 1])}; send the engine token ids, not text"
        )
        yield Finding("prompt_mismatch", "engine_prompt_tokens", message)
    if axes.retokenised:
        at = _first([a != b for a, b in zip(axes.sampled, r.sampled_tokens)])
        at = min(len(axes.sampled), len(r.sampled_tokens)) if at is None else at
        message = (
            f"sampled_tokens[{at}]: {short(r.sampled_tokens[at : at + 1])} was sampled, the record says "
            f"{short(axes.sampled[at : at + 1])}; rebuild it from the sampled ids, never from decoded text"
        )
        yield Finding("retokenised", "sampled_tokens", message)


def _logprobs(r: Rollout, axes: Axes) -> Iterator[Finding]:
    given = [(i, x) for i, x in axes.logprobs or [] if x is not None]
    if given and len(given) < len(axes.logprobs):
        at = next(i for i, x in axes.logprobs if x is None)
        message = f"behavior_logprobs[{at}]: is null under the mask; send the engine's value or unmask the token"
        yield Finding("logprob_missing", "behavior_logprobs", message)
    tests = {
        "logprob_not_finite": (lambda x: not math.isfinite(x), "is not finite; look for a faulty kernel or cast"),
        "logprob_positive": (lambda x: LOGPROB_TOLERANCE < x < math.inf, "is above 0; look for a faulty kernel"),
        "logprob_sentinel": (lambda x: -math.inf < x <= LOGPROB_SENTINEL, "stands for -inf; send the sampled token's"),
    }
    for code, (is_bad, advice) in tests.items():
        bad = [(i, x) for i, x in given if is_bad(x)]
        if bad:
            message = f"behavior_logprobs[{bad[0][0]}]: {bad[0][1]} {advice} ({len(bad)} such)"
            yield Finding(code, "behavior_logprobs", message)
    if len(given) >= FILLER_TOKENS and not any(x for _, x in given) and r.decoding and _draws_freely(r.decoding):
        message = f"behavior_logprobs: all {len(given)} are exactly 0; ask the engine for log-probs, fill none in"
        yield Finding("logprob_all_zero", "behavior_logprobs", message)


def _draws_freely(decoding: Decoding) -> bool:
    """Whether every token could have been drawn, at a temperature that leaves the softmax some width."""
    warm = (decoding.temperature or 0.0) >= FILLER_TEMPERATURE
    filters = (decoding.top_k or 0) > 0 or decoding.min_p > 0.0 or decoding.banned_token_ids
    return warm and decoding.top_p == 1.0 and not filters


def _spans(r: Rollout, axes: Axes) -> Iterator[Finding]:
    spans = r.version_spans
    if spans is None:
        return
    problem = None
    starts = [0, *(s.end for s in spans)]
    is_of_sampled = axes.retokenised and starts[-1] == len(r.sampled_tokens)  # as in `Axes`, of the engine's own ids
    if not spans:
        problem = "is empty; leave it out or cover the response"
    elif at := [i for i, s in enumerate(spans) if s.start != starts[i] or s.end <= s.start]:
        s = spans[at[0]]
        problem = f"span {at[0]} is [{s.start}, {s.end}) where one from {starts[at[0]]} is due; leave no gap or overlap"
    elif any(b.version < a.version for a, b in itertools.pairwise(spans)):
        problem = f"versions {short([s.version for s in spans])} decrease; an engine only moves forward"
    elif axes.num_response is not None and spans[-1].end > axes.num_response and not is_of_sampled:
        problem = f"end at {spans[-1].end} beyond {axes.num_response} response tokens; use the response axis"
    elif axes.end > spans[-1].end and not is_of_sampled:
        problem = f"end at {spans[-1].end}, the policy's tokens at {axes.end}; cover each of them"
    if problem:
        yield Finding("bad_spans", "version_spans", f"version_spans: {problem}")
