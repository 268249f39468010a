"""Rollout records as rectangles of numbers, and the log-probs of their tokens: what a trainer computes with.

Models: prompt and answer side by side, padded on the right; which records can be trained on exactly. Leaves out the
update (`trainer.py`), packing of short answers into one row, and filters of sampling, which are refused.
Use: `batch = collate(records, vocab_size)`; `batch_logprobs(model, batch)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlinfra_utils.doors import LOGPROB_TOLERANCE
from rlinfra_utils.rollouts import Rollout


@dataclass(frozen=True)
class Batch:
    """Rollouts as rectangles, padded on the right (the mask is 0 there, so the padding's value is free).

    `ids` (rollouts, tokens) holds prompt + response. The other two describe the predicted tokens, all but
    the first: boolean `mask` and `behavior` log-probs, (rollouts, tokens - 1). `temperature` (rollouts, 1, 1).
    """

    ids: Tensor
    mask: Tensor
    behavior: Tensor
    temperature: Tensor

    def rows(self, rows: slice) -> Batch:
        """The same for some of the rollouts."""
        return Batch(self.ids[rows], self.mask[rows], self.behavior[rows], self.temperature[rows])


def check_trainable(record: Rollout, vocab_size: int) -> None:
    """Raise ValueError unless the trainer can compute the ratio of each policy token exactly.

    Asks for less than `rollouts.validate` (provenance is not its business) and for one thing more: tokens
    drawn from the softmax at a temperature above 0 and nothing else. A top-p, top-k or min-p filter would
    need the kept set of each token, which the record does not carry.
    """
    name = f"record {record.sample_id}"
    for field in ("prompt_tokens", "response_tokens", "policy_mask", "behavior_logprobs", "decoding"):
        if getattr(record, field) is None:
            raise ValueError(f"{name}: {field} is missing; the trainer cannot do without it")
    _check_tokens(record, name, vocab_size)
    decoding = record.decoding
    if not (decoding.temperature or 0) > 0 or decoding.model_copy(update={"temperature": 1.0}).filters:
        raise ValueError(f"{name}: {decoding!r}; the trainer needs temperature > 0 and no filter")
    if decoding.temperature != 1.0 and decoding.logprobs_mode != "processed":
        raise ValueError(f"{name}: logprobs_mode={decoding.logprobs_mode!r}; off temperature 1 send 'processed' ones")


def _check_tokens(record: Rollout, name: str, vocab_size: int) -> None:
    num_prompt, num_response = len(record.prompt_tokens), len(record.response_tokens)
    for field, expected in (("policy_mask", num_prompt + num_response), ("behavior_logprobs", num_response)):
        if len(getattr(record, field)) != expected:
            raise ValueError(f"{name}: {field} has length {len(getattr(record, field))}, expected {expected}")
    for index, token in enumerate(record.prompt_tokens + record.response_tokens):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token {index} is {token}; the model's ids are 0 to {vocab_size - 1}")
    if num_prompt == 0 or any(record.policy_mask[:num_prompt]):
        raise ValueError(f"{name}: prompt_tokens has length {num_prompt}, or policy_mask claims some; give context")
    for index, (bit, value) in enumerate(zip(record.policy_mask[num_prompt:], record.behavior_logprobs)):
        if bit not in (0, 1):
            raise ValueError(f"{name}: policy_mask[{num_prompt + index}]={bit}; a mask holds 0 and 1")
        if bit and not (value is not None and -math.inf < value <= LOGPROB_TOLERANCE):
            raise ValueError(f"{name}: behavior_logprobs[{index}]={value}; a policy token's is finite and at most 0")


def collate(rollouts: Sequence[Rollout], vocab_size: int, device: torch.device | str = "cpu") -> Batch:
    """Lay records out as a `Batch`; raises ValueError for no record or one that is not trainable."""
    if not rollouts:
        raise ValueError("rollouts is empty: an update needs at least one record")
    for record in rollouts:
        check_trainable(record, vocab_size)
    width = max(len(record.policy_mask) for record in rollouts)
    ids = np.zeros((len(rollouts), width), dtype=np.int64)
    mask = np.zeros((len(rollouts), width), dtype=bool)
    behavior = np.zeros((len(rollouts), width), dtype=np.float32)
    for row, record in enumerate(rollouts):
        num_prompt, num_tokens = len(record.prompt_tokens), len(record.policy_mask)
        ids[row, :num_tokens] = record.prompt_tokens + record.response_tokens
        mask[row, :num_tokens] = record.policy_mask
        behavior[row, num_prompt:num_tokens] = [0.0 if v is None else v for v in record.behavior_logprobs]
    if not mask.any():
        raise ValueError("policy_mask is 0 everywhere in the batch: no token to train on")
    temperature = torch.tensor([record.decoding.temperature for record in rollouts], dtype=torch.float32)
    tensors = torch.from_numpy(ids), torch.from_numpy(mask[:, 1:]), torch.from_numpy(behavior[:, 1:])
    return Batch(*(t.to(device) for t in tensors), temperature.reshape(-1, 1, 1).to(device))


def batch_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-prob in nats of each token given those before it, shape (rollouts, tokens - 1).

    Of the distribution at the record's temperature, which is the one that the tokens were drawn from.
    """
    logits = model(batch.ids, use_cache=False).logits[:, :-1].float() / batch.temperature
    return logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
