"""verl's record: two outputs of an agent loop through the worker's own `_postprocess`, into a DataProto.

Leaves out Ray, the server and the rewards' worker: the worker is a bare object, and its attributes are set here.
"""

from __future__ import annotations

import numpy as np
import torch
from verl.experimental.agent_loop import agent_loop

from ci.stack_recipes import Answers, write

PROMPT_TOKENS, RESPONSE_TOKENS = 8, 6


def padded(values: list, size: int, left: bool = False) -> torch.Tensor:
    """One row of `size`, zeros on one side."""
    zeros = [0] * (size - len(values))
    return torch.tensor([zeros + values if left else values + zeros])


def output(given: Answers, i: int) -> agent_loop._InternalAgentLoopOutput:
    """Answer `i` as the worker pads it; sampled while the weights went from step 6 to 7."""
    prompt, response = given.prompt, given.tokens[i]
    ids = [padded(prompt, PROMPT_TOKENS, left=True), padded(response, RESPONSE_TOKENS)]
    attended = [padded([1] * len(prompt), PROMPT_TOKENS, left=True), padded([1] * len(response), RESPONSE_TOKENS)]
    attention = torch.cat(attended, dim=1)
    return agent_loop._InternalAgentLoopOutput(
        prompt_ids=ids[0],
        response_ids=ids[1],
        input_ids=torch.cat(ids, dim=1),
        position_ids=attention.cumsum(dim=1) - 1,
        response_mask=attended[1],
        attention_mask=attention,
        response_logprobs=padded(given.logprobs[i], RESPONSE_TOKENS),
        reward_score=float(given.stop_reasons[i] == "eos"),
        num_turns=2,
        metrics=agent_loop.AgentLoopMetrics(),
        extra_fields={"global_steps": 7, "min_global_steps": 6 + i % 2, "max_global_steps": 7},
    )


def main() -> None:
    """Two rows."""
    worker = agent_loop.AgentLoopWorker.__new__(agent_loop.AgentLoopWorker)
    worker.reward_loop_worker_handles = None
    given = Answers.given()
    inputs = [output(given, i) for i in range(2)]
    uids = {"uid": np.array(["u0", "u0"], dtype=object)}
    proto = worker._postprocess(inputs, input_non_tensor_batch=uids)
    record = {"batch": dict(proto.batch.items()), "non_tensor_batch": proto.non_tensor_batch}
    write(record, "answers of the tiny policy, made into a DataProto by the stack's AgentLoopWorker._postprocess")


if __name__ == "__main__":
    main()
