"""One update of a bigram policy, whose loss and gradient plain Python can compute from the table alone."""

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinfra_utils import policy
from rlinfra_utils.engines import teacher_forced_logprobs
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.timers import Trace

VOCAB = 5
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed"}


class Bigram(torch.nn.Module):
    """The logits after token i are row i of a table."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(torch.tensor(table), freeze=False)

    def forward(self, ids, use_cache):
        return SimpleNamespace(logits=self.table(ids))

    def get_input_embeddings(self):
        return self.table


def table(seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(dtype)


def record(prompt, response, behavior, env=(), pad=(), **decoding):
    """A record whose response positions `env` are the environment's and `pad` padding."""
    bits = [int(i not in env and i not in pad) for i in range(len(response))]
    return Rollout(
        sample_id="s0",
        prompt_tokens=prompt,
        response_tokens=response,
        policy_mask=[0] * len(prompt) + bits,
        env_mask=[0] * len(prompt) + [int(i in env) for i in range(len(response))],
        behavior_logprobs=behavior,
        decoding=Decoding(**{**PLAIN, **decoding}),
    )


RECORDS = [
    record([1, 2], [3, 4, 0], [-1.0, -0.5, -2.0]),
    record([2], [1, 1], [-0.3, -2.5], temperature=0.7),
    record([4, 4, 1], [2, 3, 1, 0], [-1.5, None, -0.9, None], env=[1], pad=[3]),
]
ADVANTAGES = [1.2, -0.7, -0.4]


def plain_tokens(weights, records, advantages):
    """(ratio, advantage) of every policy token, in plain Python."""
    tokens = []
    for rec, advantage in zip(records, advantages):
        ids = rec.prompt_tokens + rec.response_tokens
        for t in range(len(rec.prompt_tokens), len(ids)):
            if rec.policy_mask[t]:
                scaled = [float(x) / rec.decoding.temperature for x in weights[ids[t - 1]]]
                logprob = scaled[ids[t]] - math.log(sum(map(math.exp, scaled)))
                tokens.append((math.exp(logprob - rec.behavior_logprobs[t - len(rec.prompt_tokens)]), advantage))
    return tokens


def plain_loss(weights, records, advantages, low=0.2, high=0.2):
    terms = [-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in plain_tokens(weights, records, advantages)]
    return sum(terms) / len(terms)


def slopes(weights, *args, step=1e-6):
    result = np.zeros_like(weights)
    for index in np.ndindex(*weights.shape):
        above, below = weights.copy(), weights.copy()
        above[index] += step
        below[index] -= step
        result[index] = (plain_loss(above, *args) - plain_loss(below, *args)) / (2 * step)
    return result


def state_of(trainer):
    return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))


def assert_unchanged(trainer, state, counters):
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, state[0][name])
    moments = trainer.optimizer.state_dict()["state"]
    assert moments.keys() == state[1]["state"].keys()
    for key, entry in moments.items():
        assert all(torch.equal(entry[name], state[1]["state"][key][name]) for name in entry)
    assert (trainer.version, trainer.optimizer_step) == counters


def test_one_update_is_the_formula_and_adams_first_step():
    weights = table(dtype=np.float64)
    trainer = policy.Trainer(Bigram(weights), lr=1e-3, max_grad_norm=float("inf"))
    stats = trainer.update(RECORDS, ADVANTAGES)
    tokens = plain_tokens(weights, RECORDS, ADVANTAGES)
    gradient = slopes(weights, RECORDS, ADVANTAGES)
    clipped = [(a > 0 and r > 1.2) or (a < 0 and r < 0.8) for r, a in tokens]
    assert stats.num_tokens == len(tokens) == 7
    assert stats.loss == pytest.approx(plain_loss(weights, RECORDS, ADVANTAGES), rel=1e-5)
    assert stats.mean_ratio == pytest.approx(sum(r for r, _ in tokens) / 7, rel=1e-5)
    assert 0 < sum(clipped) < 7
    assert stats.clip_share == pytest.approx(sum(clipped) / 7)
    assert stats.gap == pytest.approx(sum(abs(math.log(r)) for r, _ in tokens) / 7, rel=1e-5)
    ratios = [math.prod(r for r, _ in plain_tokens(weights, [one], [1.0])) for one in RECORDS]
    assert stats.normalized_ess == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)), rel=1e-5)
    assert stats.grad_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    # Adam's first step, bias-corrected, is lr * g / (|g| + eps); the rows that no token follows stay.
    expected = weights - 1e-3 * gradient / (np.abs(gradient) + 1e-8)
    moved = trainer.model.table.weight.detach().numpy()
    is_flat = np.abs(gradient) < 1e-7
    assert is_flat.any()
    np.testing.assert_allclose(moved[~is_flat], expected[~is_flat], atol=1e-6)
    np.testing.assert_allclose(moved[is_flat], weights[is_flat], atol=1e-6)


