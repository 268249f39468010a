"""TRL's synchronous record: one real GRPO step of the tiny policy, the dict caught as the trainer makes it.

Leaves out vLLM: transformers generates, so no behaviour log-probs are in the dict (TRL's default without vLLM).
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from ci.stack_recipes import write
from rlinfra_utils import policy

NUM_GENERATIONS = 4
caught = []


def reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    """The digits' share of the answer: shaped, since equal rewards would move nothing."""
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


class Trainer(GRPOTrainer):
    """TRL's trainer, whose dict of generated and scored rollouts is kept before it is shuffled."""

    def _generate_and_score_completions(self, inputs):
        caught.append(super()._generate_and_score_completions(inputs))
        return caught[-1]


def main() -> None:
    """One optimizer step, and proof that the weights moved."""
    torch.manual_seed(0)
    model, tokenizer = policy.load_warm_start()
    before = [p.detach().clone() for p in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=NUM_GENERATIONS,
            num_generations=NUM_GENERATIONS,
            max_completion_length=6,
            max_steps=1,
            num_iterations=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            seed=0,
        )
        data = Dataset.from_list([{"prompt": p.text} for p in policy.prompts(4, seed=0)])
        Trainer(model=model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer).train()
    if all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
        raise RuntimeError("the step moved no weight")
    write(caught[0], "one real GRPO step of the tiny policy on a CPU, num_iterations=2, generation by transformers")


if __name__ == "__main__":
    main()
