"""The paths of weights: the same weights arrive by each, parts and bytes add up; adapters need their base."""

import copy
import json

import numpy as np
import pytest
import torch

from rlinfra_utils.engines import HFEngine, teacher_forced_logprobs
from rlinfra_utils.policy import load_warm_start, tiny_llama
from rlinfra_utils.sync import (
    Adapter,
    SyncError,
    adapter_only,
    attached,
    control,
    fingerprint,
    in_memory_copy,
    in_memory_pointers,
    load_adapter,
    merge,
    save_adapter,
    table,
    through_folder,
    through_shared_memory,
    verify,
)
from rlinfra_utils.sync.paths import SHARED_MEMORY
from rlinfra_utils.timers import Trace

SUMS = [load_warm_start()[1](f"{a}+{b}=").input_ids for a, b in ((59, 63), (15, 84), (77, 26), (38, 91))]
TARGETS = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"]
RANK = 4


def scores_of(model):
    def score(sequences):
        with torch.no_grad():
            return [teacher_forced_logprobs(model, torch.tensor([ids]))[0].tolist() for ids in sequences]

    return score


def moved(model, seed=0):
    model, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=random))
    return model


def adapter_for(model, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = {name: model.state_dict()[name].shape for name in TARGETS}
    a = {name: 0.3 * torch.randn(RANK, shape[1], generator=random) for name, shape in shapes.items()}
    b = {name: 0.3 * torch.randn(shape[0], RANK, generator=random) for name, shape in shapes.items()}
    return Adapter(a, b, alpha=8)


@pytest.fixture(scope="module")
def base():
    return load_warm_start()[0]


def with_state(model, state):
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model


def test_every_path_brings_the_same_weights(base, tmp_path):
    new, trace = moved(base), Trace()
    engines = [HFEngine(copy.deepcopy(base)) for _ in range(4)]
    transfers = [
        through_folder(new.state_dict(), engines[0], 1, tmp_path, SUMS, trace),
        through_shared_memory(new.state_dict(), engines[1], 1, SUMS, trace),
        in_memory_copy(new, engines[2], 1, SUMS, trace),
        in_memory_pointers(new, engines[3], 1, SUMS, trace),
    ]
    expected = fingerprint(new.state_dict())
    for engine in engines:
        assert fingerprint(engine.model.state_dict()) == expected
        assert engine.version == 1
        assert verify(engine, 1, control(scores_of(new), SUMS, 1)).verdict == "proven"
    weights_bytes = 4 * sum(parameter.numel() for parameter in new.parameters())
    assert [transfer.num_bytes for transfer in transfers] == [weights_bytes] * 3 + [0]
    shown = table(transfers)
    assert shown.index.is_unique
    assert shown.loc["snapshot, folder", "load_s"] == transfers[0].seconds["load"]
    parts = shown.loc[:, "gather_s":"reset_s"]
    np.testing.assert_allclose(parts.sum(axis=1), shown["total_s"])
    assert np.isnan(shown.loc["memory, copy", "write_s"])
    spans = trace.frame()
    assert (spans["stage"] == "weight_sync").sum() == 4
    assert not list(SHARED_MEMORY.glob("weights-*"))


def test_pointers_follow_the_trainer_and_a_copy_does_not(base):
    trainer = copy.deepcopy(base)
    copied, shared = HFEngine(copy.deepcopy(base)), HFEngine(copy.deepcopy(base))
    in_memory_copy(trainer, copied, 1)
    in_memory_pointers(trainer, shared, 1)
    before = fingerprint(trainer.state_dict())
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.01)
    assert fingerprint(copied.model.state_dict()) == before
    assert fingerprint(shared.model.state_dict()) == fingerprint(trainer.state_dict()) != before


def test_a_cache_that_is_reset_is_timed_and_its_loss_reported(base):
    class Cached(HFEngine):
        seen, resets = 0, 0

        def generate(self, prompt_ids, decoding, n=1, seed=None):
            generation = super().generate(prompt_ids, decoding, n, seed)
            self.seen += 1
            return type(generation)(generation.completions, 3.0 if self.seen in (1, 3) else 1.0, 0.0, 1, 1)

        def reset_prefix_cache(self):
            assert self.version == 1  # after the load
            self.resets += 1

    engine = Cached(copy.deepcopy(base))
    done = in_memory_copy(moved(base), engine, 1, SUMS)
    assert (engine.resets, done.cache_loss_s) == (1, 2.0)
    assert done.seconds.keys() == {"load", "reset"}
    assert in_memory_copy(base, HFEngine(copy.deepcopy(base)), 2).cache_loss_s is None


def test_merged_and_attached_are_one_function(base):
    adapter = adapter_for(base)
    ids = torch.tensor(SUMS)
    with torch.no_grad():
        plain = base(ids).logits
        with attached(base, adapter):
            beside = base(ids).logits
        merged = with_state(base, merge(base.state_dict(), adapter))(ids).logits
        after = base(ids).logits
    torch.testing.assert_close(beside, merged, rtol=1e-4, atol=1e-4)
    assert (beside - plain).abs().max() > 0.1
    assert torch.equal(after, plain)


def test_the_delta_is_the_formula_of_the_paper(base):
    adapter = adapter_for(base)
    name = TARGETS[0]
    a, b = adapter.a[name].double().numpy(), adapter.b[name].double().numpy()
    by_hand = np.zeros((b.shape[0], a.shape[1]))
    for rank in range(RANK):
        by_hand += 8 / RANK * np.outer(b[:, rank], a[rank])
    np.testing.assert_allclose(adapter.delta(name), by_hand, rtol=1e-4, atol=1e-5)


