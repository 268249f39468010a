"""Sequences of different length as one rectangle, padded on the left.

Models: ids, mask and positions such that a padded row computes what the bare sequence would. Leaves out packing.
Use: `ids, mask = pad_left([[1, 2, 3], [4]])`; the last columns of every row are the end of its sequence.
"""

from __future__ import annotations

import torch


def pad_left(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (0 at padding) and attention mask (1 = token), both int64 (batch, longest).

    Raises ValueError for no sequence and for an empty one.
    """
    if not sequences or not all(sequences):
        raise ValueError(f"sequences: has {len(sequences)} entries, some of length 0; needs a token in each")
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(sequence)) + sequence for sequence in sequences])
    mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
    return ids, mask


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of each token in its own sequence, int64 (batch, seq); 0 at padding before it."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)
