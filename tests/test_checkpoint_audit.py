"""Damaged checkpoints, each named rightly; version drift; folders of other stacks."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_samples import components

from rlinfra_utils.checkpoint import COMPONENTS, CheckpointError, audit, latest, load, save


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), 80, components())


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


def rewrite(path, change):
    """Change the manifest and make the marker agree, as a writer with a bug would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = change(manifest) or manifest
    text = json.dumps(manifest).encode() if not isinstance(manifest, bytes) else manifest
    (path / "manifest.json").write_bytes(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())


def relist(path, name, data):
    """Put other bytes in a file and list them with their true size and hash."""
    (path / name).write_bytes(data)

    def change(manifest):
        for file in manifest["components"][name.split(".")[0]]:
            if file["name"] == name:
                file |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    rewrite(path, change)


def flip(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def rename_file(path, component, name):
    rewrite(path, lambda m: m["components"][component][0].update(name=name))


def link(path, target):
    path.unlink()
    path.symlink_to(target)


def cut(path, num_bytes):
    with open(path, "r+b") as file:
        file.truncate(num_bytes)


def pickled():
    return pickle.dumps({"weight": [1.0]})


def safetensors_of(**arrays):
    return safetensors.numpy.save(arrays)


def bf16():
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0\0"


def pop(component):
    return lambda p: rewrite(p, lambda m: m["components"].pop(component) and None)


def with_json(name, **changes):
    def change(path):
        value = {**json.loads((path / f"{name}.json").read_text()), **changes}
        relist(path, f"{name}.json", json.dumps(value).encode())

    return change


def fifo(path):
    path.unlink()
    os.mkfifo(path)


# what was done, the damage, where audit must name it, the words it must use, the verdict
DAMAGE = [
    ("manifest gone", lambda p: (p / "manifest.json").unlink(), "manifest", "never came to its end", "broken"),
    ("manifest of 0 bytes", lambda p: cut(p / "manifest.json", 0), "manifest", "has 0 bytes", "broken"),
    ("manifest cut", lambda p: cut(p / "manifest.json", 99), "manifest", "differs from the hash in COMPLETE", "broken"),
    ("manifest edited", lambda p: flip(p / "manifest.json", 60), "manifest", "damaged or edited", "broken"),
    ("manifest a link", lambda p: link(p / "manifest.json", "/etc/hostname"), "manifest", "is a symbolic", "broken"),
    ("manifest huge", lambda p: cut(p / "manifest.json", 2**21), "manifest", "has 2097152 bytes", "broken"),
    ("manifest no JSON", lambda p: rewrite(p, lambda m: b"step: 80"), "manifest", "Invalid JSON", "broken"),
    ("manifest deep", lambda p: rewrite(p, lambda m: b"[" * 90_000), "manifest", "Invalid JSON", "broken"),
    (
        "manifest a list",
        lambda p: rewrite(p, lambda m: b"[]"),
        "manifest",
        "value=[]: Input should",
        "broken",
    ),
    ("manifest a fifo", lambda p: fifo(p / "manifest.json"), "manifest", "is no regular file", "broken"),
    ("other format", lambda p: rewrite(p, lambda m: m.update(format="x")), "manifest", "format='x'", "broken"),
    ("negative step", lambda p: rewrite(p, lambda m: m.update(step=-1)), "manifest", "step=-1", "broken"),
    ("other step", lambda p: rewrite(p, lambda m: m.update(step=70)), "manifest", "named for step 80", "broken"),
    ("unknown field", lambda p: rewrite(p, lambda m: m.update(x=1)), "manifest", "x=1", "broken"),
    (
        "unknown component",
        lambda p: rewrite(p, lambda m: m["components"].update(weights=[])),
        "manifest",
        "'weights', which is no component",
        "broken",
    ),
    ("marker gone", lambda p: (p / "COMPLETE").unlink(), "manifest", "the save was interrupted", "broken"),
    ("marker empty", lambda p: cut(p / "COMPLETE", 0), "manifest", "COMPLETE: has 0 bytes", "broken"),
    ("marker odd", lambda p: (p / "COMPLETE").write_bytes(b"\xff\n"), "manifest", "differs from the hash", "broken"),
    (
        "path climbs",
        lambda p: rename_file(p, "rng", "../rng.json"),
        "manifest",
        "leads out of the checkpoint",
        "broken",
    ),
    ("path absolute", lambda p: rename_file(p, "rng", "/etc/passwd"), "manifest", "leads out of the check", "broken"),
    ("path with \\", lambda p: rename_file(p, "rng", "..\\rng.json"), "manifest", "leads out of the check", "broken"),
    ("another's file", lambda p: rename_file(p, "rng", "policy.json"), "manifest", "of rng: needs rng.json", "broken"),
    ("a pickle listed", lambda p: rename_file(p, "rng", "rng.pkl"), "manifest", "of rng: needs rng.json", "broken"),
    (
        "listed twice",
        lambda p: rewrite(p, lambda m: m["components"]["rng"].append(m["components"]["rng"][0])),
        "manifest",
        "once",
        "broken",
    ),
    ("policy gone", lambda p: (p / "policy.safetensors").unlink(), "policy", "is missing", "broken"),
    ("policy cut", lambda p: cut(p / "policy.safetensors", 100), "policy", "is truncated: 100 bytes", "broken"),
    ("policy flipped", lambda p: flip(p / "policy.safetensors"), "policy", "SHA-256 differs", "broken"),
    (
        "policy a pickle",
        lambda p: (p / "policy.safetensors").write_bytes(pickled()),
        "policy",
        "begins like a pickle, which is never loaded",
        "broken",
    ),
    (
        "policy a listed pickle",
        lambda p: relist(p, "policy.safetensors", pickled()),
        "policy",
        "bytes are as listed; it begins like a pickle",
        "broken",
    ),
    (
        "policy a torch archive",
        lambda p: relist(p, "policy.safetensors", b"PK\x03\x04" + bytes(40)),
        "policy",
        "begins like a pickle",
        "broken",
    ),
    ("policy garbage", lambda p: relist(p, "policy.safetensors", b"x" * 50), "policy", "is no safetensors", "broken"),
    ("policy bfloat16", lambda p: relist(p, "policy.safetensors", bf16()), "policy", "for NumPy: data type", "broken"),
    (
        "policy lacks an array",
        lambda p: relist(p, "policy.safetensors", safetensors_of(**{"embed.weight": np.zeros(2)})),
        "policy",
        "names array 'head.weight', which policy.safetensors lacks",
        "broken",
    ),
    ("policy not listed", pop("policy"), "policy", "nothing can be resumed", "broken"),
    ("policy empty", lambda p: relist(p, "policy.json", b"{}"), "policy", "has no place in policy.json", "broken"),
    (
        "optimizer longer",
        lambda p: cut(p / "optimizer.safetensors", 10_000),
        "optimizer",
        "is too long: 10000 bytes",
        "weights only",
    ),
    (
        "optimizer a link",
        lambda p: link(p / "optimizer.json", "policy.json"),
        "optimizer",
        "is a symbolic link",
        "weights only",
    ),
    ("optimizer empty", lambda p: cut(p / "optimizer.json", 0), "optimizer", "is empty: 0 bytes", "weights only"),
    (
        "optimizer a folder",
        lambda p: ((p / "rng.json").unlink(), (p / "rng.json").mkdir()),
        "rng",
        "no reg",
        "weights only",
    ),
    ("optimizer missing", pop("optimizer"), "optimizer", "cold moments", "weights only"),
    ("scheduler missing", pop("scheduler"), "scheduler", "LR starts again", "weights only"),
    ("position missing", pop("data_position"), "data_position", "trained again, from the first", "weights only"),
    ("queue missing", pop("queue"), "queue", "rollouts vanish without a count", "weights only"),
    ("rng no JSON", lambda p: relist(p, "rng.json", b"{"), "rng", "rng.json: is no JSON", "weights only"),
    ("rng deep", lambda p: relist(p, "rng.json", b"[" * 90_000), "rng", "rng.json: is no JSON", "weights only"),
    (
        "no JSON file",
        lambda p: rewrite(p, lambda m: m["components"].update(rng=[])),
        "rng",
        "not in the",
        "weights only",
    ),
    ("odd reference", with_json("rng", a={"__tensor__": 3}), "rng", "is no reference to an array", "weights only"),
    ("dispatch counter", with_json("data_position", dispatched=9), "data_position", "data_position=", "weights only"),
    ("frontier negative", with_json("data_position", frontier=-4), "data_position", "frontier=-4", "weights only"),
    ("counters of another step", with_json("counters", global_step=79), "counters", "global_step=79", "weights only"),
    ("decoding unknown", with_json("decoding", beam=3), "decoding", "beam=3", "weights only"),
    ("queue without versions", with_json("queue", rollouts=[{}]), "queue", "neither policy_version", "weights only"),
    ("verifier empty", with_json("versions", verifier=""), "versions", "verifier=''", "weights only"),
]


@pytest.mark.parametrize(
    ("damage", "where", "words", "verdict"), [case[1:] for case in DAMAGE], ids=[c[0] for c in DAMAGE]
)
def test_each_damage_is_named(copy, damage, where, words, verdict):
    damage(copy)
    report = audit(copy)
    named = {**report.missing, **report.corrupt}
    assert list(named) == [where]
    assert words in named[where]
    assert "\n" not in named[where]
    assert (report.verdict, report.resumable) == (verdict, False)
    with pytest.raises(CheckpointError) as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="none of 1 checkpoints"):
        latest(copy.parent)
    if verdict == "weights only":
        assert load(copy, ("policy",))