def test_an_adapter_travels_in_few_bytes_and_arrives(base, tmp_path):
    adapter, engine = adapter_for(base), HFEngine(copy.deepcopy(base))
    done = adapter_only(adapter, base.state_dict(), engine, 1, tmp_path)
    assert done.num_bytes == 4 * sum(RANK * (128 + 128) for _ in TARGETS)
    with attached(base, adapter):
        held = control(scores_of(base), SUMS, 1, tolerance_nats=1e-3)
        assert verify(engine, 1, held).verdict == "proven"


def test_an_adapter_without_its_base_is_named(base, tmp_path):
    """By the manifest where the base's fingerprint is known, by the log-probs where the number is all there is."""
    adapter, other = adapter_for(base), tiny_llama(seed=5)
    save_adapter(tmp_path, adapter, fingerprint(base.state_dict()))
    digest = fingerprint(base.state_dict()).digest[:12]
    with pytest.raises(SyncError, match=f"is an adapter of base {digest}, the engine holds"):
        load_adapter(tmp_path, fingerprint(other.state_dict()))

    whole = with_state(base, merge(base.state_dict(), adapter))
    alone = with_state(other, merge(other.state_dict(), adapter))
    references = {
        "the base without the adapter": scores_of(base)(SUMS),
        "the adapter without its base": scores_of(alone)(SUMS),
    }
    held = control(scores_of(whole), SUMS, 2, references=references)
    for model, name in ((base, "the base without the adapter"), (alone, "the adapter without its base")):
        proof = verify(HFEngine(copy.deepcopy(model), version=2), 2, held)
        assert proof.verdict == "rejected"
        assert f"these are the log-probs of {name}" in proof.sentence
    assert verify(HFEngine(whole, version=2), 2, held).verdict == "proven"


def test_an_adapter_survives_the_disk(base, tmp_path):
    adapter, prints = adapter_for(base), fingerprint(base.state_dict())
    save_adapter(tmp_path, adapter, prints)
    found = load_adapter(tmp_path, prints)
    assert found.alpha == adapter.alpha
    assert found.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in adapter.tensors.items())


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("adapter_config.json", b"", "holds no whole adapter"),
        ("adapter_config.json", b"[]", "holds no whole adapter"),
        ("adapter_config.json", b"{}", "holds no whole adapter"),
        ("adapter_model.safetensors", b"x", "holds no whole adapter"),
        ("adapter_model.safetensors", None, "holds no whole adapter"),
    ],
)
def test_damaged_adapters_are_refused(base, tmp_path, file, content, said):
    prints = fingerprint(base.state_dict())
    save_adapter(tmp_path, adapter_for(base), prints)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    with pytest.raises(SyncError, match=said):
        load_adapter(tmp_path, prints)


def test_an_adapter_of_other_tensors_than_its_manifest(base, tmp_path):
    prints = fingerprint(base.state_dict())
    save_adapter(tmp_path, adapter_for(base, seed=1), prints)
    swapped = (tmp_path / "adapter_model.safetensors").read_bytes()
    save_adapter(tmp_path, adapter_for(base, seed=2), prints)
    (tmp_path / "adapter_model.safetensors").write_bytes(swapped)
    with pytest.raises(SyncError, match=r"are not the ones in adapter_config\.json"):
        load_adapter(tmp_path, prints)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_digest"] == prints.digest


@pytest.mark.parametrize(
    ("a", "b", "alpha", "said"),
    [
        ({}, {}, 1, "at least one"),
        ({"w": torch.ones(2, 3)}, {"v": torch.ones(4, 2)}, 1, "needs the names of a"),
        ({"w": torch.ones(2, 3)}, {"w": torch.ones(4, 3)}, 1, r"need \(rank, in\) and \(out, rank\)"),
        ({"w": torch.ones(3)}, {"w": torch.ones(4, 3)}, 1, "need"),
        ({"w": torch.ones(2, 3)}, {"w": torch.ones(4, 2)}, 0, "alpha=0"),
    ],
)
def test_bad_adapters_are_refused_by_name(a, b, alpha, said):
    with pytest.raises(ValueError, match=said):
        Adapter(a, b, alpha)


def test_an_adapter_that_does_not_fit_is_refused(base):
    name = TARGETS[0]
    with pytest.raises(ValueError, match="changes 'nowhere.weight', which the base lacks"):  # noqa: RUF043
        merge(base.state_dict(), Adapter({"nowhere.weight": torch.ones(2, 3)}, {"nowhere.weight": torch.ones(4, 2)}, 1))
    with pytest.raises(ValueError, match=r"has shape \(128, 128\) in the base, \(4, 3\) here"):
        merge(base.state_dict(), Adapter({name: torch.ones(2, 3)}, {name: torch.ones(4, 2)}, 1))


def test_a_folder_holds_a_version_once(base, tmp_path):
    engine = HFEngine(copy.deepcopy(base))
    through_folder(base.state_dict(), engine, 1, tmp_path)
    with pytest.raises(SyncError, match="stands there already"):
        through_folder(base.state_dict(), engine, 1, tmp_path)
    with pytest.raises(ValueError, match="version=-1"):
        in_memory_copy(base, engine, -1)
