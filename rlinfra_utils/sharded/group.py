"""The process group of a sharded trainer: `init_group` and what its ranks do together, `Ranks`.

Life: `init_group` returns on each rank once all have come, or raises; work; `close`, on each rank. Invariant: all
ranks make the same calls in the same order. Trap: a rank that raises alone leaves the others waiting for it, until
its process ends or `timeout_s` is over; whatever can fail on one rank goes through `together`.

Leaves out starting processes, and more than one mesh dimension. Use: see the package.
"""

from __future__ import annotations

import atexit
import datetime
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlinfra_utils.doors import choice, number, short, whole

T = TypeVar("T")
#: How ranks find one another: a file on a disk that all see, the address of rank 0, or torchrun's variables.
RENDEZVOUS = ("file:///", "tcp://", "env://")
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
#: gloo's threads outlive the group while a model holds it, and give the last call's tensors back to Python after the
#: call returned. A process that ends before they did is aborted (PyTorch pull request 179291): let them have the GIL.
_HAND_BACK_S = 0.5


class RanksError(RuntimeError):
    """What the ranks had to do together failed on one of them; raised on each, in one line."""


class Ranks:
    """This process's place in the group: `rank` of `world_size`, its `device` and the `mesh` over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.world_size,))

    def sum(self, values: Tensor) -> Tensor:
        """`values`, added up over all ranks: the same bits on each."""
        total = values.detach().clone()
        self._call(dist.all_reduce, total)
        return total

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, on each rank, by rank; small Python objects only."""
        values: list[Any] = [None] * self.world_size
        self._call(dist.all_gather_object, values, value)
        return values

    def together(self, work: Callable[[], T], on: int | None = None) -> T:
        """Do `work` on each rank, or on rank `on` alone, and wait for all of them.

        Returns this rank's result, or for `on` that one's, on each rank. Raises on every rank if it failed on one:
        that rank raises its own error, the others RanksError. `work` makes no collective call.
        """
        result, error = None, None
        try:
            result = work() if on in (None, self.rank) else None
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RanksError(f"rank {rank} failed: {failure}")
        return result if on is None else self.gather(result)[on]

    def _call(self, collective: Callable[..., None], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            raise RanksError(f"rank {self.rank}: another rank cannot be reached: {first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; without waiting, as another rank may have died."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def init_group(rank: int, world_size: int, rendezvous: str, device: str = "cpu", timeout_s: float = 300) -> Ranks:
    """Meet the other ranks and form a group: gloo on the CPU, NCCL on CUDA (one GPU a rank of this machine).

    `rendezvous` is one of RENDEZVOUS, with a path that no group used before, or a host and a free port. `timeout_s`
    is how long a rank waits for another, now and in each later call. Raises ValueError at the door; RanksError
    where the others do not come or the address is taken.
    """
    world_size = whole("world_size", world_size)
    rank = whole("rank", rank, 0, world_size - 1)
    number("timeout_s", timeout_s, above=True)
    if not (isinstance(rendezvous, str) and rendezvous.startswith(RENDEZVOUS)):
        raise ValueError(f"rendezvous={short(rendezvous)}: needs to begin with {', '.join(RENDEZVOUS)}")
    if rendezvous.startswith("file://") and not Path(rendezvous.removeprefix("file://")).parent.is_dir():
        raise ValueError(f"rendezvous={short(rendezvous)}: its folder does not exist")  # torch would wait for it
    if dist.is_initialized():
        raise ValueError("this process is in a group already; close that one first")
    place = _device(choice("device", device, _BACKENDS), rank)
    _hand_back_at_exit()
    try:
        dist.init_process_group(
            _BACKENDS[device],
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=place if device == "cuda" else None,
        )
        return Ranks(place)
    except (RuntimeError, ValueError) as error:  # torch raises both, for addresses and for time that ran out
        if dist.is_initialized():
            dist.destroy_process_group()
        failed = f"rank {rank} of {world_size} at {rendezvous}: no group within {timeout_s:g} s"
        raise RanksError(f"{failed}: {first_line(error)}") from error


@cache
def _hand_back_at_exit() -> None:
    atexit.register(time.sleep, _HAND_BACK_S)


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda': this machine's torch finds no GPU; use 'cpu'")
    place = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(place)
    return place


def first_line(error: BaseException) -> str:
    """What an error says, without the trace that torch's carry."""
    return (str(error).splitlines() or [""])[0]
