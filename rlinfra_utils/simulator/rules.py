"""The textbook's rules, of which the stacks' are variations: a budget by version, and a bounded queue.

Models when work starts and what is dropped, from `Counts` alone. Leaves out what a stack adds (`controllers`).
Use: `BoundedQueue(max_tokens=8192)`, `Budget(max_lag=4)`. Every constructor raises ValueError by field.
"""

from __future__ import annotations

from rlinfra_utils.doors import choice, number, whole
from rlinfra_utils.simulator.protocol import AT_UPDATE, Controller, Counts, Verdict


def take_within(lag: int, max_lag: int) -> Verdict:
    """Take up to `max_lag`, drop above it."""
    return "take" if lag <= max_lag else "drop"


class Budget(Controller):
    """Work may be dispatched for the version (or step) in hand and `max_lag` more; nothing is dropped for age.

    A bound on the mean, not on each rollout: whoever overtakes a straggler uses up its share.
    """

    counts_batches = True

    def __init__(self, max_lag: int, at_update: str = "keep"):
        self.max_lag, self.at_update = whole("max_lag", max_lag, 0), choice("at_update", at_update, AT_UPDATE)

    def may_start(self, counts):
        """Not discarded < (version + 1 + max_lag) * rollouts per version."""
        return counts.offered - counts.discarded < (counts.version + 1 + self.max_lag) * counts.per_version


class Synchronous(Budget):
    """Generate what one version trains on, train, update, repeat: budget with no lag."""

    def __init__(self):
        super().__init__(0, "finish")


class OneStepOff(Budget):
    """While the trainer has one batch, the next is generated; weights change between the two.

    Source: verl `one_step_off_policy/README.md:27-31` at 1dda039b9c63, 2026-08-22.
    """

    def __init__(self):
        super().__init__(1, "finish")


class BoundedQueue(Controller):
    """New work starts in a free slot while the queue is within every limit given; None is no limit.

    Rollouts, tokens, bytes (`bytes_per_token` each), seconds since the oldest came, versions since the stalest was
    dispatched: at a limit, no new work. Work under way still comes, so depth passes it by what is in flight. Age and
    lag hold only while a batch is ready: below one, the wait would have no end. With `drop_lag`, groups of more
    versions are dropped when the trainer comes to them.
    """

    def __init__(
        self,
        max_rollouts: int | None = None,
        max_tokens: int | None = None,
        max_bytes: float | None = None,
        max_age_s: float | None = None,
        max_lag: int | None = None,
        drop_lag: int | None = None,
        bytes_per_token: float = 8.0,
        at_update: str = "keep",
    ):
        limits = {"max_rollouts": max_rollouts, "max_tokens": max_tokens, "max_bytes": max_bytes}
        limits |= {"max_age_s": max_age_s, "max_lag": max_lag}
        for name, limit in limits.items():
            if limit is not None:
                number(name, limit, above=True)
        if drop_lag is not None:
            whole("drop_lag", drop_lag, 0)
            if max_lag is not None and max_lag > drop_lag:
                raise ValueError(f"max_lag={max_lag}: never reached, as drop_lag={drop_lag} drops those before it")
        number("bytes_per_token", bytes_per_token, above=True)
        if max_bytes is not None:
            max_tokens = min(max_bytes / bytes_per_token, max_tokens or max_bytes / bytes_per_token)
        self.max_rollouts, self.max_tokens, self.max_age_s = max_rollouts, max_tokens, max_age_s
        self.max_lag, self.drop_lag, self.at_update = max_lag, drop_lag, choice("at_update", at_update, AT_UPDATE)

    def may_start(self, counts):
        """A slot is free and no limit is reached."""
        return (
            counts.free_slots > 0
            and (self.max_rollouts is None or counts.queued < self.max_rollouts)
            and (self.max_tokens is None or counts.queued_tokens < self.max_tokens)
            and not (counts.batch_ready and self._is_old(counts))
        )

    def _is_old(self, counts: Counts) -> bool:
        return (self.max_age_s is not None and counts.now_s - counts.oldest_queued_s >= self.max_age_s) or (
            self.max_lag is not None and counts.version - counts.oldest_queued_version >= self.max_lag
        )

    def judge(self, group, counts):
        """Take, unless over `drop_lag`."""
        return "take" if self.drop_lag is None else take_within(counts.version - group.version, self.drop_lag)
