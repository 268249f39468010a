"""Rooflines against closed forms, torch's own FLOP counter, and brute force over the batch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import limits
from rlinfra_utils.memory import ModelSpec, known_models, kv_cache

DENSE = ModelSpec.named("Qwen2.5-7B")
MIXTURE = ModelSpec.named("Qwen3-30B-A3B")
MLA = ModelSpec.named("DeepSeek-V3")
H100 = limits.device("H100")


def test_a_dense_model_without_context_turns_compute_bound_at_the_ridge():
    # 2 FLOPs and 2 bytes a parameter: the batch where both times are equal is peak rate over bandwidth.
    for name in limits.known_devices():
        device = limits.device(name)
        dtype = "float16"
        ridge = device.flops_per_s[dtype] / device.bytes_per_s
        assert limits.compute_bound_batch(DENSE, device, 0, dtype) == math.floor(ridge) + 1


def test_decode_of_one_sequence_is_the_weights_over_the_bandwidth():
    bound = limits.decode(DENSE, H100, batch=1, context_tokens=0)
    assert bound.limit == "bandwidth"
    assert bound.tokens_per_s == pytest.approx(3350e9 / (2 * (7_615_616_512 - 152_064 * 3_584)))
    assert bound.share(bound.tokens_per_s / 4) == pytest.approx(0.25)


def test_long_contexts_keep_decode_bound_by_bandwidth():
    batches = [limits.compute_bound_batch(DENSE, H100, tokens) for tokens in (0, 256, 512, 8192)]
    assert batches == sorted(batches)
    assert batches[-1] == math.inf


@given(batch=st.integers(1, 600), context=st.integers(0, 700))
def test_the_batch_found_is_where_the_limit_changes(batch, context):
    turn = limits.compute_bound_batch(DENSE, H100, context)
    assert (limits.decode(DENSE, H100, batch, context).limit == "compute") == (batch >= turn)


@given(
    name=st.sampled_from(known_models()),
    batch=st.integers(1, 512),
    context=st.integers(0, 20_000),
    device=st.sampled_from(["L4", "A100-80GB", "H200", "B200"]),
)
def test_more_work_never_takes_less_time(name, batch, context, device):
    spec, device = ModelSpec.named(name), limits.device(device)
    base = limits.decode(spec, device, batch, context)
    for other in (limits.decode(spec, device, batch + 1, context), limits.decode(spec, device, batch, context + 64)):
        assert other.step_s >= base.step_s
    assert base.tokens_per_s == batch / max(base.bytes_s, base.flops_s)


def test_a_mixture_reads_all_experts_at_a_large_batch_and_few_at_a_small_one():
    one = limits.decode(MIXTURE, H100, 1, 0).bytes
    many = limits.decode(MIXTURE, H100, 4096, 0).bytes
    embedding = MIXTURE.vocab_size * MIXTURE.hidden_size  # not tied, so that a step reads only rows of it
    assert one == pytest.approx(2 * (MIXTURE.num_active_params - embedding))
    assert many == pytest.approx(2 * (MIXTURE.num_params - embedding))
    # Its rate at batch 1 is that of its active parameters; the gain is gone once every expert is read.
    assert limits.decode(MIXTURE, H100, 1, 0).tokens_per_s > 6 * limits.decode(MIXTURE, H100, 64, 0).tokens_per_s / 64


def test_experts_reached_agree_with_random_routing():
    import numpy as np

    random, tokens = np.random.default_rng(0), 20
    experts = [w for _, w in MIXTURE.weights() if w.active_experts is not None]
    num, active = experts[0].shape[0], experts[0].active_experts
    reached = [
        len({e for _ in range(tokens) for e in random.choice(num, active, replace=False)}) / num for _ in range(300)
    ]
    others = MIXTURE.num_params - sum(w.count for w in experts) - MIXTURE.vocab_size * MIXTURE.hidden_size
    share = (limits.decode(MIXTURE, H100, tokens, 0).bytes / 2 - others) / sum(w.count for w in experts)
    assert share == pytest.approx(np.mean(reached), abs=4 * np.std(reached) / 300**0.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "training"])
def test_flops_equal_torchs_own_counter(tied, stage):
    """FlopCounterMode counts the matrix products and attention of transformers' own passes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        if stage == "prefill":
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)
        else:
            model(ids, use_cache=False, labels=ids).loss.backward()
    spec = ModelSpec.from_config(config.to_dict())
    ours = getattr(limits, stage)(spec, H100, num_seqs=2, seq_tokens=32)
    # Ours has norms among the weights and half of each score matrix; the counter has whole score matrices.
    passes = 1 if stage == "prefill" else 3
    norms = 2 * (2 * 3 + 1) * 64 * 64 * passes
    half_scores = passes * 64 * 3 * 4 * 4 * 16 * 32 / 2
    assert ours.flops - norms + half_scores == counter.get_total_flops()


