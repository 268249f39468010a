"""The vLLM server: a real one against torch and the KV ledger, and stand-ins that die, hang and refuse."""

import os
import stat
import sys
import textwrap
import time

import pytest
import torch

from rlinfra_utils import engines, levels, memory
from rlinfra_utils.engines import EngineError, VLLMServer
from rlinfra_utils.engines import vllm as vllm_module
from rlinfra_utils.rollouts import Decoding

FREE = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=16)
NUCLEUS = FREE.model_copy(update={"temperature": 0.8, "top_p": 0.9})


@pytest.fixture(scope="module")
def small():
    return engines.load_small_model()


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smol")
    small.save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    assert levels.detect().vllm_python, "run `make vllm` first"
    with VLLMServer(folder, dtype="float32") as server:
        yield server
    assert is_gone(server._process.pid)


def is_gone(group, patience_s=30):
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
def prompts(small):
    return [small.tokenizer(text).input_ids for text in ("The capital of France is", "One, two, three, four,")]


def gaps(model, generation, decoding):
    """Largest |trainer - behaviour| of each completion, nats."""
    for completion in generation.completions:
        ids = torch.tensor([completion.prompt_tokens + completion.tokens])
        with torch.no_grad():
            trainer = engines.teacher_forced_logprobs(model, ids, decoding=decoding)[
                0, len(completion.prompt_tokens) - 1 :
            ]
        yield (trainer - torch.tensor(completion.behavior_logprobs)).abs().max().item()


@pytest.mark.vllm
def test_the_kv_pool_is_what_the_ledger_says(server):
    spec = memory.ModelSpec.named("SmolLM2-135M")
    assert server.kv_cache_tokens == memory.kv_capacity(spec, 2**30, dtype_bytes=4, block_tokens=128)


@pytest.mark.vllm
@pytest.mark.parametrize("decoding", [FREE, NUCLEUS], ids=["free", "nucleus"])
def test_at_zero_lag_it_agrees_with_the_trainer(server, small, prompts, decoding):
    generation = server.generate(prompts, decoding, n=3, seed=5)
    assert [c.prompt_index for c in generation.completions] == [0, 0, 0, 1, 1, 1]
    assert all(c.prompt_tokens == prompts[c.prompt_index] for c in generation.completions)
    assert max(gaps(small.model, generation, decoding)) < 5e-4
    assert generation.num_new_tokens == sum(len(c.tokens) for c in generation.completions)
    assert generation.prefill_s > 0
    assert generation.decode_s > 0


@pytest.mark.vllm
def test_the_same_seed_gives_the_same_answers(server, prompts):
    first, second = (server.generate(prompts, FREE, n=2, seed=11) for _ in range(2))
    assert [c.tokens for c in first.completions] == [c.tokens for c in second.completions]


@pytest.mark.vllm
def test_greedy_eos_and_length(server, small, prompts):
    greedy = FREE.model_copy(update={"temperature": 0.0, "max_new_tokens": 64})
    ended = [c for c in server.generate(prompts, greedy).completions if c.stop_reason == "eos"]
    assert all(c.tokens[-1] == small.tokenizer.eos_token_id for c in ended)
    cut = server.generate(prompts, greedy.model_copy(update={"max_new_tokens": 3})).completions
    assert [(c.stop_reason, len(c.tokens)) for c in cut] == [("length", 3)] * 2
    assert server.generate(prompts, greedy, seed=1).completions[1].tokens[:3] == cut[1].tokens


@pytest.mark.vllm
def test_reload_weights_leaves_a_tied_head_on_the_old_weights(server, small, folder, prompts, tmp_path):
    """Why `VLLMServer` has no `load`: the CPU backend packs the head on its own and does not pack it anew."""
    trained = engines.load_small_model(folder)
    with torch.no_grad():
        trained.model.get_input_embeddings().weight.mul_(1.05)
    trained.save(tmp_path / "v1")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "v1")}}
    server._call("/collective_rpc", reload)
    try:
        server._call("/reset_prefix_cache", {})
        generation = server.generate(prompts, FREE, seed=5)
    finally:
        server._call("/collective_rpc", {**reload, "kwargs": {"weights_path": str(folder)}})
        server._call("/reset_prefix_cache", {})
    assert max(gaps(trained.model, generation, FREE)) > 5e-3
    trained.model.lm_head.weight = torch.nn.Parameter(small.model.lm_head.weight.clone())  # body anew, head of old
    assert max(gaps(trained.model, generation, FREE)) < 5e-4


@pytest.mark.vllm
def test_what_the_server_refuses_is_one_line(server):
    with pytest.raises(EngineError, match=r"refused /v1/completions with 400.*512") as caught:
        server.generate([[1] * 600], FREE)
    assert "\n" not in str(caught.value)


def stand_in(tmp_path, body):
    """A "python" that runs `body` in place of vLLM's server; `port` is defined there."""
    script = tmp_path / "python"
    head = f"#!{sys.executable}\nimport sys, os, time\nport = int(sys.argv[sys.argv.index('--port') + 1])\n"
    script.write_text(head + textwrap.dedent(body))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 8}')
    return {"folder": tmp_path, "python": str(script)}


SERVES = """
    import http.server
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def do_POST(self):
            {post}
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_that_dies_at_start_is_named_with_its_last_line(tmp_path):
    broken = stand_in(tmp_path, "print('no such kernel'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"exit code 3; its last line: 'no such kernel'"):
        VLLMServer(**broken)


def test_a_server_that_never_serves_is_stopped(tmp_path):
    hung = stand_in(tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(EngineError, match=r"did not serve within 1\.5 s"):
        VLLMServer(**hung, startup_s=1.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_ignores_a_polite_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_module, "STOP_S", 0.5)
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(
        SERVES.format(post="pass")
    )
    server = VLLMServer(**stand_in(tmp_path, body), startup_s=20)
    server.close()
    assert server._process.returncode == -9
    server.close()


@pytest.mark.parametrize(
    ("post", "message"),
    [
        ("os._exit(7)", "ended with exit code 7|does not answer at /v1/completions"),
        ("time.sleep(60)", "does not answer at /v1/completions: timed out"),
        ("self.send_response(503); self.end_headers(); self.wfile.write(b'no\\nroom')", "with 503: no room"),
    ],
    ids=["dies", "hangs", "refuses"],
)
def test_a_request_that_fails_says_how(tmp_path, post, message):
    with VLLMServer(**stand_in(tmp_path, SERVES.format(post=post)), startup_s=20, request_s=1.5) as server:
        start_s = time.monotonic()
        with pytest.raises(EngineError, match=message):
            server.generate([[1, 2]], FREE)
        assert time.monotonic() - start_s < 30


def test_missing_parts_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_module, "detect", lambda: levels.Machine(cpu_model="x", cpu_count=1, memory_bytes=None))
    with pytest.raises(ValueError, match="make vllm"):
        VLLMServer(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        VLLMServer(tmp_path, python=sys.executable)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", None),
        ("temperature", None),
        ("logprobs_mode", "raw"),  # the server reports processed ones, so a record that says raw would be false
        ("banned_token_ids", [3]),
        ("stop", ["."]),
        ("repetition_penalty", 1.1),
        ("top_p", 0.0),
    ],
)
def test_a_decoding_that_cannot_be_recorded_truly_is_refused(tmp_path, field, value):
    with VLLMServer(**stand_in(tmp_path, SERVES.format(post="pass")), startup_s=20) as server:
        with pytest.raises(ValueError, match=field) as caught:
            server.generate([[1]], FREE.model_copy(update={field: value}))
        assert "\n" not in str(caught.value)
