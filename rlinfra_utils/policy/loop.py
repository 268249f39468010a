"""The sequential reference loop: eight actions, one after the other, each one timed.

Models: one process, one batch, one version of the weights: what every faster arrangement is compared with.
Each answer becomes a complete rollout record, passes the contract before it is trained on, and is chained
from its prompt to the weights that came out. Leaves out: overlap, queues, several engines.
Use: `SequentialLoop(engine, Trainer(model), tokenizer, Trace()).step()`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinfra_utils import rollouts
from rlinfra_utils.doors import amount, whole
from rlinfra_utils.policy.grpo import group_advantages
from rlinfra_utils.policy.model import chat_template_version, tokenizer_version
from rlinfra_utils.policy.records import record_of, reward_completions
from rlinfra_utils.policy.task import VERIFIER_VERSION, Prompt, prompts, total_reward
from rlinfra_utils.policy.trainer import Trainer, UpdateStats
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.timers import Trace

#: The default task's longest right answer has three digits and the end; a fifth token leaves room to go wrong.
DECODING = Decoding(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed", max_new_tokens=5)


@dataclass(frozen=True)
class StepResult:
    """One turn of the loop: its records as they are stored, and means over them.

    `step` is the version of the weights that the records were sampled from.
    """

    step: int
    records: list[Rollout]
    correctness: float
    format: float
    num_degenerate_groups: int
    num_prompt_tokens: int
    num_new_tokens: int
    wall_s: float
    update: UpdateStats


def _mean_rewards(rewards: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each part of the reward."""
    return {part: float(np.mean([reward[part] for reward in rewards])) for part in rewards[0]}


def evaluate(
    engine: Any, tokenizer: Any, num_prompts: int, seed: int, decoding: Decoding = DECODING, digits: int = 2
) -> dict[str, float]:
    """Mean of each reward part over one answer to each of `num_prompts` seeded prompts.

    Raises ValueError for a number of prompts or digits that `prompts` refuses, and as `engine.generate` does.
    """
    batch = prompts(num_prompts, seed, digits)
    prompt_ids = [tokenizer(prompt.text).input_ids for prompt in batch]
    rewards = reward_completions(batch, engine.generate(prompt_ids, decoding, n=1, seed=seed).completions, tokenizer)
    return _mean_rewards(rewards)


