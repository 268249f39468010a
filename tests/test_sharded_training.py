"""A sharded trainer on real ranks against the plain trainer in one process: the same weights, the same report."""

import dataclasses
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import same
from sharded_ranks import arrays, records, run, trainer_on

from rlinfra_utils.policy import Trainer, tiny_llama
from rlinfra_utils.sharded import RanksError, gather_full, init_group, named_tensors, shard_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
#: What the trainer is made with and what each update is called with.
KINDS = {
    "plain": ({}, {}),
    "minibatches": ({}, {"minibatches": 3, "num_epochs": 2}),
    "kl": ({"kl_coef": 0.1}, {"minibatches": 2}),
}
#: Weights move by about 1e-3 in three updates; another order of summation moves them by about 3e-7.
TOLERANCE = 3e-6


def three_updates(trainer, call, num_rollouts):
    """The figures of each update by name, with each log-prob as one of them."""
    reports = [dataclasses.asdict(trainer.update(*records(num_rollouts, seed), **call)) for seed in range(3)]
    for report in reports:
        report.update({f"logprob {i}": value for i, value in enumerate(report.pop("logprobs").ravel().tolist())})
    return reports


def options_of(kind):
    options, call = KINDS[kind]
    return options | ({"base_model": tiny_llama(7)} if "kl_coef" in options else {}), call


def train(ranks, kind, num_rollouts):
    options, call = options_of(kind)
    trainer = trainer_on(ranks, **options)
    reports = three_updates(trainer, call, num_rollouts)
    return arrays(gather_full(trainer.model, ranks).tensors), reports


@pytest.mark.parametrize(("kind", "num_rollouts", "world_size"), [("plain", 8, 2), ("minibatches", 7, 3), ("kl", 2, 3)])
def test_ranks_together_equal_one_process(tmp_path, kind, num_rollouts, world_size):
    """Shares of unequal numbers of tokens, and in the last case fewer rollouts than ranks."""
    answers = run(world_size, train, tmp_path, kind, num_rollouts)
    options, call = options_of(kind)
    trainer = Trainer(tiny_llama(0), **options)
    reports = three_updates(trainer, call, num_rollouts)
    start, alone = arrays(named_tensors(tiny_llama(0))), arrays(named_tensors(trainer.model))
    assert answers[0][0].keys() == alone.keys()
    for name, weight in alone.items():
        np.testing.assert_allclose(answers[0][0][name], weight, rtol=0, atol=TOLERANCE, err_msg=name)
        assert np.abs(weight - start[name]).max() > 100 * TOLERANCE
    for _, theirs in answers:
        assert theirs == answers[0][1]  # each rank reports the sums of all
        for mine, other in zip(reports, theirs):
            assert other == pytest.approx(mine, rel=1e-5, abs=1e-6)


def test_weights_of_a_decoupled_loss_are_shared_out_with_their_rows(tmp_path):
    (together, *_), others = run(2, weighted, tmp_path)
    trainer = Trainer(tiny_llama(0))
    batch, advantages = records(5)
    trainer.update(batch, advantages, weights=token_weights(batch))
    assert others == ({}, None)
    for name, weight in arrays(named_tensors(trainer.model)).items():
        np.testing.assert_allclose(together[name], weight, rtol=0, atol=TOLERANCE, err_msg=name)


def token_weights(batch):
    width = max(len(record.policy_mask) for record in batch)
    return np.random.default_rng(3).uniform(0, 2, (len(batch), width - 1))


def weighted(ranks):
    trainer = trainer_on(ranks)
    batch, advantages = records(5)
    trainer.update(batch, advantages, weights=token_weights(batch))
    return arrays(gather_full(trainer.model, ranks).tensors), None


def failing_update(ranks):
    """Rollout 1, which is rank 1's, makes the loss infinite."""
    trainer = trainer_on(ranks)
    before = arrays(gather_full(trainer.model, ranks).tensors)
    batch, _ = records(4)
    batch[1] = batch[1].model_copy(update={"behavior_logprobs": [-200.0] * len(batch[1].response_tokens)})
    try:
        trainer.update(batch, [1.0, -1.0, 1.0, -1.0])
    except FloatingPointError as error:
        after = arrays(gather_full(trainer.model, ranks).tensors)
        return str(error), same(before, after), (trainer.version, len(trainer.optimizer.state))
    return "no error"


