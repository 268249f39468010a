"""What writing and reading of shards through torch DCP have in common.

Models: which components are sharded, the types that pass, DCP's failures in one line, a reader of one file. Leaves
out what is in the files (`saving.py`, `loading.py`). Use: `with in_one_line("..."): dcp.load(...)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from rlinfra_utils.checkpoint import CheckpointError
from rlinfra_utils.sharded.group import first_line

#: Types that DCP can join and NumPy can read, with their names in safetensors.
DTYPES = {torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
SHARDED = ("policy", "optimizer")
#: What DCP calls the file of all ranks' shards joined.
JOINED = "model-00001-of-00001.safetensors"


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Raise DCP's failures inside, which are tracebacks of all ranks, as one CheckpointError."""
    try:
        yield
    except CheckpointException as error:  # no Exception, but a BaseException
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {first_line(cause)}") from error
    except RuntimeError as error:
        raise CheckpointError(f"{what}: a rank cannot be reached: {first_line(error)}") from error


class _OneFile(FileSystem):
    """A folder in which DCP finds one file alone: other components have names of their own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ls(self, path: str | os.PathLike) -> list[str]:
        """The one file."""
        return [str(Path(path) / self.name)]


class FileReader(dcp.HuggingFaceStorageReader):
    """DCP's reader of safetensors, for one file."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.parent))
        self.fs = _OneFile(file.name)
