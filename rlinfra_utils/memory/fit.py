"""Will a GRPO run fit, and what breaks first: the phases of one GPU, from a model's config and a few numbers.

Models what the other files of `memory` count, put on one GPU of a step. Leaves out the CUDA context, graphs and
workspaces, fragmentation, a reference model and a critic, fused losses and CPU memory: `gpu_bytes` is what remains
for the lines here (engines take 0.9 of a card by default). Use
`fit(ModelSpec.named("Qwen2.5-7B"), 0.9 * 80 * GIB, num_gpus=8, group_size=16, seq_tokens=4096)`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from rlinfra_utils.doors import amount, choice, divides, short, whole
from rlinfra_utils.memory.activations import GRADIENTS_OF_LOGITS, LOG_SOFTMAX, LOGITS, in_domain
from rlinfra_utils.memory.inference import kv_cache
from rlinfra_utils.memory.ledger import GIB, Ledger
from rlinfra_utils.memory.moments import beside_state
from rlinfra_utils.memory.phases import Phase, PhaseLedger, colocated, disaggregated, phases
from rlinfra_utils.memory.sharding import DIVIDED, UNITS, shard
from rlinfra_utils.memory.spec import ModelSpec, require_spec
from rlinfra_utils.memory.training import ALL_LINEARS, RECIPES, TrainRecipe, lora, lora_params, model_state

ENGINE_DTYPE_BYTES, BLOCK_TOKENS = 2, 16
#: "hsdp" is "fsdp" with `num_gpus` of one shard group.
STRATEGIES = tuple(name for name in DIVIDED if name != "hsdp")


@dataclass(frozen=True, repr=False)
class Fit:
    """The answer: phases of one GPU against `gpu_bytes`, and the conventions behind them (`notes`).

    `is_lower_bound`: some of the training phase could not be counted, so that "fits" means "may fit".
    """

    ledger: PhaseLedger
    gpu_bytes: float
    notes: tuple[str, ...]
    is_lower_bound: bool = False

    @property
    def fits(self) -> bool:
        """Whether no phase needs more than `gpu_bytes`."""
        return self.ledger.fits(self.gpu_bytes)

    @property
    def headroom_bytes(self) -> float:
        """Bytes left in the fullest phase; negative if it does not fit."""
        return self.gpu_bytes - self.ledger.peak_bytes

    @property
    def over(self) -> list[str]:
        """Phases that need more than there is, in the order of a step: the first is where the run ends."""
        return [phase.name for phase in self.ledger.phases if phase.total > self.gpu_bytes]

    def parts(self) -> pd.DataFrame:
        """Bytes, a row a phase, a column a part: the ledger's lines summed by what they belong to."""
        frame = self.ledger.frame()
        return frame.T.groupby(_part, sort=False).sum().T

    @property
    def breaks_first(self) -> tuple[str, str] | None:
        """Phase that breaks first, and the largest part in it; None if all of them fit."""
        return (self.over[0], self.parts().loc[self.over[0]].idxmax()) if self.over else None

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits, the phase, how full it is, and its largest part."""
        phase = self.over[0] if self.over else self.ledger.peak_phase
        parts = self.parts().loc[phase] / GIB
        full = f"{parts.sum():.1f} of {self.gpu_bytes / GIB:.1f} GiB, {parts.max():.1f} of them {parts.idxmax()}"
        if self.over:
            more = f"; over as well: {', '.join(self.over[1:])}" if self.over[1:] else ""
            return f"Does not fit: {phase} breaks first, {full}{more}."
        return f"{'May fit (a lower bound)' if self.is_lower_bound else 'Fits'}: the fullest phase is {phase}, {full}."

    def __str__(self) -> str:
        return "\n".join([self.verdict, str(self.ledger), *(f"* {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<p><b>{html.escape(self.verdict)}</b></p>{self.ledger._repr_html_()}<ul>{notes}</ul>"


def _part(line: str) -> str:
    """What a line of the ledger belongs to."""
    side, _, name = line.rpartition(": ")
    if side == "trainer":
        return "trainer state"
    if name in UNITS:
        return "units made whole"
    if name in (LOGITS, LOG_SOFTMAX, GRADIENTS_OF_LOGITS):
        return "logits and gradients of them"
    return "activations, temporaries" if side == "training" else line


def fit(
    spec: ModelSpec,
    gpu_bytes: float,
    num_gpus: int,
    group_size: int,
    seq_tokens: int,
    prompts_per_gpu: int = 1,
    micro_batch: int = 1,
    recipe: str = "bf16_master_bf16_grad",
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = ALL_LINEARS,
    strategy: str = "fsdp",
    checkpointing: bool = True,
    placement: str = "colocated",
    trainer: str = "offloaded",
    wake: str = "weights_first",
    engine_tp: int = 1,
    sync_bucket_bytes: float | None = None,
) -> Fit:
    """One GPU through one step of GRPO: generate, release, train, sync, wake.

    Load: `prompts_per_gpu` prompts with `group_size` answers each are alive at once for each GPU that generates
    (an engine with a smaller pool makes them wait in place of failing), `seq_tokens` tokens long with their prompt;
    the trainer takes `micro_batch` such sequences at a time. `num_gpus` share the trainer by `strategy`.
    `placement` "colocated": the same GPUs generate, `engine_tp` of them for one engine; trainer and wake as in
    `phases.colocated`. "disaggregated": as many others generate; `trainer` and `wake` say nothing.

    Conventions: the engine holds bf16 weights and KV in blocks of 16 tokens. Gradients live from one micro-batch to
    the next. At sync the whole model is gathered (of LoRA the adapters), or buckets of `sync_bucket_bytes` in turn.
    zero3 and fsdp keep the root unit whole, and gather a layer ahead. Activations are those of `training_step`; outside
    its domain only what checkpointing keeps and the logits count, a lower bound. LoRA saves what full training saves.
    In the domain the training phase is 0 to 15 % above torch's FSDPMemTracker.
    Raises ValueError in one line that names the argument and its value.
    """
    require_spec(spec)
    amount("gpu_bytes", gpu_bytes, above=True)
    for name, value in (("num_gpus", num_gpus), ("seq_tokens", seq_tokens), ("micro_batch", micro_batch)):
        whole(name, value)
    num_seqs = (
        whole("group_size", group_size) * whole("prompts_per_gpu", prompts_per_gpu) * whole("engine_tp", engine_tp)
    )
    choice("strategy", strategy, STRATEGIES)
    plan = RECIPES[choice("recipe", recipe, RECIPES)]
    weights, pool = _engine(spec, seq_tokens, num_seqs, engine_tp)
    state, published = _trainer(spec, plan, lora_rank, lora_targets, weights)
    if sync_bucket_bytes is not None:
        published = min(published, amount("sync_bucket_bytes", sync_bucket_bytes))
    rank = shard(state, strategy, num_gpus)
    extra = beside_state(spec, plan, rank, strategy, micro_batch, seq_tokens, checkpointing)
    if choice("placement", placement, ("colocated", "disaggregated")) == "colocated":
        divides("engine_tp", engine_tp, "num_gpus", num_gpus)
        ledger = colocated(weights, pool.total, rank, extra, wake, trainer, published=published)
    else:
        ledger = _both(disaggregated(weights, pool.total, rank, extra, published))
    shared = f"trainer: {strategy} over {num_gpus} GPUs"
    return Fit(ledger, gpu_bytes, (*state.notes, shared, *extra.notes, *pool.notes), not in_domain(spec))


def fit_map(
    spec: ModelSpec,
    gpu_bytes: float,
    num_gpus: int,
    group_sizes: Sequence[int],
    lengths_tokens: Sequence[int],
    **settings,
) -> pd.DataFrame:
    """`fit` for each group size and length: what limits each cell.

    Columns: group_size, seq_tokens, peak_bytes, share (of `gpu_bytes`), limited_by ("fits", or the phase that breaks
    first) and part (the largest in that phase, or in the fullest). `settings` are the other arguments of `fit`.
    Raises ValueError as `fit` does, and for sizes or lengths that are no list.
    """
    for name, values in (("group_sizes", group_sizes), ("lengths_tokens", lengths_tokens)):
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name}={short(values)}: needs a list of whole numbers")
    rows = []
    for group_size in group_sizes:
        for seq_tokens in lengths_tokens:
            found = fit(spec, gpu_bytes, num_gpus, group_size, seq_tokens, **settings)
            phase, part = found.breaks_first or ("fits", found.parts().loc[found.ledger.peak_phase].idxmax())
            peak = found.ledger.peak_bytes
            rows.append((group_size, seq_tokens, peak, peak / gpu_bytes, phase, part))
    return pd.DataFrame(rows, columns=["group_size", "seq_tokens", "peak_bytes", "share", "limited_by", "part"])


def _engine(spec: ModelSpec, seq: int, num_seqs: int, tp: int) -> tuple[int, Ledger]:
    """Bytes of the weights, and the KV pool, on one of `tp` GPUs that hold an engine with `num_seqs` sequences."""
    pool = kv_cache(spec, seq, num_seqs, ENGINE_DTYPE_BYTES, "kept", BLOCK_TOKENS, tp)
    return math.ceil(spec.num_params * ENGINE_DTYPE_BYTES / tp), pool


def _trainer(
    spec: ModelSpec, recipe: TrainRecipe, lora_rank: int | None, targets: Sequence[str], weights: float
) -> tuple[Ledger, float]:
    """Model state before sharding, and the bytes that the engine gets after an update."""
    if lora_rank is None:
        return model_state(spec.num_params, recipe), weights
    adapters = lora_params(spec, whole("lora_rank", lora_rank), targets)
    return lora(spec, lora_rank, recipe, targets), ENGINE_DTYPE_BYTES * adapters


def _both(pools: dict[str, PhaseLedger]) -> PhaseLedger:
    """The phases of two kinds of GPU as one ledger: each has to fit on its own."""
    order = (("engine", "generate"), ("trainer", "train"), ("trainer", "sync"), ("engine", "sync"))
    held = {(pool, phase.name): phase.items for pool, ledger in pools.items() for phase in ledger.phases}
    return phases([Phase(f"{phase} ({pool})", held[pool, phase]) for pool, phase in order])
