"""What is offered: the n-th rollout, its length, tools and verifier time, the same under every configuration.

Models draws by index, one random stream for each purpose, so that two configurations differ by their rules alone.
Leaves out prompts and rewards. Use: `Workload(config).rollouts(group, 8)`.
"""

from __future__ import annotations

import math

import numpy as np

from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.laws import Exponential, Stream
from rlinfra_utils.simulator.protocol import Group

# Purposes of the random streams; a number each, so that no stream moves another.
LENGTHS, TOOL_CALLS, TOOL_S, VERIFY_S, TRAIN_S, SYNC_S, HANGS, DEATHS = range(8)  # DEATHS: and a replica's number


class Rollout:
    """One rollout: what it needs (tokens, work_s, ...), and what happened to it (times in s, versions, slot).

    `clock` and `end_clock` are on its engine's clock (see `engines`): where a stretch of its tokens began and ends.
    `stretch_tokens` lie between them; `left_tokens` also has those after further tool calls, not those banked before.
    Times are not set before `start_version`, or `end_version`, is.
    """

    __slots__ = (
        "attempt",
        "calls",
        "calls_left",
        "clock",
        "end_clock",
        "end_s",
        "end_version",
        "fails",
        "group",
        "hangs",
        "index",
        "left_tokens",
        "slot",
        "start_s",
        "start_version",
        "stretch_tokens",
        "tokens",
        "tool_s",
        "verified_s",
        "verify_s",
        "verify_start_s",
        "work_s",
    )

    def __init__(
        self, index: int, group: Group, tokens: int, work_s: float, verify_s: float, calls: int, tool_s: float
    ):
        self.index, self.group, self.tokens, self.work_s, self.verify_s = index, group, tokens, work_s, verify_s
        self.calls, self.tool_s, self.attempt = calls, tool_s, 0
        self.fails = self.hangs = False
        self.left_tokens = self.stretch_tokens = tokens
        self.start_version = self.end_version = -1

    def reset(self) -> None:
        """Before another attempt: all is still to be made."""
        self.attempt += 1
        self.left_tokens = self.stretch_tokens = self.tokens
        self.fails = False


class Workload:
    """Rollouts in the order of their dispatch, and the trainer's times in the order of its steps."""

    def __init__(self, config: LoopConfig):
        self.config, seed = config, config.seed
        tools, faults = config.tools, config.faults
        self.lengths = Stream(config.lengths_tokens, seed, LENGTHS)
        self.verify = Stream(config.verify_s, seed, VERIFY_S)
        self.calls, self.call_s = Stream(tools.calls, seed, TOOL_CALLS), np.random.default_rng([seed, TOOL_S])
        self.train_s = _values(Stream(config.train_s, seed, TRAIN_S))
        self.sync_s = _values(Stream(config.sync_s, seed, SYNC_S))
        self.deaths = [
            _values(Stream(Exponential(faults.mtbf_s), seed, DEATHS + replica))
            for replica in range(config.num_replicas if faults.mtbf_s else 0)
        ]
        self.rows = self._rows()
        self.num_offered = 0

    def rollouts(self, group: Group, num: int) -> list[Rollout]:
        """The next ones, for this group."""
        first, self.num_offered = self.num_offered, self.num_offered + num
        return [Rollout(index, group, *row) for index, row in zip(range(first, first + num), self.rows)]

    def hangs(self, rollout: Rollout) -> bool:
        """Whether this attempt hangs: the same whenever it starts."""
        luck = np.random.default_rng([self.config.seed, HANGS, rollout.index, rollout.attempt])
        return luck.random() < self.config.faults.hang_share

    def _rows(self):
        """(tokens, seconds of work at fixed speed, verifier s, tool calls, tool s), a block at a time."""
        config = self.config
        cap = config.max_tokens or math.inf
        has_tools = config.tools.calls.mean > 0
        prefill_s = config.prefill_s_per_token * config.prompt_tokens
        while True:
            tokens = np.clip(np.floor(self.lengths.block()), 1, cap)
            calls, tool_s = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens))
            if has_tools:
                calls = self.calls.block().astype(np.int64)
                each_s = config.tools.call_s.draw(self.call_s, int(calls.sum()))
                tool_s = np.bincount(np.repeat(np.arange(len(calls)), calls), each_s, len(calls))
            work_s = prefill_s + tokens * config.token_s + tool_s
            columns = (tokens.astype(np.int64), work_s, self.verify.block(), calls, tool_s)
            yield from zip(*(column.tolist() for column in columns))


def _values(stream: Stream):
    while True:
        yield from stream.block().tolist()
