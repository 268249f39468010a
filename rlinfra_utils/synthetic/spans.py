"""A synthetic collection as a trace: who worked on what, and when the trainer waited.

Models: engine slots that each take the next rollout once free, one verifier (first come, first served) and
one trainer that takes batches of verified rollouts in the order in which they come.
Leaves out: back-pressure and the cost of interference; `simulator` has the queue's rules.
Use: `trace(64, seed=0).summary()`; sample ids and lengths are those of `rollout_table(64, seed=0)`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields

import numpy as np

from rlinfra_utils.synthetic.plan import Plan, draw_plan
from rlinfra_utils.synthetic.workload import DEFAULT, Workload, check, check_request
from rlinfra_utils.timers import Trace

Done = tuple[float, int, str]  # when a rollout was done with a stage, its row, and the span's id


@dataclass(frozen=True)
class Stages:
    """What the machines cost, decoding apart (that is `Workload.decode_s_per_token`). Raises ValueError by field."""

    num_engine_slots: int = 8
    batch_rollouts: int = 16
    prefill_s_per_token: float = 0.0004
    verifier_median_s: float = 0.05  # log-normal
    verifier_sigma: float = 1.0
    logprob_recompute_s_per_token: float = 0.0003
    forward_backward_s_per_token: float = 0.001
    optimizer_step_s: float = 0.05
    weight_sync_s: float = 0.3

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check(field.name, value, 1, 65536, whole=True)
            else:
                check(field.name, value, 0, 5 if "sigma" in field.name else 86400, above="median" in field.name)


DEFAULT_STAGES = Stages()


def _generate(spans: Trace, plan: Plan, names: list[str], stages: Stages) -> list[Done]:
    """Prefill, decode and tool time of each rollout on its slot, in order of the ends."""
    free = [(0.0, slot) for slot in range(stages.num_engine_slots)]
    ends = []
    for i in range(len(plan.group)):
        start_s, slot = free[0]
        decode_s = start_s + stages.prefill_s_per_token * float(plan.prompt_tokens[i])
        tools_s = decode_s + float(plan.decode_s[i])
        end_s = tools_s + float(plan.tool_s[i])
        about = {"track": f"engine-{slot}", "sample_id": names[i]}
        spans.add("prefill", start_s, decode_s, tokens=int(plan.prompt_tokens[i]), **about)
        last = spans.add("decode", decode_s, tools_s, tokens=int(plan.policy_tokens[i]), **about)
        if end_s > tools_s:
            last = spans.add("environment", tools_s, end_s, **about)
        heapq.heapreplace(free, (end_s, slot))
        ends.append((end_s, i, last))
    return sorted(ends)


def _verify(spans: Trace, ends: list[Done], names: list[str], verifier_s: np.ndarray) -> list[Done]:
    """The verifier's time on each rollout, in order of the ends."""
    clock_s, verified = 0.0, []
    for end_s, i, generated in ends:
        start_s = max(clock_s, end_s)
        clock_s = start_s + float(verifier_s[i])
        span = spans.add("verifier", start_s, clock_s, track="verifier", sample_id=names[i], after=generated)
        verified.append((clock_s, i, span))
    return verified


def _train(spans: Trace, verified: list[Done], plan: Plan, stages: Stages) -> None:
    """The trainer's time on each batch, and its wait for the batch's last rollout."""
    clock_s = 0.0
    for first in range(0, len(verified), stages.batch_rollouts):
        batch = verified[first : first + stages.batch_rollouts]
        ready_s = batch[-1][0]
        if ready_s > clock_s:
            spans.add("queue_wait", clock_s, ready_s, track="trainer", wait=True)
            clock_s = ready_s
        tokens = int(sum(plan.prompt_tokens[i] + plan.response_tokens[i] for _, i, _ in batch))
        costs = {
            "logprob_recompute": stages.logprob_recompute_s_per_token * tokens,
            "forward_backward": stages.forward_backward_s_per_token * tokens,
            "optimizer_step": stages.optimizer_step_s,
            "weight_sync": stages.weight_sync_s,
        }
        after = [span for _, _, span in batch]
        for stage, cost_s in costs.items():
            counted = {"tokens": tokens} if stage in ("logprob_recompute", "forward_backward") else {}
            after = spans.add(stage, clock_s, clock_s + cost_s, track="trainer", after=after, **counted)
            clock_s += cost_s


def trace(num_rollouts: int, seed: int, workload: Workload = DEFAULT, stages: Stages = DEFAULT_STAGES) -> Trace:
    """The spans of `num_rollouts` rollouts and of the batches trained on them, from second 0; the last may be partial.

    Tracks: engine-0, engine-1, ... (prefill, decode with failed attempts, environment), verifier, trainer
    (queue_wait, logprob_recompute, forward_backward, optimizer_step, weight_sync). Raises ValueError on bad input.
    """
    check_request(seed, workload, num_rollouts)
    if not isinstance(stages, Stages):
        raise ValueError(f"stages: {str(stages)[:40]} is not a Stages")
    rng = np.random.default_rng([seed, 1])
    plan = draw_plan(num_rollouts, rng, workload)
    verifier_s = stages.verifier_median_s * rng.lognormal(0, stages.verifier_sigma, num_rollouts)
    names = [f"synthetic-{seed}-p{group}-s{member}" for group, member in zip(plan.group, plan.member)]
    spans = Trace()
    verified = _verify(spans, _generate(spans, plan, names, stages), names, verifier_s)
    _train(spans, verified, plan, stages)
    return spans
