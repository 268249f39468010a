"""`memory.training` and `memory.sharding`: field cases, closed forms, and live torch models by tensor bytes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rlinfra_utils.memory import (
    ALL_LINEARS,
    RECIPES,
    Ledger,
    ModelSpec,
    TrainRecipe,
    explain,
    factored_moment_bytes,
    known_models,
    lora,
    lora_params,
    model_config,
    model_state,
    shard,
)
from rlinfra_utils.memory.sharding import DIVIDED

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


# --- recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "bytes_each", "gb"),
    [
        ("bf16_no_master", 12, 84),
        ("bf16_master_bf16_grad", 16, 112),
        ("bf16_master_fp32_grad", 18, 126),
        ("bf16_master_both_grads", 20, 140),
        ("fp32_autocast", 16, 112),
    ],
)
def test_mixed_precision_adam_b07(recipe, bytes_each, gb):
    assert RECIPES[recipe].total == bytes_each
    assert model_state(7e9, RECIPES[recipe]).gb == gb


def test_full_training_state_p02():
    state = model_state(7e9, RECIPES["bf16_no_master"])
    assert state.items == {
        "weights": 14_000_000_000,
        "gradients": 14_000_000_000,
        "first moment": 28_000_000_000,
        "second moment": 28_000_000_000,
    }
    assert state.gb == 84.0
    assert round(state.gib, 2) == 78.23


def test_16_bit_compute_does_not_shrink_model_state_b07():
    assert RECIPES["fp32_autocast"].total == RECIPES["bf16_master_bf16_grad"].total
    # DeepSpeed issue 3442: the optimizer's 16 bytes hold a 4-byte gradient; without it they are 12.
    recipe = RECIPES["bf16_master_fp32_grad"]
    assert recipe.grad + recipe.master + recipe.moment1 + recipe.moment2 == 16
    assert recipe.master + recipe.moment1 + recipe.moment2 == 12


def test_a_small_tied_model_b11():
    assert model_state(15_191_712, RECIPES["fp32_autocast"]).gb == pytest.approx(0.24307, abs=5e-6)
    assert pytest.approx(0.6066, abs=5e-5) == 24_407_712 / 15_191_712 - 1


def test_each_recipe_says_what_it_assumes():
    assert all(recipe.note for recipe in RECIPES.values())
    assert "gradients" in RECIPES["bf16_master_both_grads"].note
    assert TrainRecipe(2, 2, 4, 4, 4) == RECIPES["bf16_master_bf16_grad"]  # the note is no part of the numbers


def test_8_bit_adam_pays_for_its_scales():
    blocks_of_256 = 7_000_000_256 // 256
    moment = model_state(7_000_000_256, RECIPES["adam_8bit"]).items["first moment"]
    assert moment == 7_000_000_256 + 4 * blocks_of_256


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.sampled_from(sorted(RECIPES)))
def test_state_adds_over_parameters(left, right, name):
    recipe = RECIPES[name]
    both = model_state(left + right, recipe).total
    apart = model_state(left, recipe).total + model_state(right, recipe).total
    assert both <= apart <= both + 5  # a line is rounded up to whole bytes
    assert both >= (left + right) * recipe.total


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_params": -1}, "num_params=-1: needs a whole number of at least 1"),
        ({"num_params": 1.5}, "num_params=1.5: needs a whole number of at least 1"),
        ({"num_params": "7B"}, "num_params='7B': needs a whole number of at least 1"),
        ({"num_params": float("nan")}, "num_params=nan: needs a whole number of at least 1"),
        ({"num_trainable": -1}, "num_trainable=-1: needs a whole number of at least 0"),
        ({"num_trainable": 11}, "num_trainable=11: more than num_params=10; adapters count in both"),
        ({"frozen_weight": -2}, "frozen_weight=-2: needs a finite number of at least 0"),
        ({"recipe": "sgd"}, "recipe='sgd': needs a TrainRecipe, such as RECIPES['bf16_no_master']"),
    ],
)
def test_model_state_names_what_is_wrong(kwargs, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model_state(**{"num_params": 10, "recipe": RECIPES["sgd"], **kwargs})
    assert str(error.value) == message


def test_a_recipe_is_checked_at_the_door():
    with pytest.raises(ValueError, match="moment2=nan: needs a finite number"):
        TrainRecipe(2, 2, 4, 4, float("nan"))
    with pytest.raises(ValueError, match="grad='2': needs a finite number"):
        TrainRecipe(2, "2")


# --- LoRA ---------------------------------------------------------------------------------------------


def test_lora_32b_on_eight_cards_b09():
    spec = ModelSpec.named("Qwen2.5-32B")
    assert lora_params(spec, 16) == 134_217_728
    recipe = RECIPES["bf16_master_bf16_grad"]
    state = lora(spec, 16, recipe)
    assert model_state(lora_params(spec, 16), recipe).gib == 2.0
    assert state.items["weights (frozen)"] / 2**30 == pytest.approx(61.027, abs=5e-4)
    assert shard(state, "fsdp", 8).gib == pytest.approx(7.878, abs=5e-4)
    assert shard(state, "ddp", 8).gib == pytest.approx(63.027, abs=5e-4)
    full = shard(model_state(spec.num_params, recipe), "fsdp", 8)
    assert full.gib == pytest.approx(61.027, abs=5e-4)
    # A report of about 63 GiB on each rank: the base is not sharded. 61 GiB of full training is near, and named second.
    candidates = {
        "LoRA, base sharded": shard(state, "fsdp", 8),
        "LoRA, base replicated": shard(state, "ddp", 8),
        "full, sharded": full,
    }
    assert explain(63 * 2**30, candidates) == ["LoRA, base replicated", "full, sharded"]
    assert explain(63 * 2**30, candidates, tolerance=0.01) == ["LoRA, base replicated"]


def test_frozen_weights_carry_no_gradient_moment_or_master():
    state = model_state(1000, RECIPES["bf16_master_bf16_grad"], num_trainable=10)
    assert state.items == {
        "weights (frozen)": 1980,
        "weights": 20,
        "gradients": 20,
        "master weights": 40,
        "first moment": 40,
        "second moment": 40,
    }
    four_bit = model_state(1000, RECIPES["fp32_autocast"], num_trainable=10, frozen_weight=0.5)
    assert four_bit.items["weights (frozen)"] == 495
    assert "weights (frozen)" not in model_state(1000, RECIPES["sgd"]).items


@given(st.integers(1, 512), st.sets(st.sampled_from(ALL_LINEARS), min_size=1))
def test_adapters_are_linear_in_the_rank_and_add_over_targets(rank, targets):
    spec = ModelSpec.from_config(TINY)
    assert lora_params(spec, rank, sorted(targets)) == rank * sum(lora_params(spec, 1, [name]) for name in targets)


@pytest.mark.parametrize(
    ("name", "rank", "targets", "message"),
    [
        ("Qwen2.5-7B", 0, ALL_LINEARS, "rank=0: needs a whole number of at least 1"),
        ("Qwen2.5-7B", 8, ["qkv_proj"], "targets='qkv_proj': known are down_proj, gate_proj, "),
        ("Qwen2.5-7B", 8, ["q_proj", "q_proj"], "targets=.*: needs a list of projections, none of them twice"),
        ("Qwen2.5-7B", 8, [], r"targets=\[\]: needs a list of projections"),
        ("Qwen2.5-7B", 8, "q_proj", "targets='q_proj': needs a list of projections"),
        ("Qwen3-30B-A3B", 8, ALL_LINEARS, "targets='gate_proj': known are k_proj, o_proj, q_proj, v_proj"),
        ("DeepSeek-V3", 8, ["q_proj"], "targets='q_proj': known are down_proj, gate_proj, kv_b_proj"),
    ],
)
def test_a_target_that_no_layer_has_is_named(name, rank, targets, message):
    with pytest.raises(ValueError, match=message):
        lora_params(ModelSpec.named(name), rank, targets)


# --- weighed: live torch ------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen projection and a low-rank pair beside it, as LoRA has it."""

    def __init__(self, base, rank, dtype):
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features, dtype=dtype))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x):
        return self.base(x) + (x.to(self.down.dtype) @ self.down.T @ self.up.T).to(x.dtype)


