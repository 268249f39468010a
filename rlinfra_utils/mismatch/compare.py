"""Two log-probs of the same tokens side by side: how large the difference is, where it sits, where it begins.

Models: delta = trainer - behaviour in nats under a mask, by token, by position, by probability, by answer.
Leaves out the cause (`diagnose.py`). Use: `c = compare(trainer, behavior, mask)`; `print(c)`; `c.first_diverging`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlinfra_utils import offpolicy

#: Two float32 forward passes of one model differ by less than this, token by token: vLLM against transformers on
#: a 135M model, mean 5.4e-6 and max 4.6e-5 nats (measured 2026-11-29); room for deeper models is added.
SAME_MAX, SAME_MEAN = 1e-3, 1e-4
NUM_LARGEST = 5
NUM_POSITION_BINS = 8
#: Edges of the bins by the trainer's probability of the token.
PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)


class Bin(NamedTuple):
    """Tokens with position, or probability, in [low, high); the last bin by probability includes 1."""

    low: float
    high: float
    num_tokens: int
    mean: float
    mean_abs: float


class Place(NamedTuple):
    """One token: its index in the arrays passed in, both log-probs and their difference (nats)."""

    index: tuple[int, ...]
    trainer: float
    behavior: float
    delta: float


@dataclass(frozen=True)
class Comparison:
    """Differences trainer - behaviour (nats) of one record or batch.

    delta: the inputs' shape, NaN off the mask. summary: token, sequence and geometric statistics, kept apart.
    largest: the tokens of largest |delta|. by_position, by_probability: bins with tokens in them.
    sequence_log_weight: sum of delta of each answer, NaN without tokens. normalized_ess: of the sequence weights.
    first_diverging: index of the first token, answer by answer, with |delta| above 0.001; None if there is none.
    """

    delta: np.ndarray
    summary: offpolicy.Summary
    largest: tuple[Place, ...]
    by_position: tuple[Bin, ...]
    by_probability: tuple[Bin, ...]
    sequence_log_weight: np.ndarray
    normalized_ess: float
    first_diverging: tuple[int, ...] | None

    def _lines(self) -> list[tuple[str, str]]:
        token, sequence, geometric = self.summary.token, self.summary.sequence, self.summary.geometric
        lines = [
            ("tokens, answers", f"{token.num}, {sequence.num}"),
            ("|delta| mean, max (nats)", f"{token.mean_abs_log:.3g}, {token.max_abs_log:.3g}"),
            ("delta mean", f"{token.mean_log:+.3g}"),
            ("sequence |log w| max", f"{sequence.max_abs_log:.3g}"),
            ("geometric mean |log w| max", f"{geometric.max_abs_log:.3g}"),
            ("normalised ESS of answers", f"{self.normalized_ess:.4g}"),
            ("first diverging token", "none" if self.first_diverging is None else str(self.first_diverging)),
        ]
        lines += [
            (f"largest {place.index}", f"{place.trainer:.4g} - {place.behavior:.4g} = {place.delta:+.4g}")
            for place in self.largest
        ]
        for axis, bins in (("position", self.by_position), ("probability", self.by_probability)):
            lines += [
                (f"{axis} {b.low:g} to {b.high:g}", f"{b.num_tokens} tokens, mean {b.mean:+.3g}, |.| {b.mean_abs:.3g}")
                for b in bins
            ]
        return lines

    def __str__(self) -> str:
        return "\n".join(f"{name:<28}{value}" for name, value in self._lines())

    def _repr_html_(self) -> str:
        rows = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in self._lines())
        return f"<table>{''.join(rows)}</table>"


def compare(trainer: Any, behavior: Any, mask: Any) -> Comparison:
    """Compare the log-probs (nats) `trainer` and `behavior` of the same tokens, shape (..., tokens), under `mask`.

    Raises ValueError, naming argument, position and value, as `offpolicy.log_ratio` does (unequal shapes, a
    value that is missing, above 0 or -inf under the mask), and for a mask that selects no token.
    """
    trainer, behavior, mask = offpolicy.ratios.log_prob_pair(trainer, behavior, mask)
    require_a_token(mask)
    delta = trainer - behavior
    where = np.argwhere(mask)
    values = delta[mask]
    order = np.argsort(-np.abs(values), kind="stable")[:NUM_LARGEST]
    differs = np.flatnonzero(np.abs(values) > SAME_MAX)
    sequence = offpolicy.sequence_log_ratio(delta, mask)
    edges = np.unique(np.linspace(0, mask.shape[-1], NUM_POSITION_BINS + 1).astype(int))
    return Comparison(
        delta=np.where(mask, delta, np.nan),
        summary=offpolicy.summarize(trainer, behavior, mask),
        largest=tuple(
            Place(index_of(where[i]), float(trainer[mask][i]), float(behavior[mask][i]), float(values[i]))
            for i in order
            if values[i] != 0
        ),
        by_position=_bins(where[:, -1], values, edges),
        by_probability=_bins(np.exp(trainer[mask]), values, PROBABILITY_EDGES),
        sequence_log_weight=sequence,
        normalized_ess=offpolicy.normalized_ess_from_log(sequence[np.isfinite(sequence)].ravel()),
        first_diverging=index_of(where[differs[0]]) if differs.size else None,
    )


def require_a_token(mask: np.ndarray) -> None:
    """Raise ValueError for a mask that selects nothing: a difference of no token is undefined, not 0."""
    if not mask.any():
        raise ValueError(f"mask: selects none of {mask.size} tokens; there is nothing to compare")


def index_of(row: np.ndarray) -> tuple[int, ...]:
    """A row of `np.argwhere` as plain integers."""
    return tuple(int(i) for i in row)


def _bins(keys: np.ndarray, values: np.ndarray, edges: Any) -> tuple[Bin, ...]:
    at = np.clip(np.searchsorted(edges, keys, side="right") - 1, 0, len(edges) - 2)
    chosen = ((float(edges[i]), float(edges[i + 1]), values[at == i]) for i in range(len(edges) - 1))
    return tuple(
        Bin(low, high, len(part), float(part.mean()), float(np.abs(part).mean()))
        for low, high, part in chosen
        if len(part)
    )
