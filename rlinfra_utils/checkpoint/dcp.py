"""The index of a torch DCP checkpoint, looked at and never loaded: `read_index`.

`.metadata` is a pickle, and to load a pickle is to run it. Its opcodes can be listed without running any
(`pickletools.genops`): the texts that they spell are the names of tensors and of shard files, and what they import
says whether DCP wrote them. Models: names, files, imports. Leaves out shapes, offsets and the tensors, and hostile
pickles beyond their refusal. Use: `index = read_index(path / ".metadata")`.

Source: torch 2.13, torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlinfra_utils.doors import short

INDEX, SUFFIX = ".metadata", ".distcp"
#: What DCP's own index imports, as "module name".
_OWN = re.compile(
    r"torch\.distributed\.checkpoint\.[a-z_.]+ [A-Za-z_]+|torch\.serialization _get_layout|pathlib (Posix|Windows)Path"
    r"|torch (Size|bool|b?float[0-9a-z_]+|u?int[0-9]+|complex[0-9]+)"
)
#: The fields of its classes, which are spelled among the names of tensors.
_FIELDS = frozenset({"properties", "size", "chunks", "offsets", "sizes"})
_MAX_BYTES = 2**28
_END_BYTES = 22


@dataclass(frozen=True)
class Index:
    """Names of what was saved and of the shard files, in the order in which they are spelled."""

    keys: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks wrote a file: DCP names one "__RANK_NUMBER.distcp"."""
        return len({file.split("_")[2] for file in self.files})

    def parts(self) -> dict[str, list[str]]:
        """Names by the component of a checkpoint that they belong to, as the stacks name them."""
        parts: dict[str, list[str]] = {}
        for key in self.keys:
            parts.setdefault(_component(key), []).append(key)
        return parts


def read_index(path: Path) -> Index:
    """The index file's names. Raises ValueError, in one line, where DCP cannot have written it."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path.name}: has {path.stat().st_size} bytes; an index of {_MAX_BYTES} at most is read")
    texts, imports = [], []
    for kind, text in _spelled(path.read_bytes(), path.name):
        (imports if kind == "import" else texts).append(text)
    strange = [name for name in imports if not _OWN.fullmatch(name)]
    if strange:
        name = strange[0].replace(" ", ".")
        raise ValueError(f"{path.name}: imports {short(name)}, which DCP does not; to load it would run it")
    if "state_dict_metadata" not in texts or "planner_data" not in texts:
        raise ValueError(f"{path.name}: is a pickle, but no index of DCP")
    files = dict.fromkeys(text for text in texts if text.endswith(SUFFIX))
    for file in files:
        if not re.fullmatch(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp", file):
            raise ValueError(f"{path.name}: names the file {short(file)}; DCP's are __RANK_NUMBER{SUFFIX}, beside it")
    named = texts[texts.index("state_dict_metadata") + 1 : texts.index("planner_data")]
    other = {word for name in imports for word in name.split(" ")} | _FIELDS
    keys = dict.fromkeys(text for text in named if text not in other and not text.startswith("torch."))
    return Index(tuple(keys), tuple(files))


def ends_whole(path: Path) -> bool:
    """Whether a file of shards, one torch archive after another, ends with an archive's end record."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        return file.read(4) == b"PK\x05\x06"


def _spelled(data: bytes, name: str) -> Iterator[tuple[str, str]]:
    """("text", ...) and ("import", "module name") in the order of the opcodes; nothing is run."""
    memo: dict[int, str] = {}
    last: list[str] = []  # texts that the stack's top may hold
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if isinstance(argument, str) and "UNICODE" in opcode.name:
                last.append(argument)
                yield "text", argument
            elif opcode.name in ("GLOBAL", "INST"):
                yield "import", argument
            elif opcode.name == "STACK_GLOBAL":
                yield "import", " ".join(last[-2:]) if len(last) > 1 else "what is not spelled out"
                last.append("")  # what was imported stands there
            elif opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
                memo[len(memo) if opcode.name == "MEMOIZE" else argument] = last[-1] if last else ""
            elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
                last.append(memo.get(argument, ""))
            elif opcode.name.startswith("EXT"):
                yield "import", "what a registry of extensions holds"
            else:
                last.append("")
    except Exception as error:  # genops raises several kinds for bytes that are no pickle
        raise ValueError(f"{name}: is no whole pickle: {' '.join(str(error).split())}") from error


def _component(key: str) -> str:
    words = set(re.split(r"[./]", key))
    if words & {"optim", "optimizer", "optimizers", "exp_avg", "exp_avg_sq", "momentum_buffer"}:
        return "optimizer"
    if words & {"scheduler", "schedulers", "lr_scheduler", "lr_schedulers"}:
        return "scheduler"
    if words & {"dataloader", "data_loader"}:
        return "data_position"
    if words & {"rng", "rng_state"}:
        return "rng"
    return "counters" if words & {"train_state", "global_step", "step"} else "policy"
