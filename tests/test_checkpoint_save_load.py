"""Save, find and load: round trips, whole or absent, retention, one writer, asynchronous saves."""

import errno
import json
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from checkpoint_samples import components, same
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlinfra_utils.checkpoint import COMPONENTS, CheckpointError, CheckpointWarning, Writer, latest, load, save, writing
from rlinfra_utils.checkpoint.coding import DTYPES, decode, encode

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
dtypes = st.sampled_from(sorted(DTYPES)).map(np.dtype)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**130), 2**130) | st.floats() | texts | arrays.arrays(dtypes, shapes)
)
keys = texts.filter(lambda key: "/" not in key and key not in ("__tensor__", "__metadata__", ""))
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=12)


@settings(deadline=None)
@given(st.dictionaries(keys, trees, min_size=1, max_size=3))
def test_any_tree_comes_back_equal(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("tree")
    paths = []
    for name, data in encode("rng", tree).items():
        (folder / name).write_bytes(data)
        paths.append(folder / name)
    assert same(decode("rng", paths), tree)


def test_a_complete_checkpoint_comes_back_equal(tmp_path):
    saved = components()
    path = save(tmp_path, 80, saved)
    assert path == tmp_path / "step_00000080" == latest(tmp_path)
    loaded = load(path)
    assert list(loaded) == list(COMPONENTS)
    assert len(COMPONENTS) == 14
    assert same(loaded, {name: saved[name] for name in COMPONENTS})


def test_arrays_of_any_memory_order_come_back_by_value(tmp_path):
    base = np.arange(12, dtype="f4").reshape(3, 4)
    odd = {"t": base.T, "strided": base[:, ::2], "big": base.astype(">f4"), "zero_d": np.array(3.5)}
    loaded = load(save(tmp_path, 1, {"policy": odd}), ("policy",))["policy"]
    for name, array in odd.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].shape == array.shape


def test_a_random_generator_goes_on_where_it_was(tmp_path):
    rng = np.random.default_rng(5)
    rng.normal(size=100)
    path = save(
        tmp_path, 1, {"rng": {"numpy": rng.bit_generator.state, "legacy": np.random.RandomState(3).get_state()}}
    )
    ahead = rng.normal(size=5)
    other = np.random.default_rng()
    other.bit_generator.state = load(path, ("rng",))["rng"]["numpy"]
    np.testing.assert_array_equal(other.normal(size=5), ahead)


