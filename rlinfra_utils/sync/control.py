"""The trainer's side of a proof: held sequences, and what the trainer's own forward pass gives them.

Models: log-probs of tokens 1..n-1 of each sequence, by the weights to be proven and by others that an engine might
hold in their place (the version before, the base without its adapter). Leaves out how the forward pass is made: it is
a function. Use: `control(score, sequences, 7, references={"version 6": old.logprobs})`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinfra_utils.doors import instance, number, short, whole
from rlinfra_utils.sync.prints import Fingerprint

Rows = list[list[float]]
Score = Callable[[list[list[int]]], Rows]


@dataclass(frozen=True)
class Control:
    """What an engine with `version` has to answer; `control` makes one.

    `sequences` are scored, and are prompts that `max_new_tokens` more are sampled for. `score` gives the trainer's
    log-probs of any sequences. `references`: log-probs of the same sequences by other weights, by a name for people.
    `tolerance_nats`: the mean |difference| that arithmetic may make.
    """

    version: int
    sequences: list[list[int]]
    logprobs: Rows
    score: Score
    fingerprint: Fingerprint | None
    references: Mapping[str, Rows]
    tolerance_nats: float
    max_new_tokens: int

    def check_still_holds(self) -> None:
        """Raise ValueError where the trainer went on: `score` no longer gives the log-probs that it gave."""
        moved = mean_gap(self.score(self.sequences[:1]), self.logprobs[:1])
        if not moved <= self.tolerance_nats:
            raise ValueError(
                f"control.version={self.version}: score has moved by {moved:.2g} nats a token since the control was "
                "made; make another before the next update, or score with a copy of the model"
            )


def control(
    score: Score,
    sequences: Sequence[Sequence[int]],
    version: int,
    fingerprint: Fingerprint | None = None,
    references: Mapping[str, Rows] | None = None,
    tolerance_nats: float = 1e-4,
    max_new_tokens: int = 8,
) -> Control:
    """Score `sequences` with the trainer's own forward pass and keep the answers.

    score: token ids by sequence -> log-probs (nats, of the softmax at temperature 1) of tokens 1..n-1. Use the same
    long sequences at every version: a prefix cache that outlives an update can be seen only where the engine has
    cached the prompt before, and only by prompts after which the policy is not sure. `fingerprint`: of the weights in
    the engine's dtype. The tolerance suits an engine in float32 beside a trainer in float32 (vLLM on a CPU, 2026-11:
    mean 5e-6, largest 5e-5); bfloat16 differs by 0.03 in the mean.
    Raises ValueError for malformed sequences or log-probs.
    """
    if isinstance(sequences, str) or not isinstance(sequences, Sequence) or not len(sequences):
        raise ValueError(f"sequences={short(sequences)}: needs at least one sequence of token ids")
    held = [_checked_sequence(index, sequence) for index, sequence in enumerate(sequences)]
    if not callable(score):
        raise ValueError(f"score={short(score)}: needs a function from sequences to their log-probs")
    if fingerprint is not None:
        instance("fingerprint", fingerprint, Fingerprint, "as sync.fingerprint gives")
    if not isinstance(references, Mapping | None):
        raise ValueError(f"references={short(references)}: needs log-probs by a name for their weights")
    score = _one_at_a_time(score)
    return Control(
        version=whole("version", version, 0),
        sequences=held,
        logprobs=checked_rows("score(sequences)", score(held), held),
        score=score,
        fingerprint=fingerprint,
        references={
            str(name): checked_rows(f"references[{name!r}]", rows, held) for name, rows in (references or {}).items()
        },
        tolerance_nats=number("tolerance_nats", tolerance_nats, above=True),
        max_new_tokens=whole("max_new_tokens", max_new_tokens),
    )


def checked_rows(name: str, rows: Any, sequences: list[list[int]]) -> Rows:
    """Log-probs, one fewer than each sequence has tokens. Raises ValueError by name and place."""
    try:
        listed = [np.asarray(row, dtype=float) for row in rows]
    except (TypeError, ValueError):
        raise ValueError(f"{name}={short(rows)}: needs a list of log-probs a sequence") from None
    if len(listed) != len(sequences):
        raise ValueError(f"{name}: has {len(listed)} rows for {len(sequences)} sequences")
    for index, (row, sequence) in enumerate(zip(listed, sequences)):
        if row.shape != (len(sequence) - 1,):
            raise ValueError(
                f"{name}[{index}]: has shape {row.shape}; a sequence of {len(sequence)} tokens has "
                f"{len(sequence) - 1} log-probs, of tokens 1 to {len(sequence) - 1}"
            )
        if not (np.isfinite(row) & (row <= 1e-5)).all():
            place = int(np.flatnonzero(~(np.isfinite(row) & (row <= 1e-5)))[0])
            raise ValueError(f"{name}[{index}][{place}]={row[place]:g}: is no log-prob")
    return [row.tolist() for row in listed]


def mean_gap(a: Rows, b: Rows) -> float:
    """Mean |a - b| over all tokens, nats."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())


def _one_at_a_time(score: Score) -> Score:
    """Replicas are verified in threads, and share the trainer's model, which may not bear two calls at once."""
    lock = threading.Lock()

    def locked(sequences: list[list[int]]) -> Rows:
        with lock:
            return score(sequences)

    return locked


def _checked_sequence(index: int, sequence: Any) -> list[int]:
    good = isinstance(sequence, list | tuple) and len(sequence) >= 2
    if not good or not all(type(token) is int and token >= 0 for token in sequence):
        raise ValueError(f"sequences[{index}]={short(sequence)}: needs at least two token ids, whole numbers from 0")
    return list(sequence)
