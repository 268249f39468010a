"""SkyRL's record: two answers through the stack's SkyRLGymGenerator, in a GeneratedOutputGroup.

Leaves out the engine: a stand-in for the client hands the answers on. On Python 3.11 pydantic wants another TypedDict
than the standard library's, and the stack is written for 3.12.
"""

from __future__ import annotations

import asyncio
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict

from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.fully_async_trainer import GeneratedOutputGroup  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402

from ci.stack_recipes import Answers, write  # noqa: E402


class Tokenizer:
    """Hands on the prompt's ids for any conversation."""

    eos_token, eos_token_id = "<eos>", 2

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def apply_chat_template(self, *_, **__) -> list[int]:
        """The prompt."""
        return list(self.ids)

    def encode(self, *_, **__) -> list[int]:
        """No text becomes tokens."""
        return []


class Client:
    """Hands on the next answer in the form of SkyRL's engine output."""

    model_name = "tiny"

    def __init__(self, given: Answers) -> None:
        self.given, self.next = given, iter(range(len(given.tokens)))

    async def generate(self, request, **_):
        """One answer; "eos" is "stop" to vLLM."""
        i = next(self.next)
        return {
            "responses": [self.given.texts[i]],
            "response_ids": [self.given.tokens[i]],
            "stop_reasons": ["stop" if self.given.stop_reasons[i] == "eos" else "length"],
            "response_logprobs": [self.given.logprobs[i]],
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
        }

    async def finish_session(self, *_, **__) -> None:
        """Nothing is kept."""


def main() -> None:
    """One group of two answers, scheduled at step 7."""
    given = Answers.given()
    generator = SkyRLGymGenerator(
        GeneratorConfig(max_input_length=64), SkyRLGymConfig(), Client(given), Tokenizer(given.prompt)
    )
    prompts = [[{"role": "user", "content": given.question.rstrip("=")}]] * 2
    request = {
        "prompts": prompts,
        "env_classes": ["gsm8k"] * 2,
        "env_extras": [{"reward_spec": {"ground_truth": "132"}}] * 2,
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID("q0", i) for i in range(2)],
        "batch_metadata": None,
    }
    output = asyncio.run(generator.generate(request))
    output.pop("rollout_metrics")  # statistics of the batch, of no row
    group = GeneratedOutputGroup(generator_output=output, uid="q0", global_step_when_scheduled=7, prompts=prompts)
    write(group, "answers of the tiny policy, through the stack's SkyRLGymGenerator.generate and its gsm8k environment")


if __name__ == "__main__":
    main()
