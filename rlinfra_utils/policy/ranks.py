"""Several ranks train one policy together: which rows a rank takes, and what of all ranks comes together.

Models: every rank holds the whole batch and works on every world_size-th row of it; sums run over all ranks. Leaves
out the processes and the sharded model (`sharded.Ranks` has the same three names over a process group).
Use: `rows = my_rows(ranks, 8)`; `ranks.sum(values)`. On one process `ranks` is `ONE_RANK`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OneRank:
    """One process that has all rows; a sum over its ranks is the value itself."""

    rank, world_size = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        """`values`, added up over all ranks."""
        return values


ONE_RANK = OneRank()


def has_rows(ranks: OneRank, num_rows: int) -> bool:
    """Whether there is a row for this rank."""
    return ranks.rank < num_rows


def my_rows(ranks: OneRank, num_rows: int) -> slice:
    """The rows of this rank. Where there are none it is the first row, which then must not count.

    A sharded model is gathered by all ranks together, so that each has to go through each of its passes.
    """
    return slice(ranks.rank, None, ranks.world_size) if has_rows(ranks, num_rows) else slice(0, 1)


def put_together(ranks: OneRank, mine: Tensor, num_rows: int) -> Tensor:
    """All rows, shape (num_rows, ...), from the values that each rank has for its own."""
    whole = torch.zeros((num_rows, *mine.shape[1:]), dtype=mine.dtype, device=mine.device)
    if has_rows(ranks, num_rows):
        whole[my_rows(ranks, num_rows)] = mine
    return ranks.sum(whole)