def test_an_infinite_loss_on_one_rank_undoes_the_update_on_all(tmp_path):
    answers = run(2, failing_update, tmp_path)
    for message, untouched, counted in answers:
        assert message.startswith("loss=")
        assert message.endswith("not finite; update undone")
        assert untouched
        assert counted == (0, 0)


def gathering(ranks):
    model = shard_model(tiny_llama(0), ranks)
    held_bytes = sum(tensor.to_local().nbytes for tensor in named_tensors(model).values())
    full = gather_full(model, ranks)
    return arrays(full.tensors), full.num_bytes, full.largest_bytes, full.seconds, held_bytes


def test_gathering_gives_rank_0_the_model_bit_for_bit_and_says_what_it_took(tmp_path):
    """Tied embeddings are one tensor: counted once, gathered once."""
    plain = tiny_llama(0)
    answers = run(3, gathering, tmp_path)
    assert [bool(tensors) for tensors, *_ in answers] == [True, False, False]
    assert answers[0][0].keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert answers[0][0][name].tobytes() == parameter.detach().numpy().tobytes()
    sizes = [parameter.nbytes for parameter in plain.parameters()]
    for _, num_bytes, largest_bytes, seconds, _ in answers:
        assert (num_bytes, largest_bytes) == (sum(sizes), max(sizes))
        assert 0 < seconds < 60
    held = [answer[-1] for answer in answers]
    assert sum(held) == sum(sizes)
    assert max(held) < sum(sizes) / 2


def other_weights(ranks):
    try:
        shard_model(tiny_llama(ranks.rank), ranks)
    except ValueError as error:
        return str(error)


def failing_alone(ranks):
    def work():
        if ranks.rank == 1:
            raise KeyError("disk")
        return ranks.rank

    try:
        ranks.together(work)
    except (RanksError, KeyError) as error:
        first = f"{type(error).__name__}: {error}"
    return first, ranks.together(lambda: "from rank 1", on=1), ranks.sum(torch.tensor([1.0, ranks.rank])).tolist()


def test_ranks_agree_on_errors_results_and_sums(tmp_path):
    said = "model: rank 1 holds other weights than rank 0; build it from one seed or one file"
    assert run(2, other_weights, tmp_path) == [said, said]
    answers = run(2, failing_alone, tmp_path)
    assert [first for first, *_ in answers] == ["RanksError: rank 1 failed: KeyError: 'disk'", "KeyError: 'disk'"]
    assert [rest for _, *rest in answers] == [["from rank 1", [2.0, 1.0]]] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 2}, "rank=2: needs a whole number"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"rendezvous": "meet"}, "rendezvous=.meet.: needs to begin with file:///"),
        ({"rendezvous": "file:///absent/meet"}, "its folder does not exist"),
        ({"rendezvous": None}, "rendezvous=None"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_init_group_refuses_at_the_door(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        init_group(**{"rank": 0, "world_size": 2, "rendezvous": "tcp://127.0.0.1:1", "timeout_s": 1} | change)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_a_group_that_nobody_joins_is_an_error_and_not_a_wait(tmp_path):
    for rendezvous in (f"file://{tmp_path}/meet", "tcp://127.0.0.1:1"):
        with pytest.raises(RanksError, match=r"rank 1 of 2.*no group within 1 s") as caught:
            init_group(1, 2, rendezvous, timeout_s=1)
        assert "\n" not in str(caught.value)
        assert not dist.is_initialized()


def test_a_group_of_one_closes_and_opens_again(tmp_path):
    for number in range(2):
        with init_group(0, 1, f"file://{tmp_path}/{number}") as ranks:
            assert (ranks.rank, ranks.world_size) == (0, 1)
            with pytest.raises(ValueError, match="in a group already"):
                init_group(0, 1, f"file://{tmp_path}/other")
        assert not dist.is_initialized()
