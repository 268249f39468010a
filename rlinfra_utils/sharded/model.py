"""A model cut over the ranks by FSDP2, and put together again: `shard_model`, `gather_full`.

Models: each decoder layer is one unit, what is left (embeddings, final norm, head) another, in which tied weights
stay one tensor. Leaves out building a model too large for one rank, mixed precision, offloading.
Use: `model = shard_model(model, ranks)`; then the optimizer; later `full = gather_full(model, ranks)`.

Source: torch 2.13, torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rlinfra_utils.sharded.group import Ranks


def shard_model(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """Cut `model` over the ranks in place, on their device, and return it; build the optimizer after this.

    Gradients are summed over the ranks, not averaged: each rank divides its loss by the tokens of all of them.
    Layers are the modules whose class transformers names in `_no_split_modules`. Raises ValueError on each rank
    where the model has none, or is another one on another rank.
    """
    layers = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise ValueError(f"model: {type(model).__name__} names no decoder layers in _no_split_modules")
    digests = ranks.gather(_digest(model))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(f"model: rank {rank} holds other weights than rank 0; build it from one seed or one file")
    model.to(ranks.device)
    for unit in [*layers, model]:
        fully_shard(unit, mesh=ranks.mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    return model


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once: a tied tensor goes by the first of its names."""
    first_name: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if first_name.setdefault(id(tensor), name) == name}


@dataclass(frozen=True)
class FullState:
    """A model's tensors, whole, and what it took to gather them; `tensors` is empty on all ranks but 0.

    `num_bytes` is the size of the copy, which is rank 0's extra memory (host memory) while it lives; on the device
    each rank holds one whole tensor at a time, `largest_bytes` at most.
    """

    tensors: dict[str, Tensor]
    num_bytes: int
    largest_bytes: int
    seconds: float


@torch.no_grad()
def gather_full(model: nn.Module, ranks: Ranks) -> FullState:
    """The whole state of a sharded model on rank 0, for the publisher of weights; every rank must call it."""
    start_s = time.perf_counter()
    tensors, sizes = {}, []
    for name, tensor in named_tensors(model).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        sizes.append(whole.nbytes)
        if ranks.rank == 0:
            tensors[name] = whole.detach().to("cpu", copy=True)
    return FullState(tensors, sum(sizes), max(sizes), time.perf_counter() - start_s)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
