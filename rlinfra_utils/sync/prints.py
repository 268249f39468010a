"""Fingerprints of weights: what was hashed, how much of it, and which tensors two of them differ in.

Models: SHA-256 a tensor, and one digest over names, dtypes, shapes and hashes, in whatever order they come. Leaves out
weights in another layout (fused, repacked, sharded): equal weights in two layouts have two fingerprints.
Use: `differences(fingerprint(trainer.state_dict()), fingerprint(engine.state_dict()))`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rlinfra_utils.sync.tensors import dtype_name, in_host_memory, raw_bytes

#: The SHA-256 of no bytes: what an engine answers for a tensor whose memory was freed or moved.
HASH_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class TensorPrint(NamedTuple):
    """One tensor: element type, shape, size, SHA-256 of its bytes (row-major, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Fingerprint:
    """Prints by name, tied names left out; `aliases` says what they stand for. Equal where all prints are."""

    tensors: Mapping[str, TensorPrint]
    aliases: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits over all prints, the same in every order of names."""
        lines = sorted(json.dumps([name, print_.dtype, *print_[1:]]) for name, print_ in self.tensors.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes that were hashed, each tied tensor once."""
        return sum(print_.num_bytes for print_ in self.tensors.values())

    def __str__(self) -> str:
        return f"{self.digest[:12]} ({len(self.tensors)} tensors, {self.num_bytes:,} bytes)"


class Difference(NamedTuple):
    """One tensor that two fingerprints differ in; `what` is one of "missing", "dtype", "shape", "bytes"."""

    name: str
    what: str
    in_a: str
    in_b: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}: {self.in_a} against {self.in_b}"


def fingerprint(state_dict: Mapping[str, Any]) -> Fingerprint:
    """Hash the tensors of a state dict, of torch or numpy, on any device.

    A tied head gives the same fingerprint whether it is listed or not (`tensors.in_host_memory`). Raises ValueError
    for no tensors, and for a tensor of no bytes, whose hash would be the same for all weights.
    """
    tensors, aliases = in_host_memory(state_dict)
    return print_of(tensors, aliases)


def print_of(tensors: Mapping[str, Any], aliases: Mapping[str, str]) -> Fingerprint:
    """Hash what `in_host_memory` gave. Raises ValueError for a tensor of no bytes."""
    prints = {}
    for name, tensor in tensors.items():
        data = raw_bytes(tensor)
        if not data.size:
            raise ValueError(f"state_dict: {name!r} has shape {tuple(tensor.shape)}, no bytes: its hash proves nothing")
        digest = hashlib.sha256(data).hexdigest()
        prints[name] = TensorPrint(dtype_name(tensor), tuple(tensor.shape), data.size, digest)
    return Fingerprint(prints, dict(aliases))


def differences(a: Fingerprint, b: Fingerprint) -> list[Difference]:
    """Every tensor in which two fingerprints differ, by name; empty where they are equal.

    A name that is an alias on one side and a tensor of its own on the other is compared with what it stands for: a
    head that kept the old weights while its embeddings moved shows as `lm_head.weight: bytes`.
    """
    found = []
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        one, other = _named(a, name), _named(b, name)
        if one is None or other is None:
            found.append(Difference(name, "missing", _there(one), _there(other)))
        elif one.dtype != other.dtype:
            found.append(Difference(name, "dtype", one.dtype, other.dtype))
        elif one.shape != other.shape:
            found.append(Difference(name, "shape", str(one.shape), str(other.shape)))
        elif one.sha256 != other.sha256:
            found.append(Difference(name, "bytes", one.sha256[:12], other.sha256[:12]))
    return found


def _named(prints: Fingerprint, name: str) -> TensorPrint | None:
    return prints.tensors.get(name) or prints.tensors.get(prints.aliases.get(name, ""))


def _there(found: TensorPrint | None) -> str:
    return "absent" if found is None else "there"
