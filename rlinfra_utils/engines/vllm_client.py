"""What a running vLLM server is asked for: generation, control log-probs, pause and resume, caches, metrics.

Models: one server over HTTP, its answers in the words of this package. Leaves out its life and its weights: `vllm.py`
starts it and loads them. Every failure is an `EngineError` of one line.
Use: through `VLLMServer`, which is a client of the server that it started.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

from rlinfra_utils.doors import choice, whole
from rlinfra_utils.engines.generation import Generation
from rlinfra_utils.engines.requests import check_ids
from rlinfra_utils.engines.vllm_process import EngineError, ServerProcess
from rlinfra_utils.engines.vllm_requests import (
    as_version,
    completions,
    prompt_logprobs,
    sampling_params,
    summed_metrics,
)
from rlinfra_utils.rollouts import Decoding

#: What becomes of requests in flight when weights change: finished before, ended with what they have, or gone on with.
InFlight = Literal["wait", "abort", "keep"]
#: Requests that are sent at once; the server queues what its slots do not hold.
NUM_CONNECTIONS = 64
#: The server's name for its adapter; its base has a name of its own, drawn at start.
ADAPTER = "adapter"


class VLLMClient:
    """A server as it is at this moment: nothing that it knows is remembered here, so another client's acts are seen.

    Each call raises EngineError where the server has ended, gives no answer in time, or refuses.
    """

    def __init__(self, process: ServerProcess, base: str, vocab_size: int) -> None:
        self._process, self._base, self.vocab_size = process, base, vocab_size

    def generate(
        self, prompt_ids: list[list[int]], decoding: Decoding, n: int = 1, seed: int | None = None
    ) -> Generation:
        """Sample `n` completions a prompt; behaviour log-probs are vLLM's processed ones, raw ones it does not give.

        Completion k of prompt i draws from `seed + i * n + k`. Each completion has `version_spans`: more than one if
        weights were loaded under it with in_flight="keep". Wall time is split into prefill and decode as the requests'
        own seconds in the server's metrics are: an estimate, since one request decodes while another is read.

        Raises ValueError for malformed prompts and a decoding that `sampling_params` refuses, EngineError for what
        the server refuses. While the server is paused it waits.
        """
        check_ids("prompt_ids", prompt_ids, self.vocab_size)
        params = sampling_params(decoding, self.vocab_size) | {"n": whole("n", n)}
        seeds = [{} if seed is None else {"seed": seed + index * n} for index in range(len(prompt_ids))]
        before, start_s = self._phase_s(), time.perf_counter()
        answers = self._ask(prompt_ids, [params | its_seed for its_seed in seeds])
        wall_s = time.perf_counter() - start_s
        prefill_s, decode_s = (after - earlier for after, earlier in zip(self._phase_s(), before))
        share = prefill_s / (prefill_s + decode_s) if prefill_s + decode_s > 0 else 0.0
        found = [
            completion
            for index, (answer, prompt) in enumerate(zip(answers, prompt_ids))
            for completion in completions(answer, index, prompt)
        ]
        return Generation(
            completions=found,
            prefill_s=share * wall_s,
            decode_s=(1 - share) * wall_s,
            num_prompt_tokens=sum(map(len, set(map(tuple, prompt_ids)))),
            num_new_tokens=sum(len(completion.tokens) for completion in found),
        )

    def control_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """log p(token | tokens before it) of all tokens but the first, nats, of the raw softmax at temperature 1.

        What the loaded weights say: vLLM reads such prompts past its prefix cache, so a cache that outlived an update
        stays hidden (and stays in use); only `generate` shows it. Raises as `generate` does.
        """
        check_ids("sequences", sequences, self.vocab_size)
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answers = self._ask(sequences, [params] * len(sequences))
        return [prompt_logprobs(answer, ids) for answer, ids in zip(answers, sequences)]

    @property
    def version(self) -> int:
        """The server's own label. Raises EngineError for one that is no number: somebody else set it."""
        return as_version(self._process.call("/weight_info")["weight_version"])

    @property
    def has_adapter(self) -> bool:
        """Whether the server has an adapter over its base, by its own list of models."""
        return ADAPTER in self._models()

    def pause(self, in_flight: InFlight = "wait") -> None:
        """Stop scheduling; requests sent from here on wait for `resume`. The prefix cache stays.

        Raises ValueError for another `in_flight`, EngineError where the server does not pause.
        """
        choice("in_flight", in_flight, get_args(InFlight))
        self._process.call(f"/pause?mode={in_flight}&clear_cache=false", {})

    def resume(self) -> None:
        """Schedule again."""
        self._process.call("/resume", {})

    @property
    def is_paused(self) -> bool:
        """Whether the server says that it is paused."""
        return self._process.call("/is_paused")["is_paused"]

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values; running requests are read again from their first token.

        Raises EngineError where the server does not.
        """
        if not self._process.call("/reset_prefix_cache?reset_running_requests=true", {})["success"]:
            raise EngineError("vLLM did not reset its prefix cache: it holds blocks that it cannot give up")

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 by tensor as the server gives it: of nothing at all (e3b0c442...) for layers that a CPU repacked."""
        return self._process.call("/weight_checker", {"action": "checksum"})["checksums"]

    def metrics(self) -> dict[str, float]:
        """The server's Prometheus counters and gauges, summed over their labels."""
        return summed_metrics(self._process.call("/metrics"))

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the server says its KV pool holds."""
        return self._cache_config("kv_cache_size_tokens")

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of the KV pool: a shared prefix is reused in whole blocks of it."""
        return self._cache_config("block_size")

    def _models(self, timeout_s: float | None = None) -> list[str]:
        return [model["id"] for model in self._process.call("/v1/models", timeout_s=timeout_s)["data"]]

    def _ask(self, sequences: list[list[int]], params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers to one request a sequence, all of them sent at once."""
        model = ADAPTER if self.has_adapter else self._base
        bodies = [{"model": model, "token_ids": ids, "sampling_params": its} for ids, its in zip(sequences, params)]
        with ThreadPoolExecutor(min(len(bodies), NUM_CONNECTIONS)) as pool:
            return list(pool.map(lambda body: self._process.call("/inference/v1/generate", body), bodies))

    def _set_version(self, version: int) -> None:
        self._process.call("/update_weight_version", {"new_version": str(version)})

    def _phase_s(self) -> tuple[float, float]:
        metrics = self.metrics()
        names = ("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")
        return tuple(metrics.get(name, 0.0) for name in names)

    def _cache_config(self, name: str) -> int:
        return int(re.search(rf'\b{name}="(\d+)"', self._process.call("/metrics"))[1])
