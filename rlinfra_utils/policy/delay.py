"""A queue that delays real rollouts by a set number of versions, and the clock of the loop it stands for.

Models: an engine that samples ahead of the trainer, groups handed out in order or the long ones late, the time
of both sides from measured stage costs. Leaves out: several engines, updates during an answer, times that vary.
Use: `queue.take(depth=8, version=trainer.version, max_lag=None)`; `staleness.run_with_lag` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils import offpolicy
from rlinfra_utils.doors import amount
from rlinfra_utils.policy.grpo import group_advantages
from rlinfra_utils.policy.records import record_of, reward_completions
from rlinfra_utils.policy.task import prompts, total_reward
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.timers import Trace

ENGINE_STAGES = ("prepare", "prefill", "decode", "verifier", "records")
UPDATE_STAGES = ("logprob_recompute", "weight_sync")
STEP_STAGES = ("forward_backward", "optimizer_step")


@dataclass(frozen=True)
class StageCosts:
    """Seconds of a batch on the engine's side, of an update, and of each optimizer step in that update.

    Raises ValueError for one that is no finite number from 0.
    """

    generate_s: float
    update_s: float
    step_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            amount(name, value)

    @classmethod
    def measured(cls, trace: Trace) -> StageCosts:
        """Sums of the stages' medians in the trace of a `SequentialLoop`.

        The engine's side is `ENGINE_STAGES`, with verifier and records; the update is the trainer's own log-probs
        and the publication. Raises ValueError for a trace that lacks one of these stages.
        """
        spans = trace.frame()
        missing = [s for s in (*ENGINE_STAGES, *UPDATE_STAGES, *STEP_STAGES) if s not in set(spans["stage"])]
        if missing:
            raise ValueError(f"trace: has no span of {', '.join(missing)}; run a SequentialLoop with it first")
        a_step = spans.groupby(["parent", "stage"])["dur_s"].sum().groupby("stage").median()
        one_each = spans.groupby("stage")["dur_s"].median()
        sums = a_step[list(ENGINE_STAGES)].sum(), a_step[list(UPDATE_STAGES)].sum(), one_each[list(STEP_STAGES)].sum()
        return cls(*map(float, sums))


@dataclass
class Clock:
    """When an engine and a trainer side by side would be done, in seconds; each does one thing at a time.

    A batch starts once the engine is free and the version that samples it is published. An update starts once the
    trainer is free and its data are there. So at lag 0 the two take turns, and from lag 1 on they overlap.
    """

    costs: StageCosts
    engine_s: float = 0.0
    trainer_s: float = 0.0

    def generate(self) -> float:
        """One batch more, from the weights published last; returns when it is ready."""
        self.engine_s = max(self.engine_s, self.trainer_s) + self.costs.generate_s
        return self.engine_s

    def train(self, ready_s: float, num_steps: int) -> None:
        """One update more, of data that are there at `ready_s`."""
        self.trainer_s = max(self.trainer_s, ready_s) + self.costs.update_s + num_steps * self.costs.step_s


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, sampled by `version` and ready at `ready_s`; the queue hands out by `turn`."""

    version: int
    turn: float
    ready_s: float
    records: list[Rollout]
    rewards: list[float]
    advantages: list[float]


class DelayQueue:
    """An engine's work under way: groups of answers, each with the version that sampled it.

    Life: `take` first fills the queue to `depth` batches behind the one that it hands out, from the engine's
    weights of that moment. Invariant: with one depth, nothing discarded and groups in order, the batch taken at
    version v was sampled at max(0, v - depth). Trap: a discarded group's place is filled by fresher work, so a
    limit on the lag lowers the lag of what follows, and the discarded rollouts are paid for as well.

    With `long_late` a group's delay goes by its longest answer. Raises ValueError for a size that makes no sense.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        clock: Clock,
        prompts_per_step: int,
        group_size: int,
        decoding: Decoding,
        seed: int,
        long_late: bool = False,
    ) -> None:
        prompts(prompts_per_step, seed)  # each raises for a size that
        group_advantages([0.0] * group_size, group_size)  # makes no sense
        self.engine, self.tokenizer, self.clock = engine, tokenizer, clock
        self.prompts_per_step, self.group_size, self.decoding = prompts_per_step, group_size, decoding
        self.seed, self.long_late = seed, long_late
        self.groups: list[Group] = []
        self.num_batches = 0

    @property
    def num_sampled(self) -> int:
        """Rollouts that the engine was asked for so far."""
        return self.num_batches * self.prompts_per_step * self.group_size

    def take(self, depth: int, version: int, max_lag: int | None = None) -> tuple[list[Group], list[Group]]:
        """A whole batch of groups no older than `max_lag`, and those that were found too old on the way."""
        fresh, stale = [], []
        while len(fresh) < self.prompts_per_step:
            while not self.groups or len(self.groups) + len(fresh) <= depth * self.prompts_per_step:
                self.groups = sorted(self.groups + self._sample(depth), key=lambda group: group.turn)
            num_wanted = self.prompts_per_step - len(fresh)
            offered, self.groups = self.groups[:num_wanted], self.groups[num_wanted:]
            for group in offered:
                lag = offpolicy.lag(version, group.version)
                (fresh if max_lag is None or offpolicy.is_fresh(lag, max_lag) else stale).append(group)
        return fresh, stale

    def _sample(self, depth: int) -> list[Group]:
        """One batch of groups, with the prompts and the draws of a `SequentialLoop`'s step of this number."""
        index, self.num_batches = self.num_batches, self.num_batches + 1
        prompt_seed, sampling_seed = np.random.SeedSequence([self.seed, index]).generate_state(2).tolist()
        batch = prompts(self.prompts_per_step, prompt_seed)
        prompt_ids = [self.tokenizer(prompt.text).input_ids for prompt in batch]
        completions = self.engine.generate(prompt_ids, self.decoding, n=self.group_size, seed=sampling_seed).completions
        rewards = [total_reward(reward) for reward in reward_completions(batch, completions, self.tokenizer)]
        advantages = group_advantages(rewards, self.group_size).values.tolist()
        parts = [slice(start, start + self.group_size) for start in range(0, len(rewards), self.group_size)]
        longest = np.array([max(len(completion.tokens) for completion in completions[part]) for part in parts])
        delays = depth * (longest / longest.mean() if self.long_late else np.ones(len(parts)))
        version, ready_s = self.engine.version, self.clock.generate()
        groups = []
        for number, (part, delay) in enumerate(zip(parts, delays.tolist(), strict=True)):
            names = dict.fromkeys(("group_id", "sample_id"), f"b{index:04d}-p{number:03d}")
            records = [
                record_of(completion, completion.prompt_tokens, decoding=self.decoding, **names)
                for completion in completions[part]
            ]
            groups.append(Group(version, index + delay, ready_s, records, rewards[part], advantages[part]))
        return groups
