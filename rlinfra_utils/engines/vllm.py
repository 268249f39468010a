"""A real vLLM server as an engine: a process of its own, from an environment of its own, spoken to over loopback.

Models: generation from token ids with the behaviour policy's log-probs and the version of each token, weights and
adapters loaded while it serves, pause and resume, control log-probs, metrics. Leaves out streaming and text. Needs
`make vllm`, or RLINFRA_VLLM_PYTHON naming a Python that has vLLM.
Use: `with VLLMServer(folder) as engine: engine.generate(prompt_ids, decoding, n=4); engine.load(folder, 1)`.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from rlinfra_utils.engines.requests import checked_version
from rlinfra_utils.engines.vllm_client import ADAPTER, InFlight, VLLMClient
from rlinfra_utils.engines.vllm_folder import ADAPTED_MODULES, check_adapter, require_same, untied_view
from rlinfra_utils.engines.vllm_process import EngineError, ServerProcess
from rlinfra_utils.levels import detect, free_port, vllm_options


class VLLMServer(VLLMClient):
    """One vLLM server on 127.0.0.1.

    Life: the constructor starts it and returns once it serves; `generate`, `load` and the rest; `close` (or the end of
    a with block) stops it and every process that it started. Invariant: `version` is the server's own label, set once
    the weights it names are loaded; a load that fails half-way stops the server, so that a mixture is never served.
    Trap: the label is free text, and so proves nothing: `control_logprobs` does, and for a prefix cache that outlived
    its weights only `generate` from prompts of `block_tokens` and more.

    A tied head is served untied (see `vllm_folder.py`), which costs the memory of a second embedding.
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
        max_adapter_rank: int | None = None,
        startup_s: float = 240.0,
        request_s: float = 300.0,
    ) -> None:
        """Serve the Hugging Face folder `folder`; `kv_cache_gib` sizes the KV pool of a CPU.

        `max_adapter_rank`: LoRA adapters up to this rank may be loaded; none if left out. Two lines on stderr say where
        the log is and, once the server serves, how long that took.
        Raises ValueError for a folder that cannot be served or no vLLM environment, EngineError if the server does
        not serve within `startup_s` seconds.
        """
        checked_version(version)
        python = python or detect().vllm_python
        if python is None:
            raise ValueError("python=None: no vLLM environment here; run `make vllm` or set RLINFRA_VLLM_PYTHON")
        config = _config(folder)
        self._tied, self._max_adapter_rank = config.tie_word_embeddings, max_adapter_rank
        self._one_swap = threading.Lock()
        self._home = Path(tempfile.mkdtemp(prefix="vllm-"))
        self._shapes = untied_view(folder, self._home / "served", self._tied)
        options = ["--dtype", dtype, "--max-model-len", max_model_len, "--max-num-seqs", max_num_seqs]
        options += vllm_options(detect().capability)
        if max_adapter_rank is not None:
            # Without its head among the adapted modules: with it, prompt log-probs crash the server (vLLM issue 29955).
            options += ["--enable-lora", "--max-lora-rank", max_adapter_rank, "--lora-target-modules", *ADAPTED_MODULES]
        base = f"policy-{secrets.token_hex(4)}"
        super().__init__(self._start(python, base, options, kv_cache_gib, request_s), base, config.vocab_size)
        start_s = time.perf_counter()
        print(f"vLLM is starting; its log: {self.log_path}", file=sys.stderr)
        try:
            self._process.wait(self._require_serving, startup_s)
            self._set_version(version)
        except BaseException:
            self.close()
            raise
        print(f"vLLM serves after {time.perf_counter() - start_s:.0f} s", file=sys.stderr)

    def load(self, path: str | Path, version: int, reset_cache: bool = True, in_flight: InFlight = "wait") -> None:
        """Serve the safetensors in folder `path` as `version`, on their own: an adapter is taken off.

        Requests in slots: "wait" for their end, "abort" them with the tokens they have (those without a slot as well),
        or "keep" them: they go on under the new weights, read again from their first token, or on their old KV if
        `reset_cache` is False. Requests that wait for a slot are answered by the new weights. With `reset_cache`
        False the prefix cache keeps the keys and values of the old weights as well, and prompts that hit it are
        answered by neither policy: for showing what goes wrong.

        Raises ValueError, with the server as it was, unless `path` has the names and shapes of the served weights
        (values are not looked at); EngineError after stopping the server if it fails half-way.
        """
        checked_version(version)
        staging = Path(tempfile.mkdtemp(dir=self._home))
        try:
            require_same(untied_view(path, staging / "view", self._tied), self._shapes, path)
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(staging / "view")}}

            def change() -> None:
                if self.has_adapter:
                    self._process.call("/v1/unload_lora_adapter", {"lora_name": ADAPTER})
                self._process.call("/collective_rpc", rpc)

            self._swap(change, version, reset_cache, in_flight)
        finally:
            shutil.rmtree(staging)

    def load_adapter(
        self, path: str | Path, version: int, reset_cache: bool = True, in_flight: InFlight = "wait"
    ) -> None:
        """Serve the LoRA adapter in folder `path` (PEFT's layout) over the loaded base as `version`.

        It takes the place of the adapter before it, and stays until `load`. Raises ValueError, with the server as it
        was, for a server started without `max_adapter_rank` and an adapter that does not fit the base; otherwise as
        `load`. That the base is the one it was trained on, only control log-probs show.
        """
        checked_version(version)
        if self._max_adapter_rank is None:
            raise ValueError("max_adapter_rank=None: start the server with the rank of the largest adapter")
        check_adapter(path, self._shapes, self._max_adapter_rank)
        # vLLM keeps the blocks of an adapter apart from those of the base and of the adapter it replaces.
        body = {"lora_name": ADAPTER, "lora_path": str(Path(path).resolve()), "load_inplace": self.has_adapter}
        self._swap(lambda: self._process.call("/v1/load_lora_adapter", body), version, reset_cache, in_flight)

    @property
    def log_path(self) -> Path:
        """The server's log, which stays after `close`."""
        return self._home / "server.log"

    def require_alive(self) -> None:
        """Raise EngineError, with exit code and last line of the log, if the server has ended."""
        self._process.require_alive()

    def close(self) -> None:
        """Stop the server and what it started; closing twice does nothing."""
        self._process.close()
        shutil.rmtree(self._home / "served", ignore_errors=True)

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, python: str, base: str, options: list[Any], kv_cache_gib: int, request_s: float) -> ServerProcess:
        port = free_port()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._home / "served")]
        command += ["--served-model-name", base, "--host", "127.0.0.1", "--port", str(port)]
        # Only what a request says: without this, generation_config.json would add a repetition penalty of its own.
        command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        command += ["--enforce-eager", "--enable-scale-out", *map(str, options)]
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # pause, reload_weights, reset_prefix_cache
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return ServerProcess(command, environment, self.log_path, f"http://127.0.0.1:{port}", request_s)

    def _require_serving(self) -> None:
        """Ours, by the name drawn for it: another server may have taken the port between our look and our start."""
        if self._base not in (names := self._models(timeout_s=5)):
            raise EngineError(f"{self._process.address} is another server's, which serves {', '.join(names)}")

    def _swap(self, change: Callable[[], Any], version: int, reset_cache: bool, in_flight: InFlight) -> None:
        """Pause, change the weights, label them, resume; a server that was paused before stays so.

        One at a time: a caller that gave up leaves its load waiting here, and its pause is not one from before.
        """
        with self._one_swap:
            self._swap_alone(change, version, reset_cache, in_flight)

    def _swap_alone(self, change: Callable[[], Any], version: int, reset_cache: bool, in_flight: InFlight) -> None:
        was_paused = self.is_paused
        if not was_paused:
            self._pause_or_go_on(in_flight)
        try:
            change()
            if reset_cache:
                self.reset_prefix_cache()
            self._set_version(version)
        except EngineError as error:
            self.close()
            raise EngineError(f"version {version} did not load, so the server was stopped: {error}") from error
        if not was_paused:
            self.resume()

    def _pause_or_go_on(self, in_flight: InFlight) -> None:
        try:
            self.pause(in_flight)
        except EngineError:
            with contextlib.suppress(EngineError):
                self.resume()  # "wait" may have met a request that takes longer than request_s
            raise


def _config(folder: str | Path) -> PreTrainedConfig:
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r}: has no config.json; save a model there first")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"folder={str(folder)!r}: its config.json cannot be read: {reason}") from None