def test_adam_and_cosine_go_on_and_a_cold_start_jumps(tmp_path):
    """Field case B49, by torch's own optimizer and schedule."""
    torch = pytest.importorskip("torch")

    def fresh():
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.Adam([weight], lr=1e-4)
        return weight, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    def update_over_lr(weight, optimizer):
        weight.grad = torch.full_like(weight, 0.01)
        optimizer.step()
        return -weight.item() / optimizer.param_groups[0]["lr"]

    moments = {"step": np.array(10_000.0), "exp_avg": np.array([0.001]), "exp_avg_sq": np.array([1e-4])}
    _, optimizer, scheduler = fresh()
    for _ in range(500):
        optimizer.step()
        scheduler.step()
    groups = optimizer.state_dict()["param_groups"]
    optimizer_part = {"state": {"0": moments}, "param_groups": groups}
    path = save(tmp_path, 500, {"optimizer": optimizer_part, "scheduler": scheduler.state_dict()})

    loaded = load(path, ("optimizer", "scheduler"))
    weight, optimizer, scheduler = fresh()
    state = {0: {key: torch.from_numpy(value) for key, value in loaded["optimizer"]["state"]["0"].items()}}
    optimizer.load_state_dict({"state": state, "param_groups": loaded["optimizer"]["param_groups"]})
    scheduler.load_state_dict(loaded["scheduler"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-5)
    assert update_over_lr(weight, optimizer) == pytest.approx(0.19, rel=1e-3)
    weight, optimizer, _ = fresh()
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert update_over_lr(weight, optimizer) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("absent", [name for name in COMPONENTS if name != "policy"])
def test_an_incomplete_checkpoint_gives_weights_on_request_only(tmp_path, absent):
    path = save(tmp_path, 80, components(**{absent: None}))
    with pytest.raises(CheckpointError, match=f"is incomplete, lacks {absent}: without {absent}"):
        load(path)
    with pytest.raises(CheckpointError, match=absent):
        latest(tmp_path)
    assert latest(tmp_path, ("policy",)) == path
    assert list(load(path, ("policy",))) == ["policy"]


# --- whole or absent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pointer", [True, False])
def test_a_partial_folder_of_a_higher_number_is_passed_over(tmp_path, pointer):
    """Field case B50: LATEST or none, the marker and the hashes decide."""
    good = save(tmp_path, 80, components(80))
    partial = tmp_path / "step_00000090"
    partial.mkdir()
    (partial / "policy.safetensors").write_bytes((good / "policy.safetensors").read_bytes())
    if pointer:
        (tmp_path / "LATEST").write_text("step_00000090")
    with pytest.warns(CheckpointWarning, match="step_00000090.*never came to its end"):
        assert latest(tmp_path) == good
    assert save(tmp_path, 90, components(90)) == partial
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) == partial
    with open(partial / "optimizer.safetensors", "r+b") as file:
        file.truncate(30)
    with pytest.warns(CheckpointWarning, match="is truncated: 30 bytes"):
        assert latest(tmp_path) == good


def test_latest_is_none_only_where_nothing_was_finished(tmp_path):
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    (tmp_path / ".step_00000010.x.aside").mkdir()
    assert latest(tmp_path) is None
    (tmp_path / "step_10").mkdir()
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be loaded"):
        latest(tmp_path)


def test_steps_are_numbers_and_not_text(tmp_path):
    save(tmp_path, 99_999_999, components(99_999_999))
    path = save(tmp_path, 100_000_000, components(100_000_000))
    assert latest(tmp_path) == path


def test_what_stands_whole_is_not_replaced(tmp_path):
    path = save(tmp_path, 80, components(80))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert save(tmp_path, 80, components(80)) == path
    other = components(80, curriculum={"level": 3})
    with pytest.raises(CheckpointError, match="stands there whole with other content"):
        save(tmp_path, 80, other)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (path / "curriculum.json").write_text("{}")
    assert same(load(save(tmp_path, 80, other))["curriculum"], {"level": 3})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".writer.lock", "step_00000080"]


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    good = save(tmp_path, 80, components(80))
    with Writer(tmp_path) as writer:

        def fail(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(CheckpointError, match=r"step_00000090: cannot be written: No space left on device"):
                writer.save(90, components(90))
        assert latest(tmp_path) == good
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".writer.lock", "step_00000080"]
        writer.save(90, components(90))


