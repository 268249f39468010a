"""The vLLM engine without vLLM: stand-ins that die, hang, lie and refuse, and what is turned away at the door."""

import http.server
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from engines_fakes import random_llama
from safetensors.torch import save_file

from rlinfra_utils import levels
from rlinfra_utils.engines import EngineError, HFEngine, VLLMServer, vllm_process, vllm_requests
from rlinfra_utils.engines import vllm as vllm_module
from rlinfra_utils.rollouts import Decoding

FREE = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=16)

SERVER = """
    import http.server, json
    name = sys.argv[sys.argv.index("--served-model-name") + 1]
    state = {{"weight_version": "default", "is_paused": False}}
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def answer(self, content, code=200, kind="application/json"):
            self.send_response(code); self.send_header("Content-Type", kind); self.end_headers()
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())
        def do_GET(self):
            if self.path == "/metrics":
                self.answer(b"", kind="text/plain")
            else:
                self.answer({{"data": [{{"id": name}}]}} | state)
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "{path}":
                {post}
            elif self.path == "/update_weight_version":
                state["weight_version"] = body["new_version"]
            elif self.path.startswith(("/pause", "/resume")):
                state["is_paused"] = self.path.startswith("/pause")
            self.answer({{"success": True}})
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def serves(post="pass", path="/inference/v1/generate"):
    return SERVER.format(post=post, path=path)


def stand_in(tmp_path, body):
    """A "python" that runs `body` in place of vLLM's server; `port` is defined there."""
    script = tmp_path / "python"
    head = f"#!{sys.executable}\nimport sys, os, time\nport = int(sys.argv[sys.argv.index('--port') + 1])\n"
    script.write_text(head + textwrap.dedent(body))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    save_file({"model.embed_tokens.weight": torch.zeros(8, 2)}, tmp_path / "model.safetensors")
    return {"folder": tmp_path, "python": str(script)}


def test_a_server_that_dies_at_start_is_named_with_its_last_line(tmp_path):
    broken = stand_in(tmp_path, "print('no such kernel'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"exit code 3; its last line: 'no such kernel'"):
        VLLMServer(**broken)


def test_a_server_that_never_serves_is_stopped(tmp_path, monkeypatch):
    started = []

    class Noted(vllm_process.ServerProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self.pid)

    monkeypatch.setattr(vllm_module, "ServerProcess", Noted)
    with pytest.raises(EngineError, match=r"did not serve within 1\.5 s"):
        VLLMServer(**stand_in(tmp_path, "time.sleep(600)"), startup_s=1.5)
    with pytest.raises(ProcessLookupError):
        os.killpg(started[0], 0)


def test_a_start_says_where_its_log_is_and_what_it_took(tmp_path, capsys):
    with VLLMServer(**stand_in(tmp_path, serves()), startup_s=20) as server:
        starts, serves_after = capsys.readouterr().err.splitlines()
    assert starts.endswith(f"its log: {server.log_path}")
    assert re.fullmatch(r"vLLM serves after \d+ s", serves_after)


class Foreigner(http.server.BaseHTTPRequestHandler):
    """Somebody else's server, healthy and of another model."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "other"}]}).encode())


def test_a_port_that_another_server_took_is_not_mistaken_for_ours(tmp_path, monkeypatch):
    """vLLM takes a minute to find out that its port is taken: meanwhile the other one answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreigner) as foreigner:
        threading.Thread(target=foreigner.serve_forever, daemon=True).start()
        monkeypatch.setattr(vllm_module, "free_port", lambda: foreigner.server_port)
        with pytest.raises(EngineError, match=r"within 1\.5 s \(http://127.0.0.1:\d+ is another server's.* other\)"):
            VLLMServer(**stand_in(tmp_path, "time.sleep(600)"), startup_s=1.5)
        foreigner.shutdown()


def test_a_server_that_ignores_a_polite_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_process, "STOP_S", 0.5)
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + textwrap.dedent(serves())
    server = VLLMServer(**stand_in(tmp_path, body), startup_s=60)
    server.close()
    assert server._process._process.returncode == -signal.SIGKILL
    server.close()
    assert server.log_path.exists()


