"""A real vLLM server of the tiny policy: what it serves after each kind of load, against torch."""

import copy
import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinfra_utils import engines, levels, policy
from rlinfra_utils.engines import EngineError, HFEngine, VLLMServer, vllm_process
from rlinfra_utils.engines import vllm as vllm_module
from rlinfra_utils.rollouts import Decoding

pytestmark = pytest.mark.vllm

EXACT = 2e-4  # nats; float32 here and there, other kernels
FREE = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=16, ignore_eos=True)
NUCLEUS = FREE.model_copy(update={"temperature": 0.8, "top_p": 0.9})
LONG = FREE.model_copy(update={"max_new_tokens": 220})
RANK, ALPHA = 4, 16


def moved(model, seed):
    """A copy of `model`, an update or so away."""
    model, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))
    return model


def adapted(model, folder, seed):
    """Save a random LoRA adapter in PEFT's layout; returns a copy of `model` with it merged in."""
    model, random, matrices = copy.deepcopy(model), torch.Generator().manual_seed(seed), {}
    for name in ("layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj", "layers.1.mlp.down_proj"):
        linear = model.model.get_submodule(name)
        a = 0.3 * torch.randn(RANK, linear.in_features, generator=random)
        b = 0.1 * torch.randn(linear.out_features, RANK, generator=random)
        linear.weight.data += ALPHA / RANK * b @ a
        matrices |= {f"base_model.model.model.{name}.lora_{side}.weight": m for side, m in (("A", a), ("B", b))}
    folder.mkdir()
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "gate_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def models(home):
    """The tied tiny policy and one after an update, saved under their names."""
    old, tokenizer = policy.load_warm_start()
    found = {"old": old, "new": moved(old, seed=1)}
    for name, model in found.items():
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    return found


@pytest.fixture(scope="module")
def running(home, models):
    assert levels.detect().vllm_python, "run `make vllm` first"
    with VLLMServer(home / "old", 7, dtype="float32", max_model_len=256, max_adapter_rank=8) as server:
        assert server.version == 7
        yield server
    assert is_gone(server._process.pid)


@pytest.fixture
def server(running, home):
    running.load(home / "old", 0)
    return running


