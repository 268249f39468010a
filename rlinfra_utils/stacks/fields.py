"""What a rollout must say, and what its silence forbids: the contract fields that an adapter looks for.

Models: one sentence for each field of `rollouts.Rollout` that training, re-scoring or an audit needs; what a stack
carries in a missing field's place, and where else the stack has it. Leaves out whether the values are sound
(`rollouts.validate`). Use: `print(missing["policy_version"])`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlinfra_utils.rollouts import Rollout
from rlinfra_utils.stacks.data import load

#: field -> what cannot be done without it.
FORBIDS: Mapping[str, str] = {
    "run_id": "telling this run's version numbers from another run's",
    "branch_id": "telling a branch of the run from the branch that it was restarted from",
    "prompt_id": "tracing the answer to its prompt",
    "group_id": "a group baseline: which answers share a prompt is unknown",
    "sample_id": "tracing the answer to an optimizer step, and refusing a duplicate",
    "prompt_tokens": "any loss",
    "response_tokens": "any loss",
    "policy_mask": "any loss: which tokens the policy sampled is unknown",
    "env_mask": "telling what the environment wrote from what is masked for another reason",
    "behavior_logprobs": "an importance ratio, and any per-token correction, against the policy that sampled",
    "policy_version": "an exact staleness rule, and attributing a token to its weights",
    "decoding": "re-scoring: without temperature and filters the trainer's log-probs are another policy's",
    "decoding.temperature": "re-scoring at the temperature of the sampler",
    "decoding.top_p": "re-scoring over the nucleus that was sampled from",
    "decoding.top_k": "re-scoring over the tokens that could be sampled",
    "decoding.logprobs_mode": "knowing whether the log-probs are those of the distribution sampled from",
    "tokenizer_version": "re-scoring: the ids may spell another text",
    "chat_template_version": "rebuilding the prompt from its messages",
    "environment_version": "replaying the environment's turns",
    "reward": "an audit of rewards, another advantage estimator, a filter by reward",
    "verifier_version": "an audit of rewards: which rules paid is unknown",
    "stop_reason": "telling a finished answer from an aborted one",
    "truncated": "a bootstrap at truncation, and leaving cut answers out",
}
#: Empty says something else than absent in these fields; in the others it is no answer.
MAY_BE_EMPTY = ("response_tokens", "policy_mask", "behavior_logprobs")


@dataclass(frozen=True)
class Gap:
    """A field that the record lacks: what that forbids, what the payload has in its place, where else it is.

    `found` is "" where the payload has nothing in the field's place, `elsewhere` where the stack has it nowhere.
    """

    field: str
    forbids: str
    found: str = ""
    elsewhere: str = ""

    def __str__(self) -> str:
        parts = [f"{self.field}: forbids {self.forbids}"]
        parts += [f"in its place: {self.found}"] if self.found else []
        parts += [f"take it from {self.elsewhere}"] if self.elsewhere else []
        return "; ".join(parts)


def gaps(record: Rollout, found: Mapping[str, str], stack: str) -> dict[str, Gap]:
    """The fields of `FORBIDS` that `record` lacks, in that order; `found` is what the payload has in their place."""
    elsewhere = load("elsewhere.json")[stack]
    return {
        name: Gap(name, forbids, found.get(name, ""), elsewhere.get(name, ""))
        for name, forbids in FORBIDS.items()
        if _lacks(record, name)
    }


def _lacks(record: Rollout, name: str) -> bool:
    if name == "policy_version":
        return record.policy_version is None and record.version_spans is None
    if name == "env_mask":
        response = (record.policy_mask or [])[len(record.prompt_tokens or []) :]
        return record.env_mask is None and 0 in response
    if name == "environment_version":
        return record.environment_version is None and 1 in (record.env_mask or [])
    if name == "truncated":
        return record.truncated is None and record.stop_reason is None
    if name.startswith("decoding."):
        return record.decoding is not None and getattr(record.decoding, name.removeprefix("decoding.")) is None
    value = getattr(record, name)
    return value is None or (name not in MAY_BE_EMPTY and not value)
