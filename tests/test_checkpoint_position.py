"""The data position against field cases and a brute-force model of a run."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.checkpoint import DataPosition, dataset_fingerprint


def start(num_prompts=1000, seed=0):
    return DataPosition(num_prompts, "A", seed)


def test_ten_steps_of_32_prompts_go_on_at_320():
    position = start()
    for step in range(10):
        position = position.trained(range(32 * step, 32 * step + 32))
    assert next(position.upcoming()) == 320 == position.frontier


def test_a_dispatch_counter_of_1000_would_skip_96():
    position = start(5000).trained(range(904))
    assert position.frontier == 904
    assert position.regenerate(1000) == list(range(904, 1000))
    assert len(position.regenerate(1000)) == 96


def test_out_of_order_training_leaves_a_skip_set():
    position = start().trained([0, 1, 2, 4, 5])
    assert (position.frontier, position.skip) == (3, {4, 5})
    assert position.regenerate(8) == [3, 6, 7]
    assert position.regenerate(8, held=[6]) == [3, 7]


@pytest.mark.parametrize(
    ("num_prompts", "effect"), [(10_000, "skip 5,000 of 10,000 rows"), (3_000, "end at once after 3,000")]
)
def test_a_position_is_not_applied_to_another_dataset(num_prompts, effect):
    position = start(8_000).trained(range(5_000))
    with pytest.raises(ValueError, match=effect):
        position.on("B", num_prompts)
    assert position.on("A", 8_000) is position


def test_the_same_name_with_another_number_of_rows_is_another_dataset():
    with pytest.raises(ValueError, match="counts dataset 'A' of 1,000"):
        start().on("A", 999)


def test_epochs_are_permutations_that_follow_from_the_seed():
    position = start(50, seed=3).trained(range(50))
    assert position.epoch == 1
    assert sorted(position.row_order(0)) == list(range(50)) == sorted(position.row_order(1))
    assert list(position.row_order(0)) != list(position.row_order(1))
    assert list(position.row_order(1)) == list(start(50, seed=3).row_order(1)) != list(start(50, 4).row_order(1))


@given(st.lists(st.lists(st.integers(0, 40), unique=True), max_size=6), st.integers(1, 20), st.sets(st.integers(0, 40)))
def test_arithmetic_equals_a_list_of_flags(batches, num_prompts, held):
    flags = [False] * 200
    position = start(num_prompts)
    for batch in batches:
        fresh = [index for index in batch if not flags[index]]
        position = position.trained(fresh)
        for index in fresh:
            flags[index] = True
    todo = [index for index in range(200) if not flags[index]]
    assert position.frontier == todo[0]
    assert position.skip == {index for index in range(todo[0], 200) if flags[index]}
    assert position.num_trained == sum(flags)
    assert position.epoch == todo[0] // num_prompts
    free = [index for index in todo if index not in held]
    assert list(itertools.islice(position.upcoming(held), 60)) == free[:60]
    assert position.regenerate(60, held) == [index for index in free if index < 60]
    assert DataPosition.from_component(position.to_component()) == position


@given(st.lists(st.integers(0, 3), min_size=30, max_size=30), st.sets(st.integers(0, 29), max_size=4))
def test_restarts_train_each_prompt_once(order, kills):
    """A run that dispatches in order, trains out of order, and is thrown back to its position at random."""
    position, trained, in_flight = start(100), [], []
    source = position.upcoming()
    for turn, pick in enumerate(order):
        while len(in_flight) < 4:
            in_flight.append(next(source))
        index = in_flight.pop(pick)
        position, trained = position.trained([index]), [*trained, index]
        if turn in kills:
            position = DataPosition.from_component(position.to_component())
            source, in_flight = position.upcoming(), []
    assert len(set(trained)) == len(trained) == 30
    assert set(range(position.frontier)) <= set(trained)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataPosition(0, "A"), "num_prompts=0"),
        (lambda: DataPosition(True, "A"), "num_prompts=True"),
        (lambda: DataPosition(9, ""), "fingerprint=''"),
        (lambda: DataPosition(9, "A", -1), "seed=-1"),
        (lambda: DataPosition(9, "A", 0, -1), "frontier=-1"),
        (lambda: DataPosition(9, "A", 0, 3, frozenset({3})), "skip=3: needs numbers beyond the frontier, 3"),
        (lambda: DataPosition(9, "A", 0, 3, {5}), "needs a frozenset"),
        (lambda: start().trained([4, 4]), "prompt 4 is trained already"),
        (lambda: start().trained([0, 1]).trained([1]), "prompt 1 is trained already"),
        (lambda: start().trained([-1]), "indices=-1"),
        (lambda: start().trained([0, 5]).regenerate(5), "dispatched=5: 6 were handed out at least"),
        (lambda: DataPosition.from_component({"dispatched": 1000}), "data_position="),
        (lambda: DataPosition.from_component({**start().to_component(), "epoch": 1}), "epoch=1"),
        (lambda: DataPosition.from_component({**start().to_component(), "skip": "12"}), "skip='12'"),
        (lambda: DataPosition.from_component({**start().to_component(), "skip": [True]}), "skip=True"),
    ],
)
def test_a_bad_position_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_fingerprint_sees_rows_order_and_number_and_not_the_order_of_keys():
    rows = [{"prompt": "1+1", "answer": 2}, {"prompt": "2+2", "answer": 4}]
    swapped = [{"answer": 2, "prompt": "1+1"}, rows[1]]
    assert dataset_fingerprint(rows) == dataset_fingerprint(swapped)
    others = [rows[::-1], rows[:1], [*rows, rows[0]], [{**rows[0], "answer": 3}, rows[1]], ["ab"], ["a", "b"], ["a\nb"]]
    assert len({dataset_fingerprint(each) for each in [rows, *others]}) == 8