class SequentialLoop:
    """Prompts, rollouts, rewards, update and weight sync in one thread.

    Life: one `step()` an update; its prompts and ids follow from `seed` and `trainer.version`, so that a restored
    trainer goes on where it was. Invariant: before and after a step `engine.version == trainer.version`. Trap: a
    step that fails in publishing leaves them apart; the contract then refuses the next step's records.

    `engine` needs `generate(prompt_ids, decoding, n, seed)`, `version` and `adopt(model, version)`, which copies
    the trainer's weights in memory. `folder` keeps the trained records, one Parquet file a batch in "trained/",
    and by verdict the records of a batch that the contract refused. `verifier_s` is slept for every batch, as if
    answers were run in a sandbox. What else changes the load: `decoding.max_new_tokens` with `ignore_eos` or
    more `digits` for long answers, `num_epochs` and `minibatches` for a heavy trainer. Raises ValueError for a size
    out of range, and for an engine and a trainer of different versions.
    """

    def __init__(
        self,
        engine: Any,
        trainer: Trainer,
        tokenizer: Any,
        trace: Trace,
        decoding: Decoding = DECODING,
        group_size: int = 8,
        prompts_per_step: int = 32,
        digits: int = 2,
        num_epochs: int = 1,
        minibatches: int = 1,
        verifier_s: float = 0.0,
        seed: int = 0,
        run_id: str = "run0",
        branch_id: str = "main",
        folder: str | Path | None = None,
    ) -> None:
        if engine.version != trainer.version:
            raise ValueError(f"engine.version={engine.version}, trainer.version={trainer.version}: publish first")
        amount("verifier_s", verifier_s)
        whole("seed", seed, 0)
        prompts(prompts_per_step, seed, digits)  # each raises for a size that
        group_advantages([0.0] * group_size, group_size)  # makes no sense
        self.engine, self.trainer, self.tokenizer, self.trace = engine, trainer, tokenizer, trace
        self.group_size, self.prompts_per_step, self.digits = group_size, prompts_per_step, digits
        self.num_epochs, self.minibatches, self.verifier_s = num_epochs, minibatches, verifier_s
        self.seed, self.run_id = seed, run_id
        self.folder = None if folder is None else Path(folder)
        #: What all records of this loop share.
        self.provenance = {
            "run_id": run_id,
            "branch_id": branch_id,
            "eos_token_id": tokenizer.eos_token_id,
            "decoding": decoding,
            "tokenizer_version": tokenizer_version(tokenizer),
            "chat_template_version": chat_template_version(tokenizer),
            "engine": type(engine).__name__,
            "verifier_version": VERIFIER_VERSION,
        }

    def step(self) -> StepResult:
        """One update, from prompts to published weights; the trace gets a "step" with its stages inside.

        Raises ValueError, with nothing trained, if the contract does not accept every record.
        """
        start_s, step = time.perf_counter(), self.trainer.version
        with self.trace.span("step", step=step):
            result = self._eight_actions(step)
        return StepResult(step=step, wall_s=time.perf_counter() - start_s, **result)

    def _eight_actions(self, step: int) -> dict[str, Any]:
        prompt_seed, sampling_seed = np.random.SeedSequence([self.seed, step]).generate_state(2).tolist()
        with self.trace.span("prepare"):  # 1. choose the prompts
            batch = prompts(self.prompts_per_step, prompt_seed, self.digits)
            prompt_ids = [self.tokenizer(prompt.text).input_ids for prompt in batch]
        generation, times = self._generate(prompt_ids, sampling_seed)  # 2. rollouts from the behaviour policy
        with self.trace.span("verifier"):  # 3. reward them
            time.sleep(self.verifier_s)
            rewards = reward_completions(batch, generation.completions, self.tokenizer)
        with self.trace.span("records"):  # 4. masks and behaviour log-probs, 5. the batch
            sent = list(zip(batch, prompt_ids))
            records = self._records(f"{self.run_id}-s{step:04d}", sent, generation.completions, rewards, times)
            self._admit(records)
            totals = [total_reward(reward) for reward in rewards]
            advantages, num_degenerate = group_advantages(totals, self.group_size)
        # 4. the trainer's own log-probs, 6. loss and gradients, 7. the parameters
        update = self.trainer.update(records, advantages, self.num_epochs, self.minibatches, self.trace)
        with self.trace.span("weight_sync"):  # 8. publish the version that came out
            self.engine.adopt(self.trainer.model, self.trainer.version)
        with self.trace.span("records"):
            records = self._chain(f"{self.run_id}-b{step:04d}", records, update)
        return {
            "records": records,
            **_mean_rewards(rewards),
            "num_degenerate_groups": num_degenerate,
            "num_prompt_tokens": generation.num_prompt_tokens,
            "num_new_tokens": generation.num_new_tokens,
            "update": update,
        }

    def _generate(self, prompt_ids: list[list[int]], seed: int) -> tuple[Any, dict[str, float]]:
        """Generate; the engine's own split of its time becomes two spans in a row."""
        started_s = time.perf_counter()
        generation = self.engine.generate(prompt_ids, self.provenance["decoding"], n=self.group_size, seed=seed)
        times = {"started_s": started_s, "finished_s": time.perf_counter()}
        prefilled_s = started_s + generation.prefill_s
        self.trace.add("prefill", started_s, prefilled_s, tokens=generation.num_prompt_tokens)
        self.trace.add("decode", prefilled_s, prefilled_s + generation.decode_s, tokens=generation.num_new_tokens)
        return generation, times

    def _records(
        self,
        step_id: str,
        sent: list[tuple[Prompt, list[int]]],
        completions: list[Any],
        rewards: list[dict[str, float]],
        times: dict[str, float],
    ) -> list[Rollout]:
        """One record a completion, with all that is known before training."""
        records = []
        for index, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
            prompt, prompt_tokens = sent[completion.prompt_index]
            group_id = f"{step_id}-p{completion.prompt_index:03d}"
            names = {"prompt_id": prompt.prompt_id, "group_id": group_id}
            sample_id = f"{group_id}-g{index % self.group_size:02d}"
            known = {**self.provenance, **times, **names, "sample_id": sample_id, "reward": reward}
            records.append(record_of(completion, prompt_tokens, **known))
        return records

    def _admit(self, records: list[Rollout]) -> None:
        """Refuse the batch unless the contract accepts every record; `folder` keeps what was refused."""
        demands = {"current_version": self.trainer.version, "max_lag": 0}
        verdicts = [rollouts.validate(record, **demands) for record in records]
        refused = [(record, verdict) for record, verdict in zip(records, verdicts) if verdict.status != "accept"]
        if not refused:
            return
        if self.folder is not None:
            rollouts.triage(records, self.folder, **demands)
        record, verdict = refused[0]
        raise ValueError(
            f"records: {len(refused)} of {len(records)} not accepted, batch refused; "
            f"{record.sample_id} first: {verdict.status}, {verdict.findings[0].message}"
        )

    def _chain(self, batch_id: str, records: list[Rollout], update: UpdateStats) -> list[Rollout]:
        """Complete the chain of each trained record: batch, optimizer step, resulting version; store them."""
        links = {
            "training_batch_id": batch_id,
            "optimizer_step": update.optimizer_step,
            "resulting_policy_version": update.version,
        }
        records = [record.model_copy(update=links) for record in records]
        if self.folder is not None:
            trained = self.folder / "trained"
            trained.mkdir(parents=True, exist_ok=True)
            rollouts.write(records, trained / f"{batch_id}.parquet")
        return records
