"""Teacher-forced log-probs in little memory: the head runs over a chunk of tokens at a time.

Models: log p(token | tokens before it) for given sequences, of the softmax at a temperature or of the distribution
that an engine samples from. Leaves out models that change logits after their head, which are refused.
Use: `teacher_forced_logprobs(model, ids, attention_mask=mask)[i, -len(response):]` with left padding.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from rlinfra_utils.doors import whole
from rlinfra_utils.engines.padding import positions
from rlinfra_utils.engines.sampling import processed_logits, resolve
from rlinfra_utils.rollouts import Decoding

#: The float32 logits of one chunk, when `chunk_tokens` is left out.
CHUNK_BYTES = 96 * 2**20


def teacher_forced_logprobs(
    model: torch.nn.Module,
    ids: torch.Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    decoding: Decoding | None = None,
) -> torch.Tensor:
    """log p(ids[:, t + 1] | ids[:, : t + 1]) in nats, float32 (batch, seq - 1); 0.0 where either is padding.

    ids: int64 (batch, seq). attention_mask: 1 = token, one run a row, padding on either side. decoding: gives
    the log-prob under the filters of an engine, in place of `temperature`; -inf for a token outside the kept set.
    chunk_tokens: tokens whose (chunk, vocab) logits exist at once; by default 96 MiB of float32 logits.

    With gradients on, each chunk is computed again in backward, so the full (batch, seq, vocab) logits never exist.
    Raises ValueError for malformed arguments and for a model whose logits are not its head's plain output.
    """
    head = model.get_output_embeddings()
    vocab_size = head.weight.shape[0]
    _check_ids(ids, vocab_size)
    mask = torch.ones_like(ids) if attention_mask is None else _checked_mask(attention_mask, ids.shape)
    if decoding is not None and temperature != 1.0:
        raise ValueError(f"temperature={temperature!r}: decoding.temperature is {decoding.temperature!r}; give one")
    decoding = resolve(decoding or Decoding(temperature=temperature), vocab_size)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * vocab_size))
    chunk_tokens = whole("chunk_tokens", chunk_tokens)

    is_pair = (mask[:, :-1] * mask[:, 1:]).bool()
    hidden = _last_hidden(model, head, ids, mask)[:, :-1][is_pair]
    chunks = zip(hidden.split(chunk_tokens), ids[:, 1:][is_pair].split(chunk_tokens))
    values = [
        checkpoint(_chunk_logprobs, head, *chunk, decoding, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    logprobs = torch.zeros(is_pair.shape, device=ids.device)
    logprobs[is_pair] = torch.cat(values)
    return logprobs


def _chunk_logprobs(
    head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, decoding: Decoding
) -> torch.Tensor:
    logits = processed_logits(head(hidden), decoding)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    if torch.is_grad_enabled():
        return chosen - logits.logsumexp(-1)
    # Without gradients the exponentials may take the place of the logits: half the memory, and less time.
    largest = logits.amax(-1)
    return chosen - largest - logits.sub_(largest[:, None]).exp_().sum(-1).log()


def _last_hidden(model: torch.nn.Module, head: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states that the head reads, (batch, seq, hidden), from a pass that makes logits for the last column only.

    Those logits show whether anything acts between the hidden states and the logits besides the head (Gemma 2's
    softcap, Cohere's scale, MiniCPM3's scaled hidden states): the chunks would leave it out, so it is refused.
    """
    seen = {}
    hooks = [
        model.base_model.register_forward_hook(lambda module, args, out: seen.update(hidden=out.last_hidden_state)),
        head.register_forward_hook(lambda module, args, out: seen.update(head_input=args[0], head_output=out)),
    ]
    try:
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False, logits_to_keep=1
        ).logits
    finally:
        for hook in hooks:
            hook.remove()
    for found, expected in ((seen["head_input"], seen["hidden"][:, -1:]), (logits, seen["head_output"])):
        if not torch.allclose(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True):
            name = type(model).__name__
            raise ValueError(f"model: {name} changes hidden states or logits around its head; use another")
    return seen["hidden"]


def _check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"ids: is a {type(ids).__name__}; needs an int64 tensor (batch, seq)")
    if ids.dtype != torch.int64 or ids.dim() != 2 or ids.shape[1] < 2 or not len(ids):
        raise ValueError(f"ids: is {ids.dtype} {tuple(ids.shape)}; needs int64 (batch, seq), batch 1 up, seq 2 up")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"ids: holds {ids.min()} to {ids.max()}; needs ids in [0, {vocab_size})")


def _checked_mask(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if mask.shape != shape:
        raise ValueError(f"attention_mask: is {tuple(mask.shape)}; needs the shape of ids, {tuple(shape)}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask: holds values besides 0 and 1; needs 1 at a token, 0 at padding")
    mask = mask.long()
    num_runs = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
    if (num_runs != 1).any():
        row = int((num_runs != 1).nonzero()[0])
        raise ValueError(f"attention_mask[{row}]: has {num_runs[row]} runs of ones; needs one")
    return mask
