"""Replicas with continuous batching: the more sequences are active, the longer a step takes.

Models a token clock for each replica: its active sequences get a token each a step, so the clock runs at 1 / step time,
and a sequence ends when the clock has moved by its length. When sequences come or go only that rate changes, and all
remaining work is rescaled at once. Leaves out preemption and prefix reuse. Used by `loop` as `engines.Slots` is.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.engines import Engines
from rlinfra_utils.simulator.workload import Rollout


class Replica:
    """One engine: a token clock, and a heap of (end on that clock, index, rollout) of its active sequences."""

    def __init__(self, free: list[int], token_s: float, token_s_per_active: float):
        self.free, self.token_s, self.token_s_per_active = free, token_s, token_s_per_active
        self.clock, self.at_s = 0.0, 0.0
        self.heap: list[tuple[float, int, Rollout]] = []
        self.num_held = 0  # slots in use, waiting for tools included

    def step_s(self) -> float:
        """Seconds of a step that gives each active sequence a token."""
        return self.token_s + self.token_s_per_active * len(self.heap)

    def advance(self, engine_s: float) -> None:
        """Move the clock to a moment of engine time."""
        if self.heap:
            self.clock += (engine_s - self.at_s) / self.step_s()
        self.at_s = engine_s

    def next_s(self) -> float:
        """Engine time of the next end."""
        return self.at_s + max(0.0, self.heap[0][0] - self.clock) * self.step_s() if self.heap else math.inf

    def without(self, index: int) -> None:
        """Take a sequence out of the active ones."""
        self.heap = [entry for entry in self.heap if entry[1] != index]
        heapify(self.heap)


class Batched(Engines):
    """Replicas with continuous batching; prefill takes as many steps as it takes of a lone sequence's time."""

    def __init__(self, config: LoopConfig):
        super().__init__(config)
        slots = [list(range(r, config.num_slots, self.num_replicas)) for r in range(self.num_replicas)]
        self.replicas = [Replica(free, config.token_s, config.token_s_per_active) for free in slots]
        self.steps_per_token = config.prefill_s_per_token / (config.token_s + config.token_s_per_active)
        self.timers: list[tuple[float, int, int, str, Rollout]] = []  # engine time, index, attempt, what, who
        self.active: dict[int, Rollout] = {}  # by index: decoding, at a tool, or hung
        self.due: Replica | None = None  # whose sequence ends at next_s; None: a timer's

    def num_running(self) -> int:
        """Rollouts in slots, hung ones included."""
        return len(self.active)

    def clocks(self, now_s: float) -> list[float]:
        """Each replica's token clock."""
        self._advance(now_s)
        return [replica.clock for replica in self.replicas]

    def start(self, rollout: Rollout, now_s: float) -> None:
        """Put it on the replica with the fewest sequences."""
        replica = min((r for r in self.replicas if r.free), key=lambda r: r.num_held)
        rollout.slot, rollout.calls_left = replica.free.pop(), rollout.calls
        replica.num_held += 1
        self.active[rollout.index] = rollout
        engine_s = self.engine_s(now_s)
        rollout.clock = rollout.end_clock = math.inf
        if self.timeout_s < math.inf:
            heappush(self.timers, (engine_s + self.timeout_s, rollout.index, rollout.attempt, "timeout", rollout))
        if not rollout.hangs:
            self._decode(rollout, replica, engine_s, self.steps_per_token * self.config.prompt_tokens)
        self._look()

    def pop(self, now_s: float) -> Rollout | None:
        """The rollout that ends now; None if it goes to a tool, or comes back from one."""
        engine_s, replica = self.engine_s(now_s), self.due
        if replica is None:
            _, index, attempt, what, rollout = heappop(self.timers)
            if index not in self.active or rollout.attempt != attempt:
                rollout = None
            elif what == "tool":
                self._decode(rollout, self._replica(rollout), engine_s, 0.0)
                rollout = None
            else:
                self._replica(rollout).advance(engine_s)
                self._replica(rollout).without(index)
                self.bank(rollout, self._replica(rollout).clock)
                rollout.fails = True
        else:
            replica.at_s, replica.clock = engine_s, replica.heap[0][0]  # exactly, whatever the rounding
            rollout = heappop(replica.heap)[2]
            if rollout.calls_left:
                self._call_tool(rollout, engine_s)
                rollout = None
        if rollout is not None:
            del self.active[rollout.index]
            self._replica(rollout).free.append(rollout.slot)
            self._replica(rollout).num_held -= 1
        self._look()
        return rollout

    def kill(self, replica: int, now_s: float) -> list[Rollout]:
        """The replica's attempts, lost; its slots are gone until `revive`."""
        dead = self.replicas[replica]
        dead.advance(self.engine_s(now_s))
        lost = [r for r in self.active.values() if r.slot % self.num_replicas == replica]
        for rollout in lost:
            self.bank(rollout, dead.clock)
            del self.active[rollout.index]
        dead.heap, dead.free, dead.num_held = [], [], 0
        self._look()
        return lost

    def revive(self, replica: int) -> None:
        """The replica's slots are back."""
        self.replicas[replica].free = list(range(replica, self.config.num_slots, self.num_replicas))

    def _replica(self, rollout: Rollout) -> Replica:
        return self.replicas[rollout.slot % self.num_replicas]

    def _advance(self, now_s: float) -> None:
        for replica in self.replicas:
            replica.advance(self.engine_s(now_s))

    def _decode(self, rollout: Rollout, replica: Replica, engine_s: float, prefill_steps: float) -> None:
        """Up to its next tool call, or its end."""
        replica.advance(engine_s)
        rollout.stretch_tokens = rollout.left_tokens / (rollout.calls_left + 1)
        rollout.clock = replica.clock + prefill_steps
        rollout.end_clock = rollout.clock + rollout.stretch_tokens
        heappush(replica.heap, (rollout.end_clock, rollout.index, rollout))

    def _call_tool(self, rollout: Rollout, engine_s: float) -> None:
        self.bank(rollout, rollout.end_clock)
        rollout.calls_left -= 1
        rollout.clock = rollout.end_clock = math.inf  # it decodes nothing
        back_s = engine_s + rollout.tool_s / rollout.calls
        heappush(self.timers, (back_s, rollout.index, rollout.attempt, "tool", rollout))

    def _abort(self, now_s: float) -> float:
        self._advance(now_s)
        reread_tokens = 0.0
        for replica in self.replicas:
            for _, _, rollout in replica.heap:
                self.bank(rollout, replica.clock)
                reread = self.config.prompt_tokens + rollout.tokens - rollout.left_tokens
                rollout.clock = replica.clock + self.steps_per_token * reread
                rollout.end_clock = rollout.clock + rollout.stretch_tokens
                reread_tokens += reread
            replica.heap = [(r.end_clock, r.index, r) for _, _, r in replica.heap]
            heapify(replica.heap)
        return reread_tokens

    def _look(self) -> None:
        """When the next thing is due, and on which replica."""
        if self.paused_s is not None:
            self.next_s = math.inf
            return
        self.due, due_s = None, self.timers[0][0] if self.timers else math.inf
        for replica in self.replicas:
            if replica.heap and (end_s := replica.next_s()) < due_s:
                self.due, due_s = replica, end_s
        self.next_s = due_s + self.behind_s