def test_at_zero_lag_the_gap_is_0_the_ratio_1_and_nothing_is_clipped():
    """At temperature 0.6 as well, whose log-probs belong to the scaled logits."""
    logits = np.zeros((VOCAB, VOCAB), dtype=np.float64)
    logits[1, :3] = [2, 1, 0]
    for temperature in (1.0, 0.6):
        scaled = logits[1] / temperature
        behavior = (scaled - np.log(np.exp(scaled).sum()))[:3].tolist()
        records = [record([1], [token], [behavior[token]], temperature=temperature) for token in range(3)]
        stats = policy.Trainer(Bigram(logits)).update(records, [1.0, -1.0, 0.5])
        assert stats.gap == pytest.approx(0, abs=1e-6)
        assert stats.mean_ratio == pytest.approx(1, abs=1e-6)
        assert stats.normalized_ess == pytest.approx(1, abs=1e-6)
        assert stats.clip_share == 0


def test_an_update_hands_out_the_log_probs_from_before_its_first_step():
    """The oracle is the table of logits that the trainer starts from; with weights the behaviour is not in them."""
    for weights in (None, np.ones((len(RECORDS), max(len(r.policy_mask) for r in RECORDS) - 1))):
        trainer = policy.Trainer(Bigram(table()), lr=0.5)
        logits = trainer.model.table.weight.detach().double().clone()
        stats = trainer.update(RECORDS, ADVANTAGES, num_epochs=2, weights=weights)
        for row, one in zip(stats.logprobs, RECORDS, strict=True):
            ids = one.prompt_tokens + one.response_tokens
            before = torch.log_softmax(logits / one.decoding.temperature, -1)
            expected = [before[last, next_].item() for last, next_ in itertools.pairwise(ids)]
            trained = np.array(one.policy_mask[1:], dtype=bool)
            assert row[: len(trained)][trained] == pytest.approx(np.array(expected)[trained], abs=1e-6)


def test_epochs_and_minibatches_are_optimizer_steps_of_one_version():
    trace, trainer = Trace(), policy.Trainer(Bigram(table()), version=7)
    stats = trainer.update(RECORDS, ADVANTAGES, num_epochs=4, minibatches=2, trace=trace)
    assert (stats.version, stats.optimizer_step) == (trainer.version, trainer.optimizer_step) == (8, 8)
    stages = trace.frame().groupby("stage").size().to_dict()
    assert stages == {"logprob_recompute": 1, "forward_backward": 8, "optimizer_step": 8}
    stats = trainer.update(RECORDS, ADVANTAGES)
    assert (stats.version, stats.optimizer_step) == (9, 9)


def test_a_second_epoch_is_the_same_as_a_second_update():
    """The behaviour log-probs stay the record's own: they are not taken anew between epochs."""
    once, twice = policy.Trainer(Bigram(table())), policy.Trainer(Bigram(table()))
    once.update(RECORDS, ADVANTAGES, num_epochs=2)
    twice.update(RECORDS, ADVANTAGES)
    twice.update(RECORDS, ADVANTAGES)
    assert torch.equal(once.model.table.weight, twice.model.table.weight)


