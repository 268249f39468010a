"""TRL's asynchronous record: the stack's own scoring of a group that the tiny policy answered.

Leaves out the HTTP calls to vLLM: the group is filled here, and `_score_group` makes its training rows.
"""

from __future__ import annotations

import asyncio

from accelerate import PartialState
from trl.experimental.async_grpo import async_rollout_worker as worker

from ci.stack_recipes import Answers, write


def reward(completions, **_) -> list[float]:
    """The digits' share of the answer."""
    return [sum(c.isdigit() for c in messages[0]["content"]) / 8 for messages in completions]


def rows(prompt: list[int], tokens: list[int], logprobs: list[float]) -> list:
    """One conversation's training rows, made by the stack."""
    turn = worker.TurnRecord(prompt, tokens, logprobs, [1] * len(tokens))
    return worker._chain_to_sequences([turn], 0, 1024)[0]


def main() -> None:
    """One group of answers to one prompt, opened at version 7."""
    PartialState()
    given = Answers.given()
    num = len(given.tokens)
    group = worker.RolloutGroup(
        prompts=[[{"role": "user", "content": given.question}]] * num,
        reward_kwargs={},
        completions=[[{"role": "assistant", "content": text}] for text in given.texts],
        completions_ids=given.tokens,
        completions_sequences=[rows(given.prompt, *pair) for pair in zip(given.tokens, given.logprobs, strict=True)],
        tool_call_counts=[0] * num,
        tool_failure_counts=[0] * num,
        model_version=7,
        group_id=0,
        env_rewards=[],
        rollout_rewards=[None] * num,
    )
    loop = worker._AsyncRolloutLoop.__new__(worker._AsyncRolloutLoop)
    loop.reward_funcs, loop.reward_func_names, loop._env_reward_types = [reward], ["reward"], []
    sample = asyncio.run(loop._score_group(group))[0]
    record = {name: getattr(sample, name) for name in sample.__slots__}
    write(record, "answers of the tiny policy, made into scored rows by the stack's _AsyncRolloutLoop._score_group")


if __name__ == "__main__":
    main()
