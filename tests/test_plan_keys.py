"""Keys of seven stacks: none made up, none forgotten, and the values are the plan's."""

import string

import pytest
from plan_samples import brief, changed, drawn

from rlinfra_utils import plan
from rlinfra_utils.plan.stackkeys import CHECK, ITEMS, NO_KEY, _table, _words
from rlinfra_utils.stacks import AXES, STACKS


@pytest.fixture(scope="module")
def table():
    return plan.keys(drawn()).rows


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_each_item_of_each_stack_has_one_row(placement):
    p = plan.draw_up(brief(placement=placement, num_gpus=8))
    rows = plan.keys(p).rows
    items = rows.groupby("stack")["item"].apply(list)
    assert set(items.index) == set(STACKS)
    for stack in STACKS:
        assert len(set(items[stack])) == len(items[stack])
        expected = set(ITEMS)
        if placement == "colocated":
            expected -= {
                "staleness bound",
                "queue limit",
                "rollouts in flight",
                "running requests at an update",
                "correction",
            }
        assert set(items[stack]) == expected, stack


def test_a_row_without_a_key_has_no_value_and_says_why(table):
    without = table[table["key"] == NO_KEY]
    assert (without["value"] == "").all()
    assert (without["note"] != "").all()
    assert (table.loc[table["key"] != NO_KEY, "value"] != "").all()


def test_a_key_has_a_source_at_the_commit_of_the_map(table):
    with_key = table[table["key"] != NO_KEY]
    assert (with_key["source"] != "").all()
    commits = AXES.drop_duplicates("stack").set_index("stack")[["commit", "commit_date"]]
    for row in table.itertuples():
        assert (row.commit, row.commit_date) == tuple(commits.loc[row.stack])
        assert row.mark == CHECK


def test_keys_that_rest_on_a_cell_are_the_cells_own():
    cells = AXES.set_index("cell")["config_key"]
    for row in _table().itertuples():
        if row.cell and row.key and not row.source.startswith(("verl/trainer/config/rollout/rollout.yaml:93",)):
            last = [part.strip().split(".")[-1].lstrip("-") for part in row.key.split(";")]
            known = cells[row.cell] + " allocation_mode" * ("allocation" in cells[row.cell])
            text = AXES.set_index("cell").loc[row.cell, "value"] + known
            foreign = [name for name in last if name not in text]
            assert foreign in ([], ["actor.ppo_mini_batch_size"], *_BESIDE.get((row.stack, row.item), [])), row


#: Parts of a key that its second source names, beside the cell's.
_BESIDE = {
    ("NeMo RL", "resume"): [["enabled"]],
    ("verl", "behaviour log-probs"): [["logprobs_mode"]],
    ("verl", "prompts a step"): [["ppo_mini_batch_size"], ["train_batch_size", "ppo_mini_batch_size"]],
    ("SkyRL", "training GPUs"): [["policy_num_gpus_per_node"]],
    ("OpenRLHF", "training GPUs"): [["num_gpus_per_node"]],
}


def test_every_template_speaks_of_words_that_there_are():
    words = _words(drawn())
    for text in [*_table()["value"], *_table()["note"], *ITEMS.values()]:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name}
        assert names <= set(words), text


def value(run_plan, stack, item):
    rows = plan.keys(run_plan, stack).rows.set_index("item")
    return rows.loc[item, "value"]


def test_the_same_bound_in_each_stacks_own_count():
    p = changed(
        drawn(), "queue", controller="bounded_queue", options={"max_rollouts": 256, "drop_lag": 3},
        sync_interval=2, bound_versions=3, bound_of="each rollout", over_age="drop",
    )  # fmt: skip
    bounds = {stack: value(p, stack, "staleness bound") for stack in STACKS}
    # versions; inclusive global steps; batches; versions; versions; training steps; versions
    assert list(bounds.values()) == ["3", "4; drop", "6", "3", "3", "6", "3"]
    assert value(p, "TRL", "queue limit") == "256"
    assert value(p, "NeMo RL", "queue limit") == "32"
    assert value(p, "verl", "prompts a step") == "32; 16"
    assert value(p, "TRL", "sync interval") == "2"
    assert value(p, "PRIME-RL", "prompts a step") == "128"


def test_skyrls_workers_stay_within_its_own_bounds():
    for bound in (1, 2, 8):
        p = changed(
            drawn(), "queue", controller="nemo_rl", options={"max_age": bound}, bound_versions=bound, sync_interval=1
        )
        workers = int(value(p, "SkyRL", "rollouts in flight"))
        assert 16 <= workers <= 16 * (bound + 1)


def test_an_unknown_stack_is_named():
    with pytest.raises(ValueError, match="stack='trlx'"):
        plan.keys(drawn(), "trlx")
    with pytest.raises(ValueError, match="needs a RunPlan"):
        plan.keys({})


def test_the_table_has_two_faces():
    found = plan.keys(drawn(), "verl")
    assert CHECK in str(found)
    assert CHECK in found._repr_html_()
