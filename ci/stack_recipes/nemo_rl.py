"""NeMo RL's record: a prompt group through the stack's `record_to_train_batch` and `pack_payload`.

Leaves out trackers and audio, which the import asks for: stand-ins take their place. The checkout comes by path.
"""

from __future__ import annotations

import sys
import typing

import torch
import typing_extensions

from ci.stack_recipes import Answers, stand_in, write

typing.TypedDict = typing_extensions.TypedDict  # on Python 3.11 pydantic wants this one
STAND_INS = ("swanlab", "wandb", "prometheus_client", "prometheus_client.parser", "prometheus_client.samples")
stand_in(*STAND_INS, "hydra", "hydra.utils", "soundfile")


def main() -> None:
    """Two answers, the second of them cut off."""
    sys.path.insert(0, sys.argv[3])
    from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
    from nemo_rl.experience.payload import pack_payload, record_to_train_batch

    given = Answers.given()
    prompt = {"role": "user", "content": given.question, "token_ids": torch.tensor(given.prompt)}
    completions = []
    for i in range(2):
        ids, logprobs = torch.tensor(given.tokens[i]), torch.tensor(given.logprobs[i])
        answer = {"role": "assistant", "content": given.texts[i], "token_ids": ids, "generation_logprobs": logprobs}
        completions.append(Completion([dict(prompt), answer], None, truncated=bool(i), reward=1.0 - i))
    record = PromptGroupRecord(0, [prompt], {}, {"task_name": "add"}, completions, {})
    batch = record_to_train_batch(record, pad_value_dict={"token_ids": 0})
    sample_ids, _, tags = pack_payload(batch, weight_version=7, group_id="g0")
    payload = {"sample_ids": sample_ids, "fields": dict(batch), "tags": tags}
    write(payload, "answers of the tiny policy, through the stack's record_to_train_batch and pack_payload")


if __name__ == "__main__":
    main()
