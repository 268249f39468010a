"""The tiny policy: a Llama of 330,496 parameters over 17 tokens, and its warm start on disk.

Models: the same classes and files as a large policy (transformers' Llama, a fast tokenizer, safetensors,
a chat template), so that transformers and vLLM load the same folder. Leaves out: text other than sums.
Use: `model, tokenizer = load_warm_start()`; the folder itself is `WARM_START`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WARM_START = Path(__file__).parents[1] / "data" / "warm_start"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
#: Every token of the policy, in the order of its id.
VOCABULARY = [PAD, BOS, EOS, *"0123456789+-= "]
#: Prompt and answer together.
MAX_TOKENS = 256
# The user's message is a sum ("12+30"), the assistant's its value; "=" opens the assistant's turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}={{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, the start token put before each text.

    There is no "unknown" token: a character outside `VOCABULARY` raises in place of losing it.
    """
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """An untrained policy, float32, its weights drawn from `seed`.

    Heads are 32 wide, the narrowest that vLLM's attention on the CPU takes.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
        dtype="float32",
    )
    return _build(config, seed)


def _build(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def load_warm_start(folder: str | Path = WARM_START) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the half-trained policy and its tokenizer; reads safetensors and JSON only, never a pickle.

    Raises ValueError if the weights are not the ones that `provenance.json` describes, FileNotFoundError
    if a file is missing.
    """
    weights = Path(folder) / "model.safetensors"
    expected = provenance(folder)["weights_sha256"]
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != expected:
        raise ValueError(f"weights_sha256={found} of {weights}: provenance.json says {expected}; restore the file")
    model = _build(LlamaConfig.from_pretrained(folder), seed=0)
    load_model(model, weights)
    return model, AutoTokenizer.from_pretrained(folder)


def provenance(folder: str | Path = WARM_START) -> dict[str, Any]:
    """How the weights in `folder` were made: script, seed, steps, measured correctness, SHA-256, versions.

    Raises ValueError if `provenance.json` is not an object with `weights_sha256`.
    """
    path = Path(folder) / "provenance.json"
    try:
        facts = json.loads(path.read_text())
        facts["weights_sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a JSON object with weights_sha256 ({error!r}); restore the file") from error
    return facts


def tokenizer_version(tokenizer: PreTrainedTokenizerFast) -> str:
    """12 hex digits of the SHA-256 of all that turns text into ids.

    Padding and truncation are left out: they are settings of the last call, not of the tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    del content["padding"], content["truncation"]
    return _short_hash(json.dumps(content, sort_keys=True))


def chat_template_version(tokenizer: PreTrainedTokenizerFast) -> str:
    """12 hex digits of the SHA-256 of the chat template; "none" for a tokenizer without one."""
    template = tokenizer.chat_template
    return "none" if template is None else _short_hash(json.dumps(template, sort_keys=True))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