def tiny_model(dtype, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **changes}), dtype=dtype)


def add_adapters(model, rank, dtype):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name in ALL_LINEARS:
                setattr(module, name, Adapted(child, rank, dtype))
    return model


def weigh(model, optimizer_class=torch.optim.AdamW):
    """Bytes by ledger line after one step, and what the optimizer keeps beside moments."""
    ids = torch.randint(0, TINY["vocab_size"], (2, 8))
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    lines = {"weights (frozen)": 0, "weights": 0, "gradients": 0, "first moment": 0, "second moment": 0}
    for parameter in model.parameters():
        lines["weights" if parameter.requires_grad else "weights (frozen)"] += parameter.nbytes
        lines["gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
    names = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "momentum_buffer": "first moment"}
    rest = 0
    for state in optimizer.state.values():
        for name, tensor in state.items():
            if name in names and tensor is not None:
                lines[names[name]] += tensor.nbytes
            elif tensor is not None:
                rest += tensor.nbytes
    return {name: value for name, value in lines.items() if value}, rest, len(optimizer.state)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "recipe"), [(torch.float32, "fp32_autocast"), (torch.bfloat16, "bf16_pure")])
def test_model_state_equals_a_live_model_after_one_step(dtype, recipe, tied):
    spec = ModelSpec.from_config({**TINY, "tie_word_embeddings": tied})
    lines, rest, num_tensors = weigh(tiny_model(dtype, tie_word_embeddings=tied))
    assert lines == model_state(spec.num_params, RECIPES[recipe]).items
    assert rest == 4 * num_tensors  # a float32 step counter for each tensor