def test_there_are_at_least_25_kinds_of_damage():
    assert len({case[0] for case in DAMAGE}) == len(DAMAGE) >= 25


def test_nothing_is_ever_unpickled(copy, tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    bomb = pickle.dumps(Trap())
    for name in ("policy.safetensors", "rng.json"):
        relist(copy, name, bomb)
    (copy / "extra.pkl").write_bytes(bomb)
    report = audit(copy)
    assert set(report.corrupt) == {"policy", "rng"}
    assert report.notes == ("extra.pkl lies in the folder unlisted; it is never read",)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_behind_a_link_is_refused(whole, tmp_path):
    (tmp_path / "step_00000090").symlink_to(whole)
    with pytest.raises(CheckpointError, match="is a symbolic link; name the folder itself"):
        load(tmp_path / "step_00000090")
    with pytest.raises(CheckpointError, match="none of 1"):
        latest(tmp_path)
    assert audit(tmp_path / "step_00000090").verdict == "broken"


def test_a_whole_checkpoint_is_resumable_under_any_name(whole, tmp_path):
    copied = shutil.copytree(whole, tmp_path / "best")
    for path in (whole, copied):
        report = audit(path)
        assert report.resumable
        assert report.present == tuple(COMPONENTS)
        assert report.rows() == []
        assert str(report).endswith("(rlinfra): resumable")


def test_a_cold_optimizer_is_noted(tmp_path):
    path = save(tmp_path, 80, components(optimizer={"state": {}, "param_groups": []}))
    assert "optimizer holds no array" in audit(path).notes[0]


# --- drift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current", "place", "effect"),
    [
        ({"versions": {"tokenizer": "t2"}}, "versions.tokenizer", "was 't1', is 't2': stored tokens may spell"),
        ({"versions": {"chat_template": "c2"}}, "versions.chat_template", "prompts differ"),
        ({"versions": {"verifier": "v2"}}, "versions.verifier", "rewards before and after"),
        ({"versions": {"environment": "e2"}}, "versions.environment", "not of one task"),
        ({"versions": {"engine": {"precision": "fp8"}}}, "versions.engine.precision", "was 'bfloat16', is 'fp8'"),
        ({"versions": {"judge": "j1"}}, "versions.judge", "was 'not recorded', is 'j1'"),
        ({"data_position": {"fingerprint": "b"}}, "data_position.fingerprint", "must not be applied"),
        ({"rollout_schema": {"schema_version": 2}}, "rollout_schema.schema_version", "was 1, is 2"),
    ],
)
def test_drift_is_named_with_its_consequence(whole, current, place, effect):
    report = audit(whole, current)
    assert list(report.drift) == [place]
    assert effect in report.drift[place]
    assert report.verdict == "weights only"


