"""Files that other programs wrote, looked at from outside: what a folder holds (`Found`), and whether a file is whole.

Models: a file's container (zip directory, safetensors header, JSON); nothing is unpickled. Leaves out the content, and
which file is whose (`foreign.py`). Use: `found.add("policy", [path / "model.safetensors"])`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlinfra_utils.checkpoint import dcp


@dataclass
class Found:
    """Components that are there whole, that are there in part (what the part lacks), and that are damaged."""

    present: set[str] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, component: str, files: Iterable[Path]) -> None:
        """Take a component whose files are `files`, if there are any: present, or corrupt by the first fault."""
        faults = [fault(file) for file in files]
        if any(faults):
            self.corrupt[component] = next(text for text in faults if text)
        elif faults:
            self.present.add(component)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file that `fault` found whole."""
    return json.loads(path.read_bytes())


def fault(path: Path, container: bool = True) -> str:
    """What is wrong with a file as far as its `container` shows, or its size alone; "" for nothing."""
    try:
        if not path.is_file():
            return f"{path.name}: is missing"
        if not path.stat().st_size:
            return f"{path.name}: is empty"
        return _container_fault(path) if container else ""
    except OSError as error:
        return f"{path.name}: cannot be read: {error.strerror or error}"


def _container_fault(path: Path) -> str:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="np") as file:
                return "" if file.keys() else f"{path.name}: holds no tensor"
        except SafetensorError as error:
            return f"{path.name}: is no whole safetensors file: {' '.join(str(error).split())}"
    if path.suffix == ".json":
        try:
            return "" if isinstance(read_json(path), dict) else f"{path.name}: is no JSON object"
        except (ValueError, RecursionError) as error:
            return f"{path.name}: is no JSON: {error}"
    if path.suffix == dcp.SUFFIX:
        return "" if dcp.ends_whole(path) else f"{path.name}: is cut off, or holds no torch archives"
    # torch.save writes a zip archive, whose directory stands at the end: a truncated one has none.
    return "" if zipfile.is_zipfile(path) else f"{path.name}: is no whole torch archive"