@pytest.mark.parametrize(
    ("base", "adapters", "recipe", "frozen_weight"),
    [
        (torch.float32, torch.float32, "fp32_autocast", None),
        (torch.bfloat16, torch.bfloat16, "bf16_pure", None),
        (torch.bfloat16, torch.float32, "fp32_autocast", 2),
    ],
)
def test_lora_equals_a_live_model_after_one_step(base, adapters, recipe, frozen_weight):
    spec = ModelSpec.from_config(TINY)
    lines, _, _ = weigh(add_adapters(tiny_model(base), 4, adapters))
    assert lines == lora(spec, 4, RECIPES[recipe], frozen_weight=frozen_weight).items


def test_sgd_with_momentum_equals_a_live_model():
    lines, rest, _ = weigh(tiny_model(torch.float32), lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    assert lines == model_state(ModelSpec.from_config(TINY).num_params, RECIPES["sgd_momentum"]).items
    assert rest == 0


def test_adafactors_factored_moment_equals_torch():
    model = tiny_model(torch.float32)
    lines, rest, num_tensors = weigh(model, torch.optim.Adafactor)
    spec = ModelSpec.from_config(TINY)
    assert lines == model_state(spec.num_params, RECIPES["adafactor"]).items
    assert rest - 4 * num_tensors == factored_moment_bytes(spec)


# --- sharding -----------------------------------------------------------------------------------------

STATE = model_state(7e9, RECIPES["bf16_master_bf16_grad"])


def test_zero_stages_of_the_paper():
    # arXiv:1910.02054, figure 1: 7.5B parameters, 64 ranks, K = 12: 120, 31.4, 16.6 and 1.9 GB.
    state = model_state(7.5e9, RECIPES["bf16_master_bf16_grad"])
    figure = {"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9, "fsdp": 1.9}
    for strategy, gb in figure.items():
        assert shard(state, strategy, 64).gb == pytest.approx(gb, abs=0.05)


@given(st.sampled_from(sorted(DIVIDED)), st.integers(1, 4096), st.integers(1, 10**11), st.sampled_from(sorted(RECIPES)))
def test_shards_cover_the_whole_and_shrink_with_ranks(strategy, world_size, num_params, recipe):
    state = model_state(num_params, RECIPES[recipe])
    size = world_size if strategy == "hsdp" else None
    rank = shard(state, strategy, world_size, shard_size=size)
    assert state.total <= rank.total * world_size
    assert rank.total <= state.total
    twice = shard(state, strategy, 2 * world_size, shard_size=size and 2 * size)
    assert twice.total <= rank.total
    assert shard(state, strategy, 1, shard_size=size and 1) == state


def test_hsdp_is_fsdp_within_a_shard_group():
    assert shard(STATE, "hsdp", 64, shard_size=8).items == shard(STATE, "fsdp", 8).items


def test_logits_and_activations_are_a_ranks_own_b13():
    ledger = STATE + Ledger({"logits": 10**9})
    assert shard(ledger, "zero3", 1024).items["logits"] == 10**9


def test_what_is_whole_for_a_while_does_not_shrink():
    floor = {w: shard(STATE, "fsdp", w, gathered_params=10**8).total - shard(STATE, "fsdp", w).total for w in (8, 4096)}
    assert floor[8] == floor[4096] == 4 * 2 * 10**8
    lines = shard(STATE, "fsdp", 8, gathered_params=100, prefetched_params=30, reduce_dtype_bytes=4).items
    assert [lines[name] for name in list(lines)[-4:]] == [200, 60, 200, 400]


def test_a_frozen_unit_has_no_gradient_to_reduce():
    state = model_state(1000, RECIPES["bf16_pure"], num_trainable=10)
    names = set(shard(state, "fsdp", 8, gathered_params=100).items)
    assert {"gathered unit", "prefetched unit (all-gather buffer)"} <= names
    assert not {"unit's whole gradient", "reduce-scatter buffer"} & names
    assert shard(state, "fsdp", 8, gathered_params=100, trained_params=3).items["unit's whole gradient"] == 6


def test_the_convention_is_printed():
    text = str(shard(STATE, "zero2", 8))
    assert "zero2, rank of 8: divided by 8: master weights, first moment, second moment, gradients;" in text
    assert "gathered_params=0" in str(shard(STATE, "fsdp", 8))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ledger": 16e9}, "ledger=16000000000.0: needs a Ledger, such as model_state gives"),
        ({"strategy": "zero4"}, "strategy='zero4': known are ddp, fsdp, hsdp, zero1, zero2, zero3"),
        ({"world_size": 0}, "world_size=0: needs a whole number of at least 1"),
        ({"world_size": 2.5}, "world_size=2.5: needs a whole number of at least 1"),
        ({"strategy": "hsdp", "world_size": 12, "shard_size": 8}, "shard_size=8: does not divide world_size=12"),
        ({"strategy": "hsdp"}, "shard_size=None: needs a whole number of at least 1"),
        ({"shard_size": 4}, "shard_size=4: only hsdp has one, strategy='fsdp' has not"),
        ({"gathered_params": -1}, "gathered_params=-1: needs a whole number of at least 0"),
        ({"strategy": "ddp", "gathered_params": 5}, "gathered_params=5: strategy='ddp' keeps all weights whole"),
        ({"gathered_params": 5, "trained_params": 6}, "trained_params=6: more than gathered_params=5"),
    ],
)
def test_shard_names_what_is_wrong(kwargs, message):
    with pytest.raises(ValueError, match="^" + message):
        shard(**{"ledger": STATE, "strategy": "fsdp", "world_size": 8, **kwargs})


