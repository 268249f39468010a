"""One line a second or so on where a run stands: updates, tokens/s, lag, queue, reward.

Models what a person looks at first. Leaves out everything that `tracing` works out from the run folder.
Use: `Progress(print).line(book, now_s)`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW = 8  # updates that the figures are means of
LINE_S = 2.0


class Progress:
    """Means over the last updates."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._recent: deque[tuple[float, Any, float]] = deque(maxlen=WINDOW)
        self._shown_s = 0.0

    def trained(self, trained: Any, mean_lag: float, now_s: float) -> None:
        """Take in an update."""
        self._recent.append((now_s, trained, mean_lag))

    def say(self, line: str) -> None:
        """Show a line of another kind, between the others."""
        self._show(line)

    def line(self, book: Any, now_s: float) -> None:
        """Show the line, if it is time."""
        if now_s - self._shown_s < LINE_S or not self._recent:
            return
        self._shown_s = now_s
        span_s = self._recent[-1][0] - self._recent[0][0]
        tokens = sum(trained.num_tokens for _, trained, _ in list(self._recent)[1:])
        tokens_per_s = tokens / span_s if span_s else 0.0
        num, counts = len(self._recent), book.counts
        self._show(
            f"update {counts.step:4d}  version {counts.version:4d}  {tokens_per_s:7.0f} tokens/s  "
            f"lag {sum(lag for *_, lag in self._recent) / num:4.2f}  queue {counts.queued / counts.batch:.2f} batches  "
            f"reward {sum(trained.mean_reward for _, trained, _ in self._recent) / num:5.3f}"
        )
