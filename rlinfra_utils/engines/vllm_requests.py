"""What is asked of a vLLM server and what it answers, in the words of this package.

Models: the bodies of POST /inference/v1/generate (tokens in, tokens out, with the weight version of each token),
and the Prometheus text of GET /metrics. Leaves out sending them. Source: vLLM 0.32.0, entrypoints/scale_out.
"""

from __future__ import annotations

import re
from typing import Any

from rlinfra_utils.engines.generation import Completion
from rlinfra_utils.engines.requests import limited
from rlinfra_utils.engines.vllm_process import EngineError
from rlinfra_utils.rollouts import Decoding, VersionSpan

#: vLLM's finish reasons in the words of the rollout record: stop strings are refused, so only an EOS token stops.
STOP_REASONS = {"stop": "eos", "length": "length", "abort": "abort"}


def sampling_params(decoding: Decoding, vocab_size: int) -> dict[str, Any]:
    """vLLM's name for each field of `decoding`.

    Raises ValueError for a decoding that `sampling.resolve` refuses, that bans tokens or lacks max_new_tokens.
    """
    decoding = limited(decoding, vocab_size)
    if decoding.banned_token_ids:
        raise ValueError(f"decoding.banned_token_ids={decoding.banned_token_ids!r}: needs to be empty for this engine")
    return {
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "min_p": decoding.min_p,
        "ignore_eos": decoding.ignore_eos,
        "logprobs": 0,
        "detokenize": False,
    }


def as_version(label: str) -> int:
    """The server's label as a version. Raises EngineError for one that is no whole number: somebody else set it."""
    if not re.fullmatch(r"\d+", label):
        raise EngineError(f"the server's weight version is {label!r}, which no load of ours set: load again")
    return int(label)


def completions(answer: dict[str, Any], prompt_index: int, prompt: list[int]) -> list[Completion]:
    """The completions of one prompt, in the order of their index.

    One that was aborted before its first token has no span, and version -1 (nothing was sampled).
    """
    found = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        spans = [
            VersionSpan(start=span["start"], end=span["end"], version=as_version(span["version"]))
            for span in choice["weight_versions"] or []
        ]
        content = choice["logprobs"]["content"] if choice["logprobs"] else []
        found.append(
            Completion(
                prompt_index=prompt_index,
                prompt_tokens=list(prompt),
                tokens=choice["token_ids"],
                behavior_logprobs=[token["logprob"] for token in content],
                raw_logprobs=None,
                stop_reason=STOP_REASONS[choice["finish_reason"]],
                policy_version=spans[0].version if spans else -1,
                version_spans=spans,
            )
        )
    return found


def prompt_logprobs(answer: dict[str, Any], ids: list[int]) -> list[float]:
    """Log-prob of each of `ids` but the first."""
    return [by_id[str(id_)]["logprob"] for by_id, id_ in zip(answer["prompt_logprobs"][1:], ids[1:])]


def summed_metrics(text: str) -> dict[str, float]:
    """Prometheus counters and gauges of vLLM, summed over their labels."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values
