"""One component as bytes: arrays in safetensors, the rest in JSON, and back without unpickling.

Models a tree of dicts, lists, text, numbers and NumPy arrays, equal after the round trip (a tuple comes back as a
list). Leaves out hashes and disks (`manifest.py`). Use: `files = encode("optimizer", tree)`; `decode(name, paths)`.

Where an array stood, the JSON says {"__tensor__": key}; the key is the path to it, joined by "/". NumPy has no
bfloat16: store its bits, `tensor.view(torch.uint16).numpy()`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from rlinfra_utils.doors import short

#: Array types that NumPy and safetensors have in common.
DTYPES = frozenset(
    np.dtype(code).name for code in ("?", "f2", "f4", "f8", "c8", *(f"{k}{n}" for k in "iu" for n in "1248"))
)
_MARK = "__tensor__"
#: Python writes no integer of more than 4,300 digits as text.
_MAX_BITS = 14_000


def encode(name: str, value: Any) -> dict[str, bytes]:
    """Files of one component by name: NAME.json, and NAME.safetensors where it has arrays.

    The bytes are a snapshot: later changes of `value` do not reach them. Raises ValueError that names the place of
    what cannot be stored.
    """
    tensors: dict[str, np.ndarray] = {}
    try:
        tree = _take_tensors(value, name, (), tensors)
        files = {f"{name}.json": json.dumps(tree).encode()}
        if tensors:
            files[f"{name}.safetensors"] = safetensors.numpy.save(tensors)
    except RecursionError as error:
        raise ValueError(f"{name}: nests too deeply, or contains itself") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: the name of an array, {short(error.object)}, is no valid text") from error
    return files


def _take_tensors(value: Any, where: str, path: tuple[str, ...], tensors: dict[str, np.ndarray]) -> Any:
    """`value` as JSON holds it, its arrays moved to `tensors`."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise ValueError(f"{where}: an integer of {value.bit_length()} bits: needs {_MAX_BITS} at most")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return {_MARK: _keep(value, where, "/".join(path), tensors)}
    if isinstance(value, list | tuple):
        entries = enumerate(value)
        return [_take_tensors(entry, f"{where}[{i}]", (*path, str(i)), tensors) for i, entry in entries]
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise ValueError(f"{where}: {kind} {short(value)}: needs a dict, list, text, number or NumPy array; convert it")
    for key in value:
        if type(key) is not str or key == _MARK:
            raise ValueError(f"{where}: key {short(key)}: needs text, other than {_MARK!r}")
    return {key: _take_tensors(entry, f"{where}.{key}", (*path, key), tensors) for key, entry in value.items()}


def _keep(array: np.ndarray, where: str, key: str, tensors: dict[str, np.ndarray]) -> str:
    if array.dtype.name not in DTYPES:
        raise ValueError(f"{where}: array of {array.dtype}: needs one of {', '.join(sorted(DTYPES))}")
    if key in tensors or key in ("", "__metadata__"):
        raise ValueError(f"{where}: {key!r} cannot name an array here: it is taken or reserved; rename it")
    # safetensors reads memory as it lies: a transposed array would be stored wrong, unseen.
    tensors[key] = np.asarray(array, order="C")
    return key


def decode(name: str, paths: list[Path]) -> Any:
    """The component that `encode` made files of. Raises ValueError for files that it cannot have made."""
    by_suffix = {path.suffix: path for path in paths}
    if ".json" not in by_suffix:
        raise ValueError(f"{name}.json: is not in the manifest")
    tensors = read_safetensors(by_suffix[".safetensors"]) if ".safetensors" in by_suffix else {}
    unused = set(tensors)
    try:
        tree = json.loads(by_suffix[".json"].read_bytes())
        value = _put_tensors(tree, tensors, unused)
    except KeyError as error:
        raise ValueError(f"{name}.json: names array {error.args[0]!r}, which {name}.safetensors lacks") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}.json: is no JSON that this package wrote: {error}") from error
    if unused:
        raise ValueError(f"{name}.safetensors: array {min(unused)!r} has no place in {name}.json")
    return value


def _put_tensors(tree: Any, tensors: Mapping[str, np.ndarray], unused: set[str]) -> Any:
    if isinstance(tree, list):
        return [_put_tensors(entry, tensors, unused) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK in tree:
        key = tree[_MARK]
        if len(tree) != 1 or not isinstance(key, str):
            raise ValueError(f"{short(tree)} is no reference to an array")
        unused.discard(key)
        return tensors[key]
    return {key: _put_tensors(entry, tensors, unused) for key, entry in tree.items()}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name. Raises ValueError for a file that is no whole safetensors file, or has types beyond NumPy's."""
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name}: is no safetensors file for NumPy: {' '.join(str(error).split())}") from error
