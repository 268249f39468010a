"""The distribution that a token is drawn from: logits plus decoding parameters, as float32 log-probs.

Models: banned tokens, temperature, min_p, top_k and top_p, in that order (vLLM's), and greedy decoding.
Leaves out what depends on the tokens before: repetition penalty and stop strings are refused.
Use: `decoding = resolve(decoding, vocab_size)` once, then `processed_logprobs(logits, decoding)` a step.
"""

from __future__ import annotations

import math

import torch

from rlinfra_utils.rollouts import Decoding

#: Below this a positive temperature is taken for a mistake: write 0 for greedy (vLLM samples greedily below it).
MIN_TEMPERATURE = 1e-5
#: A nucleus is looked for among this many likeliest tokens first: sorting a whole vocabulary takes ten times as long.
NUM_NUCLEUS_CANDIDATES = 1024


def resolve(decoding: Decoding, vocab_size: int) -> Decoding:
    """`decoding` with every field filled in: top_p 1.0 and top_k 0 where left out, log-probs "processed".

    Raises ValueError, naming field and value, for what is out of range or not supported. The temperature
    has to be given: it is never guessed.
    """
    top_p = 1.0 if decoding.top_p is None else decoding.top_p
    top_k = 0 if decoding.top_k in (None, -1) else decoding.top_k
    banned = set(decoding.banned_token_ids)
    temperature = decoding.temperature
    if temperature is None:
        raise ValueError("decoding.temperature=None: needs a number, 0 for greedy decoding")
    requirements = {
        "temperature": (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf, f"0, or {MIN_TEMPERATURE} up"),
        "top_p": (0 < top_p <= 1, "a number in (0, 1]"),
        "top_k": (top_k >= 0, "-1, 0 or a number above"),
        "min_p": (0 <= decoding.min_p <= 1, "a number in [0, 1]"),
        "repetition_penalty": (decoding.repetition_penalty == 1, "1.0, the only value supported"),
        "stop": (not decoding.stop, "to be empty: stop strings are not supported"),
        "logprobs_mode": (decoding.logprobs_mode in (None, "processed"), "'processed', or None"),
        "banned_token_ids": (
            all(0 <= token < vocab_size for token in banned) and len(banned) < vocab_size,
            f"ids in [0, {vocab_size}) that leave at least one token",
        ),
    }
    for field, (holds, requirement) in requirements.items():
        if not holds:
            raise ValueError(f"decoding.{field}={getattr(decoding, field)!r}: needs {requirement}")
    return decoding.model_copy(update={"top_p": top_p, "top_k": top_k, "logprobs_mode": "processed"})


def processed_logprobs(logits: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Log-probs (nats, float32) of the distribution sampled from, in the shape of `logits` (..., vocab).

    `decoding` is a resolved one. Tokens outside the kept set are at -inf, the others are renormalised;
    greedy decoding puts 0.0 on the likeliest token (the lowest id of several) and -inf elsewhere.
    """
    return torch.log_softmax(processed_logits(logits, decoding), dim=-1)


def processed_logits(logits: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Logits whose softmax is the distribution sampled from: float32, -inf outside the kept set.

    Logits of lower precision become float32 before anything else happens to them.
    """
    logits = logits.float()
    if decoding.banned_token_ids:
        banned = torch.tensor(decoding.banned_token_ids, device=logits.device)
        logits = logits.index_fill(-1, banned, -math.inf)
    if decoding.temperature == 0:
        greedy = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -math.inf).scatter_(-1, greedy, 0.0)
    if decoding.temperature != 1:
        logits = logits / decoding.temperature
    if decoding.min_p > 0:
        logits = keep_min_p(logits, decoding.min_p)
    if decoding.top_k > 0:
        logits = keep_top_k(logits, decoding.top_k)
    if decoding.top_p < 1:
        logits = keep_top_p(logits, decoding.top_p)
    return logits


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """`logits` (..., vocab) with -inf where a token has less than `min_p` times the probability of the likeliest."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """`logits` (..., vocab) with -inf below the `top_k`-th largest; all that equal it stay (as in vLLM)."""
    smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """`logits` (..., vocab) with -inf outside the smallest set of likeliest tokens whose mass reaches `top_p`.

    The token that carries the mass across `top_p` stays; of equally likely ones the lower ids stay first.
    Source: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
    """
    probs = logits.softmax(-1)
    descending = probs.topk(min(NUM_NUCLEUS_CANDIDATES, probs.shape[-1])).values
    if (descending.sum(-1) < top_p).any():
        descending = probs.sort(descending=True).values
    num_kept = (descending.cumsum(-1) - descending < top_p).sum(-1, keepdim=True)
    least = descending.gather(-1, num_kept - 1)
    is_tied = probs == least
    num_ties_kept = num_kept - (probs > least).sum(-1, keepdim=True)
    is_kept = (probs > least) | (is_tied & (is_tied.cumsum(-1) <= num_ties_kept))
    return logits.masked_fill(~is_kept, -math.inf)
