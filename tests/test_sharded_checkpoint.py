"""Checkpoints of sharded trainers: any number of ranks writes, any other reads, and a death leaves the one before."""

import os
import shutil
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from checkpoint_samples import components, same
from sharded_ranks import TIMEOUT_S, arrays, records, run, start, trainer_on

from rlinfra_utils.checkpoint import CheckpointError, Writer, audit, latest, load, save
from rlinfra_utils.policy import tiny_llama
from rlinfra_utils.sharded import (
    RanksError,
    gather_full,
    init_group,
    load_sharded,
    save_sharded,
    shard_model,
)
from rlinfra_utils.sharded.optimizer import named_state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")


def others(step=1, **changes):
    return components(step, policy=None, optimizer=None, layout=None, **changes)


def whole_state(trainer, ranks):
    """Weights and moments, gathered, and the groups' settings."""
    tree = named_state(trainer.model, trainer.optimizer)
    moments = {
        f"{name}.{key}": getattr(value, "full_tensor", lambda value=value: value)()
        for name, entry in tree["state"].items()
        for key, value in entry.items()
    }
    return arrays(gather_full(trainer.model, ranks).tensors) | arrays(moments), tree["param_groups"]


def train_and_save(ranks, folder):
    trainer = trainer_on(ranks)
    trainer.update(*records(6, 0), minibatches=2)
    path = save_sharded(folder, 1, trainer.model, trainer.optimizer, others(), ranks)
    saved = whole_state(trainer, ranks)
    trainer.update(*records(6, 1))
    return path, saved, whole_state(trainer, ranks)


