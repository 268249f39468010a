"""What every engine asks of a call, at the door: token ids, a decoding with a limit, a version.

Models what `HFEngine` and `VLLMServer` refuse alike. Leaves out what one of them alone cannot do (`hf.py`,
`vllm_requests.py`). Use: `check_ids("prompt_ids", prompt_ids, vocab_size)`; `decoding = limited(decoding, vocab_size)`.
"""

from __future__ import annotations

from rlinfra_utils.doors import short, whole
from rlinfra_utils.engines.sampling import resolve
from rlinfra_utils.rollouts import Decoding


def check_ids(name: str, sequences: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError unless `sequences` is a list of lists of token ids, none of them empty."""
    if not isinstance(sequences, list) or not sequences:
        raise ValueError(f"{name}={short(sequences)}: needs a list of at least one list of ids")
    for index, ids in enumerate(sequences):
        is_good = isinstance(ids, list) and ids and all(type(id_) is int and 0 <= id_ < vocab_size for id_ in ids)
        if not is_good:
            raise ValueError(f"{name}[{index}]={short(ids)}: needs a list of ids in [0, {vocab_size})")


def limited(decoding: Decoding, vocab_size: int) -> Decoding:
    """`sampling.resolve`, and a limit on the new tokens as well. Raises ValueError where either is wanting."""
    decoding = resolve(decoding, vocab_size)
    whole("decoding.max_new_tokens", decoding.max_new_tokens)
    return decoding


def checked_version(version: int) -> int:
    """`version`, a label of weights: an int from 0 up, and no float that equals one. Raises ValueError otherwise."""
    if type(version) is not int or version < 0:
        raise ValueError(f"version={short(version)}: needs a whole number of at least 0")
    return version
