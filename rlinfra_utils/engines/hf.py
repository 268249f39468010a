"""An engine on transformers: batched sampling that records the behaviour policy exactly.

Models: left-padded prompts, one prefill a distinct prompt, a KV cache, sampling that keeps the log-prob of every token
as drawn and as raw. Leaves out continuous batching: a call decodes until its last sequence ends.
Use: `HFEngine(model, tokenizer).generate([[1, 2, 3]], Decoding(temperature=1.0, max_new_tokens=8), n=4)`.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlinfra_utils.doors import whole
from rlinfra_utils.engines.generation import Completion, Generation
from rlinfra_utils.engines.logprobs import teacher_forced_logprobs
from rlinfra_utils.engines.padding import pad_left, positions
from rlinfra_utils.engines.requests import check_ids, checked_version, limited
from rlinfra_utils.engines.sampling import processed_logprobs
from rlinfra_utils.engines.weights import copy_into, read_safetensors
from rlinfra_utils.rollouts import Decoding


@dataclass
class _Rows:
    """One row a completion: logits to sample from (rows, vocab), the cache, mask and positions (rows, all columns)."""

    logits: Tensor
    cache: DynamicCache
    mask: Tensor
    positions: Tensor


class HFEngine:
    """A causal language model of transformers as an inference engine.

    Life: `generate`, then `load` or `adopt` other weights, then `generate`. Invariant: `version` names the weights
    in `model`, and moves only once all of them are there. Trap: `model` is not copied, so whoever trains it
    elsewhere changes the engine without changing `version`: give trainer and engine a model each.

    EOS ids: `eos_token_id` if given, else the model's, which have to include the tokenizer's; with none at all,
    completions end by length only. Draws come from a generator of the engine's own, seeded by `seed`. Raises ValueError
    for a version that is none, and EOS ids that contradict one another or lie outside the vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: int = 0,
        eos_token_id: int | list[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.version = checked_version(version)
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.eos_token_ids = _eos_token_ids(model, tokenizer, eos_token_id, self.vocab_size)
        self._random = torch.Generator(model.device).manual_seed(seed)
        # transformers 5.9 calls the argument `past_key_values`, 5.24 `cache` (and warns about the other name).
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.no_grad()
    def generate(
        self, prompt_ids: list[list[int]], decoding: Decoding, n: int = 1, seed: int | None = None
    ) -> Generation:
        """Sample `n` completions a prompt. `seed` makes a call repeatable; without it the engine's own stream goes on.

        Raises ValueError for malformed prompts, a decoding that `sampling.resolve` refuses or that lacks
        `max_new_tokens`, more tokens than the model has positions for, and weights that give NaN.
        """
        decoding = limited(decoding, self.vocab_size)
        check_ids("prompt_ids", prompt_ids, self.vocab_size)
        whole("n", n)
        self._check_room(max(map(len, prompt_ids)) + decoding.max_new_tokens)
        random = self._random if seed is None else torch.Generator(self.model.device).manual_seed(seed)
        was_training = self.model.training
        self.model.eval()
        try:
            times_s = [self._clock_s()]
            rows = self._prefill(prompt_ids, decoding.max_new_tokens, n)
            times_s.append(self._clock_s())
            columns = self._decode(rows, decoding, random)
            times_s.append(self._clock_s())
        finally:
            self.model.train(was_training)
        completions = self._completions(prompt_ids, n, columns)
        return Generation(
            completions=completions,
            prefill_s=times_s[1] - times_s[0],
            decode_s=times_s[2] - times_s[1],
            num_prompt_tokens=sum(map(len, set(map(tuple, prompt_ids)))),
            num_new_tokens=sum(len(completion.tokens) for completion in completions),
        )

    @torch.no_grad()
    def control_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """log p(token | tokens before it) of all tokens but the first, nats, of the raw softmax at temperature 1.

        No cache of earlier requests is read: this is what the weights say. Raises ValueError as
        `teacher_forced_logprobs` does, and for a sequence of length 0.
        """
        ids, mask = (tensor.to(self.model.device) for tensor in pad_left(sequences))
        was_training = self.model.training
        self.model.eval()
        try:
            rows = teacher_forced_logprobs(self.model, ids, attention_mask=mask).tolist()
        finally:
            self.model.train(was_training)
        return [row[len(row) + 1 - len(sequence) :] for row, sequence in zip(rows, sequences)]

    def load(self, path: str | Path, version: int) -> None:
        """Copy the safetensors in folder `path` over the model's weights, in place.

        Raises ValueError (see `weights.copy_into`), with weights and version as they were.
        """
        version = checked_version(version)
        copy_into(self.model, read_safetensors(path), path)
        self.version = version

    def adopt(self, model: torch.nn.Module, version: int) -> None:
        """Copy the weights of `model`, of the same architecture, in place: `load` without the disk. Raises as that."""
        version = checked_version(version)
        copy_into(self.model, model.state_dict(), type(model).__name__)
        self.version = version

    def _prefill(self, prompt_ids: list[list[int]], max_new_tokens: int, n: int) -> _Rows:
        """Read each distinct prompt once, then repeat what was read for its completions."""
        row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
        ids, mask = (tensor.to(self.model.device) for tensor in pad_left(list(map(list, row_of))))
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, positions(mask), cache)
        if logits.isnan().any():
            raise ValueError(f"logits are NaN with weights version {self.version}: load other weights")
        rows = torch.tensor([row_of[tuple(prompt)] for prompt in prompt_ids], device=ids.device).repeat_interleave(n)
        cache.batch_select_indices(rows)
        mask = torch.nn.functional.pad(mask[rows], (0, max_new_tokens), value=1)
        return _Rows(logits[rows], cache, mask, positions(mask))

    def _decode(self, rows: _Rows, decoding: Decoding, random: torch.Generator) -> tuple[Tensor, ...]:
        """Tokens, behaviour and raw log-probs, (rows, steps); number of tokens and whether cut off, (rows,)."""
        device = rows.logits.device
        eos = torch.tensor([] if decoding.ignore_eos else self.eos_token_ids, dtype=torch.int64, device=device)
        is_running = torch.ones(len(rows.logits), dtype=torch.bool, device=device)
        num_tokens = torch.zeros(len(rows.logits), dtype=torch.int64, device=device)
        num_columns = rows.mask.shape[1]
        steps = []
        for column in range(num_columns - decoding.max_new_tokens, num_columns):
            steps.append(_sample(rows.logits, decoding, random))
            tokens = steps[-1][0]
            num_tokens += is_running
            is_running &= ~torch.isin(tokens, eos)
            # Rows that have ended go on as filler: their tokens beyond `num_tokens` are never read.
            if column == num_columns - 1 or not is_running.any():
                break
            mask, position_ids = rows.mask[:, : column + 1], rows.positions[:, column : column + 1]
            rows.logits = self._forward(tokens[:, None], mask, position_ids, rows.cache)
        return *(torch.stack(values, dim=1) for values in zip(*steps)), num_tokens, is_running

    def _forward(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last column, (rows, vocab); `cache` grows by the columns of `ids`."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids, self._cache_name: cache}
        return self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _completions(self, prompt_ids: list[list[int]], n: int, columns: tuple[Tensor, ...]) -> list[Completion]:
        rows = zip(*(column.tolist() for column in columns))
        return [
            Completion(
                prompt_index=row // n,
                prompt_tokens=list(prompt_ids[row // n]),
                tokens=tokens[:num_tokens],
                behavior_logprobs=behavior[:num_tokens],
                raw_logprobs=raw[:num_tokens],
                stop_reason="length" if is_cut_off else "eos",
                policy_version=self.version,
            )
            for row, (tokens, behavior, raw, num_tokens, is_cut_off) in enumerate(rows)
        ]

    def _clock_s(self) -> float:
        """`time.perf_counter()`, once an accelerator has finished what it was given."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def _check_room(self, num_tokens: int) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None) or num_tokens
        if num_tokens > limit:
            raise ValueError(f"prompt plus max_new_tokens is {num_tokens} tokens: the model has {limit} positions")


def _sample(logits: Tensor, decoding: Decoding, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row, its log-prob in the distribution drawn from, and in the raw softmax; each (rows,)."""
    behavior = processed_logprobs(logits, decoding)
    raw = torch.log_softmax(logits.float(), dim=-1) if decoding.filters else behavior
    if decoding.temperature == 0:
        tokens = behavior.argmax(-1, keepdim=True)
    else:
        tokens = torch.multinomial(behavior.exp(), 1, generator=random)
    return tokens[:, 0], behavior.gather(-1, tokens)[:, 0], raw.gather(-1, tokens)[:, 0]


def _eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, given: int | list[int] | None, vocab_size: int
) -> list[int]:
    generation_config = getattr(model, "generation_config", None) or model.config
    of_model = _as_list(generation_config.eos_token_id)
    of_tokenizer = _as_list(tokenizer.eos_token_id if tokenizer is not None else None)
    if given is None and of_model and not set(of_tokenizer) <= set(of_model):
        raise ValueError(f"eos_token_id: is {of_tokenizer} in the tokenizer, {of_model} in the model; give one")
    ids = _as_list(given) or of_model or of_tokenizer
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"eos_token_id={ids}: needs ids in [0, {vocab_size})")
    return ids


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
