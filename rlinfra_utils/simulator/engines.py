"""Where rollouts are decoded: what both kinds of engine share, and slots of fixed speed.

Models decoding that stands still while weights are loaded. Leaves out preemption, prefix reuse, and continuous batching
(`batching`). Used by `loop`: `start`, `pop` what is due at `next_s`, `pause`, `resume`, `kill`, `revive`.

Each replica has a token clock; between a rollout's `clock` and `end_clock` its `stretch_tokens` lie evenly, and
`views.version_spans` finds from it which version made which. `Slots` have one clock in seconds of decoding, a
`batching.Replica` counts in tokens.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from rlinfra_utils.simulator.config import LoopConfig
from rlinfra_utils.simulator.workload import Rollout


class Piece(NamedTuple):
    """Tokens of one attempt that were banked before its last stretch, by an abort or at a tool call."""

    rollout: int
    attempt: int
    replica: int
    clock: float
    end_clock: float
    tokens: float


class Engines:
    """What both kinds share: who is in a slot, and a time that stops in a pause."""

    def __init__(self, config: LoopConfig):
        self.config = config
        self.num_replicas = config.num_replicas
        self.timeout_s = config.faults.timeout_s or math.inf
        self.prefill_s = config.prefill_s_per_token * config.prompt_tokens
        self.behind_s, self.paused_s = 0.0, None  # wall less engine time; wall time at which a pause began
        self.next_s = math.inf
        self.pieces: list[Piece] = []

    def engine_s(self, now_s: float) -> float:
        """Seconds of decoding time so far."""
        return (now_s if self.paused_s is None else self.paused_s) - self.behind_s

    def pause(self, now_s: float) -> None:
        """Decoding stops: weights are being loaded."""
        self.paused_s, self.next_s = now_s, math.inf

    def resume(self, now_s: float, abort: bool) -> float:
        """Decoding goes on. After an abort, prompts and partial answers are read again; returns those tokens."""
        reread_tokens = self._abort(now_s) if abort else 0
        self.behind_s += now_s - self.paused_s
        self.paused_s = None
        self._look()
        return reread_tokens

    def bank(self, rollout: Rollout, clock: float) -> None:
        """Put the tokens made since the stretch began into a piece."""
        if clock <= rollout.clock or rollout.end_clock == math.inf:
            return
        share = min(1.0, (clock - rollout.clock) / (rollout.end_clock - rollout.clock))
        tokens, replica = share * rollout.stretch_tokens, rollout.slot % self.num_replicas
        self.pieces.append(Piece(rollout.index, rollout.attempt, replica, rollout.clock, clock, tokens))
        rollout.stretch_tokens -= tokens
        rollout.left_tokens -= tokens


class Slots(Engines):
    """Every slot decodes at a fixed speed, whatever the others do; tool time is part of a rollout's work."""

    def __init__(self, config: LoopConfig):
        super().__init__(config)
        self.free = list(range(config.num_slots))[::-1]
        self.heap: list[tuple[float, int, Rollout]] = []
        self.hung: list[Rollout] = []

    def num_running(self) -> int:
        """Rollouts in slots, hung ones included."""
        return len(self.heap) + len(self.hung)

    def clocks(self, now_s: float) -> list[float]:
        """Each replica's token clock; here it is engine time."""
        return [self.engine_s(now_s)] * self.num_replicas

    def start(self, rollout: Rollout, now_s: float) -> None:
        """Put it into a free slot: it ends after its work, fails at the time limit, or hangs."""
        rollout.slot = self.free.pop()
        work_s = rollout.work_s
        if rollout.hangs:
            work_s, rollout.stretch_tokens = math.inf, 0
        if work_s > self.timeout_s:
            rollout.stretch_tokens *= max(0.0, self.timeout_s - self.prefill_s) / (work_s - self.prefill_s)
            work_s, rollout.fails = self.timeout_s, True
        start_s = now_s - self.behind_s
        rollout.clock = start_s + self.prefill_s
        rollout.end_clock = end_s = start_s + work_s
        if end_s == math.inf:
            self.hung.append(rollout)
            return
        heappush(self.heap, (end_s, rollout.index, rollout))
        self.next_s = self.heap[0][0] + self.behind_s

    def pop(self, now_s: float) -> Rollout:
        """The rollout that ends now; its slot is free."""
        heap = self.heap
        rollout = heappop(heap)[2]
        if rollout.fails:
            self.bank(rollout, rollout.end_clock)
        self.free.append(rollout.slot)
        self.next_s = heap[0][0] + self.behind_s if heap else math.inf
        return rollout

    def kill(self, replica: int, now_s: float) -> list[Rollout]:
        """The replica's attempts, lost; its slots are gone until `revive`."""
        running = sorted([entry[2] for entry in self.heap] + self.hung, key=lambda rollout: rollout.index)
        lost = [rollout for rollout in running if rollout.slot % self.num_replicas == replica]
        for rollout in lost:
            self.bank(rollout, self.engine_s(now_s))
        self._hold([rollout for rollout in running if rollout.slot % self.num_replicas != replica])
        self.free = [slot for slot in self.free if slot % self.num_replicas != replica]
        return lost

    def revive(self, replica: int) -> None:
        """The replica's slots are back."""
        self.free += range(replica, self.config.num_slots, self.num_replicas)

    def _abort(self, now_s: float) -> float:
        clock, reread_tokens = self.engine_s(now_s), 0.0
        for _, _, rollout in self.heap:
            left_s = max(0.0, rollout.end_clock - max(clock, rollout.clock))
            self.bank(rollout, clock)
            reread = self.config.prompt_tokens + rollout.tokens - rollout.left_tokens
            rollout.clock = clock + self.config.prefill_s_per_token * reread
            rollout.end_clock = rollout.clock + left_s
            reread_tokens += reread
        self._hold([entry[2] for entry in self.heap] + self.hung)
        return reread_tokens

    def _hold(self, running: list[Rollout]) -> None:
        self.heap = [(r.end_clock, r.index, r) for r in running if r.end_clock < math.inf]
        heapify(self.heap)
        self.hung = [rollout for rollout in running if rollout.end_clock == math.inf]
        self._look()

    def _look(self) -> None:
        self.next_s = self.heap[0][0] + self.behind_s if self.heap and self.paused_s is None else math.inf
