"""Activations of one training step, and the moments when a device is fullest.

Domain: dense decoders of transformers 5 (`DOMAIN`; any other is refused), full attention in each layer, weights in
one dtype without autocast, no dropout, no KV cache, transformers' own cross-entropy on labels, one micro-batch a
step, the output kept until backward has ended, torch's AdamW. Within it saved tensors are exact, and the peak is
within 5 % of torch's MemTracker. Leaves out fused losses and the allocator's rounding.
"""

from __future__ import annotations

from rlinfra_utils.doors import amount, choice, whole
from rlinfra_utils.memory.layers import Layer
from rlinfra_utils.memory.ledger import Ledger
from rlinfra_utils.memory.phases import Phase, PhaseLedger, phases
from rlinfra_utils.memory.spec import ModelSpec, require_spec
from rlinfra_utils.memory.training import GRADIENTS, TrainRecipe, model_state

DOMAIN = ("llama", "qwen2", "qwen3")
ATTENTIONS = ("sdpa", "sdpa_masked", "eager")
#: Lines that other files of `memory` know by name.
LAYER_INPUTS = "layer inputs"
LOGITS, LOG_SOFTMAX, GRADIENTS_OF_LOGITS = "logits", "log-softmax (float32)", "gradients of logits"


def in_domain(spec: ModelSpec) -> bool:
    """Whether `activations` counts this model."""
    return spec.model_type in DOMAIN and not any(cache.window for cache in spec.caches)


def activations(
    spec: ModelSpec,
    batch: int,
    seq: int,
    dtype_bytes: float = 2,
    attention: str = "sdpa",
    checkpointing: bool = False,
) -> Ledger:
    """Bytes that autograd keeps from forward to backward, a line a part of the model.

    `seq` counts prompt and response, padding too. `attention`: "sdpa" (no mask, keys and values unrepeated),
    "sdpa_masked" (a padded batch: a mask a layer, keys and values repeated for each query head), or
    "eager" (all attention probabilities). `checkpointing` keeps only what enters each layer.

    Source: each line is a tensor that transformers 5.24 saves (`torch.autograd.graph.saved_tensors_hooks`).
    Raises ValueError outside the domain, for a size that is not whole, and for an unknown `attention`.
    """
    require_spec(spec)
    tokens, b = whole("batch", batch) * whole("seq", seq), amount("dtype_bytes", dtype_bytes, above=True)
    choice("attention", attention, ATTENTIONS)
    outside = {
        "final norm": _norm_bytes(spec.hidden_size, 1, b) * tokens,
        "rotary tables": 2 * seq * _layer(spec).cache.key_dim * b,
        LOG_SOFTMAX: 4 * spec.vocab_size * tokens,
        "labels": 8 * tokens,
    }
    if checkpointing:
        return Ledger({LAYER_INPUTS: spec.num_layers * spec.hidden_size * b * tokens, **outside})
    return _layer_activations(spec, tokens, seq, b, attention) * spec.num_layers + Ledger(outside)


def _layer(spec: ModelSpec) -> Layer:
    """The layer that all layers of a dense decoder are like."""
    choice("model_type", spec.model_type, DOMAIN)
    window = next((cache.window for cache in spec.caches if cache.window), None)
    if window:
        raise ValueError(f"sliding_window={window}: outside the domain, which has full attention in each layer")
    return spec.layers[0]


def _widths(layer: Layer) -> tuple[int, int, int]:
    """Widths of queries, of keys, and of the feed-forward."""
    shapes = {weight.name: weight.shape for weight in layer.weights}
    return tuple(shapes[f"{name}.weight"][0] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))


def _norm_bytes(dim: int, num_groups: int, b: float) -> float:
    """A norm saves its input in float32, a float32 factor, the normalised input, and its output (read next)."""
    return (4 + 2 * b) * dim + 4 * num_groups


