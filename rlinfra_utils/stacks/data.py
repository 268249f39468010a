"""The stored tables of the stack map: read once, when first asked for.

Models: JSON and CSV files in `data/stacks`. Leaves out their meaning. Use: `load("stacks.json")`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

FOLDER: Traversable = files("rlinfra_utils") / "data" / "stacks"


@cache
def load(name: str) -> Any:
    """A JSON file of `data/stacks`; callers leave it as it is."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))
