"""What training keeps for its parameters: recipes in bytes a parameter, model state, LoRA adapters.

Models state that lives from step to step, before it is divided. Leaves out shards (`sharding`), activations
(`activations`) and the allocator's rounding. Use `model_state(7e9, RECIPES["bf16_master_both_grads"]).gib`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinfra_utils.doors import amount, choice, instance, short, whole
from rlinfra_utils.memory.ledger import Ledger
from rlinfra_utils.memory.spec import ModelSpec, require_spec

FROZEN, WEIGHTS, GRADIENTS, MASTER = "weights (frozen)", "weights", "gradients", "master weights"
FIRST, SECOND = "first moment", "second moment"
#: The lines of `model_state`, in its order.
MODEL_STATE = (FROZEN, WEIGHTS, GRADIENTS, MASTER, FIRST, SECOND)


@dataclass(frozen=True)
class TrainRecipe:
    """Bytes kept for each trainable parameter, by object. `note`: what is assumed, and by whom.

    Raises ValueError for bytes that are negative or not finite.
    """

    weight: float
    grad: float
    master: float = 0
    moment1: float = 0
    moment2: float = 0
    note: str = field(default="", compare=False)

    def __post_init__(self):
        for name in ("weight", "grad", "master", "moment1", "moment2"):
            amount(name, getattr(self, name))

    @property
    def total(self) -> float:
        """Bytes for each trainable parameter in all."""
        return self.weight + self.grad + self.master + self.moment1 + self.moment2


#: A block of 256 values shares one float32 scale (bitsandbytes since 0.44, torchao: PR 927 of pytorch/ao).
EIGHT_BIT = 1 + 4 / 256

RECIPES: dict[str, TrainRecipe] = {
    "fp32_autocast": TrainRecipe(4, 4, 0, 4, 4, "float32 weights are their own master; 16-bit casts are transient"),
    "bf16_no_master": TrainRecipe(2, 2, 0, 4, 4, "bf16 weights and gradients, float32 moments, no master copy"),
    "bf16_pure": TrainRecipe(2, 2, 0, 2, 2, "torch.optim.AdamW on bf16 weights: moments take the weights' dtype"),
    "bf16_master_bf16_grad": TrainRecipe(2, 2, 4, 4, 4, "16-bit gradients kept (16 in ZeRO, arXiv:1910.02054, 3.1)"),
    "bf16_master_fp32_grad": TrainRecipe(
        2, 4, 4, 4, 4, "float32 gradients kept (18 in Megatron Core's optimizer guide)"
    ),
    "bf16_master_both_grads": TrainRecipe(2, 6, 4, 4, 4, "16-bit and float32 gradients kept (20 in the same guide)"),
    "adam_8bit": TrainRecipe(
        2, 2, 0, EIGHT_BIT, EIGHT_BIT, "8-bit moments, a float32 scale a block of 256; small tensors stay float32"
    ),
    "adafactor": TrainRecipe(4, 4, 0, 0, 0, "no first moment; row and column statistics: `factored_moment_bytes`"),
    "sgd": TrainRecipe(4, 4, 0, 0, 0, "no optimizer state"),
    "sgd_momentum": TrainRecipe(4, 4, 0, 4, 0, "one momentum buffer"),
}


def model_state(
    num_params: float, recipe: TrainRecipe, num_trainable: float | None = None, frozen_weight: float | None = None
) -> Ledger:
    """Bytes of weights, gradients, master copy and moments for `num_params` parameters.

    `num_trainable` of them are trained (all, if None); the rest are frozen: `frozen_weight` bytes each
    (the recipe's weight, if None), no gradient, no master, no moments. So for LoRA `num_params` counts base
    and adapters (`lora` does that). Formula: lecture step 12.2.1. torch's Adam also keeps a 4-byte step
    counter for each tensor, which is left out. Raises ValueError for a count that is not whole, and for more
    trainable than all.
    """
    instance("recipe", recipe, TrainRecipe, "such as RECIPES['bf16_no_master']")
    num_params = whole("num_params", num_params)
    trainable = num_params if num_trainable is None else whole("num_trainable", num_trainable, 0)
    if trainable > num_params:
        raise ValueError(f"num_trainable={trainable}: more than num_params={num_params}; adapters count in both")
    frozen_weight = recipe.weight if frozen_weight is None else amount("frozen_weight", frozen_weight)
    lines = {
        FROZEN: (num_params - trainable) * frozen_weight,
        WEIGHTS: trainable * recipe.weight,
        GRADIENTS: trainable * recipe.grad,
        MASTER: trainable * recipe.master,
        FIRST: trainable * recipe.moment1,
        SECOND: trainable * recipe.moment2,
    }
    notes = (recipe.note,) if recipe.note else ()
    return Ledger({name: math.ceil(value) for name, value in lines.items() if value}, notes=notes)


def factored_moment_bytes(spec: ModelSpec, dtype_bytes: float = 4) -> float:
    """Second-moment bytes of Adafactor for a whole model: a row and a column sum a matrix, a full moment a vector.

    Source: arXiv:1804.04235, section 3; for stacked experts, a row and a column sum each, as torch.optim.Adafactor.
    Raises ValueError for `dtype_bytes` that are not above 0.
    """
    shapes = (weight.shape for _, weight in require_spec(spec).weights())
    counts = (math.prod(shape[:-1]) + math.prod(shape) // shape[-2] if len(shape) > 1 else shape[0] for shape in shapes)
    return sum(counts) * amount("dtype_bytes", dtype_bytes, above=True)


#: The projections of a dense decoder layer that LoRA usually adapts.
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_params(spec: ModelSpec, rank: int, targets: Sequence[str] = ALL_LINEARS) -> int:
    """Adapter parameters: rank * (in + out) for each target projection (arXiv:2106.09685, section 4.1).

    Raises ValueError for a rank below 1, for no target, and for one that is there twice or that no layer has; stacked
    experts are not targets.
    """
    whole("rank", rank)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, weight in require_spec(spec).weights():
        if name.endswith("_proj.weight"):
            shapes.setdefault(name.split(".")[-2], []).append(weight.shape)
    if not isinstance(targets, tuple | list) or not targets or any(targets.count(target) > 1 for target in targets):
        raise ValueError(f"targets={short(targets)}: needs a list of projections, none of them twice")
    for target in targets:
        choice("targets", target, shapes)
    return sum(rank * (num_out + num_in) for target in targets for num_out, num_in in shapes[target])


def lora(
    spec: ModelSpec,
    rank: int,
    recipe: TrainRecipe,
    targets: Sequence[str] = ALL_LINEARS,
    frozen_weight: float | None = None,
) -> Ledger:
    """Model state with a frozen base and trained adapters: `recipe` is charged for the adapters alone.

    `frozen_weight` as in `model_state`. Raises ValueError as `lora_params` and `model_state` do.
    """
    adapters = lora_params(spec, rank, targets)
    return model_state(spec.num_params + adapters, recipe, adapters, frozen_weight)