def test_minibatches_take_every_record_once():
    parts = policy.Trainer(Bigram(table()))
    parts.update(RECORDS, ADVANTAGES, minibatches=2)
    whole = policy.Trainer(Bigram(table()))
    whole.update([RECORDS[0], RECORDS[2]], [ADVANTAGES[0], ADVANTAGES[2]])
    whole.update([RECORDS[1]], [ADVANTAGES[1]])
    assert torch.equal(parts.model.table.weight, whole.model.table.weight)


def test_only_policy_tokens_train():
    """Environment and padding tokens may carry any log-prob, and no row of the table moves for predicting them."""
    results = []
    for filler in (None, 0.0, -9999.0, float("nan"), 123.0):
        trainer = policy.Trainer(Bigram(table()))
        stats = trainer.update([record([0], [1, 2, 3, 4], [-1.0, filler, -0.9, filler], env=[1], pad=[3])], [1.0])
        results.append((stats, trainer.model.table.weight.tolist()))
        assert stats.num_tokens == 2
    assert all(result == results[0] for result in results)
    moved = (np.array(results[0][1]) != table()).any(axis=1)
    assert moved.tolist() == [True, False, True, False, False]  # the rows of 0 and 2 predict the tokens 1 and 3


def test_the_kl_penalty_pulls_towards_the_base():
    base = Bigram(table(seed=1))
    free = policy.Trainer(Bigram(table()), lr=1e-2)
    held = policy.Trainer(Bigram(table()), lr=1e-2, base_model=base, kl_coef=1.0)
    zeros = [0.0] * len(RECORDS)
    first = held.update(RECORDS, zeros)
    assert first.kl > 0
    assert first.loss == pytest.approx(first.kl, rel=1e-6)
    for _ in range(50):
        last, idle = held.update(RECORDS, zeros), free.update(RECORDS, zeros)
    assert last.kl < first.kl / 2
    assert (idle.kl, idle.loss) == (0.0, 0.0)
    assert torch.equal(free.model.table.weight, torch.tensor(table()))
    assert torch.equal(base.table.weight, torch.tensor(table(seed=1)))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(minibatches):
    trainer = policy.Trainer(Bigram(table()))
    trainer.update(RECORDS, ADVANTAGES)
    state = state_of(trainer)
    # exp(trainer - behaviour) overflows float32; with two minibatches the first has been trained on by then.
    records = [RECORDS[0], record([1], [2], [-500.0])]
    with pytest.raises(FloatingPointError, match="loss=inf"):
        trainer.update(records, [1.0, -1.0], minibatches=minibatches)
    assert_unchanged(trainer, state, counters=(1, 1))


def test_an_interrupt_in_the_middle_leaves_everything_as_it_was():
    trainer = policy.Trainer(Bigram(table()))
    state, step, calls = state_of(trainer), trainer.optimizer.step, []

    def interrupted():
        calls.append(step())
        if len(calls) == 2:
            raise KeyboardInterrupt

    trainer.optimizer.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.update(RECORDS, ADVANTAGES, num_epochs=3)
    assert_unchanged(trainer, state, counters=(0, 0))


GOOD = RECORDS[0]


