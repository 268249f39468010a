"""AReaL's record: one episode of the stack's RLVRWorkflow, with a stand-in for the inference engine.

The reward function runs in a process of its own, so it stands at the top of a module that can be imported.
"""

from __future__ import annotations

import asyncio

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelResponse
from areal.workflow.rlvr import RLVRWorkflow

from ci.stack_recipes import Answers, write


def reward(prompt, completion, prompt_ids, completion_ids, **_) -> float:
    """One for an answer of any length."""
    return float(len(completion_ids) > 0)


class Engine:
    """Hands on one answer, whose last token was sampled after an update of the weights."""

    def __init__(self, given: Answers) -> None:
        self.given = given

    async def agenerate(self, request) -> ModelResponse:
        """AReaL's response."""
        tokens, logprobs = self.given.tokens[0], self.given.logprobs[0]
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=[6] * (len(tokens) - 1) + [7],
            stop_reason="stop",
        )


class Tokenizer:
    """Hands on the prompt's ids."""

    eos_token_id, pad_token_id = 2, 0

    def decode(self, *_, **__) -> str:
        """No text is needed."""
        return ""


def main() -> None:
    """One episode."""
    given = Answers.given()
    workflow = RLVRWorkflow(
        reward_fn=reward,
        gconfig=GenerationHyperparameters(max_new_tokens=8),
        tokenizer=Tokenizer(),
        get_input_ids_fn=lambda *_: given.prompt,
        data_extract_prompt_fn=lambda _: None,
    )
    record = asyncio.run(workflow.arun_episode(Engine(given), {}))
    write(record, "an answer of the tiny policy, through the stack's RLVRWorkflow.arun_episode")


if __name__ == "__main__":
    main()