def test_everything_is_flushed_before_the_rename_and_the_rename_after(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(handle):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def record_rename(source, target):
        events.append("rename")
        rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to name an open file")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    path = save(tmp_path / "run", 80, components(80))
    at = events.index("rename")
    files = {file.name for file in path.iterdir()}
    assert files <= set(events[:at])
    assert events[at - 2] == "COMPLETE"
    assert events[at - 1].endswith(".aside")
    assert events[at + 1 :] == ["run"]


# --- retention -------------------------------------------------------------------------------------------------------


def names(folder):
    return [path.name for path in sorted(folder.glob("step_*"))]


def test_retention_keeps_the_newest_whole_ones(tmp_path):
    with Writer(tmp_path, keep=2) as writer:
        for step in (10, 20, 30):
            writer.save(step, components(step))
        assert names(tmp_path) == ["step_00000020", "step_00000030"]
        (tmp_path / "step_00000030" / "rng.json").write_text("{}")
        writer.save(40, components(40))
        assert names(tmp_path) == ["step_00000020", "step_00000030", "step_00000040"]  # 30 is damaged: 20 counts


def test_weights_alone_do_not_push_out_what_can_be_resumed(tmp_path):
    with Writer(tmp_path, keep=1) as writer:
        writer.save(10, components(10))
        writer.save(20, {"policy": components(20)["policy"]})
        writer.save(30, {"policy": components(30)["policy"]})
        assert names(tmp_path) == ["step_00000010", "step_00000030"]
        writer.save(40, components(40))
        assert names(tmp_path) == ["step_00000040"]


def test_retention_leaves_later_steps_alone(tmp_path):
    save(tmp_path, 90, components(90))
    save(tmp_path, 50, components(50), keep=1)
    assert names(tmp_path) == ["step_00000050", "step_00000090"]


# --- one writer ------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path):
    with Writer(tmp_path), pytest.raises(CheckpointError, match=f"has another writer, process {os.getpid()}"):
        save(tmp_path, 1, components(1))
    save(tmp_path, 1, components(1))


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    code = (
        "import sys; from rlinfra_utils.checkpoint import Writer\n"
        "w = Writer(sys.argv[1]); (w.folder / '.step_00000007.x.aside').mkdir(); print('up', flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=-1, stdout=-1)
    assert other.stdout.readline() == b"up\n"
    with pytest.raises(CheckpointError, match=f"has another writer, process {other.pid}"):
        Writer(tmp_path)
    other.kill()
    other.communicate()
    with Writer(tmp_path):
        assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]


# --- asynchronous ----------------------------------------------------------------------------------------------------


def test_a_save_in_progress_shows_nothing_and_holds_the_snapshot(tmp_path, monkeypatch):
    go_on, reached = threading.Event(), threading.Event()
    publish = Writer._publish

    def slow(self, *args):
        reached.set()
        assert go_on.wait(120)
        publish(self, *args)

    monkeypatch.setattr(Writer, "_publish", slow)
    values = components(80)
    before = values["policy"]["embed.weight"].copy()
    with Writer(tmp_path) as writer:
        writer.save_async(80, values)
        values["policy"]["embed.weight"] += 1
        values["queue"]["rollouts"].clear()
        assert reached.wait(120)
        assert latest(tmp_path) is None
        go_on.set()
        path = writer.wait()
        assert writer.wait() is None
    loaded = load(path)
    np.testing.assert_array_equal(loaded["policy"]["embed.weight"], before)
    assert len(loaded["queue"]["rollouts"]) == 1


@pytest.mark.parametrize("next_call", ["save_async", "save", "wait", "close"])
def test_an_error_surfaces_at_the_next_call_once(tmp_path, monkeypatch, next_call):
    writer = Writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        writer.save_async(10, components(10))
        arguments = (20, components(20)) if next_call.startswith("save") else ()
        with pytest.raises(CheckpointError, match="step_00000010: cannot be written: No space left"):
            getattr(writer, next_call)(*arguments)
    if next_call != "close":
        assert names(tmp_path) == []
        writer.save(20, components(20))
        writer.close()
        assert names(tmp_path) == ["step_00000020"]


def test_a_failed_save_does_not_hide_the_error_of_the_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))

    def loop():
        with Writer(tmp_path) as writer:
            writer.save_async(10, components(10))
            raise FloatingPointError("loss=nan")

    with pytest.raises(FloatingPointError) as caught:
        loop()
    assert "a checkpoint was not written" in caught.value.__notes__[0]


# --- the door --------------------------------------------------------------------------------------------------------


def itself():
    tree = {"a": []}
    tree["a"].append(tree)
    return tree


