"""Supervised steps on worked sums, from which RL can start: `supervise`.

Models: cross-entropy on each answer and its end-of-sequence token, AdamW at a constant learning rate after a short
rise, gradients clipped to a norm of 1. Leaves out: falling schedules, packing, chat templates, mixed precision.
Use: `supervise(model, tokenizer, num_steps=20, batch_size=16, lr=1e-4)` teaches a pretrained model the form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlinfra_utils.doors import amount, number, whole
from rlinfra_utils.policy.task import prompts

#: A label that the loss passes over.
IGNORED = -100
_NUM_LINES = 8


def labelled_sums(tokenizer: PreTrainedTokenizerBase, num_prompts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sums with their answers, padded on the right: ids and labels, (num_prompts, tokens).

    Labels are IGNORED but on the answer and the end-of-sequence token. The draws are those of `prompts`.
    """
    ids, labels = [], []
    for prompt in prompts(num_prompts, seed):
        question = tokenizer(prompt.text).input_ids
        answer = [*tokenizer(str(prompt.answer), add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        ids.append(torch.tensor(question + answer))
        labels.append(torch.tensor([IGNORED] * len(question) + answer))
    return pad_sequence(ids, True, tokenizer.eos_token_id), pad_sequence(labels, True, IGNORED)


def supervise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    warmup_steps: int = 1,
    label_smoothing: float = 0.0,
    show: Callable[[str], object] = print,
) -> list[float]:
    """Train all weights of the model in place; each step's loss in nats a token, before that step.

    Step `i` learns from `labelled_sums(tokenizer, batch_size, seed=i)`. `label_smoothing` spreads that share
    of the target over all tokens. Raises ValueError for an argument out of range, by its name.
    """
    for name, value in (("num_steps", num_steps), ("batch_size", batch_size), ("warmup_steps", warmup_steps)):
        whole(name, value)
    amount("lr", lr)
    number("label_smoothing", label_smoothing, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warmup_steps)
        ids, labels = labelled_sums(tokenizer, batch_size, step)
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % max(1, num_steps // _NUM_LINES) == 0:
            show(f"supervised step {step + 1:4d} of {num_steps}  loss {losses[-1]:.3f} nats a token")
    return losses
