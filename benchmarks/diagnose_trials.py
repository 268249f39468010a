"""A batch as an engine and a trainer would see it, before anything goes wrong: what `diagnose_faults` damages.

Models: logits that depend on all tokens before, sampling under a decoding, an engine of another number format. Leaves
out real engines. Its softmax, filters and rounding are written apart from the package's: an oracle of its own.
Use: `trial = Trial.draw(rng, Decoding(temperature=0.7))`; `mismatch.diagnose(**trial.arguments())`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinfra_utils.rollouts import Decoding

VOCABS, SCALES, FORMATS = (32, 256, 2048), (1.5, 4.0, 8.0), ("float32", "float32", "float16", "bfloat16")
HIDDEN, DECAY = 32, 0.97


def round_bits(x: np.ndarray, number_format: str) -> np.ndarray:
    """x in the engine's format: mantissa bits by frexp, independent of the package's own rounding."""
    bits = {"float32": 24, "float16": 11, "bfloat16": 8}[number_format]
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


@dataclass
class Model:
    """Logits that depend on all tokens before: a decaying sum of embeddings, normalised, times an output matrix."""

    embed: np.ndarray
    out: np.ndarray
    scale: float

    @classmethod
    def draw(cls, rng: np.random.Generator, vocab: int, scale: float) -> Model:
        """Normal matrices; logits of the spread `scale`."""
        return cls(rng.normal(size=(vocab, HIDDEN)), rng.normal(size=(vocab, HIDDEN)) / HIDDEN**0.5, scale)

    def moved(self, rng: np.random.Generator, size: float) -> Model:
        """A neighbour in weight space: an older or newer policy."""
        return replace(
            self,
            embed=self.embed + size * rng.normal(size=self.embed.shape),
            out=self.out + size * rng.normal(size=self.out.shape) / HIDDEN**0.5,
        )

    def quantized(self, bits: int) -> Model:
        """Output weights on a symmetric grid of `bits` bits a row."""
        step = np.abs(self.out).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
        return replace(self, out=np.round(self.out / step) * step)

    def logits(self, ids: np.ndarray, number_format: str = "float32", old: Model | None = None, cached: int = 0):
        """(answers, tokens, vocab); the first `cached` tokens are read with the embeddings of `old`."""
        embedded = self.embed[ids]
        if old is not None:
            embedded = np.concatenate([old.embed[ids[:, :cached]], embedded[:, cached:]], axis=1)
        state = np.zeros((len(ids), ids.shape[1], HIDDEN))
        for t in range(1, ids.shape[1]):
            state[:, t] = DECAY * state[:, t - 1] + embedded[:, t - 1]
        hidden = state * (HIDDEN**0.5 / (np.linalg.norm(state, axis=-1, keepdims=True) + 1e-9))
        out = round_bits(self.out, number_format)
        return round_bits(self.scale * round_bits(hidden, number_format) @ out.T, number_format).astype(np.float32)


def distribution(logits: np.ndarray, decoding: Decoding) -> np.ndarray:
    """Probabilities after processing, token by token in the plainest way: the bench's own oracle."""
    z = logits.astype(np.float64) / decoding.temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    keep = p >= decoding.min_p * p.max(-1, keepdims=True)
    rank = np.argsort(np.argsort(-p, axis=-1, kind="stable"), axis=-1)
    if decoding.top_k:
        keep &= rank < decoding.top_k
    q = np.where(keep, p, 0.0)
    q /= q.sum(-1, keepdims=True)
    if decoding.top_p is not None:
        ordered = -np.sort(-q, axis=-1)
        start = np.concatenate([np.zeros_like(ordered[..., :1]), ordered.cumsum(-1)[..., :-1]], axis=-1)
        q = np.where(np.take_along_axis(start, rank, axis=-1) < decoding.top_p, q, 0.0)
    return q / q.sum(-1, keepdims=True)


def chosen(logits: np.ndarray, ids: np.ndarray, decoding: Decoding) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.take_along_axis(distribution(logits, decoding), ids[..., None], axis=-1)[..., 0])


@dataclass
class Trial:
    """One batch, answers x tokens: prompt of `num_prompt`, then what the policy sampled. Faults edit the call."""

    rng: np.random.Generator
    model: Model
    number_format: str
    ids: np.ndarray
    mask: np.ndarray
    num_prompt: int
    decoding: Decoding
    trainer_logits: np.ndarray
    engine_logits: np.ndarray
    behavior: np.ndarray
    call: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def draw(cls, rng: np.random.Generator, decoding: Decoding, answers: int = 4, response: tuple = (24, 96)) -> Trial:
        """Sample answers from a random model under `decoding`, with the engine's log-probs."""
        model = Model.draw(rng, int(rng.choice(VOCABS)), float(rng.choice(SCALES)))
        number_format = str(rng.choice(FORMATS))
        num_prompt = int(rng.integers(6, 16))
        length = (num_prompt + int(rng.integers(*response))) // 8 * 8
        vocab = len(model.embed)
        ids = np.zeros((answers, length), dtype=int)
        ids[:, :num_prompt] = rng.integers(1, vocab, size=(answers, num_prompt))
        state = np.zeros((answers, HIDDEN))
        for t in range(length):
            if t >= num_prompt:
                hidden = state * (HIDDEN**0.5 / np.linalg.norm(state, axis=-1, keepdims=True))
                probs = distribution(model.scale * hidden @ model.out.T, decoding)
                ids[:, t] = [rng.choice(vocab, p=p) for p in probs]
            state = DECAY * state + model.embed[ids[:, t]]
        mask = np.zeros(ids.shape, dtype=int)
        mask[:, num_prompt:] = 1
        trainer, engine = model.logits(ids), model.logits(ids, number_format)
        behavior = np.where(mask, chosen(engine, ids, decoding), 0.0)
        if np.isneginf(behavior).any():  # the engine's rounding moved a sampled token out of its own kept set
            return cls.draw(rng, decoding, answers, response)
        return cls(rng, model, number_format, ids, mask, num_prompt, decoding, trainer, engine, behavior)

    def noise(self) -> float:
        """Mean |delta| that the engine's format alone brings."""
        full = Decoding(temperature=self.decoding.temperature)
        delta = chosen(self.trainer_logits, self.ids, full) - chosen(self.engine_logits, self.ids, full)
        return float(np.abs(delta[self.mask == 1]).mean())

    def arguments(self) -> dict[str, Any]:
        """What `mismatch.diagnose` is called with."""
        base = {"trainer_logits": self.trainer_logits, "tokens": self.ids, "behavior": self.behavior, "mask": self.mask}
        return {**base, "decoding": self.decoding, **self.call}

    def gap(self) -> float:
        """Mean |delta| as the diagnoser will see it."""
        a = self.arguments()
        trainer = a.get("trainer_logprobs")
        if trainer is None:
            recorded = a["decoding"].temperature if a["decoding"] else 1.0
            trainer = chosen(a["trainer_logits"], a["tokens"], Decoding(temperature=recorded))
        return float(np.abs((trainer - a["behavior"])[np.asarray(a["mask"]) == 1]).mean())
