"""Folders that torch DCP wrote, judged from outside: real ones, damaged ones, and pickles that would run something."""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharded_ranks import records, run, trainer_on

from rlinfra_utils.checkpoint import audit, dcp
from rlinfra_utils.sharded import named_tensors
from rlinfra_utils.sharded.optimizer import named_state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")


def write(ranks, folder):
    """As trainers do: model, optimizer, a step and a loader's state in one tree; and a model alone in safetensors."""
    trainer = trainer_on(ranks)
    trainer.update(*records(4))
    tree = {
        "model": named_tensors(trainer.model),
        "optimizer": named_state(trainer.model, trainer.optimizer),
        "lr_scheduler": {"last_epoch": 1},
        "train_state": {"step": 1},
        "dataloader": {"position": ranks.rank},
    }
    torch_dcp.save(tree, checkpoint_id=folder / "dcp")
    writer = torch_dcp.HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
    torch_dcp.save(named_tensors(trainer.model), storage_writer=writer)
    return list(tree["model"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    names = run(2, write, folder, folder)[0]
    return folder, names


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written[0] / "dcp", tmp_path / "step-1")


def test_names_are_those_that_torch_reads(written):
    """The oracle loads the pickle, which this test itself wrote."""
    index = dcp.read_index(written[0] / "dcp" / ".metadata")
    metadata = torch_dcp.FileSystemReader(written[0] / "dcp").read_metadata()
    assert set(index.keys) == set(metadata.state_dict_metadata)
    assert set(index.files) == {info.relative_path for info in metadata.storage_data.values()}
    assert index.num_ranks == 2
    assert index.parts()["policy"] == [f"model.{name}" for name in written[1]]


def test_what_a_folder_holds_and_lacks(folder):
    report = audit(folder)
    assert (report.kind, report.verdict, report.corrupt) == ("torch DCP", "weights only", {})
    assert report.present == ("policy", "optimizer", "scheduler", "layout")
    assert report.missing["counters"].startswith("'train_state.step': a step and no policy version")
    assert report.missing["data_position"].startswith("'dataloader.position': a loader's own state")
    assert "queue" in report.missing
    assert any("not loaded" in note for note in report.notes)
    assert any("2 ranks" in note for note in report.notes)


def test_a_model_alone_without_a_dot_in_its_names(tmp_path):
    metadata = torch_dcp.metadata.Metadata(
        state_dict_metadata={"weight": torch_dcp.metadata.BytesStorageMetadata()},
        storage_data={"weight": "__0_0.distcp"},
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({}, tmp_path / "__0_0.distcp")
    assert audit(tmp_path).present == ("policy", "layout")


def shard(folder):
    return sorted(folder.glob("__1_*.distcp"))[0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


class Evil:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def index_with(folder, old, changed):
    data = (folder / ".metadata").read_bytes()
    assert old in data
    (folder / ".metadata").write_bytes(data.replace(old, changed))


DAMAGE = {
    "shard missing": (lambda f: shard(f).unlink(), "distcp: is missing"),
    "shard empty": (lambda f: shard(f).write_bytes(b""), "distcp: is empty"),
    "shard cut": (lambda f: cut(shard(f)), "distcp: is cut off"),
    "no index": (lambda f: (f / ".metadata").unlink(), ".metadata: is missing: DCP writes it last"),
    "index empty": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata: is empty"),
    "index cut": (lambda f: cut(f / ".metadata"), ".metadata: is no whole pickle"),
    "index a folder": (lambda f: ((f / ".metadata").unlink(), (f / ".metadata").mkdir()), ".metadata: is missing"),
    "index noise": (lambda f: (f / ".metadata").write_bytes(b"\x00\xff noise"), ".metadata: is no whole pickle"),
    "another pickle": (lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})), "but no index of DCP"),
    "file outside": (lambda f: index_with(f, b"__0_0.distcp", b"../b0.distcp"), "names the file '../b0.distcp'"),
    "file renamed": (lambda f: index_with(f, b"__0_0.distcp", b"__7_0.distcp"), "__7_0.distcp: is missing"),
    "no file named": (lambda f: index_with(f, b".distcp", b".distcq"), "names no file of shards"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_its_consequence(folder, name):
    damage, words = DAMAGE[name]
    damage(folder)
    report = audit(folder)
    assert report.verdict == "broken"
    assert words in report.corrupt["policy"]
    assert report.corrupt["policy"].endswith("without it, nothing can be resumed")
    assert "\n" not in str(report.corrupt)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_named_and_not_run(folder, monkeypatch, protocol):
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(["state_dict_metadata", Evil()], protocol=protocol))
    assert "imports 'posix.mkdir', which DCP does not" in audit(folder).corrupt["policy"]
    assert not (folder / "evil").exists()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), tail=st.binary(max_size=20))
def test_any_change_of_the_index_ends_in_a_verdict(folder, written, place, byte, tail):
    data = bytearray((written[0] / "dcp" / ".metadata").read_bytes())
    data[place % len(data)] = byte
    (folder / ".metadata").write_bytes(bytes(data) + tail)
    report = audit(folder)
    assert report.verdict in ("weights only", "broken")
    assert all("\n" not in text for _, text in report.rows())


def test_a_trainer_with_fsdp_keeps_two_such_folders(tmp_path):
    """As accelerate's FSDP with SHARDED_STATE_DICT writes them."""
    weight = torch.ones(3)
    torch_dcp.save({"model": {"layer.weight": weight}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    torch_dcp.save({"optimizer": {"state.layer.exp_avg": weight}}, checkpoint_id=tmp_path / "optimizer_0")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 5}')
    report = audit(tmp_path)
    assert (report.kind, report.verdict, report.present) == ("transformers", "weights only", ("policy", "optimizer"))
    (tmp_path / "optimizer_0" / ".metadata").unlink()
    cut(tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp")
    report = audit(tmp_path)
    assert report.corrupt["policy"].startswith("pytorch_model_fsdp_0: ")
    assert "optimizer_0: .metadata: is missing: DCP writes it last" in report.corrupt["optimizer"]


def test_shards_in_safetensors(written, tmp_path):
    folder = shutil.copytree(written[0] / "shards", tmp_path / "shards")
    report = audit(folder)
    assert (report.kind, report.verdict, report.present) == ("torch DCP", "weights only", ("policy",))
    first, second = sorted(folder.iterdir())
    cut(second)
    assert f"{second.name}: is no whole safetensors file" in audit(folder).corrupt["policy"]
    shutil.copy(written[0] / "shards" / second.name, second)
    first.unlink()
    assert "shard 1 of at least 2 is missing" in audit(folder).corrupt["policy"]