def test_decoding_is_compared_whole(whole):
    same = components()["decoding"]
    assert audit(whole, {"decoding": same, "versions": components()["versions"]}).resumable
    less = {name: value for name, value in same.items() if name != "top_p"}
    report = audit(whole, {"decoding": less})
    assert report.drift["decoding.top_p"].startswith("was 0.9, is None: the behaviour policy changes")


@pytest.mark.parametrize("current", [{"tokenizer": "t1"}, {"layout": {}}, [1], {"decoding": {"beam": 3}}])
def test_a_senseless_current_is_refused(whole, current):
    with pytest.raises(ValueError, match=r"current|decoding") as caught:
        audit(whole, current)
    assert "\n" not in str(caught.value)


def test_the_html_face_escapes_what_it_found(copy):
    rename_file(copy, "rng", "<b>x")
    assert "<b>x" not in audit(copy)._repr_html_()


# --- other stacks ----------------------------------------------------------------------------------------------------


def torch_file(path, data=b"x"):
    """The container of torch.save, without torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "checkpoint-500"
    path.mkdir()
    (path / "model.safetensors").write_bytes(safetensors_of(weight=np.zeros(3)))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch_file(path / name)
    (path / "trainer_state.json").write_text('{"global_step": 500, "epoch": 1.0}')
    (path / "tokenizer_config.json").write_text("{}")
    (path / "generation_config.json").write_text("{}")
    return path


@pytest.fixture
def verl(tmp_path):
    path = tmp_path / "global_step_40"
    for rank in range(2):
        for kind in ("model", "optim", "extra_state"):
            torch_file(path / "actor" / f"{kind}_world_size_2_rank_{rank}.pt")
    torch_file(path / "data.pt")
    (path / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    (path / "actor" / "huggingface").mkdir()
    (path / "actor" / "huggingface" / "tokenizer_config.json").write_text("{}")
    return path


def test_a_trainer_checkpoint_and_what_it_lacks(trainer):
    report = audit(trainer)
    assert (report.kind, report.verdict) == ("transformers", "weights only")
    assert report.present == ("policy", "optimizer", "scheduler", "rng")
    assert set(report.missing) == set(COMPONENTS) - set(report.present)
    assert report.missing["counters"].startswith("trainer_state.json has global_step 500 and no policy version; ")
    assert "no dataset fingerprint" in report.missing["data_position"]
    assert "training_args.bin is a pickle and is not read" in report.missing["layout"]
    assert report.missing["queue"] == COMPONENTS["queue"].without


def test_a_verl_checkpoint_and_what_it_lacks(verl):
    report = audit(verl)
    assert (report.kind, report.verdict) == ("verl", "weights only")
    assert report.present == ("policy", "optimizer", "scheduler", "rng", "layout")
    assert "loader's cursor" in report.missing["data_position"]
    assert "folder's name alone" in report.missing["counters"]


def test_megatrons_shards_are_said_to_be_unread(verl):
    for file in (verl / "actor").glob("*.pt"):
        file.unlink()
    (verl / "actor" / "dist_ckpt").mkdir()
    assert audit(verl).verdict == "broken"
    (verl / "actor" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"a shard")
    report = audit(verl)
    assert (report.verdict, report.resumable) == ("not read", False)
    for name in ("policy", "optimizer", "scheduler", "rng"):
        assert report.missing[name].startswith("actor/dist_ckpt holds Megatron's shards, which are not read; ")


def test_an_adapter_alone_is_noted(trainer):
    assert not audit(trainer).notes
    (trainer / "model.safetensors").rename(trainer / "adapter_model.safetensors")
    report = audit(trainer)
    assert "policy" in report.present
    assert report.notes == ("an adapter alone: the base that adapter_config.json names is not here",)


def test_skyrl_keeps_verls_files_in_another_folder(verl, tmp_path):
    path = tmp_path / "runs" / "global_step_40"
    path.parent.mkdir()
    verl.rename(path)
    (path / "actor").rename(path / "policy")
    torch_file(path / "trainer_state.pt")
    report = audit(path)
    assert (report.kind, report.verdict) == ("SkyRL", "weights only")
    assert report.present == ("policy", "optimizer", "scheduler", "rng", "layout")
    assert "trainer_state.pt is a pickle and is not read" in report.missing["counters"]
    (path / "policy" / "model_world_size_2_rank_1.pt").unlink()
    assert audit(path).verdict == "broken"


@pytest.fixture
def sharded_trainer(trainer):
    """As DeepSpeed's ZeRO 3 leaves a Trainer's folder: `latest` names the folder of the shards."""
    for name in ("model.safetensors", "optimizer.pt"):
        (trainer / name).unlink()
    for rank in range(2):
        torch_file(trainer / "global_step500" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch_file(trainer / "global_step500" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (trainer / "latest").write_text("global_step500\n")
    return trainer


def test_a_trainer_checkpoint_of_deepspeed(sharded_trainer):
    report = audit(sharded_trainer)
    assert (report.kind, report.verdict) == ("transformers", "weights only")
    assert report.present == ("policy", "optimizer", "scheduler", "rng")
    assert not any("not read" in note for note in report.notes)


@pytest.mark.parametrize(
    ("damage", "where", "words"),
    [
        (lambda p: next(p.glob("zero_pp_rank_0*")).unlink(), "policy", "1 of at least 2 ranks have a file"),
        (lambda p: cut(next(p.glob("bf16_zero_pp_rank_1*")), 20), "optimizer", "is no whole torch archive"),
        (lambda p: [file.unlink() for file in p.glob("*optim*")], "optimizer", r"holds no *_optim_states.pt"),
        (lambda p: (p.parent / "latest").write_text("global_step400"), "policy", "global_step400: holds no *_model"),
    ],
)
def test_damage_of_deepspeeds_shards(sharded_trainer, damage, where, words):
    damage(sharded_trainer / "global_step500")
    assert words in audit(sharded_trainer).corrupt[where]


def test_a_tag_that_leads_elsewhere_is_not_followed(sharded_trainer):
    (sharded_trainer / "latest").write_text("../checkpoint-500/global_step500")
    report = audit(sharded_trainer)
    assert report.verdict == "broken"
    assert "folders are not read: global_step500" in report.notes


INDEX = "model.safetensors.index.json"


def sharded(path, **weight_map):
    (path / "model.safetensors").rename(path / "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "where", "words"),
    [
        (lambda p: cut(p / "model.safetensors", 70), "policy", "is no whole safetensors file"),
        (lambda p: (p / "model.safetensors").write_bytes(pickled()), "policy", "is no whole safetensors file"),
        (lambda p: sharded(p, x="a.safetensors", y="b.safetensors"), "policy", "b.safetensors: is missing"),
        (lambda p: sharded(p, x="../a.safetensors"), "policy", "leads out of the checkpoint"),
        (lambda p: sharded(p), "policy", "weight_map={}: names no files"),
        (lambda p: (p / INDEX).write_text("{"), "policy", "is no JSON"),
        (lambda p: cut(p / "optimizer.pt", 30), "optimizer", "optimizer.pt: is no whole torch archive"),
        (lambda p: cut(p / "scheduler.pt", 0), "scheduler", "scheduler.pt: is empty"),
        (lambda p: (p / "trainer_state.json").write_text("[]"), "counters", "is no JSON object"),
        (lambda p: (p / "trainer_state.json").write_text('{"global_step": -1}'), "counters", "global_step=-1: no step"),
    ],
)
def test_damage_of_a_trainer_checkpoint(trainer, damage, where, words):
    damage(trainer)
    report = audit(trainer)
    assert list(report.corrupt) == [where]
    assert words in report.corrupt[where]
    assert where not in report.present
    assert where not in report.missing


@pytest.mark.parametrize(
    ("damage", "where", "words"),
    [
        (lambda p: (p / "actor/model_world_size_2_rank_1.pt").unlink(), ["policy"], "model: 1 shards of 2 ranks"),
        (lambda p: torch_file(p / "actor/optim_world_size_4_rank_0.pt"), ["optimizer"], "world sizes 2, 4 lie side"),
        (lambda p: cut(p / "actor/extra_state_world_size_2_rank_0.pt", 9), ["scheduler", "rng"], "no whole torch"),
        (lambda p: cut(p / "data.pt", 0), ["data_position"], "data.pt: is empty"),
        (lambda p: (p / "actor/fsdp_config.json").write_text("x"), ["layout"], "is no JSON"),
    ],
)
def test_damage_of_a_verl_checkpoint(verl, damage, where, words):
    damage(verl)
    report = audit(verl)
    assert list(report.corrupt) == where
    assert all(words in report.corrupt[name] for name in where)


def test_a_folder_of_checkpoints_is_no_checkpoint(trainer, verl, whole, tmp_path):
    for folder in (tmp_path, whole.parent):
        with pytest.raises(CheckpointError, match="holds checkpoints and is none; name one of them"):
            audit(folder)
    (tmp_path / "empty").mkdir()
    assert audit(tmp_path / "empty").verdict == "broken"
    with pytest.raises(CheckpointError, match="is no folder"):
        audit(tmp_path / "absent")


@pytest.mark.slow
def test_the_trainers_own_files_are_recognised(tmp_path):
    """A checkpoint that transformers' Trainer itself wrote; in a process of its own, as it starts threads."""
    pytest.importorskip("accelerate")
    code = """
import sys, torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
arguments = TrainingArguments(sys.argv[1], max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
                              report_to=[], disable_tqdm=True)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = audit(tmp_path / "checkpoint-2")
    assert (report.kind, report.corrupt) == ("transformers", {})
    assert report.present == ("policy", "optimizer", "scheduler", "rng")
    assert "global_step 2 " in report.missing["counters"]
