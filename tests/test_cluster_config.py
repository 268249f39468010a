"""What a cluster run is told, and the one line it answers to what makes no sense. No Ray here."""

import builtins
import contextlib
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.cluster import ClusterConfig, ClusterError, Dataset, run, session
from rlinfra_utils.cluster.__main__ import configure, main, parser
from rlinfra_utils.cluster.machine import cores

BAD = [
    {"model": "no/such/folder"},
    {"engine": "sglang"},
    {"device": "tpu"},
    {"placement": "both"},
    {"num_workers": 0},
    {"num_trainers": 1.5},
    {"groups_at_once": 2},
    {"controller": "fifo"},
    {"controller_options": {"no_such": 1}},
    {"controller_options": 7},
    {"controller": "bounded_queue", "controller_options": {"max_rollouts": -1}},
    {"placement": "colocated", "controller": "one_step_off"},
    {"group_size": 1},
    {"minibatches": 65},
    {"max_new_tokens": 256},
    {"forced_tokens": 6},
    {"forced_sigma": float("nan")},
    {"lr": 0.0},
    {"deadline_s": float("inf")},
    {"duration_s": 0},
    {"seed": -1},
    {"run_id": "a/b"},
    {"pin_cores": 1},
    {"num_updates": "20"},
]


@pytest.mark.parametrize("changes", BAD, ids=lambda changes: ",".join(changes))
def test_bad_settings_end_in_one_line_by_field(changes):
    with pytest.raises(ValueError, match=f"^{list(changes)[-1]}=|^controller=|^max_rollouts=") as caught:
        ClusterConfig(**changes)
    assert "\n" not in str(caught.value)


def test_json_there_and_back():
    config = ClusterConfig(controller="bounded_queue", controller_options={"max_rollouts": 64}, forced_tokens=3)
    assert ClusterConfig.from_json(config.to_json()) == config
    assert ClusterConfig.from_json(json.dumps(config.to_json())) == config
    assert ClusterConfig.from_json(config.to_json()).hash == config.hash
    assert ClusterConfig(seed=1).hash != ClusterConfig().hash


@given(
    st.one_of(
        st.none(),
        st.text(max_size=8),
        st.lists(st.integers(), max_size=2),
        st.dictionaries(st.sampled_from(["seed", "lr", "controller_options", "x"]), st.text(), min_size=1),
    )
)
def test_foreign_json_ends_in_one_line(value):
    with pytest.raises(ValueError, match=r"=|is no field") as caught:
        ClusterConfig.from_json(value)
    assert len(str(caught.value).splitlines()) == 1


def test_hf_always_finishes_running_groups():
    assert ClusterConfig(controller="bounded_queue").at_update == "finish"
    assert ClusterConfig(controller="bounded_queue", engine="vllm", groups_at_once=2).at_update == "keep"


def test_forced_lengths_follow_their_law_whoever_asks():
    config = ClusterConfig(forced_tokens=40, forced_sigma=0.5, max_new_tokens=120)
    dataset = Dataset(config)
    lengths = [dataset.task(index, 0, "main").max_new_tokens for index in range(2000)]
    again = [dataset.task(index, 1, "resume1").max_new_tokens for index in range(2000)]
    assert lengths == again
    # Quartiles of a log-normal: median * exp(+-0.6745 sigma); 2000 draws are within 5 % of them.
    quartiles = sorted(lengths)[499::500][:3]
    assert quartiles == pytest.approx([40 * 2.71828 ** (0.6745 * 0.5 * k) for k in (-1, 0, 1)], rel=0.06)


def test_each_epoch_asks_every_prompt_once():
    dataset = Dataset(ClusterConfig(num_prompts=50))
    for first in (0, 50):
        texts = [dataset.task(index, 0, "main").text for index in range(first, first + 50)]
        assert sorted(texts) == sorted(row.text for row in dataset.rows)


@pytest.mark.parametrize(
    ("trainers", "workers", "available", "expected"),
    [
        (1, 2, [0, 1], ([0], [1, 1])),
        (1, 3, [4, 5, 6, 7], ([4], [5, 6, 7])),
        (2, 3, [0, 1, 2, 3], ([0, 1], [2, 3, 2])),
        (2, 1, [0], ([0, 0], [0])),
        (2, 2, [0, 1], ([0, 1], [0, 1])),
    ],
)
def test_cores(trainers, workers, available, expected):
    assert cores(trainers, workers, available) == expected


def test_ray_absent(monkeypatch):
    find = builtins.__import__

    def without_ray(name, *rest):
        if name == "ray":
            raise ImportError("no ray")
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(ClusterError, match=r"^ray is not installed: pip install"):
        session.import_ray()


@pytest.mark.parametrize("address", ["here", "host:0", "host:many", ":6379", "127.0.0.1:1", "nobody.invalid:6379"])
def test_an_address_that_nobody_answers_at(address):
    with pytest.raises(ClusterError, match=r"^address=.*(needs auto|no Ray cluster answers)") as caught:
        session.reach(address)
    assert "\n" not in str(caught.value)


def answering(answer):
    """A port where something says `answer` to whoever comes, and the thread that says it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as connection:
            connection.recv(64)
            connection.sendall(answer)
            with contextlib.suppress(ConnectionError):
                connection.recv(64)  # until the other side has gone

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "no Ray cluster answers there: timed out"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is no Ray cluster"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "what answers there is no Ray cluster"),
        (b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + bytes(8), "what answers there is no Ray cluster"),  # GOAWAY
    ],
)
def test_an_address_where_something_else_answers(answer, message, monkeypatch):
    monkeypatch.setattr(session, "REACH_S", 60.0 if answer else 0.5)
    port, thread = answering(answer)
    with pytest.raises(ClusterError, match=f"^address='127.0.0.1:{port}': {message}") as caught:
        session.reach(f"127.0.0.1:{port}")
    thread.join(60)
    assert not thread.is_alive()
    assert "\n" not in str(caught.value)


def test_an_address_where_a_grpc_server_answers():
    port, thread = answering(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00")
    session.reach(f"127.0.0.1:{port}")
    thread.join(60)


def test_too_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "available_bytes", lambda: 1e9)
    with pytest.raises(ClusterError, match=r"^too little memory: 4 processes need about 2.0 GB, 1.0 GB are free"):
        run(ClusterConfig(), tmp_path / "run")


def test_options_become_the_configuration(tmp_path):
    options = parser().parse_args(
        f"--out {tmp_path} --controller bounded_queue --limit max_rollouts=64 --limit drop_lag=2 --workers 3 "
        "--set group_size=16 --set run_id=mine".split()
    )
    config = configure(options)
    assert (config.num_workers, config.group_size, config.run_id) == (3, 16, "mine")
    assert config.controller_options == {"max_rollouts": 64, "drop_lag": 2}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--workers 0", "num_workers=0"), ("--set nonsense=1", "nonsense"), ("--limit nonsense=1", "controller_options")],
)
def test_the_shell_gets_one_line(arguments, named, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "run"), *arguments.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("cluster: ")
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
