"""What a run was: its tables, its summary, and its picture for Perfetto.

Models nothing: all is worked out from the times and versions that the loop wrote down, when asked for. Leaves out
confidence intervals: run several seeds. Use: `run.summary(after_s=60)`, `run.lag`, `run.to_perfetto("loop.json")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from rlinfra_utils.doors import number
from rlinfra_utils.simulator import views
from rlinfra_utils.simulator.summary import summary
from rlinfra_utils.timers import Trace


class Lost(NamedTuple):
    """An attempt that came to nothing: "timeout" or "died", after `tokens` of its own."""

    rollout: int
    attempt: int
    replica: int
    start_s: float
    end_s: float
    tokens: float
    why: str


@dataclass(slots=True)
class Step:
    """One optimizer step: what it took, and when its parts ended; NaN for what it did not have."""

    step: int
    version: int
    taken_s: float
    rollouts: int
    tokens: int
    trained_s: float = math.nan
    sync_start_s: float = math.nan
    sync_end_s: float = math.nan
    paused_slots: int = 0
    checkpoint_s: float = 0.0


class Run:
    """A finished run. `status`: "done", "blocked" (nothing could happen any more) or "starved" (all was lost).

    `reason` says in a line what was missing. `counts` are the last ones; `end_s` is the time of the end.
    """

    def __init__(self, loop: Any):
        self.config, self.status, self.reason, self.counts = loop.config, loop.status, loop.reason, loop.counts
        self.end_s: float = loop.counts.now_s
        self.reread_tokens: float = loop.trainer.reread_tokens
        self._groups, self._rollouts, self._steps, self._lost = (
            loop.groups,
            loop.rollouts,
            loop.trainer.steps,
            loop.lost,
        )
        self._pieces, self._marks = loop.engines.pieces, loop.trainer.marks

    def __repr__(self):
        return f"Run({self.status} at {self.end_s:g} s{': ' if self.reason else ''}{self.reason}; {self.counts!r})"

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """One row a rollout offered: `group`, `tokens`, times in s, versions, `attempts`, `outcome`; NaN: not reached.

        `start_s` is of the attempt that ended or still runs; those that came to nothing are in `lost`.
        `outcome` is in_flight, queued, training, trained, dropped (by the rule) or failed. `version` is that of the
        group's dispatch, `start_version` that of the first token, `taken_version` the one held when it was taken.
        """
        return views.rollouts(self._rollouts, self._groups, self.end_s)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row an optimizer step begun: see `Step`."""
        names = list(Step.__dataclass_fields__)
        return pd.DataFrame([[getattr(step, name) for name in names] for step in self._steps], columns=names)

    @cached_property
    def lost(self) -> pd.DataFrame:
        """One row an attempt lost."""
        table = pd.DataFrame(self._lost, columns=Lost._fields)
        return table.astype(dict.fromkeys(("start_s", "end_s", "tokens"), "float64"))

    @cached_property
    def events(self) -> pd.DataFrame:
        """Every event by time: `time_s`, `event`, and of what: `rollout`, `group`, `step` (-1: not of one)."""
        return views.events(self.rollouts, self.steps, self.lost, self.end_s)

    @cached_property
    def queue(self) -> pd.DataFrame:
        """The queue's depth after each change: `time_s`, `rollouts`, `tokens`; it holds until the next row."""
        return views.queue(self.rollouts, self.end_s)

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Which version made which tokens: `rollout`, `version`, `tokens`, of rollouts whose decoding has ended."""
        return views.version_spans(self._rollouts, self._pieces, self._marks, self.config.num_replicas)

    @cached_property
    def lag(self) -> pd.DataFrame:
        """Lag of the trained tokens: `lag` in versions when taken, `tokens`, `share`."""
        return views.lag(self.spans, self.rollouts)

    @cached_property
    def length_bias(self) -> pd.DataFrame:
        """Lengths offered and trained on, by tenths of the offered: shares and their ratio; see `views.length_bias`.

        Of the rollouts that have left the loop, trained or discarded: the others' fate is open.
        """
        return views.length_bias(self.rollouts)

    def summary(self, after_s: float = 0.0) -> dict[str, float | str]:
        """The run in numbers, of all that happened from `after_s` on: see `summary.summary` for each.

        Raises ValueError for an `after_s` outside the run.
        """
        number("after_s", after_s, 0, self.end_s)
        return summary(self, after_s)

    def trace(self) -> Trace:
        """Spans of decoding by replica, verifier and trainer, its waits among them, from second 0."""
        return views.trace(self.rollouts, self.steps, self.lost, self.config.num_replicas)

    def to_perfetto(self, path: str) -> None:
        """Write the trace for ui.perfetto.dev."""
        self.trace().to_perfetto(path)