@pytest.mark.parametrize(
    ("post", "message"),
    [
        ("os._exit(7)", "ended with exit code 7"),
        ("time.sleep(600)", "does not answer at /inference/v1/generate: timed out"),
        ("return self.answer(b'no\\nroom', 503)", "with 503: no room"),
        ("return self.answer(b'{\"choices\": [', 200)", "something that is not JSON"),
        (
            "self.send_response(200); self.send_header('Content-Length', '99'); self.end_headers(); os._exit(5)",
            "code 5",
        ),
    ],
    ids=["dies", "hangs", "refuses", "half an answer", "dies in the answer"],
)
def test_a_request_that_fails_says_how(tmp_path, monkeypatch, post, message):
    limit_s = 3.0 if "timed out" in message else 60.0
    with VLLMServer(**stand_in(tmp_path, serves(post)), startup_s=60) as server:
        server._process.request_s = limit_s
        monkeypatch.setattr(vllm_process, "DEATH_S", 60.0)
        with pytest.raises(EngineError, match=message) as caught:
            server.generate([[1, 2]], FREE)
        assert "\n" not in str(caught.value)


def test_a_load_that_fails_half_way_stops_the_server(tmp_path):
    """What it holds then is unknown: with vLLM 0.32.0 the next request would kill it."""
    body = serves("return self.answer({'error': 'disk'}, 500)", "/collective_rpc")
    with VLLMServer(**stand_in(tmp_path, body), startup_s=60) as server:
        with pytest.raises(EngineError, match=r"version 1 did not load, so the server was stopped.*500.*disk"):
            server.load(tmp_path, 1)
        with pytest.raises(EngineError, match="ended with exit code"):
            server.generate([[1]], FREE)


def test_a_pause_that_takes_too_long_leaves_version_and_scheduling(tmp_path):
    body = serves("time.sleep(600)", "/pause?mode=wait&clear_cache=false")
    with VLLMServer(**stand_in(tmp_path, body), startup_s=60, version=4) as server:
        server._process.request_s = 3.0
        with pytest.raises(EngineError, match=r"/pause.*timed out"):
            server.load(tmp_path, 5)
        assert (server.version, server.is_paused) == (4, False)


def test_loads_of_two_callers_come_one_after_the_other(tmp_path):
    """A pause that one load still waits for is not taken by another for a pause from before."""
    said = tmp_path / "said"
    body = serves("time.sleep(1.0)", "/pause?mode=wait&clear_cache=false").replace(
        "body = json", f"open({str(said)!r}, 'a').write(self.path.split('?')[0] + ' '); body = json", 1
    )
    with VLLMServer(**stand_in(tmp_path, body), startup_s=60) as server:
        said.unlink()
        first = threading.Thread(target=server.load, args=(tmp_path, 1))
        first.start()
        while not said.exists():
            assert first.is_alive()
            time.sleep(0.01)
        server.load(tmp_path, 2)
        first.join(60)
        load = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert said.read_text().split() == 2 * load
        assert server.version == 2


def test_a_label_that_no_load_set_is_refused(tmp_path):
    with VLLMServer(**stand_in(tmp_path, serves()), startup_s=60, version=3) as server:
        assert server.version == 3
        server._process.call("/update_weight_version", {"new_version": "main"})
        with pytest.raises(EngineError, match="'main', which no load of ours set"):
            _ = server.version


def test_missing_parts_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_module, "detect", lambda: levels.Machine(cpu_model="x", cpu_count=1, memory_bytes=None))
    with pytest.raises(ValueError, match="make vllm"):
        VLLMServer(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        VLLMServer(tmp_path, python=sys.executable)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ValueError, match=r"its config\.json cannot be read"):
        VLLMServer(tmp_path, python=sys.executable)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"with \.safetensors files"):
        VLLMServer(tmp_path, python=sys.executable)


