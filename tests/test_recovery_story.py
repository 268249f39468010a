"""The check of a run folder can fail: each kind of loss, done by hand to a sound folder, is named."""

import json
import shutil

import pytest
from recovery_samples import TINY, rewrite

from rlinfra_utils.recovery import broken, run_in_turns, tell


@pytest.fixture(scope="module")
def sound(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("sound") / "run"
    run_in_turns(folder, TINY)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def _lines(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in change(lines)))


def _batches(change):
    return lambda folder: _lines(folder / "batches.jsonl", change)


def _swap_rollout(lines):
    lines[2]["rollout_ids"][0] = lines[1]["rollout_ids"][0]
    return lines


def _other_loss(lines):
    lines[3]["stats"]["loss"] += 1e-12
    return lines


def _other_weights(lines):
    published = [line for line in lines if line["kind"] == "published"]
    published[-1]["weights_sha256"] = "0" * 64
    return lines


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _shorten_checkpoint(folder):
    _cut(folder / "checkpoints" / "step_00000005" / "policy.safetensors")


DAMAGES = {
    "a batch is lost": (_batches(lambda lines: lines[:-1]), "1 batches of the uninterrupted run are missing"),
    "a batch is lost in the middle": (_batches(lambda lines: lines[:2] + lines[3:]), "batch 2: training_batch_id"),
    "a batch is trained twice": (_batches(lambda lines: [*lines, lines[-1]]), "stands 2 times"),
    "a rollout is trained twice": (_batches(_swap_rollout), "was trained on 2 times"),
    "a loss differs in the last bits": (_batches(_other_loss), "batch 3: stats"),
    "weights differ": (lambda folder: _lines(folder / "events.jsonl", _other_weights), "version 5: weights"),
    "a file of rollouts is lost": (lambda f: (f / "rollouts" / "run0-b0001.parquet").unlink(), "stored nowhere"),
    "a token differs": (
        lambda f: rewrite(
            f / "rollouts" / "run0-b0001.parquet",
            lambda rows: [rows[0] | {"behavior_logprobs": [-9.0] * len(rows[0]["response_tokens"])}, *rows[1:]],
        ),
        "batch 1: rollouts_sha256",
    ),
    "a batch in the queue is cut": (lambda f: _cut(f / "queue" / "s0004.parquet"), "is no whole Parquet file"),
    "a batch in the queue lacks a row": (
        lambda f: rewrite(f / "queue" / "s0004.parquet", lambda rows: rows[1:]),
        "has not the 3 rollouts ordered",
    ),
    "a group is cut": (lambda f: _cut(next((f / "samples").glob("*/*.parquet"))), "is no whole Parquet file"),
    "a checkpoint is cut": (_shorten_checkpoint, "is truncated"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_loss_is_named(folder, sound, damage):
    spoil, sentence = DAMAGES[damage]
    reference = tell(sound)
    assert broken(folder, TINY, reference, finished=True) == []
    spoil(folder)
    problems = broken(folder, TINY, reference, finished=True)
    assert any(sentence in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_a_line_torn_by_a_kill_is_no_loss(folder, sound):
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"time_unix_s":17')
    assert broken(folder, TINY, tell(sound), finished=True) == []
