"""The rules off the token axes: provenance, behaviour versions, decoding, outcome, times.

Models: which weights and which decoder sampled the record, how far they lag, how it ended and what it was
paid. Leaves out the token axes (`checks_tokens.py`).
Use: `list(policy_findings(rollout, axes, demands))`. `validate` is the door.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.checks_tokens import Axes
from rlinfra_utils.rollouts.record import STOP_REASONS, Decoding, Rollout, is_truncated
from rlinfra_utils.rollouts.verdict import Demands, Finding

#: Absent when null or empty; and absent when null, since empty contradicts something else.
REQUIRED_FILLED = (
    *("run_id", "branch_id", "prompt_id", "sample_id", "prompt_tokens", "tokenizer_version"),
    *("chat_template_version", "reward", "verifier_version", "stop_reason"),
)
REQUIRED_PRESENT = ("response_tokens", "policy_mask", "behavior_logprobs", "decoding")
REQUIRED_DECODING = ("temperature", "top_p", "top_k", "logprobs_mode")
LOGPROBS_MODES = ("raw", "processed")


def policy_findings(r: Rollout, axes: Axes, demands: Demands) -> Iterator[Finding]:
    """Every finding on the provenance, policy and outcome of `r`."""
    yield from _absent(r, axes)
    yield from _versions(r, demands)
    yield from _decoding(r.decoding)
    yield from _outcome(r)
    yield from _times(r)


def _absent(r: Rollout, axes: Axes) -> Iterator[Finding]:
    names = [name for name in REQUIRED_FILLED if not getattr(r, name)]
    names += [name for name in REQUIRED_PRESENT if getattr(r, name) is None]
    if axes.logprobs and all(x is None for _, x in axes.logprobs):
        names.append("behavior_logprobs")
    if r.policy_version is None and r.version_spans is None:
        names.append("policy_version")
    if r.decoding is not None:
        names += [f"decoding.{name}" for name in REQUIRED_DECODING if getattr(r.decoding, name) in (None, "")]
    if 1 in (r.env_mask or []) and not r.environment_version:
        names.append("environment_version")
    for name in names:
        yield Finding("missing_field", name, f"{name}: is missing; recover it from the log written at collection time")


def _versions(r: Rollout, demands: Demands) -> Iterator[Finding]:
    spanned = [s.version for s in r.version_spans or []]
    scalar = [] if r.policy_version is None else [r.policy_version]
    field = "version_spans" if spanned else "policy_version"
    if spanned and scalar and set(spanned) != set(scalar):
        message = f"policy_version: {scalar[0]} contradicts version_spans {short(spanned)}; keep the spans alone"
        yield Finding("scalar_version_on_span", "policy_version", message)
    if len(set(spanned)) > 1 and not demands.partial_rollouts:
        message = f"version_spans: {short(spanned)} are several versions; pass partial_rollouts=True if that is meant"
        yield Finding("partial_not_declared", "version_spans", message)
    if not (spanned or scalar):
        return
    oldest, newest = min(spanned + scalar), max(spanned + scalar)
    current = demands.current_version
    if oldest < 0:
        yield Finding("version_negative", field, f"{field}: {oldest} is negative; count versions from 0")
    if current is not None and newest > current:
        message = f"{field}: {newest} is above the trainer's {current}; check run_id, branch_id and current_version"
        yield Finding("version_in_future", field, message)
    if demands.max_lag is not None and oldest >= 0 and current - oldest > demands.max_lag:
        message = (
            f"{field}: {oldest} lags {current - oldest} behind {current}, above max_lag {demands.max_lag}; leave it out"
        )
        yield Finding("stale", field, message)
    if r.resulting_policy_version is not None and r.resulting_policy_version <= newest:
        message = (
            f"resulting_policy_version: {r.resulting_policy_version} is not above {newest}; training makes a later one"
        )
        yield Finding("version_order", "resulting_policy_version", message)


def _decoding(d: Decoding | None) -> Iterator[Finding]:
    if d is None:
        return
    allowed = {
        "temperature": (d.temperature is None or 0.0 <= d.temperature < math.inf, "finite and at least 0"),
        "top_p": (d.top_p is None or 0.0 < d.top_p <= 1.0, "in (0, 1]"),
        "top_k": (d.top_k is None or d.top_k >= -1, "at least -1"),
        "min_p": (0.0 <= d.min_p < 1.0, "in [0, 1)"),
        "logprobs_mode": (d.logprobs_mode in (None, "", *LOGPROBS_MODES), f"one of {LOGPROBS_MODES}"),
        "repetition_penalty": (0.0 < d.repetition_penalty < math.inf, "finite and above 0"),
        "max_new_tokens": (d.max_new_tokens is None or d.max_new_tokens >= 1, "at least 1"),
    }
    for name, (fits, range_text) in allowed.items():
        if not fits:
            field = f"decoding.{name}"
            message = f"{field}: {short(getattr(d, name))} is not {range_text}; send what the engine was asked"
            yield Finding("decoding_out_of_range", field, message)
    if d.logprobs_mode == "raw" and d.temperature is not None and d.top_p is not None and d.filters:
        message = (
            f"decoding.logprobs_mode: 'raw' under temperature {d.temperature}, top_p {d.top_p}, top_k {d.top_k}; "
            "ask the engine for processed log-probs: from one value a token the others cannot be had"
        )
        yield Finding("logprobs_not_behavior", "decoding.logprobs_mode", message)


def _outcome(r: Rollout) -> Iterator[Finding]:
    for name, value in (r.reward or {}).items():
        if not math.isfinite(value):
            field = f"reward.{short(name)[1:-1]}"
            yield Finding("reward_not_finite", field, f"{field}: {value} is not finite; mend the verifier")
    if not r.stop_reason:
        return
    if r.stop_reason not in STOP_REASONS:
        message = f"stop_reason: {short(r.stop_reason)} is not one of {', '.join(STOP_REASONS)}; map the engine's word"
        yield Finding("stop_reason_unknown", "stop_reason", message)
        return
    cut_off = is_truncated(r.stop_reason)
    if cut_off is None:
        message = f"stop_reason: {r.stop_reason!r} means that no answer was finished; sample it again"
        yield Finding("not_finished", "stop_reason", message)
    elif r.truncated is not None and r.truncated != cut_off:
        message = f"truncated: {r.truncated} contradicts stop_reason {r.stop_reason!r}; never infer it from a length"
        yield Finding("truncation_contradiction", "truncated", message)


def _times(r: Rollout) -> Iterator[Finding]:
    for name in ("started_s", "finished_s"):
        value = getattr(r, name)
        if value is not None and not 0.0 <= value < math.inf:
            yield Finding("negative_time", name, f"{name}: {value} is no time; send seconds of one monotonic clock")
    if r.started_s is not None and r.finished_s is not None and r.finished_s < r.started_s:
        message = f"finished_s: {r.finished_s} is before started_s {r.started_s}; read both from one monotonic clock"
        yield Finding("negative_time", "finished_s", message)
    if r.num_retries < 0:
        yield Finding("negative_time", "num_retries", f"num_retries: {r.num_retries} is negative; count from 0")
    if r.optimizer_step is not None and r.optimizer_step < 0:
        message = f"optimizer_step: {r.optimizer_step} is negative; count steps from 0"
        yield Finding("version_order", "optimizer_step", message)
