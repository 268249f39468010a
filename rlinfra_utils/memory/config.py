"""A Hugging Face config.json, read strictly: what is missing or of the wrong kind is said, what is assumed is noted.

Models the reading. Leaves out the architecture (`families`). A value that the config leaves out is taken only where
transformers' own config class has a default for it, and each time `notes` says so. Use: `Config(mapping).head_dim`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rlinfra_utils.doors import divides, short, whole

_REQUIRED = object()

#: head_dim in transformers' own config classes; the others divide hidden_size by num_attention_heads.
HEAD_DIM_DEFAULTS = {"qwen3": 128, "qwen3_next": 256, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64}
#: Far above any real model; keeps a typing error from filling the memory that it asks about.
MAX_LAYERS = 10_000
#: Families whose config class ties the output head to the embedding unless the config says otherwise.
TIED_BY_DEFAULT = ("gemma2", "gemma3_text")


class Config:
    """One config as a mapping, with typed access. Each reader raises ValueError naming key and value."""

    def __init__(self, values: Mapping[str, Any]):
        if not isinstance(values, Mapping):
            raise ValueError(f"config={short(values)}: needs the mapping of a config.json")
        self.values = values
        self.notes: list[str] = []

    def _get(self, key: str, default: Any) -> Any:
        """The value; null counts as left out. A default is noted."""
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise ValueError(f"{key}: missing from the config of {self.model_type!r}")
        if value is None:
            self._note(f"{key} is not in the config: {default}, as in transformers' own class")
            return default
        return value

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def whole(self, key: str, default: Any = _REQUIRED, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        return whole(key, self._get(key, default), minimum)

    def optional(self, key: str, default: int | None) -> int | None:
        """A whole number above zero, or None where the config says null."""
        if key in self.values and self.values[key] is None:
            return None
        value = self._get(key, default)
        return None if value is None else whole(key, value)

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{key}={short(value)}: needs true or false")
        return default if value is None else value

    def indices(self, key: str) -> list[int]:
        """A list of layer indices, empty if left out."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{key}={short(value)}: needs a list of layer indices")
        return [whole(key, index, 0) for index in value]

    @cached_property
    def model_type(self) -> str:
        """The architecture's name."""
        value = self.values.get("model_type")
        if not isinstance(value, str):
            raise ValueError(f"model_type={short(value)}: needs the architecture's name, as in config.json")
        return value

    @cached_property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.whole("hidden_size")

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers."""
        return whole("num_hidden_layers", self._get("num_hidden_layers", _REQUIRED), high=MAX_LAYERS)

    @cached_property
    def num_heads(self) -> int:
        """Query heads."""
        return self.whole("num_attention_heads")

    @cached_property
    def num_kv_heads(self) -> int:
        """Key-value heads; null, or left out by a Llama of the first generation, means one a query head."""
        key, is_llama = "num_key_value_heads", self.model_type == "llama"
        default = self.num_heads if is_llama or key in self.values else _REQUIRED
        num_kv_heads = self.whole(key, default)
        divides(key, num_kv_heads, "num_attention_heads", self.num_heads)
        return num_kv_heads

    @cached_property
    def head_dim(self) -> int:
        """Width of a head: given, or the class's own default, or hidden_size / num_attention_heads; noted which."""
        if self.values.get("head_dim") is not None:
            self._note(f"head_dim = {self.values['head_dim']}, given by the config")
            return self.whole("head_dim")
        if self.model_type in HEAD_DIM_DEFAULTS:
            return self.whole("head_dim", HEAD_DIM_DEFAULTS[self.model_type])
        divides("num_attention_heads", self.num_heads, "hidden_size", self.hidden_size)
        head_dim = self.hidden_size // self.num_heads
        self._note(f"head_dim is not in the config: {head_dim} = hidden_size / num_attention_heads")
        return head_dim

    @cached_property
    def tied(self) -> bool:
        """Whether the output head is the embedding itself."""
        default = self.model_type in TIED_BY_DEFAULT
        if self.values.get("tie_word_embeddings") is None:
            self._note(f"tie_word_embeddings is not in the config: {default}, as in transformers' own class")
        return self.flag("tie_word_embeddings", default)

    def layer_types(self, interval: int, others: str, known: Sequence[str]) -> list[str]:
        """Type of each layer: `layer_types` where given, else a full layer at each `interval`-th, `others` between."""
        given = self.values.get("layer_types")
        if given is None:
            return [others if (index + 1) % interval else "full_attention" for index in range(self.num_layers)]
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != self.num_layers:
            raise ValueError(f"layer_types={short(given)}: needs one name a layer, num_hidden_layers={self.num_layers}")
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ValueError(f"layer_types={unknown!r}: known in {self.model_type!r} are {', '.join(known)}")
        return list(given)
