"""How much: model state, shards, KV cache, logits, phases and their peak.

Models bytes by name, from a model's config.json and a recipe, as ledgers that add up. Leaves out the CUDA context,
the allocator's rounding and fragmentation, and time within a phase.

    spec = ModelSpec.named("Qwen2.5-7B")                                  # or ModelSpec.from_config(mapping)
    shard(model_state(spec.num_params, RECIPES["bf16_master_bf16_grad"]), "fsdp", world_size=8).gib
    kv_cache(spec, tokens_per_seq=4096, num_seqs=64); kv_capacity(spec, pool_bytes=40 * GIB)
    print(fit(spec, 0.9 * 80 * GIB, num_gpus=8, group_size=16, seq_tokens=4096))
"""

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
