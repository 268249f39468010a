"""The replicas of an engine, each asked in a thread of its own, and how long one waits for all.

Life of a replica: its calls run in the order in which they came, one at a time. Invariant: a call that was given up
still comes before the next, so a rollback asked of a replica that hangs is the last thing it does. Trap: a call
cannot be interrupted; its thread is a daemon, so a hanging replica does not keep the process alive.
Use: `failures = ask([replica], lambda engine: engine.load(path, 7), deadline_s=60)`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class Replica:
    """One engine and the thread that speaks to it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(self._calls,), daemon=True, name="replica").start()

    def ask(self, call: Callable[[Any], Any]) -> Future:
        """`call(engine)`, after all that was asked before."""
        answer: Future = Future()
        self._calls.put((call, self.engine, answer))
        return answer

    def close(self) -> None:
        """End the thread once it has done all that was asked."""
        self._calls.put(None)

    @staticmethod
    def _serve(calls: queue.SimpleQueue) -> None:
        while (item := calls.get()) is not None:
            call, engine, answer = item
            try:
                answer.set_result(call(engine))
            except BaseException as error:
                answer.set_exception(error)


def ask(replicas: Sequence[Replica], call: Callable[[Any], Any], deadline_s: float) -> dict[int, str]:
    """Ask all at once, wait for all until one deadline, and say why each that failed did, by its place.

    Raises nothing that a replica raised: that is its answer. A KeyboardInterrupt of the waiting itself goes on.
    """
    answers = [replica.ask(call) for replica in replicas]
    until_s = time.monotonic() + deadline_s
    failures = {}
    for index, answer in enumerate(answers):
        try:
            answer.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError as error:
            # The replica's own TimeoutError is an answer; the wait's is none.
            failures[index] = _one_line(error) if answer.done() else f"did not answer within {deadline_s:g} s"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not answer.done():
                raise
            failures[index] = _one_line(error)
    return failures


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
