"""Supervised steps: what is labelled, the loss against log-probs counted by hand, and a model that learns the form."""

import math

import pytest
import torch

from rlinfra_utils import policy
from rlinfra_utils.engines import HFEngine
from rlinfra_utils.policy import supervise

TOKENIZER = policy.make_tokenizer()
SMALL = {"num_steps": 3, "batch_size": 4, "lr": 1e-3, "show": lambda line: None}


def test_the_answer_and_its_end_alone_are_labelled():
    ids, labels = policy.labelled_sums(TOKENIZER, 128, seed=4)
    for row, label, prompt in zip(ids, labels, policy.prompts(128, seed=4), strict=True):
        asked = f"{prompt.text}{prompt.answer}"
        num_padded = len(row) - len(asked) - 2  # the first token and the last
        assert TOKENIZER.decode(row) == f"<bos>{asked}<eos>" + num_padded * "<eos>"
        assert TOKENIZER.decode(label[label != -100]) == f"{prompt.answer}<eos>"
        assert torch.equal(row[label != -100], label[label != -100])


def test_the_loss_is_the_mean_over_labelled_tokens_of_what_an_engine_says_of_them():
    model, tokenizer = policy.load_warm_start()
    answers = [(prompt.text, f"{prompt.answer}") for prompt in policy.prompts(8, seed=0)]
    sequences = [[*tokenizer(text + answer).input_ids, tokenizer.eos_token_id] for text, answer in answers]
    engine = HFEngine(model, tokenizer)
    said = engine.control_logprobs(sequences)
    tokens = [value for row, (_, answer) in zip(said, answers, strict=True) for value in row[-len(answer) - 1 :]]
    losses = supervise(model, tokenizer, num_steps=1, batch_size=8, lr=0.0, show=lambda line: None)
    assert losses[0] == pytest.approx(-sum(tokens) / len(tokens), rel=1e-5)


def test_a_policy_that_knows_nothing_learns_how_an_answer_ends():
    model = policy.tiny_llama(seed=1)
    lines = []
    losses = supervise(model, TOKENIZER, num_steps=60, batch_size=32, lr=3e-3, warmup_steps=10, show=lines.append)
    assert losses[0] == pytest.approx(math.log(len(policy.VOCABULARY)), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]
    assert len(losses) == 60
    assert lines
    assert lines[-1].endswith(f"{losses[int(lines[-1].split()[2]) - 1]:.3f} nats a token")


@pytest.mark.parametrize(
    "changes",
    [{"num_steps": 0}, {"batch_size": 2.5}, {"lr": -1}, {"lr": math.nan}, {"warmup_steps": 0}, {"label_smoothing": 2}],
)
def test_bad_arguments_are_refused_by_name(changes):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}="):
        supervise(policy.tiny_llama(seed=1), TOKENIZER, **SMALL | changes)