def is_gone(group, patience_s=120):
    """Whether nothing of a process group is left; init has to collect what died."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def prompts():
    random = torch.Generator().manual_seed(3)
    return [torch.randint(3, 17, (size,), generator=random).tolist() for size in (5, 9, 3)]


def gap(model, completions, decoding=FREE, part=slice(None)):
    """Largest |trainer - behaviour|, nats, over `part` of the generated tokens."""
    largest = 0.0
    for completion in completions:
        ids = torch.tensor([completion.prompt_tokens + completion.tokens])
        with torch.no_grad():
            row = engines.teacher_forced_logprobs(model, ids, decoding=decoding)[0, len(completion.prompt_tokens) - 1 :]
        largest = max(largest, (row - torch.tensor(completion.behavior_logprobs))[part].abs().max().item())
    return largest


@pytest.mark.parametrize("decoding", [FREE, NUCLEUS], ids=["free", "nucleus"])
def test_each_load_is_what_it_serves(server, home, models, prompts, decoding):
    """Of a tied model, head and all."""
    for version, name, other in ((1, "new", "old"), (2, "old", "new")):
        server.load(home / name, version)
        completions = server.generate(prompts, decoding, n=2, seed=5).completions
        assert gap(models[name], completions, decoding) < EXACT
        assert gap(models[other], completions, FREE) > 0.1
        assert server.version == version
        assert {c.policy_version for c in completions} == {version}
        assert [c.prompt_index for c in completions] == [0, 0, 1, 1, 2, 2]
        assert all(c.prompt_tokens == prompts[c.prompt_index] for c in completions)


def test_seeds(server, prompts):
    first, second = (server.generate([prompts[0]] * 3, FREE, n=2, seed=11).completions for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in second]
    assert len({tuple(c.tokens) for c in first}) == 6
    alone = server.generate([prompts[0]], FREE, seed=11 + 3).completions[0]
    assert alone.tokens == first[3].tokens  # completion k of prompt i: seed + i * n + k


def test_an_end_of_sequence_is_the_last_token(server, prompts):
    completions = server.generate(prompts, LONG.model_copy(update={"ignore_eos": False}), n=4, seed=1).completions
    assert "eos" in {c.stop_reason for c in completions}
    assert all((c.tokens[-1] == 2) == (c.stop_reason == "eos") and 2 not in c.tokens[:-1] for c in completions)
    cut = server.generate(prompts, FREE.model_copy(update={"max_new_tokens": 3}))
    assert [(c.stop_reason, len(c.tokens)) for c in cut.completions] == [("length", 3)] * 3
    assert cut.num_new_tokens == 9
    assert min(cut.prefill_s, cut.decode_s) > 0


def save_untied(model, folder, head):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} | {"lm_head.weight": head}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


def without(state):
    del state["model.norm.weight"]


def transposed(state):
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].T.contiguous()


@pytest.mark.parametrize(("break_it", "message"), [(without, "lacks"), (transposed, "has shape")])
def test_weights_that_do_not_fit_leave_everything_as_it_was(server, home, models, prompts, tmp_path, break_it, message):
    state = load_file(home / "new" / "model.safetensors")
    break_it(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        server.load(tmp_path, 1)
    assert (server.version, server.is_paused) == (0, False)
    assert gap(models["old"], server.generate(prompts, FREE).completions) < EXACT


def test_a_head_of_its_own_is_refused_by_a_tied_server_unless_it_is_the_embedding(server, models, prompts, tmp_path):
    head = models["new"].model.embed_tokens.weight.detach()
    with pytest.raises(ValueError, match="differ, but the model ties them"):
        server.load(save_untied(models["new"], tmp_path / "apart", head + 1), 1)
    server.load(save_untied(models["new"], tmp_path / "same", head.clone()), 1)
    assert gap(models["new"], server.generate(prompts, FREE).completions) < EXACT


def test_adapters(server, home, models, prompts, tmp_path):
    merged = adapted(models["old"], tmp_path / "first", seed=1)
    second = adapted(models["old"], tmp_path / "second", seed=2)
    for version, name, model in ((1, "first", merged), (2, "second", second), (3, "first", merged)):
        server.load_adapter(tmp_path / name, version)
        completions = server.generate(prompts, FREE, n=2).completions
        assert gap(model, completions) < EXACT
        assert gap(models["old"], completions) > 0.1
        assert {c.policy_version for c in completions} == {server.version} == {version}
        sequences = [c.prompt_tokens + c.tokens for c in completions]  # several at once: vLLM issue 29955
        assert spread(server.control_logprobs(sequences), HFEngine(model).control_logprobs(sequences)) < EXACT
    server.load(home / "new", 4)
    assert not server.has_adapter
    assert gap(models["new"], server.generate(prompts, FREE).completions) < EXACT
    server.load_adapter(tmp_path / "first", 5)  # over a base that it was not trained on: only control log-probs tell
    assert spread(server.control_logprobs(sequences), HFEngine(merged).control_logprobs(sequences)) > 0.1


def spread(rows, others):
    return max(abs(a - b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True))


def test_a_cache_that_outlives_its_weights_shows_in_generation_only(server, home, models):
    held = [torch.randint(3, 17, (server.block_tokens + 60,), generator=torch.Generator().manual_seed(9)).tolist()]
    trusted = HFEngine(models["new"])
    assert gap(models["old"], server.generate(held, FREE, n=2).completions) < EXACT
    server.load(home / "new", 1, reset_cache=False)
    assert spread(server.control_logprobs(held), trusted.control_logprobs(held)) < EXACT
    assert gap(models["new"], server.generate(held, FREE, n=2).completions) > 100 * EXACT
    server.reset_prefix_cache()
    assert gap(models["new"], server.generate(held, FREE, n=2).completions) < EXACT


def test_checksums_of_packed_layers_do_not_change_with_their_weights(server, home):
    before = server.weight_checksums()
    server.load(home / "new", 1)
    after = server.weight_checksums()
    packed = [name for name in before if "qkv_proj" in name]
    assert packed
    assert all(before[name] == after[name] for name in packed)
    assert any(before[name] != after[name] for name in before)


def in_background(act):
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    return thread, found


def test_a_paused_server_answers_after_resume(server, prompts, home):
    server.pause()
    assert server.is_paused
    thread, found = in_background(lambda: server.generate(prompts, FREE))
    server.load(home / "new", 1)
    time.sleep(0.5)
    assert server.is_paused  # it was before the load
    assert not found
    server.resume()
    thread.join(300)
    assert {c.policy_version for c in found[0].completions} == {1}


def test_what_the_server_refuses_is_one_line(server):
    with pytest.raises(EngineError, match=r"refused /inference/v1/generate with 400.*256") as caught:
        server.generate([[3] * 300], FREE)
    assert "\n" not in str(caught.value)


def test_reload_weights_leaves_a_tied_head_on_the_old_weights(home, models, prompts, monkeypatch):
    """Why `VLLMServer` serves an untied view: the CPU backend packs the head on its own and does not pack it anew."""
    seen = vllm_module._config(home / "old")
    seen.tie_word_embeddings = False  # so that the server gets the folder as it is
    monkeypatch.setattr(vllm_module, "_config", lambda folder: seen)
    with VLLMServer(home / "old", dtype="float32", max_model_len=256) as server:
        server.load(home / "new", 1)
        completions = server.generate(prompts, FREE, n=2).completions
    assert gap(models["new"], completions) > 0.1
    mixture = copy.deepcopy(models["new"])  # body anew, head of old
    mixture.lm_head.weight = torch.nn.Parameter(models["old"].lm_head.weight.detach().clone())
    assert gap(mixture, completions) < EXACT


def tokens_of(server):
    """Tokens that it has generated so far."""
    return server.metrics()["vllm:generation_tokens_total"]


def test_a_server_that_hangs_then_dies_in_a_request(running, prompts, monkeypatch):
    """Last in this file: it ends the server."""
    monkeypatch.setattr(vllm_process, "DEATH_S", 60.0)
    group, request_s = running._process.pid, running._process.request_s
    os.killpg(group, signal.SIGSTOP)
    running._process.request_s = 2.0
    try:
        with pytest.raises(EngineError, match="timed out"):
            running.generate(prompts, FREE)
    finally:
        running._process.request_s = request_s
        os.killpg(group, signal.SIGCONT)
    assert running.generate(prompts, FREE).num_new_tokens == 48
    errors = []

    def ask():
        try:
            running.generate(prompts, LONG, n=16)
        except EngineError as error:
            errors.append(str(error))

    before = tokens_of(running)
    thread = threading.Thread(target=ask)
    thread.start()
    while tokens_of(running) == before:
        assert thread.is_alive()
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    thread.join(300)
    assert len(errors) == 1
    assert "ended with exit code -9" in errors[0]
