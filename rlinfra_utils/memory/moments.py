"""What a training step holds on one GPU beside its share of the model state, at the fullest of its moments.

Models the moments of `activations.training_step`, and for sharded weights the units that are whole meanwhile. Leaves
out the model state (`sharding`) and a run's other phases (`fit`). Use
`beside_state(spec, recipe, rank, "fsdp", micro_batch=1, seq=4096, checkpointing=True)`.
"""

from __future__ import annotations

from rlinfra_utils.memory.activations import (
    GRADIENTS_OF_LOGITS,
    LAYER_INPUTS,
    LOG_SOFTMAX,
    LOGITS,
    in_domain,
    training_step,
)
from rlinfra_utils.memory.ledger import Ledger
from rlinfra_utils.memory.sharding import GATHERING, UNITS
from rlinfra_utils.memory.spec import ModelSpec
from rlinfra_utils.memory.training import FIRST, FROZEN, MODEL_STATE, WEIGHTS, TrainRecipe


def beside_state(
    spec: ModelSpec, recipe: TrainRecipe, rank: Ledger, strategy: str, micro_batch: int, seq: int, checkpointing: bool
) -> Ledger:
    """Bytes of a micro-batch of `micro_batch` sequences of `seq` tokens, where `rank` is the GPU's model state.

    A fused optimizer step has one temporary as large as a moment.
    """
    is_full = FROZEN not in rank.items
    moments = _moments(spec, recipe, micro_batch, seq, checkpointing, is_full)
    if strategy in GATHERING:
        units = _whole_units(spec, recipe.weight, is_full)
        moments = {name: {**units[name], **lines} for name, lines in moments.items()}
    moments["optimizer"] = {"optimizer temporaries": rank.items.get(FIRST, rank.items[WEIGHTS])}
    note = f"training: micro-batches of {micro_batch} x {seq:,} tokens, {'' if checkpointing else 'no '}checkpointing"
    lower = () if in_domain(spec) else (f"activations inside a layer of {spec.model_type!r} are not counted",)
    return Ledger(max(moments.values(), key=lambda lines: sum(lines.values())), notes=(note, *lower))


def _moments(
    spec: ModelSpec, recipe: TrainRecipe, micro_batch: int, seq: int, checkpointing: bool, is_full: bool
) -> dict[str, dict[str, float]]:
    """Lines beside the model state from the first forward to the last backward pass of a micro-batch."""
    if in_domain(spec):
        step = training_step(spec, recipe, micro_batch, seq, checkpointing=checkpointing)
        names = ("loss", "last layer", "first layer", *(("embedding",) if is_full else ()))
        found = {phase.name: phase.items for phase in step.phases if phase.name in names}
        beside = {name: {k: v for k, v in lines.items() if k not in MODEL_STATE} for name, lines in found.items()}
        return {"forward": {}, **beside}
    tokens = micro_batch * seq
    kept = {LAYER_INPUTS: spec.num_layers * spec.hidden_size * recipe.weight * tokens}
    logits = {LOGITS: recipe.weight * spec.vocab_size * tokens}
    at_loss = {LOG_SOFTMAX: 4 * spec.vocab_size * tokens, GRADIENTS_OF_LOGITS: 8 * spec.vocab_size * tokens}
    return {"forward": {}, "loss": {**kept, **logits, **at_loss}, "last layer": {**kept, **logits}}


def _whole_units(spec: ModelSpec, weight_bytes: float, is_full: bool) -> dict[str, dict[str, float]]:
    """Lines of `shard` for what is whole at each moment, with each layer as a unit, as FSDPMemTracker shows it.

    The root stays whole through a step, layers come and go. A unit is copied out of its all-gather buffer, so that
    the first ones lie there twice.
    """
    root, layer = spec.root_params * weight_bytes, spec.largest_layer_params * weight_bytes
    head = spec.vocab_size * spec.hidden_size * weight_bytes
    in_a_layer = (root + layer, layer, head + layer, layer)
    sizes = {  # in the order of UNITS
        "forward": (root + layer, root + layer, 0, 0),
        "loss": (root, layer, 0, 0),
        "last layer": in_a_layer,
        "first layer": in_a_layer,
        "embedding": (root, 0, root, layer),
    }
    num_lines = len(UNITS) if is_full else 2
    return {name: {k: v for k, v in zip(UNITS, each[:num_lines]) if v} for name, each in sizes.items()}
