"""1,000 publishes, readers beside them, a publisher killed at random: each read is one version, whole."""

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from rlinfra_utils.sync import Publisher, SyncError, fingerprint, read, write_pointer
from rlinfra_utils.sync.manifest import version_folder
from rlinfra_utils.sync.paths import SHARED_MEMORY

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
NUM_READERS = 3


@pytest.fixture
def folder():
    """In memory where there is such a place: a flush to a disk is not what this test is about."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as path:
        yield Path(path)


def weights(version):
    """Every value says which version it belongs to."""
    return {name: np.full((64, 64), version, "i4") for name in ("first", "middle", "last")}


def forked(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def read_on(folder, stop, report):
    """Read until told to stop; report the number of reads, or the first that is no whole version.

    REPORT.begun says that one version has been read.
    """
    last, reads, seen = -1, 0, set()
    while not stop.exists():
        try:
            found = read(folder)
        except SyncError as error:
            report.write_text(f"torn: {error}")
            return
        values = {int(value) for tensor in found.tensors.values() for value in np.unique(tensor)}
        if values != {found.version} or found.version < last or fingerprint(found.tensors) != found.fingerprint:
            report.write_text(f"torn: version {found.version} after {last} holds values of {sorted(values)}")
            return
        last, reads = found.version, reads + 1
        seen.add(last)
        report.with_suffix(".begun").touch()
    report.write_text(f"whole: {reads} {len(seen)}")


def publish_on(folder, last):
    with Publisher(folder) as publisher:
        for version in range(publisher.version + 1, last + 1):
            publisher.publish(weights(version), version)


def each_has(folder, suffix=""):
    """Whether each reader has written its report, or its REPORT.begun."""
    return all((folder / f"report{index}{suffix}").exists() for index in range(NUM_READERS))


def wait_until_each_has(folder, suffix=""):
    end_s = time.monotonic() + 120
    while not each_has(folder, suffix):
        assert time.monotonic() < end_s, f"not each reader has written report{suffix}"
        time.sleep(0.001)


def reports(folder, work):
    """What the readers say that run beside `work`."""
    stop, files = folder / "stop", [folder / f"report{index}" for index in range(NUM_READERS)]
    readers = [forked(lambda file=file: read_on(folder / "w", stop, file)) for file in files]
    try:
        work()
    finally:
        stop.touch()
        codes = [os.waitpid(reader, 0)[1] for reader in readers]
    assert codes == [0] * NUM_READERS
    return [file.read_text().split(" ", 1) for file in files]


@pytest.mark.slow
def test_a_thousand_publishes_with_readers_and_kills(folder):
    rng, ends = np.random.default_rng(0), []
    with Publisher(folder / "w") as publisher:
        publisher.publish(weights(0), 0)

    def kill_each_after_fifty():
        """Counted in versions, so that a fast machine sees as many kills as a slow one."""
        wait_until_each_has(folder, ".begun")
        for last in range(50, 1001, 50):
            child = forked(lambda: publish_on(folder / "w", 10**6))
            while read(folder / "w").version < last:
                assert os.waitpid(child, os.WNOHANG) == (0, 0), "the publisher ended by itself"
                time.sleep(rng.uniform(0, 0.002))
            os.kill(child, signal.SIGKILL)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    found = reports(folder, kill_each_after_fifty)
    assert [verdict for verdict, _ in found] == ["whole:"] * NUM_READERS, found
    reads, versions = np.array([text.split() for _, text in found], int).T
    assert reads.min() > 50
    assert versions.min() > 20
    assert ends == [-signal.SIGKILL] * 20
    assert read(folder / "w").version >= 1000
    with Publisher(folder / "w"):
        assert len(list((folder / "w").glob("v*"))) <= 2


def test_the_readers_would_notice_weights_that_are_written_in_place(folder):
    """The same readers beside a publisher that overwrites the announced file: the harness can fail."""
    with Publisher(folder / "w") as publisher:
        publisher.publish(weights(0), 0)
        file = version_folder(folder / "w", 0) / "model.safetensors"
        old = file.read_bytes()

        def overwrite():
            for step in range(100_000):
                with open(file, "r+b") as opened:
                    opened.seek(len(old) // 2)
                    opened.write(bytes([step % 256]) * 512)
                if each_has(folder):
                    break
                time.sleep(0.001)

        found = reports(folder, overwrite)
    assert all(verdict == "torn:" for verdict, _ in found), found


def test_the_readers_would_notice_a_version_that_falls(folder):
    with Publisher(folder / "w") as publisher:
        publisher.publish(weights(0), 0)
        publisher.publish(weights(1), 1)

        def go_back():
            wait_until_each_has(folder, ".begun")
            write_pointer(folder / "w", 0)
            wait_until_each_has(folder)

        found = reports(folder, go_back)
    assert all("version 0 after 1" in text for _, text in found), found
