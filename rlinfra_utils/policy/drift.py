"""How far real updates move a policy from fixed data: log-ratios at lag k, by lag and by length.

Models: answers sampled once, then a real loop that trains on other answers, and at each lag the same tokens'
log-probs again. Leaves out: training on the fixed answers themselves, other data than the policy's own.
Use: `drift(loop).by_lag`; `.by_turns` for long answers, `.by_answer_length` for the lengths that the task has.

The task's answers have 1 to 5 tokens. A long one is an episode: `turns` sums, each in a context of its own, so that
its log weight is the sum over all its tokens. Episodes share no answer with one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils import offpolicy
from rlinfra_utils.doors import divides, whole
from rlinfra_utils.offpolicy import WeightStats
from rlinfra_utils.policy.batch import Batch
from rlinfra_utils.policy.loop import SequentialLoop
from rlinfra_utils.policy.records import record_of
from rlinfra_utils.policy.task import prompts

LAGS = (0, 1, 2, 4, 8, 16, 32)
TURNS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Drift:
    """Log-ratios of the fixed answers, dict lag -> (answers, tokens), their mask, and tables of what they say.

    `by_lag`: token and sequence ESS over their number, share of token ratios outside 1 +- 0.2, mean |log w| by
    token, largest |log w| by token and by sequence, k1 and k3 in nats a token.
    `by_turns` and `by_answer_length`, a row a lag and length: number of sequences, their mean tokens, ESS over their
    number, mean and largest |log w|, variance of log w.
    """

    log_ratios: dict[int, np.ndarray]
    mask: np.ndarray
    by_lag: pd.DataFrame
    by_turns: pd.DataFrame
    by_answer_length: pd.DataFrame


def drift(
    loop: SequentialLoop,
    lags: Sequence[int] = LAGS,
    num_answers: int = 1024,
    turns: Sequence[int] = TURNS,
    seed: int = 1,
) -> Drift:
    """Sample `num_answers` from the loop's engine, then look at them after each of `lags` updates of the loop.

    Raises ValueError for lags that do not rise from 0 or more, for `turns` that do not divide `num_answers`, and
    for a `seed` that is the loop's.
    """
    lags = [whole(f"lags[{index}]", lag, 0) for index, lag in enumerate(lags)]
    if not lags or any(later <= earlier for earlier, later in pairwise(lags)):
        raise ValueError(f"lags={lags}: need at least one, and each above the one before")
    for index, num in enumerate(turns):
        divides(f"turns[{index}]", whole(f"turns[{index}]", num), "num_answers", whole("num_answers", num_answers))
    if seed == loop.seed:
        raise ValueError(f"seed={seed}: is the loop's own; give the fixed answers another one")
    batch = _sample(loop, num_answers, seed)
    behavior, mask = batch.behavior.cpu().numpy(), batch.mask.cpu().numpy()
    start, ratios, rows = loop.trainer.version, {}, []
    for lag in lags:
        while loop.trainer.version < start + lag:
            loop.step()
        logprobs = loop.trainer.logprobs(batch).cpu().numpy()
        ratios[lag] = offpolicy.log_ratio(logprobs, behavior, mask)
        rows.append({"lag": lag} | _row(offpolicy.summarize(logprobs, behavior, mask)))
    return Drift(ratios, mask, pd.DataFrame(rows), _by_turns(ratios, mask, turns), _by_answer_length(ratios, mask))


def _sample(loop: SequentialLoop, num_answers: int, seed: int) -> Batch:
    """One answer to each of `num_answers` prompts, as the trainer reads them."""
    decoding = loop.provenance["decoding"]
    prompt_ids = [loop.tokenizer(prompt.text).input_ids for prompt in prompts(num_answers, seed, loop.digits)]
    completions = loop.engine.generate(prompt_ids, decoding, n=1, seed=seed).completions
    records = [
        record_of(completion, completion.prompt_tokens, sample_id=f"fixed-{index}", decoding=decoding)
        for index, completion in enumerate(completions)
    ]
    return loop.trainer.collate(records)


def _row(summary: offpolicy.Summary) -> dict[str, float]:
    return {
        "token_ess": summary.token.normalized_ess,
        "sequence_ess": summary.sequence.normalized_ess,
        "clip_share": summary.clip.fraction,
        "mean_abs_log": summary.token.mean_abs_log,
        "max_abs_log": summary.token.max_abs_log,
        "max_abs_log_sequence": summary.sequence.max_abs_log,
        "k1": summary.k1,
        "k3": summary.k3,
    }


def _weights(log_weights: np.ndarray) -> dict[str, Any]:
    stats = WeightStats.of(log_weights)
    return {
        "num_sequences": stats.num,
        "sequence_ess": stats.normalized_ess,
        "mean_abs_log": stats.mean_abs_log,
        "max_abs_log": stats.max_abs_log,
        "var_log": float(log_weights.var()),
    }


def _by_turns(ratios: dict[int, np.ndarray], mask: np.ndarray, turns: Sequence[int]) -> pd.DataFrame:
    rows = []
    for lag, ratio in ratios.items():
        of_answer = offpolicy.sequence_log_ratio(ratio, mask)
        for num in turns:
            place = {"lag": lag, "turns": num, "mean_tokens": num * float(mask.sum(axis=1).mean())}
            rows.append(place | _weights(of_answer.reshape(-1, num).sum(axis=1)))
    return pd.DataFrame(rows)


def _by_answer_length(ratios: dict[int, np.ndarray], mask: np.ndarray) -> pd.DataFrame:
    lengths, rows = mask.sum(axis=1), []
    for lag, ratio in ratios.items():
        of_answer = offpolicy.sequence_log_ratio(ratio, mask)
        for length in np.unique(lengths).tolist():
            rows.append({"lag": lag, "tokens": length} | _weights(of_answer[lengths == length]))
    return pd.DataFrame(rows)
