"""`memory.fit`: hand arithmetic, field cases, torch's own trackers, monotonicity, and arguments that are wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils.memory import (
    GIB,
    RECIPES,
    ModelSpec,
    fit,
    fit_map,
    known_models,
    logits,
    training_step,
)

QWEN = ModelSpec.named("Qwen2.5-7B")
CARD = 80 * GIB
#: All arguments without a default, small enough to fit anywhere.
SMALL = {"spec": QWEN, "gpu_bytes": CARD, "num_gpus": 8, "group_size": 8, "seq_tokens": 2048}


def totals(found):
    return {phase.name: phase.total for phase in found.ledger.phases}


# --- by hand ------------------------------------------------------------------------------------------


def test_a_7b_model_on_eight_cards_by_hand():
    found = fit(QWEN, CARD, num_gpus=8, group_size=16, seq_tokens=4096, prompts_per_gpu=4)
    params, vocab, hidden, layers = 7_615_616_512, 152_064, 3584, 28
    weights, pool = 2 * params, 64 * 4096 * (2 * layers * 4 * 128 * 2)
    root = 2 * vocab * hidden + hidden  # embedding, head, final norm
    layer = (params - root) // layers
    units = 2 * root + 2 * layer  # whole in bf16: the root, and the next layer
    norm, rotary = (4 + 2 * 2) * hidden + 4, 2 * 128 * 2
    kept = 4096 * (layers * hidden * 2 + norm + rotary + 8)  # layer inputs, final norm, rotary tables, labels
    loss = 4096 * vocab * (2 + 4 + 8)  # logits, log-softmax, two gradients
    assert totals(found) == {
        "generate": weights + pool,
        "release": weights,
        "train": 16 * params // 8 + units + kept + loss,
        "sync": 2 * weights,
        "wake": weights + pool,
    }
    assert found.fits
    assert found.breaks_first is None
    assert found.headroom_bytes == CARD - 2 * weights
    assert found.ledger.peak_phase == "sync"


def test_lora_by_hand():
    found = fit(**SMALL, lora_rank=16, trainer="resident")
    adapters = 28 * 16 * sum(a + b for a, b in QWEN_LINEARS)
    base, pool = 2 * 7_615_616_512, 8 * 2048 * 57_344
    state = base // 8 + 16 * adapters // 8
    assert totals(found)["generate"] == base + pool + state
    assert totals(found)["sync"] == base + state + 2 * adapters
    assert {name for name in found.ledger.frame() if "unit" in name} == {
        "training: gathered unit",
        "training: prefetched unit (all-gather buffer)",
    }


#: (in, out) of the seven projections of a Qwen2.5-7B layer.
QWEN_LINEARS = [(3584, 3584), (3584, 512), (3584, 512), (3584, 3584), (3584, 18944), (3584, 18944), (18944, 3584)]


def test_two_pools_have_their_own_cards():
    one, two = fit(**SMALL), fit(**SMALL, placement="disaggregated")
    weights = 2 * QWEN.num_params
    assert list(totals(two)) == ["generate (engine)", "train (trainer)", "sync (trainer)", "sync (engine)"]
    assert totals(two)["generate (engine)"] == totals(one)["generate"]
    assert totals(two)["train (trainer)"] == totals(one)["train"]
    assert totals(two)["sync (engine)"] == totals(one)["generate"] + weights
    bucketed = fit(**SMALL, placement="disaggregated", sync_bucket_bytes=GIB)
    assert totals(bucketed)["sync (engine)"] == totals(one)["generate"] + GIB
    assert totals(fit(**SMALL, sync_bucket_bytes=10**15)) == totals(one)


def test_engines_of_two_cards_share_weights_and_cache():
    one, two = fit(**SMALL), fit(**SMALL, engine_tp=2)
    assert totals(two)["release"] == totals(one)["release"] / 2
    assert totals(two)["generate"] - totals(two)["release"] == totals(one)["generate"] - totals(one)["release"]


# --- field cases --------------------------------------------------------------------------------------


def test_the_order_of_waking_changes_the_verdict_b14():
    load = {"group_size": 16, "prompts_per_gpu": 16, "seq_tokens": 4016}  # 55 GiB of KV, less 0.1
    late = fit(QWEN, CARD, num_gpus=8, **load, wake="together")
    early = fit(QWEN, CARD, num_gpus=8, **load, wake="weights_first")
    assert totals(late)["wake"] / GIB == pytest.approx(83.37, abs=0.1)
    assert late.breaks_first == ("wake", "KV pool")
    assert late.over == ["wake"]
    assert early.fits
    assert early.ledger.peak_bytes / GIB == pytest.approx(69.185, abs=0.1)


def test_a_replicated_base_leaves_no_room_for_the_engine_b09():
    load = {"group_size": 8, "seq_tokens": 2048, "lora_rank": 16, "trainer": "resident"}
    spec = ModelSpec.named("Qwen2.5-32B")
    replicated = fit(spec, CARD, num_gpus=8, strategy="ddp", engine_tp=4, **load)
    sharded = fit(spec, CARD, num_gpus=8, strategy="fsdp", engine_tp=4, **load)
    state = {name: found.parts()["trainer state"].max() / GIB for name, found in (("r", replicated), ("s", sharded))}
    assert state == {"r": pytest.approx(63.027, abs=5e-4), "s": pytest.approx(7.878, abs=5e-4)}
    assert replicated.breaks_first == ("generate", "trainer state")
    assert sharded.fits
    # Unsharded engines (a whole copy on each card) break first for another reason.
    assert fit(spec, CARD, num_gpus=8, strategy="ddp", **load).over[0] == "generate"


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_logits_break_a_small_model_whatever_the_sharding_b13(strategy):
    small = ModelSpec.named("Qwen3-0.6B")
    found = fit(small, 20e9, num_gpus=8, group_size=4, seq_tokens=3072, micro_batch=4, strategy=strategy)
    assert found.breaks_first == ("train", "logits and gradients of them")
    four_bytes = logits(4, 3072, 151_936).total
    assert four_bytes / GIB == pytest.approx(6.9551, abs=5e-5)
    assert found.parts().loc["train", "logits and gradients of them"] == 3.5 * four_bytes
    assert fit(small, 20e9, num_gpus=8, group_size=4, seq_tokens=3072, micro_batch=1, strategy=strategy).fits


# --- torch's own count --------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batch", "seq"), [(1, 16), (2, 512), (8, 2048)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-7B", "Qwen3-0.6B", "Llama-3.1-8B"])
def test_one_gpus_training_is_the_weighed_step_and_its_kept_gradients(name, checkpointing, micro_batch, seq):
    """`training_step` is within 5 % of MemTracker; here gradients are alive throughout, as between micro-batches."""
    spec, recipe = ModelSpec.named(name), RECIPES["bf16_pure"]
    load = {"micro_batch": micro_batch, "checkpointing": checkpointing, "recipe": "bf16_pure", "strategy": "ddp"}
    train = totals(fit(spec, CARD, num_gpus=1, group_size=1, seq_tokens=seq, **load))["train"]
    step = training_step(spec, recipe, micro_batch, seq, checkpointing=checkpointing, foreach=True)
    assert step.peak_bytes <= train <= step.peak_bytes + 2 * spec.num_params


@pytest.fixture
def fake_mesh():
    """Eight ranks that exist in name only; rank 0 is this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def fsdp_peak(config, mesh, batch, seq):
    """Most bytes on rank 0 in forward and backward, by FSDPMemTracker, over three micro-batches in two steps."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.zeros(batch, seq, dtype=torch.long)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            for num_micro_batches in (1, 2):
                for _ in range(num_micro_batches):
                    tracker.reset_mod_stats()
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    # The root's own snapshots: the optimizer's first step also propagates whole tensors, which no rank holds.
    root = next(stats for module, stats in tracker.memory_tracking.items() if module is model)
    at = [kinds for snapshots in root.snapshots.values() for each in snapshots for kinds in each.items()]
    return max(kinds["Total"] for device, kinds in at if str(device) == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "batch", "seq"),
    [
        ({}, 2, 512),
        ({"tie_word_embeddings": False}, 2, 512),
        ({"tie_word_embeddings": False}, 1, 64),
        ({"vocab_size": 500, "intermediate_size": 4000}, 1, 16),
        ({"vocab_size": 500, "intermediate_size": 4000}, 2, 256),
        ({"vocab_size": 4000, "intermediate_size": 4000, "tie_word_embeddings": False}, 2, 256),
    ],
)
def test_a_rank_of_eight_is_at_most_15_percent_above_fsdps_own_tracker(fake_mesh, changes, batch, seq):
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 768,
        "vocab_size": 20_000,
        "tie_word_embeddings": True,
        **changes,
    }
    load = {"micro_batch": batch, "checkpointing": False, "recipe": "bf16_pure"}
    found = fit(ModelSpec.from_config(config), CARD, num_gpus=8, group_size=1, seq_tokens=seq, **load)
    ratio = totals(found)["train"] / fsdp_peak(config, fake_mesh, batch, seq)
    assert 1 <= ratio <= 1.15


# --- order --------------------------------------------------------------------------------------------

plans = st.fixed_dictionaries(
    {
        "spec": st.sampled_from([ModelSpec.named(name) for name in ("Qwen2.5-7B", "SmolLM2-135M", "gpt-oss-20b")]),
        "gpu_bytes": st.sampled_from([16e9, 80e9]),
        "num_gpus": st.sampled_from([1, 2, 8, 64]),
        "group_size": st.integers(1, 64),
        "seq_tokens": st.integers(1, 40_000),
        "prompts_per_gpu": st.integers(1, 8),
        "micro_batch": st.integers(1, 8),
        "recipe": st.sampled_from(sorted(RECIPES)),
        "strategy": st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp"]),
        "checkpointing": st.booleans(),
        "placement": st.sampled_from(["colocated", "disaggregated"]),
        "trainer": st.sampled_from(["offloaded", "resident"]),
        "wake": st.sampled_from(["together", "weights_first"]),
    }
)


@settings(deadline=None)
@given(plans, st.sampled_from(["group_size", "seq_tokens", "prompts_per_gpu", "micro_batch"]), st.integers(1, 1000))
def test_more_load_never_takes_less_in_any_phase(plan, what, more):
    before, after = totals(fit(**plan)), totals(fit(**{**plan, what: plan[what] + more}))
    assert all(after[phase] >= before[phase] for phase in before)


@settings(deadline=None)
@given(plans, st.integers(2, 4))
def test_more_gpus_never_take_more_each(plan, times):
    before, after = totals(fit(**plan)), totals(fit(**{**plan, "num_gpus": plan["num_gpus"] * times}))
    assert all(after[phase] <= before[phase] for phase in before)


@settings(deadline=None)
@given(plans, st.floats(1, 4))
def test_a_larger_card_breaks_no_more_phases(plan, times):
    small, large = fit(**plan), fit(**{**plan, "gpu_bytes": plan["gpu_bytes"] * times})
    assert set(large.over) <= set(small.over)
    assert small.fits == (small.over == [])
    assert small.fits == (small.breaks_first is None) == (small.headroom_bytes >= 0)
    if not small.fits:
        phase, part = small.breaks_first
        names = list(totals(small))
        assert all(totals(small)[name] <= plan["gpu_bytes"] for name in names[: names.index(phase)])
        assert small.parts().loc[phase, part] == small.parts().loc[phase].max()


@settings(deadline=None)
@given(plans)
def test_parts_add_up_to_the_phases(plan):
    found = fit(**plan)
    assert found.parts().sum(axis=1).to_dict() == pytest.approx(totals(found))
    assert len(found.parts().columns) <= 7


# --- the map ------------------------------------------------------------------------------------------


def test_the_map_is_fit_cell_by_cell_and_has_both_limits():
    groups, lengths = [4, 64], [1024, 16_384, 32_768]
    table = fit_map(QWEN, 0.9 * CARD, 8, groups, lengths, prompts_per_gpu=4)
    assert list(zip(table["group_size"], table["seq_tokens"])) == [(g, n) for g in groups for n in lengths]
    for row in table.itertuples():
        found = fit(QWEN, 0.9 * CARD, 8, row.group_size, row.seq_tokens, prompts_per_gpu=4)
        assert row.peak_bytes == found.ledger.peak_bytes
        assert row.share == pytest.approx(found.ledger.peak_bytes / (0.9 * CARD))
        assert row.limited_by == ("fits" if found.fits else found.over[0])
    assert list(table["limited_by"]) == ["fits", "fits", "train", "fits", "generate", "generate"]
    assert table["part"].iloc[2] == "logits and gradients of them"


@settings(deadline=None, max_examples=20)
@given(plans)
def test_what_fits_in_the_map_fits_for_smaller_groups_and_lengths(plan):
    given_ = {name: value for name, value in plan.items() if name not in ("group_size", "seq_tokens")}
    table = fit_map(**given_, group_sizes=[1, 4, 16], lengths_tokens=[256, 2048, 16_384])
    is_fit = (table["limited_by"] == "fits").to_numpy().reshape(3, 3)
    assert (np.diff(is_fit.astype(int), axis=0) <= 0).all()
    assert (np.diff(is_fit.astype(int), axis=1) <= 0).all()


# --- faces and refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_models())
def test_every_known_model_gets_a_verdict_and_says_when_it_is_a_bound(name):
    spec = ModelSpec.named(name)
    found = fit(spec, CARD, num_gpus=8, group_size=2, seq_tokens=512)
    in_domain = spec.model_type in ("llama", "qwen2", "qwen3")
    assert found.is_lower_bound != in_domain
    assert any("not counted" in note for note in found.notes) != in_domain
    assert found.verdict.startswith(
        "Does not" if not found.fits else "Fits" if in_domain else "May fit (a lower bound)"
    )
    assert found.verdict.count("\n") == 0


def test_the_verdict_is_a_sentence_on_both_faces():
    found = fit(QWEN, 20 * GIB, num_gpus=8, group_size=16, seq_tokens=4096, trainer="resident")
    assert found.verdict == (
        "Does not fit: generate breaks first, 31.9 of 20.0 GiB, 14.2 of them engine weights; "
        "over as well: release, train, sync, wake."
    )
    for face in (str(found), found._repr_html_()):
        assert found.verdict in face
        assert "trainer: fsdp over 8 GPUs" in face
        assert "generate" in face
    odd = replace(found, notes=("a < b",))
    assert "a &lt; b" in odd._repr_html_()


def test_a_sliding_window_is_kept_and_said_so():
    found = fit(ModelSpec.named("gpt-oss-20b"), CARD, num_gpus=8, group_size=32, seq_tokens=8192)
    assert found.parts().loc["generate", "KV pool"] == 12 * GIB
    assert any("window are kept" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"spec": "Qwen2.5-7B"}, "spec='Qwen2.5-7B': needs a ModelSpec"),
        ({"gpu_bytes": 0}, "gpu_bytes=0: needs a finite number above 0"),
        ({"gpu_bytes": "80GB"}, "gpu_bytes='80GB': needs a finite number above 0"),
        ({"num_gpus": 0}, "num_gpus=0: needs a whole number of at least 1"),
        ({"num_gpus": 8.5}, "num_gpus=8.5: needs a whole number of at least 1"),
        ({"group_size": -1}, "group_size=-1: needs a whole number of at least 1"),
        ({"group_size": True}, "group_size=True: needs a whole number of at least 1"),
        ({"seq_tokens": "4k"}, "seq_tokens='4k': needs a whole number of at least 1"),
        ({"seq_tokens": float("nan")}, "seq_tokens=nan: needs a whole number of at least 1"),
        ({"prompts_per_gpu": None}, "prompts_per_gpu=None: needs a whole number of at least 1"),
        ({"micro_batch": 0}, "micro_batch=0: needs a whole number of at least 1"),
        ({"recipe": "adam"}, "recipe='adam': known are adafactor, adam_8bit, "),
        ({"lora_rank": 0}, "lora_rank=0: needs a whole number of at least 1"),
        ({"lora_rank": 8, "lora_targets": ["qkv"]}, "targets='qkv': known are down_proj"),
        ({"strategy": "hsdp"}, "strategy='hsdp': known are ddp, fsdp, zero1, zero2, zero3"),
        ({"placement": "shared"}, "placement='shared': known are colocated, disaggregated"),
        ({"trainer": "gone"}, "trainer='gone': known are offloaded, resident"),
        ({"wake": "kv_first"}, "wake='kv_first': known are together, weights_first"),
        ({"engine_tp": 0}, "engine_tp=0: needs a whole number of at least 1"),
        ({"engine_tp": 2, "num_gpus": 1}, "engine_tp=2: does not divide num_gpus=1"),
        ({"engine_tp": 3, "num_gpus": 3}, "tp=3: does not divide num_attention_heads=28"),
        ({"sync_bucket_bytes": -1}, "sync_bucket_bytes=-1: needs a finite number of at least 0"),
    ],
)
def test_a_wrong_argument_is_named(kwargs, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        fit(**{**SMALL, **kwargs})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [8, "8", None])
def test_a_map_needs_lists(values):
    with pytest.raises(ValueError, match=r"^lengths_tokens=.*: needs a list of whole numbers$"):
        fit_map(QWEN, CARD, 8, [8], values)
    with pytest.raises(ValueError, match=r"^group_sizes=.*: needs a list of whole numbers$"):
        fit_map(QWEN, CARD, 8, values, [8])
