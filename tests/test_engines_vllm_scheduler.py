"""A real vLLM server of the 135M model: agreement at zero lag, KV pool, scheduler, and loads under running requests."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlinfra_utils import engines, levels, memory
from rlinfra_utils.engines import HFEngine, VLLMServer
from rlinfra_utils.rollouts import Decoding

pytestmark = [pytest.mark.vllm, pytest.mark.model]

NUM_SLOTS = 8
FREE = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=16)


@pytest.fixture(scope="module")
def small():
    return engines.load_small_model()


@pytest.fixture(scope="module")
def server(small, tmp_path_factory):
    assert levels.detect().vllm_python, "run `make vllm` first"
    folder = tmp_path_factory.mktemp("smol")
    small.save(folder)
    with VLLMServer(folder, dtype="float32", max_num_seqs=NUM_SLOTS) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(small):
    return [small.tokenizer(text).input_ids for text in ("The capital of France is", "One, two, three, four,")]


def difference(server, act, *names):
    before = server.metrics()
    act()
    after = server.metrics()
    return [after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in names]


def test_the_kv_pool_is_what_the_ledger_says(server):
    spec = memory.ModelSpec.named("SmolLM2-135M")
    assert server.kv_cache_tokens == memory.kv_capacity(spec, 2**30, dtype_bytes=4, block_tokens=server.block_tokens)


def test_at_zero_lag_it_agrees_with_the_trainer(server, small, prompts):
    completions = server.generate(prompts, FREE, n=3, seed=5).completions
    sequences = [c.prompt_tokens + c.tokens for c in completions]
    trainer = HFEngine(small.model).control_logprobs(sequences)
    for completion, row, control in zip(completions, trainer, server.control_logprobs(sequences)):
        assert completion.behavior_logprobs == pytest.approx(row[len(completion.prompt_tokens) - 1 :], abs=5e-4)
        assert control == pytest.approx(row, abs=5e-4)


def test_a_group_reads_the_whole_blocks_of_its_prompt_once(server, small):
    """Seven of eight find them; the rest of the prompt each reads for itself."""
    block = server.block_tokens
    prompt = (small.tokenizer("A queue met a server and asked how long it would take. ").input_ids * 60)[
        : 3 * block + 16
    ]
    ask = lambda: server.generate([prompt], FREE.model_copy(update={"max_new_tokens": 2}), n=8)  # noqa: E731
    server.reset_prefix_cache()
    for found in (7 * 3 * block, 8 * 3 * block):  # the second group finds all that the first one left
        hits, queries = difference(server, ask, "prefix_cache_hits_total", "prefix_cache_queries_total")
        assert (hits, queries) == (found, 8 * len(prompt))
    server.reset_prefix_cache()
    assert difference(server, ask, "prefix_cache_hits_total") == [7 * 3 * block]


def test_a_freed_slot_is_filled_at_once(server, prompts):
    """Steps of static batches: the longest of each. Of continuous batching: Graham's bounds (1969), in any order."""
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.9, 32), 2, 100).astype(int).tolist()
    free = FREE.model_copy(update={"ignore_eos": True})

    def ask(num_tokens):
        server.generate([prompts[0]], free.model_copy(update={"max_new_tokens": num_tokens}))

    def send(batch):
        """All at one moment: while the server is paused, requests wait at its door."""
        server.pause("keep")
        with ThreadPoolExecutor(len(batch)) as pool:
            asked = [pool.submit(ask, num_tokens) for num_tokens in batch]
            time.sleep(1.0 + len(batch) / 8)
            server.resume()
            for each in asked:
                each.result()

    batches = [lengths[i : i + NUM_SLOTS] for i in range(0, len(lengths), NUM_SLOTS)]
    counters = ("iteration_tokens_total_count", "generation_tokens_total")
    static_steps, static_tokens = difference(server, lambda: list(map(send, batches)), *counters)
    steps, tokens = difference(server, lambda: send(lengths), *counters)
    assert tokens == static_tokens == sum(lengths)
    assert static_steps == pytest.approx(sum(map(max, batches)), rel=0.1)
    assert sum(lengths) / NUM_SLOTS <= steps <= 1.1 * (sum(lengths) / NUM_SLOTS + max(lengths))
    assert steps < 0.9 * static_steps


@pytest.fixture(scope="module")
def folders(small, tmp_path_factory):
    """The model and one that is some updates away: folder by version."""
    home = tmp_path_factory.mktemp("versions")
    changed = copy.deepcopy(small.model)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=draw)
    models = [small.model, changed]
    for version, model in enumerate(models):
        engines.SmallModel(model, small.tokenizer, {"version": version}).save(home / str(version))
    return home, [HFEngine(model) for model in models]


@pytest.mark.parametrize(
    ("in_flight", "reset_cache"), [("wait", True), ("abort", True), ("keep", True), ("keep", False)]
)
def test_requests_in_flight_at_a_load_record_their_versions(
    server, folders, prompts, in_flight, reset_cache, monkeypatch
):
    """12 completions on 8 slots: at the load some are running and some are waiting for a slot."""
    home, trainers = folders
    server.load(home / "0", 0)
    long = FREE.model_copy(update={"max_new_tokens": 192, "ignore_eos": True})
    asked, pause = [], server.pause

    def pause_midway(mode):
        """Asked for only here, so that the time a load takes to prepare is none of theirs."""
        started = server.metrics()["vllm:generation_tokens_total"]
        asked.append(pool.submit(server.generate, prompts, long, 6, 1))
        while server.metrics()["vllm:generation_tokens_total"] < started + 80:
            assert not asked[0].done()
            time.sleep(0.01)
        pause(mode)

    monkeypatch.setattr(server, "pause", pause_midway)
    with ThreadPoolExecutor(1) as pool:
        server.load(home / "1", 1, reset_cache, in_flight)
        found = asked[0].result()
    assert server.version == 1
    versions, mixture_tokens = [], [0]
    for completion in found.completions:
        spans, num_prompt = completion.version_spans, len(completion.prompt_tokens)
        versions.append([span.version for span in spans])
        assert completion.stop_reason in ("length", in_flight)
        assert (len(completion.tokens) < 192) == (completion.stop_reason == "abort")
        assert completion.policy_version == (spans[0].version if spans else -1)
        for span in spans:
            (row,) = trainers[span.version].control_logprobs([completion.prompt_tokens + completion.tokens])
            gap_nats = np.abs(np.subtract(row[num_prompt - 1 :], completion.behavior_logprobs))[
                span.start : span.end
            ].max()
            is_mixture = in_flight == "keep" and not reset_cache and span.version == 1 and span.start > 0
            if is_mixture:  # new weights on keys of the old ones; a token or two may agree by chance
                mixture_tokens.append(span.end - span.start)
                assert gap_nats > 5e-3 or span.end - span.start < 8
            else:
                assert gap_nats < 5e-4
    assert {"wait": [0], "abort": [0], "keep": [0, 1]}[in_flight] in versions
    assert in_flight == "keep" or [0, 1] not in versions
    assert (max(mixture_tokens) >= 8) == (in_flight == "keep" and not reset_cache)