@pytest.mark.parametrize(
    ("records", "advantages", "message"),
    [
        ([], [], "rollouts is empty"),
        ([GOOD], [], "advantages has length 0, rollouts 1"),
        ([GOOD], [1.0, 2.0], "advantages has length 2, rollouts 1"),
        ([GOOD, GOOD], [1.0, float("nan")], r"advantages\[1\]=nan"),
        ([GOOD], [float("inf")], r"advantages\[0\]=inf"),
        *(
            ([GOOD.model_copy(update={name: None})], [1.0], f"{name} is missing")
            for name in ("prompt_tokens", "response_tokens", "policy_mask", "behavior_logprobs", "decoding")
        ),
        ([GOOD.model_copy(update={"policy_mask": [0, 0, 1, 1]})], [1.0], "policy_mask has length 4, expected 5"),
        ([GOOD.model_copy(update={"behavior_logprobs": [-1.0]})], [1.0], "behavior_logprobs has length 1, expected 3"),
        ([record([], [1], [-1.0])], [1.0], "prompt_tokens has length 0"),
        ([GOOD.model_copy(update={"policy_mask": [0, 1, 1, 1, 1]})], [1.0], "policy_mask claims some"),
        ([GOOD.model_copy(update={"policy_mask": [0, 0, 1, 2, 1]})], [1.0], r"policy_mask\[3\]=2"),
        ([record([1], [VOCAB], [-1.0])], [1.0], "token 1 is 5; the model's ids are 0 to 4"),
        ([record([-1], [1], [-1.0])], [1.0], "token 0 is -1"),
        ([record([1], [2**70], [-1.0])], [1.0], f"token 1 is {2**70}"),
        ([record([1], [2, 3], [-1.0, None])], [1.0], r"behavior_logprobs\[1\]=None"),
        ([record([1], [2, 3], [-1.0, float("nan")])], [1.0], r"behavior_logprobs\[1\]=nan"),
        ([record([1], [2, 3], [-float("inf"), -1.0])], [1.0], r"behavior_logprobs\[0\]=-inf"),
        ([record([1], [2, 3], [-0.7, 123.7357])], [1.0], r"behavior_logprobs\[1\]=123.7357"),
        ([record([1], [2], [None], pad=[0])], [1.0], "policy_mask is 0 everywhere"),
        ([record([1], [2], [0.0], temperature=0.0)], [1.0], "needs temperature > 0"),
        ([record([1], [2], [-1.0], temperature=None)], [1.0], "needs temperature > 0"),
        ([record([1], [2], [-1.0], top_p=0.9)], [1.0], "no filter"),
        ([record([1], [2], [-1.0], top_k=3)], [1.0], "no filter"),
        ([record([1], [2], [-1.0], min_p=0.1)], [1.0], "no filter"),
        ([record([1], [2], [-1.0], repetition_penalty=1.1)], [1.0], "no filter"),
        ([record([1], [2], [-1.0], banned_token_ids=[0])], [1.0], "no filter"),
        ([record([1], [2], [-1.0], temperature=0.5, logprobs_mode="raw")], [1.0], "logprobs_mode='raw'"),
    ],
)
def test_bad_batches_stop_at_the_door(records, advantages, message):
    trainer = policy.Trainer(Bigram(table()))
    state = state_of(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.update(records, advantages)
    assert_unchanged(trainer, state, counters=(0, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_epochs": 0}, "num_epochs=0"), ({"minibatches": 0}, "minibatches=0"), ({"minibatches": 4}, "minibatches=4")],
)
def test_senseless_repetitions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        policy.Trainer(Bigram(table())).update(RECORDS, ADVANTAGES, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"clip_high": float("inf")}, "clip_high=inf"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"kl_coef": 0.1}, "kl_coef=0.1"),
        ({"base_model": Bigram(table())}, "kl_coef=0.0"),
        ({"kl_coef": -0.1, "base_model": Bigram(table())}, "kl_coef=-0.1"),
    ],
)
def test_senseless_trainers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        policy.Trainer(Bigram(table()), **settings)


def test_a_model_is_not_its_own_base():
    model = Bigram(table())
    with pytest.raises(ValueError, match="base_model is the trained model itself"):
        policy.Trainer(model, base_model=model, kl_coef=0.1)


def test_log_probs_agree_with_the_engines_teacher_forcing_and_ignore_the_neighbours():
    """Rows of several lengths in one batch against each row alone, by another implementation."""
    model, tokenizer = policy.load_warm_start()
    texts = ["1+2=3", "12+30=42", "123+456=579"]
    records = []
    for text, temperature in zip(texts, (1.0, 0.7, 1.3)):
        ids = tokenizer(text).input_ids
        split = len(ids) - 2
        records.append(record(ids[:split], ids[split:], [-1.0, -1.0], temperature=temperature))
    with torch.no_grad():
        together = policy.batch_logprobs(model, policy.collate(records, vocab_size=17))
    for row, rec in enumerate(records):
        ids = torch.tensor([rec.prompt_tokens + rec.response_tokens])
        alone = teacher_forced_logprobs(model, ids, temperature=rec.decoding.temperature)[0].detach()
        np.testing.assert_allclose(together[row, : len(alone)], alone, atol=1e-5)
