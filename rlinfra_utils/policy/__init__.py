"""A tiny real policy: its task and verifier, its model, one GRPO update, the sequential loop, the stale one."""

from rlinfra_utils.doors import installed

installed("torch", "transformers", extra="torch")

from rlinfra_utils.policy.batch import Batch, batch_logprobs, check_trainable, collate
from rlinfra_utils.policy.delay import Clock, DelayQueue, Group, StageCosts
from rlinfra_utils.policy.drift import Drift, drift
from rlinfra_utils.policy.grpo import GroupAdvantages, group_advantages, grpo_loss, kl_to_base, token_ratio
from rlinfra_utils.policy.loop import DECODING, SequentialLoop, StepResult, evaluate
from rlinfra_utils.policy.measures import Measure, measures
from rlinfra_utils.policy.model import (
    MAX_TOKENS,
    VOCABULARY,
    WARM_START,
    chat_template_version,
    load_warm_start,
    make_tokenizer,
    provenance,
    tiny_llama,
    tokenizer_version,
)
from rlinfra_utils.policy.records import (
    answer_prompt,
    answer_text,
    record_of,
    reward_completions,
    reward_records,
    versions_of,
)
from rlinfra_utils.policy.staleness import BUDGETS, LagRun, run_with_lag
from rlinfra_utils.policy.supervised import labelled_sums, supervise
from rlinfra_utils.policy.task import (
    MAX_ANSWER_CHARS,
    REWARD_WEIGHTS,
    VERIFIER_VERSION,
    Prompt,
    prompts,
    total_reward,
    verify,
)
from rlinfra_utils.policy.trainer import Trainer, UpdateStats