BAD = [
    (-1, components(), "step=-1"),
    (True, components(), "step=True"),
    (80.5, components(), r"step=80\.5"),
    (10**18, components(), "step=1000000000000000000"),
    (81, components(80), r"step=81: counters.global_step is 80"),
    (80, {}, "components={}"),
    (80, [1], r"components=\[1\]"),
    (80, {"weights": {}}, "'weights' is no component"),
    (80, {"policy": {"a": 1}}, "policy: .* holds no array"),
    (80, {"policy": {"a": np.array([object()])}}, "policy.a: array of object"),
    (80, {"policy": {"a": np.array(["text"])}}, "policy.a: array of <U4"),
    (80, {"policy": {"a": np.zeros(2, "c16")}}, "policy.a: array of complex128"),
    (80, {"policy": {"a/b": np.zeros(2), "a": {"b": np.zeros(2)}}}, "policy.a.b: 'a/b' cannot name an array"),
    (80, {"policy": {"__metadata__": np.zeros(2)}}, "'__metadata__' cannot name an array"),
    (80, {"policy": {"\ud800": np.zeros(2)}}, "policy: the name of an array"),
    (80, {"optimizer": {"state": {0: {}}}}, "optimizer.state: key 0: needs text"),
    (80, {"optimizer": {"lr": np.float32(1)}}, "optimizer.lr: float32"),
    (80, {"optimizer": {"x": {"__tensor__": "y"}}}, "key '__tensor__'"),
    (80, {"optimizer": itself()}, "optimizer: nests too deeply, or contains itself"),
    (80, {"optimizer": {"f": print}}, "optimizer.f: builtin_function_or_method"),
    (80, {"scheduler": {}}, "scheduler: {} says nothing"),
    (80, {"counters": {"global_step": 80}}, "counters: policy_version="),
    (80, {"counters": {"global_step": -1, "policy_version": 0}}, "counters: global_step=-1"),
    (80, {"counters": {"global_step": "80", "policy_version": 0}}, "counters: global_step='80'"),
    (80, {"data_position": {"dispatched": 1000}}, "data_position: data_position="),
    (80, {"versions": {"tokenizer": "t"}}, "versions: chat_template="),
    (80, {"decoding": {"temprature": 1.0}}, "decoding: temprature="),
    (80, {"layout": {"world_size": 0}}, "layout: world_size=0"),
    (80, {"queue": {"rollouts": []}}, "queue: lost="),
    (80, {"queue": {"rollouts": [{"sample_id": "a"}], "lost": []}}, r"queue: rollouts\[0\] has neither policy_version"),
    (80, {"open_episodes": {"episodes": [{"episode_id": "a"}], "lost": []}}, "environment_state"),
]


@pytest.mark.parametrize(("step", "values", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, step, values, message):
    with pytest.raises(ValueError, match=message) as caught:
        save(tmp_path, step, values)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [".writer.lock"]


@pytest.mark.parametrize("require", ["policy", (), ("weights",), [["policy"]], None])
def test_a_bad_require_is_refused(tmp_path, require):
    path = save(tmp_path, 80, components())
    for call in (lambda: load(path, require), lambda: latest(tmp_path, require)):
        with pytest.raises(ValueError, match="require="):
            call()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_bad_keep_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="keep="):
        Writer(tmp_path, keep)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: cannot be written"):
        save(tmp_path / "file", 1, components(1))
    with pytest.raises(CheckpointError, match="file: cannot be listed"):
        latest(tmp_path / "file")
    with pytest.raises(CheckpointError, match="is no folder"):
        load(tmp_path / "file")


def test_the_manifest_is_as_documented(tmp_path):
    path = save(tmp_path, 80, components())
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == ("rlinfra-checkpoint-1", 80)
    assert manifest["versions"]["numpy"] == np.__version__
    listed = {file["name"]: file["size_bytes"] for files in manifest["components"].values() for file in files}
    on_disk = {entry.name: entry.stat().st_size for entry in path.iterdir()}
    assert listed == {name: size for name, size in on_disk.items() if name not in ("manifest.json", "COMPLETE")}