# --- weighed: FSDP2 under fake tensors ----------------------------------------------------------------


@pytest.fixture
def fake_mesh():
    """Eight ranks that exist in name only; rank 0 is this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def fsdp_snapshots(spec_config, mesh):
    """MiB by FSDPMemTracker's own categories, at each state of the root module in the second step."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard

    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec_config), dtype=torch.float32)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh)
        optimizer, ids = torch.optim.AdamW(model.parameters(), foreach=False), torch.zeros(1, 16, dtype=torch.long)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    root = next(stats for module, stats in tracker.memory_tracking.items() if module is model)
    at = {state.name: snapshots[-1] for state, snapshots in root.snapshots.items()}
    return {name: _mib(snapshot) for name, snapshot in at.items()}


def _mib(snapshot):
    on_cpu = next(by_kind for device, by_kind in snapshot.items() if str(device) == "cpu")
    return {getattr(kind, "value", kind): size / 2**20 for kind, size in on_cpu.items()}


@pytest.mark.slow
def test_what_state_over_d_leaves_out_line_by_line(fake_mesh):
    config = model_config("SmolLM2-135M")
    spec = ModelSpec.from_config(config)
    at = fsdp_snapshots(config, fake_mesh)
    state = model_state(spec.num_params, RECIPES["fp32_autocast"])
    rank = shard(
        state,
        "fsdp",
        8,
        gathered_params=spec.root_params,
        prefetched_params=spec.largest_layer_params,
        dtype_bytes=4,
    )
    mib = {name: value / 2**20 for name, value in rank.items.items()}
    assert at["AFT_PRE_BW"]["Sharded Param"] == pytest.approx(mib["weights"], rel=1e-4)
    assert at["AFT_POST_BW"]["Sharded Grad"] == pytest.approx(mib["gradients"], rel=1e-4)
    assert at["AFT_PRE_BW"]["OptState"] == pytest.approx(mib["first moment"] + mib["second moment"], rel=1e-3)
    assert at["AFT_PRE_BW"]["Unsharded Param"] == pytest.approx(mib["gathered unit"], rel=1e-4)
    assert at["AFT_PRE_BW"]["All Gather"] == pytest.approx(mib["prefetched unit (all-gather buffer)"], rel=1e-3)
    assert at["BEF_POST_BW"]["Unsharded Grad"] == pytest.approx(mib["unit's whole gradient"], rel=1e-4)
    assert at["AFT_POST_BW"]["Reduce Scatter"] == pytest.approx(mib["reduce-scatter buffer"], rel=1e-4)
    # The figures measured once for the whole model, rounded as they were.
    assert mib["weights"] == pytest.approx(64.14, abs=0.005)
    assert mib["gathered unit"] == pytest.approx(108, abs=0.01)
    assert mib["prefetched unit (all-gather buffer)"] == pytest.approx(13.5, abs=0.01)


def test_the_root_and_the_layers_are_all_there_is():
    for name in known_models():
        spec = ModelSpec.named(name)
        assert spec.root_params + sum(layer.num_params for layer in spec.layers) == spec.num_params
        assert spec.largest_layer_params == max(
            sum(math.prod(weight.shape) for weight in layer.weights) for layer in spec.layers
        )
