"""The run in one process: what it records, and that it may be left off anywhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from recovery_samples import TINY, Turns, rewrite

from rlinfra_utils import checkpoint, policy, rollouts
from rlinfra_utils.recovery import RecoveryError, RunConfig, broken, run_in_turns, tell
from rlinfra_utils.tracing import RunFolderError, follow, read_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    run_in_turns(path, TINY)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    return tell(folder)


def test_every_prompt_of_the_data_is_trained_once_and_in_order(folder):
    run = read_run(folder)
    assert run.problems == []
    rows = policy.prompts(TINY.num_prompts, TINY.seed)
    order = [i for epoch in range(2) for i in np.random.default_rng([TINY.seed, epoch]).permutation(TINY.num_prompts)]
    expected = [rows[i] for i in order[: TINY.num_updates * TINY.prompts_per_step]]
    in_order = [rollout for ids in run.batches["rollout_ids"] for rollout in ids]
    assert len(set(in_order)) == len(in_order) == TINY.num_updates * TINY.prompts_per_step * TINY.group_size
    by_id = run.rollouts.set_index("rollout_id")
    for number, rollout_id in enumerate(in_order):
        prompt = expected[number // TINY.group_size]
        a, b = prompt.text.rstrip("=").split("+")
        assert by_id.loc[rollout_id, "prompt_id"] in {prompt.prompt_id, f"add-{int(a) % 10}+{int(b) % 10}"}


def test_rollouts_are_as_old_as_the_lag_says_and_pass_the_contract(folder):
    run = read_run(folder)
    for step, batch in enumerate(run.batches.itertuples()):
        records = run.rollouts[run.rollouts["training_batch_id"] == batch.training_batch_id]
        assert set(records["policy_version"]) == {max(0, step - TINY.lag)}
        assert set(records["resulting_policy_version"]) == {step + 1} == {batch.resulting_policy_version}
        assert set(records["optimizer_step"]) == {TINY.minibatches * (step + 1)} == {batch.optimizer_step}
    verdicts = rollouts.validate_table(run.table, current_version=TINY.num_updates, max_lag=TINY.num_updates)
    assert set(verdicts["status"].to_pylist()) == {"accept"}


def test_rewards_are_the_verifiers_for_the_prompt_that_the_record_holds(folder):
    tokenizer = policy.make_tokenizer()
    for record in rollouts.from_table(read_run(folder).table):
        a, b = tokenizer.decode(record.prompt_tokens[1:]).rstrip("=").split("+")
        text = policy.answer_text(record.response_tokens, tokenizer)
        assert record.reward == policy.verify(text, int(a) + int(b), record.truncated)


def test_each_checkpoint_would_resume_the_run(folder):
    paths = sorted((folder / "checkpoints").glob("step_*"))
    assert [path.name for path in paths] == ["step_00000004", "step_00000005"]
    assert all(checkpoint.audit(path).resumable for path in paths)


def test_what_no_kept_checkpoint_leads_back_to_is_gone(folder):
    assert sorted(path.name for path in (folder / "queue").iterdir()) == ["s0004.parquet"]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["v0003", "v0004", "v0005"]


def test_a_second_run_is_the_same_to_the_last_bit(tmp_path, reference):
    run_in_turns(tmp_path, TINY)
    assert tell(tmp_path) == reference


def test_another_seed_is_another_run(tmp_path, reference):
    run_in_turns(tmp_path, replace(TINY, seed=1))
    assert tell(tmp_path).weights != reference.weights


@pytest.fixture(scope="module")
def saves_each(tmp_path_factory):
    """A run that saves after every update, so that a life of one update gets on."""
    config = replace(TINY, save_every=1)
    folder = tmp_path_factory.mktemp("each") / "run"
    run_in_turns(folder, config)
    return config, tell(folder)


@pytest.mark.parametrize(
    ("turns_a_life", "queue_policy"), [(1, "restore"), (2, "restore"), (3, "restore"), (8, "restore"), (13, "drop")]
)
def test_a_run_that_loses_all_its_workers_every_few_turns_is_the_same(tmp_path, saves_each, turns_a_life, queue_policy):
    config, reference = saves_each
    run = Turns(tmp_path, config)
    for _ in range(200):
        for _ in range(turns_a_life):
            run.turn()
        run.crash()
        assert broken(tmp_path, config, reference) == []
        if run.trainer.finished:
            break
        run.start(queue_policy)
    assert broken(tmp_path, config, reference, finished=True) == []


def test_batches_after_the_restored_step_stay_in_the_log_and_count_as_undone(tmp_path, reference):
    run = Turns(tmp_path)
    run.until(3)
    run.crash()
    run.start()
    assert run.trainer.learner.version == 2
    run.finish()
    batches = read_run(tmp_path).batches
    assert list(batches["resulting_policy_version"]) == [1, 2, 3, 3, 4, 5]
    assert list(batches["rolled_back"]) == [False, False, True, False, False, False]
    assert tell(tmp_path) == reference


DAMAGES = {
    "a row missing": lambda rows: rows[:-1],
    "rows in another order": lambda rows: rows[::-1],
    "a reward by another verifier": lambda rows: [rows[0] | {"verifier_version": "arith-v3"}, *rows[1:]],
    "no reward": lambda rows: [rows[0] | {"reward": None}, *rows[1:]],
    "another policy version": lambda rows: [row | {"policy_version": 1} for row in rows],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_batch_that_is_not_what_was_ordered_is_refused_whole_and_made_again(tmp_path, reference, damage):
    run = Turns(tmp_path)
    rewrite(run.fill_queue(), DAMAGES[damage])
    assert run.trainer.turn()
    assert run.trainer.learner.version == 0
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    run.finish()
    assert tell(tmp_path) == reference
    assert "retry" in set(read_run(tmp_path).events["kind"])


@pytest.mark.parametrize("place", ["queue", "samples/c0", "samples/c1"])
def test_a_file_that_was_damaged_on_the_disk_goes_to_quarantine_and_is_made_again(tmp_path, reference, place):
    run = Turns(tmp_path)
    while any(worker.turn() for worker in run.collectors):
        pass
    if place == "queue":
        run.fill_queue()
    damaged = sorted((tmp_path / place).glob("*.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    run.finish()
    assert tell(tmp_path) == reference
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_a_batch_that_stays_wrong_stops_the_run(tmp_path):
    run = Turns(tmp_path)
    rewrite(run.fill_queue(), DAMAGES["no reward"])
    assert run.trainer.turn()
    rewrite(run.fill_queue(), DAMAGES["no reward"])
    with pytest.raises(RecoveryError, match=r"refused twice.*codes="):
        run.trainer.turn()
    assert run.trainer.learner.version == 0
    run.crash()


def test_lost_rollouts_that_cannot_be_sampled_again_are_named(tmp_path):
    run = Turns(tmp_path)
    run.until(2)
    run.crash()
    for path in [*(tmp_path / "queue").glob("*.parquet"), *(tmp_path / "weights/v0001").iterdir()]:
        path.unlink()
    (tmp_path / "weights/v0001").rmdir()
    with pytest.raises(RecoveryError, match=r"v0001: is gone, and so is the batch of step 2.*branch of its own"):
        run.start()
    assert "rollout_lost" in set(read_run(tmp_path).events["kind"])


def test_published_weights_that_a_resume_would_not_make_stop_it(tmp_path):
    run = Turns(tmp_path)
    run.until(2)
    run.crash()
    path = tmp_path / "weights/v0002/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RecoveryError, match="v0002: stands there with other content"):
        run.start()


def test_two_trainers_on_one_folder_are_refused(tmp_path):
    run = Turns(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="has another writer, process"):
        run.start()
    run.crash()


def test_another_configuration_on_a_run_folder_is_refused(tmp_path):
    Turns(tmp_path).crash()
    with pytest.raises(RunFolderError, match=r"lr was 0.0003, is 0.001"):
        Turns(tmp_path, replace(TINY, lr=1e-3))


def _climb(path):
    """Have the manifest name a file outside the checkpoint, with a marker that vouches for it."""
    import hashlib

    manifest = json.loads((path / "manifest.json").read_text())
    manifest["components"]["policy"][0]["name"] = "../../../outside.json"
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())


def test_a_checkpoint_that_climbs_out_of_its_folder_is_passed_over_aloud(tmp_path, reference):
    run = Turns(tmp_path)
    run.until(4)
    run.crash()
    _climb(tmp_path / "checkpoints/step_00000004")
    run.start()
    assert run.trainer.learner.version == 2
    events = read_run(tmp_path).events
    assert events.loc[events["kind"] == "retry", "reason"].str.contains("leads out of the checkpoint").any()
    run.finish()
    assert broken(tmp_path, TINY, reference, finished=True) == []


def test_no_checkpoint_that_can_be_loaded_stops_the_run(tmp_path):
    run = Turns(tmp_path)
    run.crash()
    _climb(tmp_path / "checkpoints/step_00000000")
    with pytest.raises(checkpoint.CheckpointError, match=r"none of 1 checkpoints.*leads out of the checkpoint"):
        run.start()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_updates", 0),
        ("group_size", 1),
        ("lag", -1),
        ("lag", True),
        ("save_every", 0),
        ("keep", 0),
        ("minibatches", 5),
        ("num_prompts", 3),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("seed", -1),
        ("seed", "1"),
        ("max_new_tokens", 1000),
        ("num_collectors", 0),
        ("run_id", "../up"),
        ("branch_id", ""),
    ],
)
def test_a_senseless_setting_is_named_in_one_line(field, value):
    with pytest.raises(ValueError, match=f"^{field}=") as caught:
        replace(TINY, **{field: value})
    assert "\n" not in str(caught.value)


def test_an_unknown_queue_policy_is_refused_before_anything_is_written(tmp_path):
    run = Turns(tmp_path)
    run.crash()
    with pytest.raises(ValueError, match="queue_policy='keep': known are drop, restore"):
        run.start("keep")


def test_settings_survive_json():
    assert RunConfig(**json.loads(json.dumps(TINY.to_json()))) == TINY


def test_every_rollout_of_an_interrupted_run_can_be_followed_to_the_weights_it_moved(tmp_path):
    run = Turns(tmp_path)
    run.until(3)
    run.crash()
    run.start()
    run.finish()
    data = read_run(tmp_path)
    for rollout_id in data.rollouts["rollout_id"]:
        step = int(rollout_id.split("-s")[1][:4])
        standing = [chain for chain in follow(data, rollout_id).chains if not chain.rolled_back]
        assert [chain.links["resulting_policy_version"] for chain in standing] == [step + 1]
        assert [chain.links["training_batch_id"] for chain in standing] == [f"run0-b{step:04d}"]
        assert all(chain.missing == {} for chain in standing)