def resume(ranks, path):
    """A trainer of another seed takes over the state and makes the next update."""
    trainer = trainer_on(ranks, seed=5, lr=1.0)
    rest = load_sharded(path, trainer.model, trainer.optimizer, ranks)
    loaded = whole_state(trainer, ranks)
    trainer.update(*records(6, 1))
    return rest, loaded, whole_state(trainer, ranks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one and of two ranks, with the states before and after the next update."""
    made = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"saved{world_size}")
        made[world_size] = run(world_size, train_and_save, folder, folder / "checkpoints")[0]
    return made


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks_takes_over_bit_for_bit(tmp_path, saved, before, after):
    path, (tensors, groups), (next_tensors, _) = saved[before]
    for rest, (loaded, loaded_groups), (next_loaded, _) in run(after, resume, tmp_path, path)[:1]:
        assert same(rest, load(path, rest))
        given = others() | {"layout": rest["layout"]}
        assert same(rest, {name: given[name] for name in rest})
        assert rest.keys() == given.keys()
        assert loaded.keys() == tensors.keys()
        assert loaded_groups == groups
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].tobytes()) == (tensor.dtype, tensor.tobytes()), name
        for name, tensor in next_tensors.items():
            np.testing.assert_allclose(next_loaded[name], tensor, rtol=0, atol=3e-6, err_msg=name)


def test_it_is_a_checkpoint_like_any_other(saved):
    path, (tensors, groups), _ = saved[2]
    assert latest(path.parent) == path
    assert audit(path).verdict == "resumable"
    assert not audit(path).notes
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".step")] == []
    whole = load(path)
    assert whole["layout"] == {"world_size": 2, "strategy": "fsdp2", "device": "cpu"}
    assert {name: whole["policy"][name].tobytes() for name in whole["policy"]} == {
        name: tensor.tobytes() for name, tensor in tensors.items() if name in whole["policy"]
    }
    assert whole["policy"].keys() == dict(tiny_llama(0).named_parameters()).keys()
    moment = whole["optimizer"]["state"]["model.norm.weight"]["exp_avg"]
    assert moment.tobytes() == tensors["model.norm.weight.exp_avg"].tobytes()
    assert whole["optimizer"]["param_groups"][0]["params"] == groups[0]["params"]
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"\x80", b"PK")), file


def test_a_fresh_optimizer_is_saved_without_a_step(tmp_path):
    with init_group(0, 1, f"file://{tmp_path}/meet") as ranks:
        trainer = trainer_on(ranks)
        path = save_sharded(tmp_path / "c", 1, trainer.model, trainer.optimizer, others(), ranks)
        assert len(trainer.optimizer.state) == 0
        assert load(path)["optimizer"]["state"] == {}
        other = trainer_on(ranks, seed=3)
        load_sharded(path, other.model, other.optimizer, ranks, require=["counters"])
        assert all(
            torch.equal(a.to_local(), b.to_local())
            for a, b in zip(trainer.model.parameters(), other.model.parameters())
        )


# Damage ---------------------------------------------------------------------------------------------------------------


def flip(path):
    file = path / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def evil_metadata(path):
    """What DCP itself writes: its reader would run whatever the pickle says."""
    shutil.rmtree(path)
    path.mkdir()
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
    (path / "__0_0.distcp").write_bytes(b"PK\x03\x04")


DAMAGE = {
    "a bit": (flip, "policy.safetensors: its SHA-256 differs"),
    "DCP's own format": (evil_metadata, "manifest.json: is missing"),
    "no optimizer file": (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors: is missing"),
    "other component": (lambda path: (path / "rng.json").write_text("{}"), "rng.json: is truncated"),
    "no marker": (lambda path: (path / "COMPLETE").unlink(), "COMPLETE: is missing"),
}


def try_to_load(ranks, path):
    trainer = trainer_on(ranks)
    before = arrays(gather_full(trainer.model, ranks).tensors)
    try:
        load_sharded(path, trainer.model, trainer.optimizer, ranks)
        message = "no error"
    except (CheckpointError, RanksError) as error:
        message = f"{type(error).__name__}: {error}"
    after = arrays(gather_full(trainer.model, ranks).tensors)
    return message, same(before, after), len(trainer.optimizer.state)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[2][0], tmp_path / "step_00000001")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_before_anything_is_read(copied, tmp_path, name):
    damage, words = DAMAGE[name]
    damage(copied)
    with init_group(0, 1, f"file://{tmp_path}/meet") as ranks:
        message, untouched, num_moments = try_to_load(ranks, copied)
    assert message.startswith("CheckpointError")
    assert words in message
    assert "\n" not in message
    assert untouched
    assert num_moments == 0


def test_every_rank_refuses(copied, tmp_path):
    flip(copied)
    (first, *rest), (second, *other_rest) = run(2, try_to_load, tmp_path, copied)
    assert first.startswith("CheckpointError")
    assert second.startswith("RanksError: rank 0 failed: CheckpointError")
    assert "policy.safetensors: its SHA-256 differs" in second
    assert rest == other_rest == [True, 0]


def test_another_model_or_optimizer_is_refused(saved, tmp_path):
    path = saved[2][0]
    with init_group(0, 1, f"file://{tmp_path}/meet") as ranks:
        model = shard_model(tiny_llama(0), ranks)
        half = shard_model(tiny_llama(0).to(torch.float64), ranks)
        short = tiny_llama(0)
        del short.model.layers[1]
        short = shard_model(short, ranks)
        cases = [
            (model, torch.optim.SGD(model.parameters(), lr=0.1), "param_groups.0. has other settings"),
            (model, torch.optim.AdamW(list(model.parameters())[1:]), "other parameters: 'model.embed_tokens.weight'"),
            (half, torch.optim.AdamW(half.parameters()), "is ..17, 128., 'F32'., the model's is ..17, 128., 'F64'."),
            (short, torch.optim.AdamW(short.parameters()), "the model lacks 'model.layers.1.input_layernorm.weight'"),
        ]
        for other, optimizer, words in cases:
            with pytest.raises(CheckpointError, match=words) as caught:
                load_sharded(path, other, optimizer, ranks)
            assert "\n" not in str(caught.value)


def with_optimizer(path, folder, **changes):
    """The checkpoint again, whole by its hashes, with another content of the optimizer."""
    values = load(path)
    values["optimizer"] = values["optimizer"] | changes
    return save(folder, 1, values)


def test_what_is_whole_and_no_state_of_this_optimizer_is_refused(saved, tmp_path):
    path, name = saved[2][0], "model.norm.weight"
    entry, groups = load(path)["optimizer"]["state"][name], load(path)["optimizer"]["param_groups"]
    cases = {
        "has no state and param_groups by name": {"param_groups": "none"},
        "0 groups are stored, the optimizer has 1": {"param_groups": []},
        "param_groups.0. has other parameters": {"param_groups": [groups[0] | {"params": [0, 1]}]},
        "param_groups.0..betas=0.9: needs 2 values": {"param_groups": [groups[0] | {"betas": 0.9}]},
        "'list' object has no attribute": {"state": {name: [1.0]}},
        "state of 'lm_head.weight', which the optimizer does not step": {"state": {"lm_head.weight": entry}},
        r"its parameter has shape \(128,\)": {"state": {name: entry | {"exp_avg": np.zeros(3, "f4")}}},
        "'I32'": {"state": {name: entry | {"exp_avg": np.zeros(128, "i4")}}},
    }
    with init_group(0, 1, f"file://{tmp_path}/meet") as ranks:
        trainer = trainer_on(ranks)
        for number, (words, changes) in enumerate(cases.items()):
            other = with_optimizer(path, tmp_path / str(number), **changes)
            with pytest.raises(CheckpointError, match=words) as caught:
                load_sharded(other, trainer.model, trainer.optimizer, ranks)
            assert "\n" not in str(caught.value)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path):
    with init_group(0, 1, f"file://{tmp_path}/meet") as ranks:
        trainer = trainer_on(ranks)
        model, optimizer, folder = trainer.model, trainer.optimizer, tmp_path / "c"
        early = tiny_llama(0)
        stale = torch.optim.AdamW(early.parameters())
        early = shard_model(early, ranks)
        half = shard_model(tiny_llama(0).to(torch.bfloat16), ranks)
        cases = [
            ((model, stale, others()), "parameter 0 is not the model's; build the optimizer after shard_model"),
            (
                (half, torch.optim.AdamW(half.parameters()), others()),
                "embed_tokens.weight: is torch.bfloat16",
            ),
            ((model, optimizer, components(1, layout=None)), "components: 'policy' is not one of"),
            ((model, optimizer, others() | {"layout": {"world_size": 1}}), "components: 'layout' is not one of"),
            ((model, optimizer, others(weather={})), "components: 'weather' is not one of"),
            ((model, optimizer, others(counters={"global_step": -1, "policy_version": 0})), "global_step=-1"),
            ((model, optimizer, others(counters={"global_step": 2, "policy_version": 0})), "global_step is 2"),
        ]
        for (some_model, some_optimizer, given), words in cases:
            with pytest.raises(ValueError, match=words):
                save_sharded(folder, 1, some_model, some_optimizer, given, ranks)
            assert latest(folder) is None
            assert not list(folder.glob(".step*"))
        with Writer(folder), pytest.raises(CheckpointError, match="has another writer"):
            save_sharded(folder, 1, model, optimizer, others(), ranks)
        save_sharded(folder, 1, model, optimizer, others(), ranks)


# Death ----------------------------------------------------------------------------------------------------------------


def save_until_killed(ranks, folder, first, signs):
    """One checkpoint after another; a file of `signs` says that the first is there."""
    trainer = trainer_on(ranks)
    for step in range(first, first + 1000):
        try:
            save_sharded(folder, step, trainer.model, trainer.optimizer, others(step), ranks, keep=2)
        except (CheckpointError, RanksError) as error:
            return f"{type(error).__name__}: {error}"
        if step == first and ranks.rank == 0:
            signs.touch()
    return "not killed"


@pytest.mark.slow
def test_a_rank_killed_at_a_random_instant_leaves_the_checkpoint_before(tmp_path):
    """Each rank in turn; the survivor says so in one line, and the next group goes on in the same folder."""
    rng = np.random.default_rng(0)
    reached = 0
    for number in range(6):
        signs = tmp_path / f"signs{number}"
        started = start(2, save_until_killed, tmp_path, tmp_path / "c", reached + 1, signs)
        until_s = time.monotonic() + TIMEOUT_S
        while not signs.exists():
            assert time.monotonic() < until_s, "no first checkpoint"
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        victim, survivor = started[number % 2], started[1 - number % 2]
        os.kill(victim[0].pid, signal.SIGKILL)
        assert survivor[1].poll(TIMEOUT_S), "the survivor waits for a dead rank"
        done, answer = survivor[1].recv()
        assert done, answer
        assert answer.split(":")[0] in ("CheckpointError", "RanksError"), answer
        assert "\n" not in answer
        for process, _ in started:
            process.join(TIMEOUT_S)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = latest(tmp_path / "c")
        step = int(path.name.removeprefix("step_"))
        assert step > reached
        assert load(path)["counters"]["global_step"] == step
        assert load(path)["policy"].keys() == dict(tiny_llama(0).named_parameters()).keys()
        reached = step
    with Writer(tmp_path / "c"):
        assert not list((tmp_path / "c").glob(".step_*"))
