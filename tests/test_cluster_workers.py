"""A rollout worker in this process: what its engine is built for, and that sleep gives everything back."""

import json
import os
import shutil
from typing import ClassVar

import pytest

from rlinfra_utils import policy, sync
from rlinfra_utils.cluster import ClusterConfig, Dataset, workers
from rlinfra_utils.cluster.tasks import PROOF_TOKENS
from rlinfra_utils.engines import EngineError

pytestmark = pytest.mark.usefixtures("one_thread")


class Server:
    """Stands in for VLLMServer: what it was built with and asked for."""

    alive: ClassVar[list["Server"]]

    def __init__(self, folder, **options):
        self.folder, self.options, self.version, self.loaded = folder, options, 0, []
        self.alive.append(self)

    def load(self, path, version, in_flight="wait"):
        self.loaded.append((str(path), in_flight))
        self.version = version

    def require_alive(self):
        if self not in self.alive:
            raise EngineError("the server has ended")

    def close(self):
        self.alive.remove(self)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(workers, "VLLMServer", Server)
    monkeypatch.setattr(Server, "alive", [], raising=False)


def worker(tmp_path, **settings):
    return workers.RolloutWorker("worker0", ClusterConfig(**settings), str(tmp_path / "weights"), None)


@pytest.mark.parametrize(("max_new_tokens", "digits"), [(1, 2), (3, 2), (5, 1), (40, 3)])
def test_a_server_holds_the_longest_sequence_of_the_run_and_no_more(tmp_path, max_new_tokens, digits):
    engine = worker(tmp_path, engine="vllm", groups_at_once=2, max_new_tokens=max_new_tokens, digits=digits).engine
    # The tiny policy reads a character a token, after <bos>; a published version is proven by what the server
    # samples after a prompt with its right answer.
    rows = Dataset(ClusterConfig(max_new_tokens=max_new_tokens, digits=digits)).rows
    prompt = max(1 + len(row.text) for row in rows)
    proof = max(1 + len(row.text) + len(str(row.answer)) for row in rows)
    assert engine.options["max_model_len"] == max(prompt + max_new_tokens, proof + PROOF_TOKENS)
    assert engine.options["max_num_seqs"] == 16


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_model_that_holds_too_few_tokens_is_refused_in_one_line(tmp_path, engine):
    folder = tmp_path / "model"
    shutil.copytree(policy.WARM_START, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 20}
    (folder / "config.json").write_text(json.dumps(config))
    worker(tmp_path, engine=engine, model=str(folder), max_new_tokens=13)
    message = r"^max_new_tokens=14, digits=2: the longest sequence has 21 tokens, the model holds 20$"
    with pytest.raises(ValueError, match=message):
        worker(tmp_path, engine=engine, model=str(folder), max_new_tokens=14)


def test_asleep_nothing_of_a_server_is_left_and_the_next_one_has_the_announced_weights(tmp_path):
    asleep = worker(tmp_path, engine="vllm", placement="colocated", controller="synchronous")
    (first,) = Server.alive
    assert first.loaded == []
    model, _ = policy.load_warm_start()
    (tmp_path / "weights").mkdir()
    with sync.Publisher(tmp_path / "weights", [first]) as publisher:
        publisher.publish(dict(model.state_dict()), 7)
        asleep.sleep()
        assert Server.alive == []
        asleep.sleep()  # twice is once
        assert asleep.wake() == 7
    (second,) = Server.alive
    assert second is not first
    assert [in_flight for _, in_flight in second.loaded] == ["wait"]
    asleep.close()
    assert Server.alive == []


def test_asleep_an_engine_of_ours_is_gone(tmp_path):
    asleep = worker(tmp_path)
    asleep.sleep()
    assert asleep.engine is None
    asleep.load(str(policy.WARM_START), 3, "wait")
    assert asleep.version() == 3


def test_a_worker_whose_server_has_ended_says_so_when_asked_how_it_is(tmp_path):
    served = worker(tmp_path, engine="vllm", placement="colocated", controller="synchronous")
    assert served.hello() == os.getpid()
    served.sleep()
    assert served.hello() == os.getpid()
    served.wake()
    Server.alive.clear()
    for asked in (served.hello, served.ping):
        with pytest.raises(EngineError, match="has ended"):
            asked()
