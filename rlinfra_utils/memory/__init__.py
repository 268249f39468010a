"""How much: model state, shards, KV cache, logits, phases and their peak."""

from rlinfra_utils.memory.activations import activations, training_step
from rlinfra_utils.memory.fit import Fit, fit, fit_map
from rlinfra_utils.memory.inference import RequestCost, kv_cache, kv_capacity, logits, logits_dtype_bytes
from rlinfra_utils.memory.ledger import GB, GIB, Ledger, explain
from rlinfra_utils.memory.phases import Phase, PhaseLedger, colocated, disaggregated, phases
from rlinfra_utils.memory.sharding import shard
from rlinfra_utils.memory.spec import ModelSpec, known_models, model_config
from rlinfra_utils.memory.training import (
    ALL_LINEARS,
    RECIPES,
    TrainRecipe,
    factored_moment_bytes,
    lora,
    lora_params,
    model_state,
)
