"""One record or batch put before the tests: checked at the door, laid out as the tokens under the mask.

Models: logits, tokens, both log-probs, decoding, lag, recorded kept sets, and `Evidence` from outside the record.
Leaves out the tests. Use: `case = Case.of(logits, tokens, behavior, mask, ...)`; `case.delta`, `case.at(values)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlinfra_utils import doors, offpolicy
from rlinfra_utils.mismatch.compare import SAME_MAX, SAME_MEAN, index_of, require_a_token
from rlinfra_utils.mismatch.distributions import token_logprobs
from rlinfra_utils.mismatch.evidence import Evidence
from rlinfra_utils.rollouts import Decoding

#: Mean and largest |delta| of a bfloat16 engine against a float32 trainer on a 135M model (vLLM, 16 answers of about 60
#: tokens, measured 2026-11-29): the scale of noise where there are no logits to round.
TYPICAL_NOISE, TYPICAL_LARGEST = 0.029, 0.243
#: Logits used where a parameter is fitted; the residual is then taken over all tokens.
_FIT_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class Case:
    """Arrays of shape (answers, tokens); `rows`, `positions` and what is computed from them run over the mask alone."""

    logits: np.ndarray | None
    tokens: np.ndarray
    trainer: np.ndarray
    behavior: np.ndarray
    mask: np.ndarray
    decoding: Decoding | None
    lag: np.ndarray
    kept: list[np.ndarray] | None
    evidence: Evidence
    is_trainer_given: bool

    @classmethod
    def of(
        cls,
        logits: Any,
        tokens: Any,
        behavior: Any,
        mask: Any,
        decoding: Decoding | None,
        lag: Any,
        kept_ids: Any,
        trainer_logprobs: Any,
        evidence: Evidence | None,
    ) -> Case:
        """Check everything once; raises ValueError in one line that names the argument and the value."""
        if logits is None and trainer_logprobs is None:
            raise ValueError("trainer_logits: None; pass logits, or trainer_logprobs where only those were kept")
        ids = _integers("tokens", tokens)
        shape = ids.shape
        selected = doors.boolean_mask(mask, "tokens", shape)
        require_a_token(selected)
        scores = None if logits is None else checked_logits("trainer_logits", logits, ids, selected)
        if decoding is not None:
            _check_decoding(decoding, None if scores is None else scores.shape[-1])
        if evidence is not None:
            doors.instance("evidence", evidence, Evidence, "Evidence(fingerprints=..., ...)")
        given = trainer_logprobs is not None
        if not given:
            trainer_logprobs = np.zeros(shape)
            trainer_logprobs[selected] = token_logprobs(scores[selected], ids[selected], _scaled(decoding))
        elif (own := doors.floats("trainer_logprobs", trainer_logprobs)).shape != shape:
            raise ValueError(f"trainer_logprobs: shape {own.shape} is not the shape {shape} of tokens")
        trainer, behavior, selected = offpolicy.ratios.log_prob_pair(trainer_logprobs, behavior, selected)
        grid = (-1, shape[-1])
        return cls(
            logits=None if scores is None else scores.reshape(*grid, scores.shape[-1]),
            tokens=ids.reshape(grid),
            trainer=trainer.reshape(grid),
            behavior=behavior.reshape(grid),
            mask=selected.reshape(grid),
            decoding=decoding,
            lag=_lag(lag, shape)[selected],
            kept=None if kept_ids is None else _kept(kept_ids, ids, selected, scores),
            evidence=evidence or Evidence(),
            is_trainer_given=given,
        )

    @cached_property
    def delta(self) -> np.ndarray:
        """trainer - behaviour (nats) of the tokens under the mask, shape (n,)."""
        return (self.trainer - self.behavior)[self.mask]

    @cached_property
    def gap(self) -> float:
        """Mean |delta|, nats."""
        return float(np.abs(self.delta).mean())

    @cached_property
    def is_same(self) -> bool:
        """Whether the difference is no more than two float32 passes of one model show."""
        return self.gap <= SAME_MEAN and float(np.abs(self.delta).max()) <= SAME_MAX

    @cached_property
    def rows(self) -> np.ndarray:
        """Answer of each token under the mask, shape (n,)."""
        return np.nonzero(self.mask)[0]

    @cached_property
    def positions(self) -> np.ndarray:
        """Position on the token axis of each token under the mask, shape (n,)."""
        return np.nonzero(self.mask)[1]

    @cached_property
    def scores(self) -> np.ndarray:
        """Logits of the tokens under the mask, shape (n, vocab)."""
        return self.logits[self.mask]

    @cached_property
    def ids(self) -> np.ndarray:
        """Token ids under the mask, shape (n,)."""
        return self.tokens[self.mask]

    @cached_property
    def behavior_logprobs(self) -> np.ndarray:
        """Behaviour log-probs under the mask, shape (n,)."""
        return self.behavior[self.mask]

    @property
    def temperature(self) -> float:
        """Temperature of sampling; 1 where none is recorded or decoding is greedy."""
        return _scaled(self.decoding).temperature

    @cached_property
    def sample(self) -> np.ndarray:
        """Evenly spaced indices into the tokens under the mask: enough to fit one parameter, few enough to be quick."""
        num = min(len(self.ids), max(16, _FIT_ELEMENTS // self.scores.shape[-1]))
        return np.unique(np.linspace(0, len(self.ids) - 1, num).astype(int))

    @cached_property
    def rounding(self) -> dict[str, np.ndarray]:
        """By format, what rounding these logits adds to each log-prob, shape (n,); empty without logits."""
        if self.logits is None:
            return {}
        exact = token_logprobs(self.scores, self.ids, _scaled(self.decoding))
        return {
            dtype: token_logprobs(self.scores, self.ids, _scaled(self.decoding), dtype) - exact
            for dtype in ("bfloat16", "float16")
        }

    @cached_property
    def noise(self) -> float:
        """Mean |delta| that bfloat16 would bring, nats."""
        if not self.rounding:
            return TYPICAL_NOISE
        return max(float(np.abs(self.rounding["bfloat16"]).mean()), SAME_MEAN)


def _scaled(decoding: Decoding | None) -> Decoding:
    temperature = None if decoding is None else decoding.temperature
    return Decoding(temperature=temperature or 1.0)


def _check_decoding(decoding: Any, vocab: int | None) -> None:
    if not isinstance(decoding, Decoding):
        raise ValueError(f"decoding: {type(decoding).__name__}; pass rollouts.Decoding(temperature=..., ...)")
    temperature, top_p, top_k = decoding.temperature, decoding.top_p, decoding.top_k
    banned = decoding.banned_token_ids
    requirements = {
        "temperature": (temperature is None or 0 <= temperature < np.inf, "0 for greedy, or a finite number above it"),
        "top_p": (top_p is None or 0 < top_p <= 1, "in (0, 1]"),
        "top_k": (top_k is None or top_k >= -1, "at least -1"),
        "min_p": (0 <= decoding.min_p <= 1, "in [0, 1]"),
        "banned_token_ids": (
            min(banned, default=0) >= 0 and max(banned, default=0) < (vocab or np.inf),
            "in vocabulary",
        ),
    }
    for name, (holds, requirement) in requirements.items():
        if not holds:
            raise ValueError(f"decoding.{name}: {getattr(decoding, name)!r} must be {requirement}")


def _integers(name: str, values: Any) -> np.ndarray:
    array = doors.floats(name, values)
    doors.refuse(name, array, ~((array >= 0) & (array <= doors.LARGEST) & (array == np.floor(array))), "is no token id")
    return array.astype(np.int64)


def checked_logits(name: str, values: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`values` as logits over the tokens `ids`, finite or -inf under the mask; raises ValueError otherwise."""
    try:
        scores = np.asarray(values)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}; pass .detach().float().cpu()") from None
    if scores.shape[:-1] != ids.shape or scores.ndim != ids.ndim + 1:
        raise ValueError(f"{name}: shape {scores.shape}; needs (..., tokens, vocab) over tokens of shape {ids.shape}")
    if scores.dtype.kind != "f":
        raise ValueError(f"{name}: holds {scores.dtype} values; needs floating point")
    vocab = scores.shape[-1]
    doors.refuse("tokens", ids, mask & (ids >= vocab), f"is outside the vocabulary of {vocab}")
    bad = mask[..., None] & (np.isnan(scores) | np.isposinf(scores))
    doors.refuse(name, scores, bad, "is not a logit")
    return scores