BAD_CALLS = {
    "decoding.max_new_tokens=None": lambda server: server.generate([[1]], Decoding(temperature=1.0)),
    "prompt_ids=\\[\\]": lambda server: server.generate([], FREE),
    "prompt_ids\\[1\\]=\\[\\]": lambda server: server.generate([[1], []], FREE),
    "prompt_ids\\[0\\]=\\[8\\]": lambda server: server.generate([[8]], FREE),
    "prompt_ids\\[0\\]=1": lambda server: server.generate([1], FREE),
    "n=0": lambda server: server.generate([[1]], FREE, n=0),
    "sequences\\[0\\]=\\[True\\]": lambda server: server.control_logprobs([[True]]),
    "version=-1": lambda server: server.load(server._home, -1),
    "version='1'": lambda server: server.load(server._home, "1"),
    "in_flight='drop'": lambda server: server.pause("drop"),
    "max_adapter_rank=None": lambda server: server.load_adapter(server._home, 1),
}
BAD_FIELDS = {
    "temperature": None,
    "logprobs_mode": "raw",  # the server reports processed ones, so a record that says raw would be false
    "banned_token_ids": [3],
    "stop": ["."],
    "repetition_penalty": 1.1,
    "top_p": 0.0,
    "max_new_tokens": 0,
}


def test_what_cannot_be_asked_is_refused_in_one_line(tmp_path):
    with VLLMServer(**stand_in(tmp_path, serves()), startup_s=60) as server:
        for message, call in BAD_CALLS.items():
            with pytest.raises(ValueError, match=message) as caught:
                call(server)
            assert "\n" not in str(caught.value)
        for field, value in BAD_FIELDS.items():
            with pytest.raises(ValueError, match=field) as caught:
                server.generate([[1]], FREE.model_copy(update={field: value}))
            assert "\n" not in str(caught.value)


def test_a_completion_keeps_the_versions_of_its_tokens():
    choice = {
        "token_ids": [5, 6, 7],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": 0.0}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    nothing = {"token_ids": [], "finish_reason": "abort", "logprobs": None, "weight_versions": []}
    answer = {"choices": [{"index": 1} | nothing, {"index": 0} | choice]}
    mixed, aborted = vllm_requests.completions(answer, 2, [1, 2])
    assert (mixed.tokens, mixed.behavior_logprobs, mixed.stop_reason) == ([5, 6, 7], [-0.5, -1.5, 0.0], "length")
    assert mixed.policy_version == 3
    assert [(s.start, s.end, s.version) for s in mixed.version_spans] == [(0, 1, 3), (1, 3, 4)]
    assert (aborted.tokens, aborted.stop_reason, aborted.policy_version) == ([], "abort", -1)


def test_metrics_are_summed_over_their_labels():
    text = '# HELP vllm:a x\nvllm:a{engine="0",why="}"} 2.0\nvllm:a{engine="1"} 0.5\nvllm:b 1e3\nprocess_x 3\n'
    assert vllm_requests.summed_metrics(text) == {"vllm:a": 2.5, "vllm:b": 1000.0}


@pytest.mark.parametrize("tied", [True, False])
def test_control_logprobs_of_the_other_engine_are_those_of_the_bare_sequence(tied):
    model = random_llama(tied=tied).train()
    sequences = [[1, 2, 3, 4, 5, 6], [7, 8], [9]]
    found = HFEngine(model).control_logprobs(sequences)
    assert model.training
    assert list(map(len, found)) == [5, 1, 0]
    for ids, row in zip(sequences, found):
        with torch.no_grad():
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert row == pytest.approx([table[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-5)
    with pytest.raises(ValueError, match="some of length 0"):
        HFEngine(model).control_logprobs([[1, 2], []])


def test_a_server_that_nobody_closed_ends_with_its_owner(tmp_path):
    """A kernel that is restarted, a script that raises: no stray process."""
    code = f"""
from pathlib import Path
from rlinfra_utils.engines.vllm_process import ServerProcess
server = ServerProcess(["sleep", "600"], {{}}, Path({str(tmp_path / "log")!r}), "http://127.0.0.1:1", 1.0)
print(server.pid, flush=True)
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    with pytest.raises(ProcessLookupError):
        os.killpg(int(done.stdout), 0)
