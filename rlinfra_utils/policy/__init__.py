"""A tiny real policy: its task and verifier, its model, one GRPO update, the sequential loop around them."""

from rlinfra_utils.policy.grpo import GroupAdvantages, group_advantages, grpo_loss, kl_to_base, token_ratio
from rlinfra_utils.policy.loop import DECODING, SequentialLoop, StepResult, answer_text, evaluate, reward_completions
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
from rlinfra_utils.policy.task import (
    MAX_ANSWER_CHARS,
    REWARD_WEIGHTS,
    VERIFIER_VERSION,
    Prompt,
    prompts,
    total_reward,
    verify,
)
from rlinfra_utils.policy.trainer import (
    Batch,
    Trainer,
    UpdateStats,
    batch_logprobs,
    check_trainable,
    collate,
)
