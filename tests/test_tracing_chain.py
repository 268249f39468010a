"""One answer followed to the weights that it moved, and back."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from tracing_runs import NUM_STEPS, ROLLOUTS, make_run

from rlinfra_utils import synthetic
from rlinfra_utils.tracing import FORBIDS, RunLog, follow, read_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain") / "run"
    records = make_run(folder, seed=5)
    return records, read_run(folder)


def behavior(record):
    """The behaviour version as a reader would write it down from the record."""
    if record.policy_version is not None:
        return record.policy_version
    return " ".join(f"{s.version}:[{s.start},{s.end})" for s in record.version_spans)


def test_every_rollout_leads_to_the_step_that_it_was_trained_in(made):
    records, run = made
    for step, batch in enumerate(records):
        for record in batch[::7]:
            (chain,) = follow(run, record.sample_id).chains
            assert chain.links == {
                "prompt_id": record.prompt_id,
                "rollout_id": record.sample_id,
                "behavior_policy_version": behavior(record),
                "verifier_version": "synthetic-verifier-v1",
                "training_batch_id": f"b{step:04d}",
                "optimizer_step": step + 1,
                "resulting_policy_version": 11 + step,
            }
            assert list(chain.links) == list(FORBIDS)
            assert (chain.missing, chain.notes, chain.rolled_back, chain.branch_id) == ({}, (), False, "main")


@pytest.mark.parametrize("step", [0, 7, NUM_STEPS - 1])
def test_a_step_and_a_version_lead_back_to_their_rollouts(made, step):
    records, run = made
    by_step = follow(run, optimizer_step=step + 1)
    assert by_step.chains == follow(run, resulting_policy_version=11 + step).chains
    assert list(by_step.frame()["rollout_id"]) == [record.sample_id for record in records[step]]
    for chain in by_step.chains[:5]:  # there and back again
        assert follow(run, chain.links["rollout_id"]).chains == (chain,)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give one of rollout_id, optimizer_step"),
        ({"rollout_id": "x", "optimizer_step": 1}, "give one of"),
        ({"rollout_id": "x"}, "rollout_id='x': the run 'run-5' holds none; it holds 'synthetic-5000-p0-s0' to"),
        ({"rollout_id": ["x"]}, r"rollout_id=\['x'\]: needs a str"),
        ({"optimizer_step": "1"}, "optimizer_step='1'"),
        ({"optimizer_step": 99}, "optimizer_step=99: .* it holds 1 to 20"),
        ({"optimizer_step": 1, "branch_id": "side"}, "holds none in branch 'side'"),
    ],
)
def test_what_the_run_does_not_hold_is_said(made, asked, message):
    with pytest.raises(ValueError, match=message):
        follow(made[1], **asked)


def one_rollout(folder, batch=True, **changes):
    log = RunLog(folder, "r", "main", {})
    (record,) = synthetic.rollouts(1, 0)
    changes = {"run_id": "r", "policy_version": 4, "version_spans": None} | changes
    log.rollouts([record.model_copy(update=changes)], name="a")
    if batch:
        log.batch("b1", 1, [record.sample_id], 4, 5)
    return log, record.sample_id


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"prompt_id": None}, {"prompt_id"}),
        ({"policy_version": None}, {"behavior_policy_version"}),
        ({"verifier_version": None}, {"verifier_version"}),
        ({"prompt_id": None, "verifier_version": None}, {"prompt_id", "verifier_version"}),
    ],
)
def test_a_missing_link_says_what_it_forbids(tmp_path, changes, names):
    log, rollout_id = one_rollout(tmp_path, **changes)
    followed = follow(read_run(log.folder), rollout_id)
    assert followed.chains[0].missing == {name: FORBIDS[name] for name in names}
    for name in names:
        assert f"missing: {FORBIDS[name]}" in str(followed)
        assert FORBIDS[name].replace("'", "&#x27;") in followed._repr_html_()


def test_a_rollout_that_nobody_trained_on_has_no_end(tmp_path):
    log, rollout_id = one_rollout(tmp_path, batch=False)
    log.event("retry", "engine-0", 7.5, rollout_id=rollout_id)
    (chain,) = follow(read_run(log.folder), rollout_id).chains
    assert set(chain.missing) == {"training_batch_id", "optimizer_step", "resulting_policy_version"}
    assert chain.notes == ("retry at 7.500 s by engine-0",)


def test_the_records_own_word_counts_where_no_batch_speaks_and_a_contradiction_is_noted(tmp_path):
    ends = {"training_batch_id": "b9", "optimizer_step": 9, "resulting_policy_version": 10}
    log, rollout_id = one_rollout(tmp_path / "own", batch=False, **ends)
    (chain,) = follow(read_run(log.folder), rollout_id).chains
    assert {name: chain.links[name] for name in ends} == ends
    assert "the record's own word" in chain.notes[0]
    log, rollout_id = one_rollout(tmp_path / "both", **ends)
    (chain,) = follow(read_run(log.folder), rollout_id).chains
    assert chain.links["optimizer_step"] == 1
    assert "the record says optimizer_step=9, the batch 1" in chain.notes


def test_a_rollout_stored_nowhere_and_one_from_the_future_are_noted(tmp_path):
    log, rollout_id = one_rollout(tmp_path, policy_version=8)
    log.batch("b2", 2, ["ghost"], 5, 6)
    run = read_run(log.folder)
    (chain,) = follow(run, optimizer_step=2).chains
    assert chain.links["rollout_id"] is None
    assert chain.notes == ("'ghost' is named by the batch and stored nowhere",)
    assert follow(run, "ghost").chains == (chain,)
    assert "sampled by version 8, trained at 4" in follow(run, rollout_id).chains[0].notes[0]


def test_work_undone_and_repeated_is_two_chains(tmp_path):
    log, rollout_id = one_rollout(tmp_path)
    log.event("restored", "trainer", step=0, seconds=0.1)
    log.batch("b1", 1, [rollout_id], 4, 5)
    followed = follow(read_run(log.folder), rollout_id)
    assert [chain.rolled_back for chain in followed.chains] == [True, False]
    assert "undone" in followed._repr_html_()


def test_the_picture_is_well_formed_escapes_and_has_a_box_a_link(tmp_path, made):
    nasty = '<script>alert("x")</script>'
    log, rollout_id = one_rollout(tmp_path, prompt_id=nasty)
    page = follow(read_run(log.folder), rollout_id)._repr_html_()
    assert nasty not in page
    assert "<script" not in page
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    space = "{http://www.w3.org/2000/svg}"
    assert len(svg.findall(f".//{space}rect")) == len(FORBIDS)
    assert len(svg.findall(f".//{space}path")) == len(FORBIDS) - 1
    assert nasty in [title.text for title in svg.findall(f".//{space}title")]
    page = follow(made[1], optimizer_step=1)._repr_html_()
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    assert f"{ROLLOUTS} chain(s), {ROLLOUTS - 16} more not drawn" in page
    boxes = [title.text for title in svg.findall(f".//{space}g/{space}title")]
    assert sum(text.startswith("synthetic-5000") for text in boxes) == 16
