"""The publisher: announced last, taken back whole, and what each failure leaves behind."""

import contextlib
import errno
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from rlinfra_utils.sync import Publisher, SyncError, fingerprint, hold, read
from rlinfra_utils.timers import Trace


def weights(version):
    return {
        "model.embed_tokens.weight": np.full((4, 3), version, "f4"),
        "model.norm.weight": np.full(3, -version, "f4"),
    }


class Engine:
    """A replica of numpy arrays that can be told to misbehave, once it is asked for version `bad`."""

    def __init__(self, fault=None, bad=2):
        self.version, self.tensors, self.fault, self.bad, self.loads = 0, {}, fault, bad, []
        self.gate = threading.Event()

    def load(self, path, version):
        self.loads.append(version)
        tensors = load_file(path / "model.safetensors")
        if version == self.bad and self.fault is not None:
            if self.fault == "keeps the old weights":
                tensors = self.tensors
            elif self.fault == "keeps the old number":
                return
            elif self.fault == "hangs":
                assert self.gate.wait(60)
            else:
                raise self.fault
        self.tensors, self.version = tensors, version

    def fingerprint(self):
        return fingerprint(self.tensors)

    @property
    def value(self):
        return float(self.tensors["model.norm.weight"][0])


def held(folder):
    """Versions on the disk, and no debris beside them."""
    names = {path.name for path in folder.iterdir()} - {".publisher.lock", "current"}
    assert not [name for name in names if not name.startswith("v")]
    return sorted(int(name[1:]) for name in names)


def test_a_life(tmp_path):
    engines, trace = [Engine(), Engine()], Trace()
    with Publisher(tmp_path / "w", engines, trace=trace) as publisher:
        assert publisher.version is None
        first = publisher.publish(weights(0), 0)
        second = publisher.publish(weights(0) | {"model.norm.weight": np.full(3, -7, "f4")}, 7)
        assert publisher.version == 7
    assert (first.num_changed, second.num_changed) == (None, 1)
    assert [engine.version for engine in engines] == [7, 7]
    assert engines[0].value == -7.0
    found = read(tmp_path / "w")
    assert (found.version, found.fingerprint) == (7, second.fingerprint)
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        "model.embed_tokens.weight": [[0.0] * 3] * 4,
        "model.norm.weight": [-7.0] * 3,
    }
    assert trace.frame()["stage"].value_counts()["weight_sync"] == 2
    assert {"gather", "hash", "write", "check", "load", "announce"} == second.seconds.keys()


