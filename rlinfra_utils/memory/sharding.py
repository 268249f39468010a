"""One rank's share of a ledger: DDP, ZeRO 1 to 3, FSDP2, HSDP.

Models which lines are divided and what must be whole for a while. Leaves out DDP's gradient buckets
(a second copy of the gradients unless `gradient_as_bucket_view=True`) and the collectives' own memory.
Use `shard(state, "fsdp", world_size=8, gathered_params=spec.largest_layer_params)`.
"""

from __future__ import annotations

import math

from rlinfra_utils.doors import amount, choice, divides, instance, whole
from rlinfra_utils.memory.ledger import Ledger
from rlinfra_utils.memory.training import FIRST, FROZEN, GRADIENTS, MASTER, MODEL_STATE, SECOND

_OPTIMIZER = (MASTER, FIRST, SECOND)
#: Strategies that divide the weights too, and gather a unit of them when it is needed.
GATHERING = ("zero3", "fsdp", "hsdp")
#: Lines of a model-state ledger that each strategy divides.
DIVIDED: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": _OPTIMIZER,
    "zero2": (*_OPTIMIZER, GRADIENTS),
    **dict.fromkeys(GATHERING, MODEL_STATE),
}
#: Lines for what is whole for a while: the unit in hand, the next one, and where it is trained its gradient, twice.
UNITS = ("gathered unit", "prefetched unit (all-gather buffer)", "unit's whole gradient", "reduce-scatter buffer")


def shard(
    ledger: Ledger,
    strategy: str,
    world_size: int,
    gathered_params: int = 0,
    shard_size: int | None = None,
    prefetched_params: int | None = None,
    trained_params: int | None = None,
    dtype_bytes: float = 2,
    reduce_dtype_bytes: float | None = None,
) -> Ledger:
    """Bytes on one of `world_size` ranks. Lines that are no model state (activations, logits) stay whole.

    Each divided line is rounded up, as shards are padded. "hsdp" divides by `shard_size` and repeats that
    over the rest. With `gathered_params`, the parameters of the largest unit that is whole at once, zero3,
    fsdp and hsdp add lines: that unit and the next one (as large, or `prefetched_params`), and for the
    `trained_params` in it (all, or none beside frozen weights) their whole gradient and the buffer it is
    reduced from (in `reduce_dtype_bytes`, or `dtype_bytes`).

    Source: ZeRO, arXiv:1910.02054, section 3; FSDP2's buffers as FSDPMemTracker of torch 2.13 shows them.
    Raises ValueError for an unknown strategy, a size or count that is not whole, a `shard_size` that does not divide
    the ranks or that the strategy has not, and a gathered unit where nothing is gathered.
    """
    instance("ledger", ledger, Ledger, "such as model_state gives")
    choice("strategy", strategy, DIVIDED)
    world_size = whole("world_size", world_size)
    ways = _ways(strategy, world_size, shard_size)
    divided = DIVIDED[strategy]
    lines = {name: math.ceil(value / ways) if name in divided else value for name, value in ledger.items.items()}
    trained = (0 if FROZEN in ledger.items else gathered_params) if trained_params is None else trained_params
    buffers = _buffers(strategy, gathered_params, prefetched_params, trained, dtype_bytes, reduce_dtype_bytes)
    what = ", ".join(name for name in divided if name in ledger.items) or "nothing"
    note = f"{strategy}, rank of {world_size}: divided by {ways}: {what}; the rest is whole on each rank"
    if strategy in GATHERING and not buffers:
        note += "; gathered_params=0: no unit is charged for being whole"
    return Ledger({**lines, **buffers}, ledger.unit, (*ledger.notes, note))


def _ways(strategy: str, world_size: int, shard_size: int | None) -> int:
    """How many ranks share one copy."""
    if strategy != "hsdp":
        if shard_size is not None:
            raise ValueError(f"shard_size={shard_size!r}: only hsdp has one, strategy={strategy!r} has not")
        return world_size
    ways = whole("shard_size", shard_size)
    divides("shard_size", ways, "world_size", world_size)
    return ways


def _buffers(
    strategy: str,
    gathered: int,
    prefetched: int | None,
    trained: int,
    dtype_bytes: float,
    reduce_dtype_bytes: float | None,
) -> dict[str, float]:
    """Lines for what is whole for a while."""
    gathered = whole("gathered_params", gathered, 0)
    prefetched = gathered if prefetched is None else whole("prefetched_params", prefetched, 0)
    if whole("trained_params", trained, 0) > gathered:
        raise ValueError(f"trained_params={trained}: more than gathered_params={gathered}")
    if not gathered:
        return {}
    if strategy not in GATHERING:
        raise ValueError(f"gathered_params={gathered}: strategy={strategy!r} keeps all weights whole, it gathers none")
    amount("dtype_bytes", dtype_bytes, above=True)
    reduce_bytes = dtype_bytes if reduce_dtype_bytes is None else amount("reduce_dtype_bytes", reduce_dtype_bytes)
    sizes = (gathered * dtype_bytes, prefetched * dtype_bytes, trained * dtype_bytes, trained * reduce_bytes)
    return {name: value for name, value in zip(UNITS, sizes) if value}