def test_training_is_three_forwards_and_four_with_recomputation():
    three, four = limits.training(DENSE, H100, 4, 2048), limits.training(DENSE, H100, 4, 2048, recompute=True)
    assert four.flops == pytest.approx(three.flops * 4 / 3)
    assert three.flops > 6 * (DENSE.num_params - 152_064 * 3_584) * 4 * 2048  # the rule 6 N D, and attention


def test_mla_decodes_in_the_latent():
    bound, empty = limits.decode(MLA, H100, 1, 1000), limits.decode(MLA, H100, 1, 0)
    assert bound.flops - empty.flops == 61 * 2 * 128 * (2 * 512 + 64) * 1000
    assert bound.bytes - empty.bytes == 70_272 * 1000


def test_concurrency_counts_whole_sequences_in_blocks():
    pool = 8 * 2**30
    per_seq = kv_cache(DENSE, 1008, 1).total  # 1,000 tokens are 63 blocks of 16
    assert limits.concurrency(DENSE, pool, 1000) == pool // per_seq
    assert limits.concurrency(DENSE, per_seq - 1, 1000) == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_this_machine_is_measured(backend):
    found = limits.measure(backend, seconds=0.2)
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.rate("float32") < 1e15
    with pytest.raises(ValueError, match="bfloat16"):
        found.rate("bfloat16")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: limits.device("H900"), "'H900'"),
        (lambda: limits.measure("jax"), "'jax'"),
        (lambda: limits.measure("numpy", dtype="bfloat16"), "bfloat16"),
        (lambda: limits.measure("torch", dtype="int3"), "int3"),
        (lambda: limits.measure(seconds=-1), "seconds=-1"),
        (lambda: limits.decode(DENSE, H100, 0, 10), "batch=0"),
        (lambda: limits.decode(DENSE, H100, math.nan, 10), "batch=nan"),
        (lambda: limits.decode(DENSE, H100, 1, -1), "context_tokens=-1"),
        (lambda: limits.decode(DENSE, H100, 1, 1, "int3"), "int3"),
        (lambda: limits.decode(DENSE, "H100", 1, 1), "device='H100': needs a Device"),
        (lambda: limits.prefill("Qwen3-4B", H100, 1, 1), "spec='Qwen3-4B': needs a ModelSpec"),
        (lambda: limits.decode(DENSE, H100, 2.5, 1), "batch=2.5"),
        (lambda: limits.device(["H100"]), "name=.*known devices are"),
        (lambda: limits.decode(DENSE, H100, "4", 1), "batch='4'"),
        (lambda: limits.prefill(DENSE, H100, 1, 0), "seq_tokens=0"),
        (lambda: limits.decode(DENSE, limits.device("T4"), 1, 1, "bfloat16"), "bfloat16"),
        (lambda: limits.concurrency(DENSE, 0, 10), "pool_bytes=0"),
    ],
)
def test_bad_input_is_one_line_that_names_it(call, named):
    with pytest.raises(ValueError, match=named) as caught:
        call()
    assert "\n" not in str(caught.value)
