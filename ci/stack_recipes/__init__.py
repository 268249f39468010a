"""One recipe a stack: its own classes make a record, in an environment where that stack is installed.

Each file is run as a module by `ci.make_stack_records`, with the path of the JSON to write and the path of answers
that the tiny policy gave beforehand. Leaves out engines: a stand-in hands these answers on, so tokens and log-probs
are a policy's own, while weight versions and times are made up.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def plain(value: Any) -> Any:
    """Tensors, arrays and dataclasses as JSON: lists, numbers, text and mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return round(value, 6) if isinstance(value, float) else value
    raise TypeError(f"{type(value).__name__} has no place in a JSON record")


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers of the tiny policy to one sum: `prompt` are its token ids, the lists have one entry an answer."""

    question: str
    prompt: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    texts: list[str]
    stop_reasons: list[str]

    @classmethod
    def sample(cls, num: int) -> Answers:
        """Ask the tiny policy; needs the project's own environment."""
        from rlinfra_utils import policy
        from rlinfra_utils.engines import HFEngine

        model, tokenizer = policy.load_warm_start()
        prompt = policy.prompts(1, seed=0)[0]
        ids = tokenizer(prompt.text).input_ids
        made = HFEngine(model, tokenizer).generate([ids], policy.DECODING, n=num, seed=0).completions
        tokens = [c.tokens for c in made]
        texts = [tokenizer.decode(t, skip_special_tokens=True) for t in tokens]
        return cls(prompt.text, ids, tokens, [c.behavior_logprobs for c in made], texts, [c.stop_reason for c in made])

    @classmethod
    def given(cls) -> Answers:
        """The ones at the second path of the command line."""
        return cls(**json.loads(Path(sys.argv[2]).read_text()))


def stand_in(*names: str) -> None:
    """Put a module that answers to everything in the place of each package that an import asks for in vain."""
    for name in names:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])


def write(record: Any, how: str) -> None:
    """Store `record` and the sentence that says how it was made, at the path given on the command line."""
    Path(sys.argv[1]).write_text(json.dumps({"how": how, "payload": plain(record)}))