def _lag(lag: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        values = np.asarray(lag)
    except ValueError:
        raise ValueError("lag: rows of unequal length; needs a whole number, or one a token") from None
    if values.dtype.kind not in "iu" or values.shape not in ((), shape):
        raise ValueError(f"lag: {values.dtype} of shape {values.shape}; needs a whole number, or one a token {shape}")
    if (values < 0).any():
        raise ValueError(f"lag: {values.min()} is below 0; the trainer cannot be older than its data")
    return np.broadcast_to(values, shape)


def _kept(kept_ids: Any, ids: np.ndarray, mask: np.ndarray, scores: np.ndarray | None) -> list[np.ndarray]:
    """The recorded ids at each token under the mask, every one holding the token that was sampled."""
    if scores is None:
        raise ValueError("kept_ids: need trainer_logits to be renormalised over")
    kept = []
    for place in map(index_of, np.argwhere(mask)):
        here = kept_ids
        try:
            for i, size in zip(place, ids.shape, strict=True):
                if len(here) != size:
                    raise ValueError(f"{len(here)} entries where tokens have {size}")
                here = here[i]
            chosen = np.unique(np.asarray(here, dtype=np.int64))
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"kept_ids[{place}]: {error}; needs a list of ids for each sampled token") from None
        if ids[place] not in chosen or chosen[0] < 0 or chosen[-1] >= scores.shape[-1]:
            raise ValueError(f"kept_ids[{place}]: lacks the sampled token {ids[place]}, or leaves the vocabulary")
        kept.append(chosen)
    return kept
