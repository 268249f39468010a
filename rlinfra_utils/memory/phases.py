"""Memory over time: what each phase of a step holds, and the phase where a device is fullest.

Models a step as a list of phases with named amounts; the peak is a maximum over phases, never a sum of
maxima. Leaves out what happens inside a phase. Use `colocated(...)` or `disaggregated(...)`, or
`phases([Phase("generate", {"weights": w, "KV pool": kv}), ...])`, then `.peak_phase`, `.fits(80 * 2**30)`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike

import pandas as pd

from rlinfra_utils.doors import amount, choice, instance, short
from rlinfra_utils.memory.ledger import GB, GIB, Ledger

WAKE_ORDERS = ("together", "weights_first")


@dataclass(frozen=True)
class Phase:
    """One phase of a step: its name, and what lies on the device meanwhile, {item: bytes}.

    Raises ValueError for bytes that are negative or not finite.
    """

    name: str
    items: Mapping[str, float]

    def __post_init__(self):
        object.__setattr__(self, "items", Ledger(self.items).items)

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.items.values())


@dataclass(frozen=True, repr=False)
class PhaseLedger:
    """Phases of one step on one device, in order. Raises ValueError for none, and for two of one name."""

    phases: tuple[Phase, ...]

    def __post_init__(self):
        for index, phase in enumerate(self.phases):
            instance(f"phases[{index}]", phase, Phase, "Phase(name, {item: bytes})")
        names = [phase.name for phase in self.phases]
        if not names:
            raise ValueError("phases=(): needs at least one phase")
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"phases: {repeated!r} occurs twice; give each phase a name of its own")

    @property
    def _peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest phase: max over t of B(t), lecture step 12.2.4."""
        return self._peak.total

    @property
    def peak_phase(self) -> str:
        """Name of the fullest phase (the first of equals)."""
        return self._peak.name

    def fits(self, capacity_bytes: float) -> bool:
        """Whether no phase needs more than `capacity_bytes`; raises ValueError where that is no amount."""
        return self.peak_bytes <= amount("capacity_bytes", capacity_bytes)

    def frame(self) -> pd.DataFrame:
        """Bytes as a table, a row a phase, a column an item; what a phase does not hold is 0."""
        rows = [dict(phase.items) for phase in self.phases]
        return pd.DataFrame(rows, index=[phase.name for phase in self.phases]).fillna(0)

    def _table(self) -> pd.DataFrame:
        """For reading: a row an item, a column a phase, in GiB, the fullest phase marked."""
        table = (self.frame().T / GIB).map("{:,.3f}".format)
        table.loc["total GB"] = [f"{phase.total / GB:,.3f}" for phase in self.phases]
        table.loc["total GiB"] = [f"{phase.total / GIB:,.3f}" for phase in self.phases]
        table.loc[""] = ["peak" if phase is self._peak else "" for phase in self.phases]
        return table.rename_axis(columns="GiB")

    def __str__(self) -> str:
        return self._table().to_string()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def to_csv(self, path: str | PathLike) -> None:
        """Write one row a phase and item: phase, item, bytes."""
        rows = [(phase.name, item, value) for phase in self.phases for item, value in phase.items.items()]
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("phase", "item", "bytes"), *rows])


def phases(steps: Iterable[Phase]) -> PhaseLedger:
    """The phases of one step as a ledger with a peak. Raises ValueError as `PhaseLedger` does."""
    if not isinstance(steps, Iterable):
        raise ValueError(f"steps={short(steps)}: needs a list of Phase(name, {{item: bytes}})")
    return PhaseLedger(tuple(steps))


def colocated(
    engine_weights: float,
    kv_pool: float,
    trainer_state: Ledger,
    training: Ledger,
    wake: str = "weights_first",
    trainer: str = "offloaded",
    engine: str = "offloaded",
    published: float | None = None,
) -> PhaseLedger:
    """One device that generates and trains in turn: generate, release, train, sync, wake.

    `engine_weights`, `kv_pool`: bytes. `trainer_state`: this rank's model state. `training`: what a
    training step adds (activations, logits, buffers). `published`: the weights gathered for the engine
    (all of `engine_weights`, if None; for LoRA the adapters alone).

    `trainer`: its state is "offloaded" while the engine runs, or "resident". `engine`: its weights are
    "offloaded" while the trainer runs, or "resident". The KV pool is always released. `wake`: "together"
    wakes weights and KV pool while the gathered copy is still there, then loads (vllm issue 15254, field
    case B14); "weights_first" wakes the weights, loads, frees the copy, then wakes the KV pool.
    Raises ValueError for bytes that are no amount, an unknown word, and a ledger that is not in bytes.
    """
    choice("wake", wake, WAKE_ORDERS)
    for name, value in (("trainer", trainer), ("engine", engine)):
        choice(name, value, ("offloaded", "resident"))
    weights = {"engine weights": amount("engine_weights", engine_weights)}
    pool = {"KV pool": amount("kv_pool", kv_pool)}
    copy = {"gathered copy": amount("published", engine_weights if published is None else published)}
    state = _prefixed("trainer", "trainer_state", trainer_state)
    kept_state = state if trainer == "resident" else {}
    kept_weights = weights if engine == "resident" else {}
    extra = _prefixed("training", "training", training)
    late = {"sync": {**kept_weights, **kept_state, **copy}, "wake": {**weights, **pool, **kept_state, **copy}}
    early = {"sync": {**weights, **kept_state, **copy}, "wake": {**weights, **pool, **kept_state}}
    return phases(
        [
            Phase("generate", {**weights, **pool, **kept_state}),
            Phase("release", {**weights, **kept_state}),
            Phase("train", {**kept_weights, **state, **extra}),
            *(Phase(name, items) for name, items in (late if wake == "together" else early).items()),
        ]
    )


def _prefixed(prefix: str, argument: str, ledger: Ledger) -> dict[str, float]:
    """Lines of a ledger of bytes, under names that say whose they are."""
    if not isinstance(ledger, Ledger) or ledger.unit != "bytes":
        raise ValueError(f"{argument}={short(ledger)}: needs a Ledger in bytes")
    return {f"{prefix}: {name}": value for name, value in ledger.items.items()}


def disaggregated(
    engine_weights: float, kv_pool: float, trainer_state: Ledger, training: Ledger, published: float | None = None
) -> dict[str, PhaseLedger]:
    """Two devices, {"trainer": ..., "engine": ...}; arguments and errors as in `colocated`.

    Nothing is offloaded: what trades places on one device lies on two. While weights are synchronised, each
    side holds the gathered copy beside its own.
    """
    weights = {"engine weights": amount("engine_weights", engine_weights)}
    pool = {"KV pool": amount("kv_pool", kv_pool)}
    copy = {"gathered copy": amount("published", engine_weights if published is None else published)}
    extra = _prefixed("training", "training", training)
    state = _prefixed("trainer", "trainer_state", trainer_state)
    return {
        "trainer": phases([Phase("train", {**state, **extra}), Phase("sync", {**state, **copy})]),
        "engine": phases([Phase("generate", {**weights, **pool}), Phase("sync", {**weights, **pool, **copy})]),
    }
