"""OpenRLHF's record: an answer through the stack's executor and generator, into an Experience.

Leaves out vLLM and Ray, which the module imports and does not need here: mocks stand in for both.
"""

from __future__ import annotations

import asyncio
import tempfile
import types
from pathlib import Path

import torch
import transformers  # noqa: F401  before the stand-ins: it asks whether vllm and ray are installed

from ci.stack_recipes import Answers, stand_in, write

REWARD = """
import torch
def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": torch.tensor([1.0]), "scores": torch.tensor([1.0]), "extra_logs": {}}
"""


class Engine:
    """Hands on one answer in the form of vLLM's output."""

    def __init__(self, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        each = [{t: types.SimpleNamespace(logprob=x)} for t, x in zip(tokens, logprobs, strict=True)]
        self.output = types.SimpleNamespace(token_ids=tokens, logprobs=each, finish_reason=finish_reason, text="")

    async def generate(self, *_, **__):
        """vLLM's request output."""
        return types.SimpleNamespace(outputs=[self.output])


class Tokenizer:
    """Hands on the prompt's ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, **_):
        """The prompt as a batch of one."""
        return {"input_ids": torch.tensor([self.ids])}

    def decode(self, *_, **__) -> str:
        """No text is needed."""
        return ""


def main() -> None:
    """One answer cut off by the length limit: two tokens less than the policy gave."""
    stand_in("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies", "ray.util.queue")
    stand_in("vllm", "vllm.inputs", "vllm.utils")
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    given = Answers.given()
    params = types.SimpleNamespace(max_tokens=5, logprobs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(REWARD)
        executor = SingleTurnAgentExecutor(str(path))
        engine = Engine(given.tokens[0][:2], given.logprobs[0][:2], "length")
        answer = executor.execute(given.question, "0", params, 64, Tokenizer(given.prompt), engine)
        response = asyncio.run(answer)
    generator = SamplesGenerator.__new__(SamplesGenerator)
    experience = generator._process_response_into_experience(response, max_len=64)
    write(experience, "an answer of the tiny policy, through the stack's SingleTurnAgentExecutor and SamplesGenerator")


if __name__ == "__main__":
    main()
