"""A model as numbers: parameters by name and shape, and what it keeps for each token of context.

Models the families in `families` from the mapping of a Hugging Face config.json; any other is refused by
name. Leaves out values, buffers and quantised storage. Use `ModelSpec.from_config(json.load(file))`, or
`ModelSpec.named("Qwen3-4B")` for one of `known_models()`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from rlinfra_utils.doors import amount, choice, instance, short
from rlinfra_utils.memory.config import Config
from rlinfra_utils.memory.families import FAMILIES
from rlinfra_utils.memory.layers import Cache, Layer, StateCache, Weight
from rlinfra_utils.memory.ledger import Ledger

MLA_FORMS = ("latent", "expanded")


@dataclass(frozen=True, repr=False)
class ModelSpec:
    """Weights and caches of one model. `notes` say what the config left out and what was taken instead."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    tied: bool
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, mapping: Mapping[str, Any]) -> ModelSpec:
        """Read the mapping of a config.json (or `model.config.to_dict()`).

        Raises ValueError, in one line, for an unknown `model_type`, a missing key, or a value that is
        not what its key needs.
        """
        c = Config(mapping)
        if c.model_type not in FAMILIES:
            hint = "; pass its text_config for the text part" if "text_config" in mapping else ""
            raise ValueError(f"model_type={short(c.model_type)}: known are {', '.join(FAMILIES)}{hint}")
        layers = tuple(FAMILIES[c.model_type](c))
        vocab_size, tied = c.whole("vocab_size"), c.tied
        return cls(c.model_type, vocab_size, c.hidden_size, c.num_heads, tied, layers, tuple(c.notes))

    @classmethod
    def named(cls, name: str) -> ModelSpec:
        """One of `known_models()`. Raises ValueError for another name."""
        return cls.from_config(model_config(name))

    @cached_property
    def outer(self) -> tuple[Weight, ...]:
        """Weights outside the layers. A tied head is the embedding itself, so it is listed once."""
        embedding = (self.vocab_size, self.hidden_size)
        head = () if self.tied else (Weight("lm_head.weight", embedding),)
        return (Weight("model.embed_tokens.weight", embedding), Weight("model.norm.weight", (self.hidden_size,)), *head)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Each parameter tensor under the full name that transformers gives it."""
        yield from ((weight.name, weight) for weight in self.outer)
        for index, layer in enumerate(self.layers):
            yield from ((f"model.layers.{index}.{weight.name}", weight) for weight in layer.weights)

    @cached_property
    def caches(self) -> Counter[Cache]:
        """Each kind of cache, and how many layers have it."""
        return Counter(layer.cache for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @cached_property
    def num_params(self) -> int:
        """Parameters held in memory."""
        return sum(weight.count for _, weight in self.weights())

    @cached_property
    def num_active_params(self) -> int:
        """Parameters that one token meets: all but the experts that it is not routed to.

        The whole embedding counts, though a token reads one row; some cards leave it out (gpt-oss: 3.6B).
        """
        return sum(weight.active_count for _, weight in self.weights())

    @property
    def root_params(self) -> int:
        """Parameters outside the layers: FSDP2's root unit when each layer is a unit of its own."""
        return sum(weight.count for weight in self.outer)

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest layer: the unit that FSDP2 gathers in turn."""
        return max(layer.num_params for layer in self.layers)

    def parameters(self, active: bool = False) -> Ledger:
        """Parameters (or those active for a token) by part of the model, as a ledger of counts."""
        lines: dict[str, int] = {}
        for name, weight in self.weights():
            part = _part(name)
            lines[part] = lines.get(part, 0) + (weight.active_count if active else weight.count)
        return Ledger(lines, "parameters", self.notes)

    def kv_bytes_per_token(self, dtype_bytes: float = 2, mla: str = "latent") -> float:
        """Bytes that one more token of context costs over all layers, before any window is full.

        Formula: 2 * layers * kv_heads * head_dim * dtype_bytes (lecture step 12.2.3), or for MLA
        layers * (kv_lora_rank + qk_rope_head_dim) * dtype_bytes (arXiv:2405.04434, table 1). `mla`:
        "latent", or "expanded" for an engine that keeps full keys and values. Linear layers add nothing.
        Raises ValueError for another `mla`, and for `dtype_bytes` that are not above 0.
        """
        amount("dtype_bytes", dtype_bytes, above=True)
        choice("mla", mla, MLA_FORMS)
        growing = ((cache, num) for cache, num in self.caches.items() if not isinstance(cache, StateCache))
        return sum(num * cache.values_per_token(mla=mla) for cache, num in growing) * dtype_bytes

    def __repr__(self) -> str:
        return f"ModelSpec({self.model_type}, {self.num_layers} layers, {self.num_params:,} parameters)"


def require_spec(spec: Any) -> ModelSpec:
    """`spec` itself. Raises ValueError for anything else, such as a model's name."""
    return instance("spec", spec, ModelSpec, "as ModelSpec.named(name) or ModelSpec.from_config(config) makes one")


def _part(name: str) -> str:
    """`model.layers.3.mlp.experts.down_proj` is of part "layers: mlp experts"."""
    if ".layers." not in name:
        return name.removesuffix(".weight").removeprefix("model.")
    module, *rest = name.split(".")[3:]
    if module.endswith("norm"):
        return "layers: norms"
    return f"layers: {module} experts" if rest[0] == "experts" else f"layers: {module}"


def known_models() -> list[str]:
    """Names of the public models whose config is shipped."""
    return sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json"))


def model_config(name: str) -> dict[str, Any]:
    """Config of one of `known_models()`, as its config.json has it, numbers only. ValueError for another name."""
    choice("name", name, known_models())
    return json.loads((_folder() / f"{name}.json").read_text(encoding="utf-8"))["config"]


def _folder():
    return files("rlinfra_utils") / "data" / "models"