def test_torch_weights_with_a_tied_head_in_bfloat16(tmp_path):
    import torch

    embed = torch.arange(6).reshape(3, 2).bfloat16()
    with Publisher(tmp_path) as publisher:
        done = publisher.publish({"model.embed_tokens.weight": embed, "lm_head.weight": embed}, 1)
    found = read(tmp_path, framework="torch")
    assert found.tensors.keys() == {"model.embed_tokens.weight"}
    assert torch.equal(found.tensors["model.embed_tokens.weight"], embed)
    assert found.fingerprint.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert done.fingerprint == fingerprint(found.tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": np.array([1, np.nan, 1], "f4")}, "'model.norm.weight' holds NaN"),
        ({"model.norm.weight": np.array([1, -np.inf, 1], "f4")}, "'model.norm.weight' holds NaN or infinity"),
        ({"model.norm.weight": np.ones(4, "f4")}, "'model.norm.weight': shape was (3,), is (4,)"),
        ({"model.norm.weight": np.ones(3, "f2")}, "'model.norm.weight': dtype was float32, is float16"),
        ({"extra": np.ones(3, "f4")}, "'extra': missing was absent, is there"),
        ({"model.norm.weight": np.ones(0, "f4")}, "no bytes"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, change, said):
    engine = Engine()
    with Publisher(tmp_path, [engine]) as publisher:
        publisher.publish(weights(1), 1)
        with pytest.raises(ValueError, match=r"^state_dict: ") as error:
            publisher.publish(weights(2) | change, 2)
        assert said in str(error.value)
        assert engine.loads == [1]
        assert held(tmp_path) == [1]
        with pytest.raises(ValueError, match=r"'model\.norm\.weight': missing was there, is absent"):
            publisher.publish({"model.embed_tokens.weight": weights(2)["model.embed_tokens.weight"]}, 2)


@pytest.mark.parametrize("version", [4, 5, -1, 5.5, "6", None, True, float("nan")])
def test_versions_only_grow(tmp_path, version):
    with Publisher(tmp_path) as publisher:
        publisher.publish(weights(5), 5)
        with pytest.raises(ValueError, match=r"^version="):
            publisher.publish(weights(6), version)
        assert read(tmp_path).version == 5


FAULTS = [
    RuntimeError("out of memory"),
    ConnectionError("the server\nis gone"),
    TimeoutError("its own"),
    "keeps the old weights",
    "keeps the old number",
    "hangs",
]


@pytest.mark.parametrize("fault", FAULTS, ids=[str(fault).split("\n")[0] for fault in FAULTS])
def test_one_bad_replica_and_all_are_back_on_the_old_version(tmp_path, fault):
    engines = [Engine(), Engine(fault), Engine()]
    with Publisher(tmp_path, engines, deadline_s=60.0) as publisher:
        publisher.publish(weights(1), 1)
        publisher.deadline_s = 1.5 if fault == "hangs" else 60.0
        with pytest.raises(SyncError, match="version=2: not announced: replica 1: ") as error:
            publisher.publish(weights(2), 2)
        assert "\n" not in str(error.value)
        assert read(tmp_path).version == publisher.version == 1
        assert held(tmp_path) == [1]
        if fault == "hangs":
            assert "not back on version 1, send it no requests: replica 1" in str(error.value)
            engines[1].gate.set()  # it loads version 2 late, and then what it was asked after that
            until_s = time.monotonic() + 60
            while engines[1].loads != [1, 2, 1] and time.monotonic() < until_s:
                time.sleep(0.01)
        else:
            assert "all replicas are back on version 1" in str(error.value)
        publisher.deadline_s = 60.0
        publisher.publish(weights(3), 3)
    assert [(engine.version, engine.value) for engine in engines] == [(3, -3.0)] * 3
    assert [engine.loads for engine in engines] == [[1, 2, 1, 3]] * 3


def test_b52_the_label_alone_is_not_enough(tmp_path):
    with Publisher(tmp_path, [Engine("keeps the old weights")]) as publisher:
        publisher.publish(weights(1), 1)
        with pytest.raises(SyncError, match=r"says version 2, but 2 tensors differ, first model\.embed_tokens\.weight"):
            publisher.publish(weights(2), 2)


def test_a_first_version_that_fails_leaves_none(tmp_path):
    with Publisher(tmp_path, [Engine(RuntimeError("no"), bad=0)]) as publisher:
        with pytest.raises(SyncError, match="no version before it to go back to"):
            publisher.publish(weights(0), 0)
        assert held(tmp_path) == []
        assert publisher.version is None
    with pytest.raises(SyncError, match="no version is announced yet"):
        read(tmp_path)


def test_a_full_disk_at_each_write_leaves_the_old_version(tmp_path, monkeypatch):
    """Each call that flushes or renames fails in turn, until one publish gets through."""
    engine, number = Engine(), 0
    with Publisher(tmp_path, [engine]) as publisher:
        publisher.publish(weights(1), 1)
        while True:
            number += 1
            with monkeypatch.context() as patch:
                fail_at_call(patch, number)
                with contextlib.suppress(SyncError):
                    publisher.publish(weights(2), 2)
                    break
            if publisher.version == 2:  # the pointer was renamed, only its flush failed
                break
            assert (read(tmp_path).version, engine.version, engine.value) == (1, 1, -1.0)
            assert held(tmp_path) == [1]
    assert (engine.version, engine.value) == (2, -2.0)
    assert number >= 7


def fail_at_call(patch, number):
    left = [number]

    def failing(call):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return counted

    for name in ("mkdir", "fsync", "rename", "replace"):
        patch.setattr(os, name, failing(getattr(os, name)))


def test_a_disk_that_is_full_for_real(tmp_path):
    """The operating system refuses bytes beyond 64 kB a file: the error comes out of safetensors."""
    with Publisher(tmp_path) as publisher:
        publisher.publish({"w": np.zeros(50_000, "f4")}, 1)
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            Publisher(tmp_path).publish({"w": np.ones(50_000, "f4")}, 2)
        except SyncError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert "cannot be written" in pipe.read()
    assert (read(tmp_path).version, held(tmp_path)) == (1, [1])


def publish_dying_at_call(folder, number, before):
    left = [number]

    def counted(call):
        def dying(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and before:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **kwargs)
            finally:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return dying

    with Publisher(folder, [Engine()], keep=1) as publisher:
        for name in ("mkdir", "fsync", "rename", "replace", "rmdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        publisher.publish(weights(2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_death_at_each_call_in_turn(tmp_path, before):
    """SIGKILL at every instant between two calls that change the disk; the next publisher sets all replicas right."""
    number, died, reached = 0, True, set()
    while died:
        number += 1
        folder = tmp_path / str(number)
        with Publisher(folder, keep=1) as publisher:
            publisher.publish(weights(1), 1)
        if (child := os.fork()) == 0:
            try:
                publish_dying_at_call(folder, number, before)
            finally:
                os._exit(0)
        died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = read(folder)
        reached.add(found.version)
        assert found.fingerprint == fingerprint(found.tensors) == fingerprint(weights(found.version))
        ahead = Engine()
        ahead.version, ahead.tensors = 2, weights(99)  # the replica that the dead publisher had loaded
        with Publisher(folder, [ahead], keep=1) as publisher:
            assert (ahead.version, ahead.value) == (found.version, -found.version)
            publisher.publish(weights(3), 3)
            assert held(folder) == [3]
        shutil.rmtree(folder)
    assert reached == {1, 2}
    assert number > 9


def test_two_publishers_on_one_folder(tmp_path):
    with Publisher(tmp_path), pytest.raises(SyncError, match="has another publisher"):
        Publisher(tmp_path)
    Publisher(tmp_path).close()


def test_a_version_stays_while_a_reader_holds_it(tmp_path):
    with Publisher(tmp_path, keep=2) as publisher:
        publisher.publish(weights(1), 1)
        with hold(tmp_path) as first:
            for version in range(2, 6):
                publisher.publish(weights(version), version)
            assert held(tmp_path) == [1, 4, 5]
            assert load_file(first.path / "model.safetensors")["model.norm.weight"][0] == -1
        publisher.publish(weights(6), 6)
        assert held(tmp_path) == [5, 6]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("current", b"", "current: the file: "),
        ("current", b"7", "current: the file: "),
        ("current", b'{"version": -1, "manifest_sha256": "0"}', "current: version: "),
        ("current", b'{"version": 9, "manifest_sha256": "%s"}' % (b"0" * 64), "is missing, though version 9"),
        ("v00000001/manifest.json", b"{}", "its SHA-256 differs from the one in current"),
        ("v00000001/model.safetensors", b"", "cannot be read as numpy"),
        ("v00000001/model.safetensors", b"x" * 220, "cannot be read as numpy"),
        ("v00000001/model.safetensors", save(weights(2)), "2 tensors are not as published, first model.embed_tokens"),
        ("v00000001/model.safetensors", save({"w": np.ones(2)}), "first model.embed_tokens.weight: missing"),
    ],
)
def test_damage_is_named(tmp_path, file, content, said):
    with Publisher(tmp_path) as publisher:
        publisher.publish(weights(1), 1)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SyncError) as error:
        read(tmp_path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": [object()]}, r"replicas\[0\]=.*has no load"),
        ({"keep": 0}, "keep=0"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan"),
    ],
)
def test_bad_arguments_are_refused_and_the_folder_is_let_go(tmp_path, arguments, said):
    with pytest.raises(ValueError, match=said):
        Publisher(tmp_path, **arguments)
    Publisher(tmp_path).close()


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match="cannot be written"):
        Publisher(tmp_path / "file" / "w")
    with pytest.raises(SyncError, match="no version is announced yet"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="framework='jax'"):
        read(tmp_path, framework="jax")
