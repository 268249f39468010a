"""A state dict as tensors in host memory, each once: what is hashed, written and compared.

Models: dense tensors of torch or of numpy, and two names for one tensor (a tied head). Leaves out sharded, quantised
and meta tensors, which are refused by name. Imports no torch, so that a reader of weights starts in a moment.
Use: `tensors, aliases = in_host_memory(model.state_dict())`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinfra_utils.doors import short

#: The output head, and how the input embeddings that it may be tied to are called at the end of their names.
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def in_host_memory(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by name, contiguous on the CPU, and the names left out: alias -> name of the same tensor.

    An alias is a name that shares its storage with another, and an `lm_head.weight` whose bytes are those of the
    input embeddings (a tied head after a copy). Other tensors of equal bytes stay apart: each name can go missing.
    On the CPU nothing is copied: the tensors change with the model. Raises ValueError by the tensor's name.
    """
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise ValueError(f"state_dict={short(state_dict)}: needs at least one tensor by name")
    names_of: dict[Any, list[str]] = {}
    for name, tensor in state_dict.items():
        _check(name, tensor)
        names_of.setdefault(_place(tensor), []).append(name)
    aliases = {}
    for names in names_of.values():
        first, *others = sorted(names, key=lambda name: (name == HEAD, name))
        aliases |= dict.fromkeys(others, first)
    if len({isinstance(tensor, np.ndarray) for tensor in state_dict.values()}) > 1:
        raise ValueError("state_dict: mixes tensors of torch and of numpy; give one kind")
    tensors = {name: _contiguous(tensor) for name, tensor in state_dict.items() if name not in aliases}
    if embedding := _tied_embedding(tensors):
        aliases[HEAD] = embedding
        del tensors[HEAD]
    return tensors, aliases


def dtype_name(tensor: Any) -> str:
    """The element type in words that torch and numpy share: "float32", "bfloat16", "int64"."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a contiguous tensor in host memory, uint8 (bytes,), not copied."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(np.uint8)
    import torch  # only where a tensor of torch is at hand

    return tensor.reshape(-1).view(torch.uint8).numpy()


def is_finite(tensor: Any) -> bool:
    """Whether no element is NaN or infinite; true of whole numbers."""
    if isinstance(tensor, np.ndarray):
        return bool(np.isfinite(tensor).all())
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit floats know no isfinite
    return bool(wide.isfinite().all())


def _check(name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"state_dict: name {short(name)} is no text")
    cause = None
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind not in "biufc" or not tensor.dtype.isnative:
            cause = f"is {tensor.dtype}, which safetensors cannot hold"
    elif not hasattr(tensor, "data_ptr"):
        cause = f"is a {type(tensor).__name__}, no tensor"
    elif hasattr(tensor, "full_tensor"):
        cause = "is one shard of a tensor; gather it first, tensor.full_tensor() on every rank"
    elif tensor.is_meta:
        cause = "is on the meta device and has no values"
    elif tensor.is_sparse or tensor.is_quantized:
        cause = "is sparse or quantised; publish dense tensors"
    if cause:
        raise ValueError(f"state_dict: {name!r} {cause}")


def _place(tensor: Any) -> tuple:
    """Where and how a tensor lies in memory: equal for two names of one tensor. Empty ones lie nowhere."""
    if isinstance(tensor, np.ndarray):
        address, strides, size = tensor.__array_interface__["data"][0], tensor.strides, tensor.size
    else:
        address, strides, size = tensor.data_ptr(), tensor.stride(), tensor.numel()
    device = str(getattr(tensor, "device", ""))
    return (address, tuple(tensor.shape), strides, tensor.dtype, device) if size else (id(tensor),)


def _contiguous(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.asarray(tensor, order="C")
    return tensor.detach().cpu().contiguous()


def _tied_embedding(tensors: Mapping[str, Any]) -> str | None:
    """The input embeddings that the head is a copy of, if it is."""
    head = tensors.get(HEAD)
    if head is None:
        return None
    for name, tensor in tensors.items():
        like = name.endswith(EMBEDDINGS) and tensor.shape == head.shape and tensor.dtype == head.dtype
        if like and np.array_equal(raw_bytes(tensor), raw_bytes(head)):
            return name
    return None
