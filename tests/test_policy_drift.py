"""Drift: log-ratios against teacher forcing, tables against sums by hand, and a loop that it does not disturb."""

import math

import numpy as np
import pytest
import torch

from rlinfra_utils import policy
from rlinfra_utils.engines import HFEngine, teacher_forced_logprobs
from rlinfra_utils.timers import Trace


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors too small to share out: on a busy machine threads that wait for one another cost many times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_loop():
    model, tokenizer = policy.load_warm_start()
    engine, trainer = HFEngine(policy.load_warm_start()[0], tokenizer), policy.Trainer(model, lr=1e-3)
    return policy.SequentialLoop(engine, trainer, tokenizer, Trace(), prompts_per_step=4, group_size=4)


@pytest.fixture(scope="module")
def drifted():
    loop = make_loop()
    return loop, policy.drift(loop, lags=(0, 1, 3), num_answers=16, turns=(1, 4), seed=9)


def ess_share(log_weights):
    weights = [math.exp(value) for value in log_weights]
    return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)


def test_the_log_ratios_are_those_of_the_loops_weights_after_so_many_updates(drifted):
    _, found = drifted
    loop = make_loop()
    engine = HFEngine(policy.load_warm_start()[0], loop.tokenizer)
    prompt_ids = [loop.tokenizer(prompt.text).input_ids for prompt in policy.prompts(16, 9)]
    answers = engine.generate(prompt_ids, policy.DECODING, n=1, seed=9).completions
    assert found.mask.sum(axis=1).tolist() == [len(answer.tokens) for answer in answers]
    for lag in (0, 1, 3):
        while loop.trainer.version < lag:
            loop.step()
        for row, mask, answer in zip(found.log_ratios[lag], found.mask, answers, strict=True):
            ids = torch.tensor([answer.prompt_tokens + answer.tokens])
            with torch.no_grad():
                trainer = teacher_forced_logprobs(loop.trainer.model, ids)[0, len(answer.prompt_tokens) - 1 :].numpy()
            np.testing.assert_allclose(row[mask], trainer - answer.behavior_logprobs, atol=1e-4)
            assert (row[~mask] == 0).all()
    assert np.abs(found.log_ratios[0]).max() < 1e-5 < 1e-3 < np.abs(found.log_ratios[3]).max()


def test_the_tables_are_sums_by_hand(drifted):
    _, found = drifted
    by_turns = found.by_turns.set_index(["lag", "turns"])
    by_length = found.by_answer_length.set_index(["lag", "tokens"])
    for lag, ratios in found.log_ratios.items():
        answers = [float(row[mask].sum()) for row, mask in zip(ratios, found.mask, strict=True)]
        tokens = [float(value) for row, mask in zip(ratios, found.mask, strict=True) for value in row[mask]]
        row = found.by_lag.set_index("lag").loc[lag]
        assert row["token_ess"] == pytest.approx(ess_share(tokens))
        assert row["sequence_ess"] == pytest.approx(ess_share(answers))
        assert row["clip_share"] == sum(abs(math.exp(value) - 1) > 0.2 for value in tokens) / len(tokens)
        assert row["mean_abs_log"] == pytest.approx(sum(map(abs, tokens)) / len(tokens))
        assert row["max_abs_log"] == pytest.approx(max(map(abs, tokens)))
        assert row["max_abs_log_sequence"] == pytest.approx(max(map(abs, answers)))
        assert row["k1"] == pytest.approx(-sum(tokens) / len(tokens))
        assert row["k3"] == pytest.approx(sum(math.exp(v) - 1 - v for v in tokens) / len(tokens), abs=1e-12)
        episodes = [sum(answers[start : start + 4]) for start in range(0, 16, 4)]
        assert by_turns.loc[(lag, 4), "num_sequences"] == 4
        assert by_turns.loc[(lag, 4), "mean_tokens"] == pytest.approx(len(tokens) / 4)
        assert by_turns.loc[(lag, 4), "sequence_ess"] == pytest.approx(ess_share(episodes))
        assert by_turns.loc[(lag, 4), "var_log"] == pytest.approx(np.var(episodes))
        assert by_turns.loc[(lag, 1), "sequence_ess"] == pytest.approx(row["sequence_ess"])
        lengths = found.mask.sum(axis=1)
        assert by_length.loc[lag].index.tolist() == sorted(set(lengths.tolist()))
        for length, of_length in by_length.loc[lag].iterrows():
            same = [value for value, n in zip(answers, lengths, strict=True) if n == length]
            assert of_length["num_sequences"] == len(same)
            assert of_length["max_abs_log"] == pytest.approx(max(map(abs, same)))


def test_the_loop_trains_as_if_nobody_looked(drifted):
    loop, _ = drifted
    other = make_loop()
    for _ in range(3):
        other.step()
    assert loop.trainer.version == 3
    for left, right in zip(loop.trainer.model.parameters(), other.trainer.model.parameters(), strict=True):
        assert (left == right).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lags": ()}, r"lags=\[\]"),
        ({"lags": (0, 2, 2)}, r"lags=\[0, 2, 2\]"),
        ({"lags": (-1, 2)}, r"lags\[0\]=-1"),
        ({"lags": (0, 1.5)}, r"lags\[1\]=1.5"),
        ({"turns": (1, 3)}, r"turns\[1\]=3: does not divide num_answers=16"),
        ({"turns": (0,)}, r"turns\[0\]=0"),
        ({"num_answers": 0}, "num_answers=0"),
        ({"seed": 0}, "seed=0: is the loop's own"),
    ],
)
def test_malformed_arguments_are_refused(settings, message):
    loop = make_loop()
    with pytest.raises(ValueError, match=message):
        policy.drift(loop, **{"lags": (0,), "num_answers": 16, "turns": (1,), **settings})
    assert loop.trainer.version == 0