def _layer_activations(spec: ModelSpec, tokens: int, seq: int, b: float, attention: str) -> Ledger:
    """Bytes that one layer saves for `tokens` tokens in sequences of `seq`."""
    layer, heads = _layer(spec), spec.num_heads
    queries, keys, width = _widths(layer)
    has_qk_norm = any(weight.name == "self_attn.q_norm.weight" for weight in layer.weights)
    scores = {
        "sdpa": 2 * keys * b + 4 * heads,
        "sdpa_masked": 2 * queries * b + 4 * heads + seq * b,
        # The softmax is taken in float32; in 16 bits a cast copy is saved beside it.
        "eager": 2 * queries * b + heads * seq * (4 if b == 4 else 4 + b),
    }
    each = {
        "norms": 2 * _norm_bytes(spec.hidden_size, 1, b),
        "query and key norms": has_qk_norm * ((4 + b) * (queries + keys) + 4 * (heads + layer.cache.num_kv_heads)),
        "queries and attention output": 2 * queries * b,
        f"keys, values, scores ({attention})": scores[attention],
        "feed-forward": 4 * width * b,
    }
    return Ledger({name: value * tokens for name, value in each.items() if value})


def training_step(
    spec: ModelSpec,
    recipe: TrainRecipe,
    batch: int,
    seq: int,
    attention: str = "sdpa",
    checkpointing: bool = False,
    foreach: bool = False,
) -> PhaseLedger:
    """Moments of one full-parameter step on one device, from the second step on: `.peak_bytes`, `.peak_phase`.

    "loss": backward begins; logits, log-softmax and two gradients of their size live at once. "last layer",
    "first layer": backward is in that layer's feed-forward (recomputed first, with `checkpointing`).
    "embedding": backward ends; a tied embedding holds the head's gradient, its own, and their sum.
    "optimizer": AdamW steps weight by weight with two temporaries, or with `foreach`, torch's default
    on CUDA, with one for all weights. Raises ValueError as `activations` does.
    """
    state = dict(model_state(require_spec(spec).num_params, recipe).items)
    b, tokens = recipe.weight, whole("batch", batch) * whole("seq", seq)
    gradients = {"gradients": state.pop(GRADIENTS, 0)}
    saved = activations(spec, batch, seq, b, attention, checkpointing)
    logits = {LOGITS: tokens * spec.vocab_size * b}
    layers = {name: value for name, value in saved.items.items() if name not in (LOG_SOFTMAX, "labels")}
    layer = _layer_activations(spec, tokens, seq, b, attention).total
    recomputed = {"a layer's activations": layer} if checkpointing else {}
    transient = {"gradients inside a layer": _transient(spec, recipe, tokens)}
    head = spec.vocab_size * spec.hidden_size * recipe.grad
    so_far = gradients["gradients"] - _layer(spec).num_params * recipe.grad - (0 if spec.tied else head)
    stepped = spec.num_params if foreach else 2 * max(weight.count for _, weight in spec.weights())
    return phases(
        [
            Phase("loss", {**state, **saved.items, **logits, GRADIENTS_OF_LOGITS: 8 * tokens * spec.vocab_size}),
            Phase("last layer", {**state, **layers, **recomputed, **transient, **logits, "gradients": head}),
            Phase("first layer", {**state, "a layer's activations": layer, **transient, **logits, "gradients": so_far}),
            Phase("embedding", {**state, **logits, **gradients, "tied gradients to add": 2 * head * spec.tied}),
            Phase("optimizer", {**state, **gradients, "temporaries": stepped * b}),
        ]
    )


def _transient(spec: ModelSpec, recipe: TrainRecipe, tokens: int) -> float:
    """Gradients alive while backward is in a feed-forward, less the one saved tensor that is freed by then."""
    width, h = _widths(_layer(spec))[2], spec.hidden_size
    return (2 * width + 2 * h) * recipe.weight * tokens + width * h * recipe.grad
