"""Rollouts in Parquet files: `write` and `read`.

Models: a file is there whole or not at all, and a damaged one says so. Leaves out whether its rows may be
trained on (`validate_table`), and the folders of what was sorted by that (`intake.py`).
Use: `write(records, path)`; `table = read(path)`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from rlinfra_utils.rollouts.convert import schema_table, to_table
from rlinfra_utils.rollouts.record import SCHEMA, Rollout


class RolloutFileError(Exception):
    """A file of rollouts cannot be read or written; the message names the path and the cause in one line."""


def write(records: pa.Table | Iterable[Rollout | Mapping], path: str | os.PathLike) -> None:
    """Write records or a table in `SCHEMA` as one Parquet file, in place of any file at `path`.

    The file is written aside, flushed to disk and renamed, so that a reader meets the old one or the new one.
    Raises ValueError for what the schema cannot hold, RolloutFileError where the file cannot be written.
    """
    table = schema_table(records) if isinstance(records, pa.Table) else to_table(records)
    path = Path(path)
    try:
        with replacing(path) as file:
            write_parquet(table, file)
    except OSError as error:
        raise RolloutFileError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open file beside `path` that is flushed and takes its place when the block ends; nothing of it if that fails.

    A reader meets the old file or the new one, also after a power cut. Raises OSError where the disk does.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.aside")
    try:
        with open(aside, "xb") as file:
            yield file
            flush(file)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    flush_folder(path.parent)


def locked(path: Path) -> BinaryIO:
    """The open lock file at `path`, ours alone until it is closed or the process dies.

    Raises BlockingIOError where another process, or another open file of this one, holds it.
    """
    file = open(path, "a+b")  # noqa: SIM115
    try:
        exclusive(file)
    except BlockingIOError:
        file.close()
        raise
    return file


def exclusive(file: BinaryIO) -> None:
    """Lock an open file for ourselves until it is closed; raises BlockingIOError where it is held."""
    import fcntl  # POSIX alone has it, and readers need not

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_parquet(table: pa.Table, file: Any) -> None:
    """Write to an open file, with a checksum a page; the caller flushes it."""
    pq.write_table(table, file, write_page_checksum=True)


def flush(file: Any) -> None:
    """Have the operating system put an open file on the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Have a rename in `folder` survive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: str | os.PathLike) -> pa.Table:
    """The table that `write` wrote, in `SCHEMA`.

    Raises RolloutFileError for a path that is no file, a file that is no whole Parquet file, a page whose checksum
    is wrong, or a schema that is not ours. Parquet puts no checksum on page headers and footer. Whether the rows may
    be trained on is `validate_table`'s to say.
    """
    path = Path(path)
    try:
        if not path.is_file():
            cause = "is a folder; name one of its files" if path.is_dir() else "is no file"
            raise RolloutFileError(f"{path}: {cause}")
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RolloutFileError(f"{path}: is no whole Parquet file: {' '.join(str(error).split())}") from error
    if table.schema != SCHEMA:
        raise RolloutFileError(f"{path}: {_schema_difference(table.schema)}; write it with rollouts.write")
    return table


def _schema_difference(schema: pa.Schema) -> str:
    for name in (*SCHEMA.names, *schema.names):
        ours = SCHEMA.field(name).type if name in SCHEMA.names else None
        theirs = schema.field(name).type if schema.names.count(name) == 1 else None
        if ours != theirs:
            return f"column {name!r} is {theirs or 'missing'}, the schema has {ours or 'no such column'}"
    return "the columns are not in the schema's order"
