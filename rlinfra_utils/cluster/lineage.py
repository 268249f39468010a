"""What a resume owes to the run before it: a branch of its own, and a log that says what was undone.

Models: each resume as a branch, since version numbers mean something within one branch only. Leaves out which
checkpoint is taken (`checkpoint.latest`). Use: `branch_id, before = next_branch(folder)`, then `undo(...)`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils import rollouts
from rlinfra_utils.tracing import BatchLine
from rlinfra_utils.tracing.folder import BATCHES, DESCRIPTION, ROLLOUTS, Branch, describe
from rlinfra_utils.tracing.lines import parse


def next_branch(folder: Path) -> tuple[str, Branch | None]:
    """The branch that begins now, and the one before it."""
    if not (folder / DESCRIPTION).exists():
        return "main", None
    known = describe(folder)
    return f"resume{len(known.branches)}", known.branches[known.branch_id]


def undo(folder: Path, branch_id: str, optimizer_step: int, waiting: Collection[str]) -> int:
    """Take rollouts that wait again, `waiting` by sample_id, out of the files of batches after `optimizer_step`.

    They will be trained, and stored, by the weights that go on. The other rollouts of those batches stay where they
    are, for whoever looks into the undone part. Returns how many rollouts stay undone.
    """
    lines, _ = parse(folder / BATCHES, BatchLine)
    undone = [line for line in lines if line.branch_id == branch_id and line.optimizer_step > optimizer_step]
    left = 0
    for line in undone:
        path = folder / ROLLOUTS / f"{line.training_batch_id}.parquet"
        table = rollouts.read(path)
        again = pc.is_in(table["sample_id"], pa.array(sorted(waiting), pa.string()))
        table = table.filter(pc.invert(again))
        rollouts.write(table, path)
        left += table.num_rows
    return left
