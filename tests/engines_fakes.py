"""Models with known answers for the tests of `engines`, and the filters once more in plain Python.

`bigram_llama`: a real Llama whose logits after token i are row i of a table. `PositionModel`: logits are the row
of the position, whatever the tokens. `random_llama`: a small Llama with random weights, for comparisons.
"""

import math
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlinfra_utils.rollouts import Decoding

VOCAB = 16


def random_llama(seed: int = 0, vocab: int = VOCAB, tied: bool = True, **settings) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=2,
        # Large weights, so that the distributions are far from uniform and the context matters.
        initializer_range=0.2,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def bigram_table(seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Logits (VOCAB, VOCAB) that bfloat16 holds exactly."""
    table = spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return table.bfloat16().float()


def bigram_llama(table: torch.Tensor, eos_token_id: int | None = None) -> LlamaForCausalLM:
    """Layers that add nothing, one-hot embeddings, and the table as the head: logits after token i are table[i]."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rms_norm_eps=0.0,
        eos_token_id=eos_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        # The norm turns a one-hot vector into one-hot times sqrt(VOCAB) = 4.
        model.lm_head.weight.copy_(table.T / math.sqrt(VOCAB))
    return model


def save_tiny(folder) -> LlamaForCausalLM:
    """A random Llama and a tokenizer of single letters, as a folder that transformers loads."""
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnop"[:VOCAB])}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="c").save_pretrained(folder)
    model = random_llama(seed=1)
    model.save_pretrained(folder)
    return model


class PositionModel(torch.nn.Module):
    """Logits of row `position_ids` of a table (positions, vocab), through a base model and a head as in transformers.

    `scale` multiplies the logits after the head, `hidden_scale` the hidden states before it.
    """

    base_model_prefix = "base_model"

    def __init__(self, table: torch.Tensor, scale: float = 1.0, hidden_scale: float = 1.0) -> None:
        super().__init__()
        num_positions, vocab = table.shape
        self.base_model = PositionBase(num_positions)
        self.head = torch.nn.Linear(num_positions, vocab, bias=False)
        self.head.weight.data = table.T.contiguous()
        self.scale, self.hidden_scale = scale, hidden_scale
        self.device = torch.device("cpu")
        self.config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=num_positions, eos_token_id=None)
        #: (rows, columns) of the ids of each call.
        self.calls: list[tuple[int, int]] = []

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, input_ids, attention_mask, position_ids, use_cache, logits_to_keep, cache=None):
        self.calls.append(tuple(input_ids.shape))
        hidden = self.base_model(position_ids).last_hidden_state * self.hidden_scale
        return SimpleNamespace(logits=self.head(hidden[:, -logits_to_keep:]) * self.scale)


class PositionBase(torch.nn.Module):
    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding.from_pretrained(torch.eye(num_positions))

    def forward(self, position_ids):
        return SimpleNamespace(last_hidden_state=self.rows(position_ids))


def filtered_distribution(logits: list[float], decoding: Decoding) -> list[float]:
    """Probabilities that `decoding` makes of `logits`, token by token in double precision; ties: lower id first."""
    kept = {token: value for token, value in enumerate(logits) if token not in decoding.banned_token_ids}
    likeliest = max(kept, key=lambda token: (kept[token], -token))
    if decoding.temperature == 0:
        return [float(token == likeliest) for token in range(len(logits))]
    weights = {token: math.exp((value - kept[likeliest]) / decoding.temperature) for token, value in kept.items()}
    weights = {token: weight for token, weight in weights.items() if weight >= decoding.min_p}
    if decoding.top_k and decoding.top_k > 0:
        smallest = sorted(weights.values(), reverse=True)[: decoding.top_k][-1]
        weights = {token: weight for token, weight in weights.items() if weight >= smallest}
    total = sum(weights.values())
    nucleus, mass = {}, 0.0
    for token in sorted(weights, key=lambda token: (-weights[token], token)):
        if mass >= (1.0 if decoding.top_p is None else decoding.top_p):
            break
        nucleus[token] = weights[token]
        mass += weights[token] / total
    total = sum(nucleus.values())
    return [nucleus.get(token, 0.0) / total for token in range(len(logits))]
