"""`memory.phases`: a maximum over phases, and the order of wake-up."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils.memory import (
    GIB,
    RECIPES,
    Ledger,
    ModelSpec,
    Phase,
    colocated,
    disaggregated,
    lora,
    lora_params,
    model_state,
    phases,
    shard,
)

NOTHING = Ledger({})
WEIGHTS = 2 * 7_615_616_512
POOL = 55 * GIB
names = st.sampled_from("abcd")
phase_lists = st.lists(st.dictionaries(names, st.integers(0, 10**12)), min_size=1, max_size=6).map(
    lambda items: [Phase(f"phase {i}", lines) for i, lines in enumerate(items)]
)


@given(phase_lists)
def test_the_peak_is_a_maximum_not_a_sum(steps):
    ledger = phases(steps)
    totals = [sum(step.items.values()) for step in steps]
    assert ledger.peak_bytes == max(totals)
    assert ledger.peak_phase == steps[totals.index(max(totals))].name
    assert ledger.fits(ledger.peak_bytes)
    assert ledger.peak_bytes == 0 or not ledger.fits(ledger.peak_bytes - 1)
    assert list(ledger.frame().sum(axis=1)) == totals


def test_out_of_memory_at_wake_up_b14():
    together = colocated(WEIGHTS, POOL, NOTHING, NOTHING, wake="together")
    weights_first = colocated(WEIGHTS, POOL, NOTHING, NOTHING, wake="weights_first")
    assert pytest.approx(14.185, abs=5e-4) == WEIGHTS / GIB
    assert together.peak_bytes == 2 * WEIGHTS + POOL
    assert together.peak_bytes / GIB == pytest.approx(83.370, abs=5e-4)
    assert together.peak_phase == "wake"
    assert not together.fits(80 * GIB)
    assert weights_first.peak_bytes == WEIGHTS + POOL
    assert weights_first.peak_bytes / GIB == pytest.approx(69.185, abs=5e-4)
    assert weights_first.fits(80 * GIB)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_order_of_waking_in_closed_form_b14(weights, pool):
    together = colocated(weights, pool, NOTHING, NOTHING, wake="together")
    weights_first = colocated(weights, pool, NOTHING, NOTHING, wake="weights_first")
    assert together.peak_bytes == 2 * weights + pool
    assert weights_first.peak_bytes == max(2 * weights, weights + pool)


def test_a_step_in_its_five_phases():
    state, extra = Ledger({"weights": 10, "moments": 20}), Ledger({"activations": 7})
    ledger = colocated(100, 1000, state, extra)
    assert [phase.name for phase in ledger.phases] == ["generate", "release", "train", "sync", "wake"]
    totals = {phase.name: phase.total for phase in ledger.phases}
    assert totals == {"generate": 1100, "release": 100, "train": 37, "sync": 200, "wake": 1100}


def test_what_stays_resident_is_there_in_each_phase():
    state, extra = Ledger({"state": 30}), Ledger({"activations": 7})
    trainer = colocated(100, 1000, state, extra, trainer="resident")
    assert [phase.total for phase in trainer.phases] == [1130, 130, 37, 230, 1130]
    engine = colocated(100, 1000, state, extra, engine="resident", wake="together")
    assert [phase.total for phase in engine.phases] == [1100, 100, 137, 200, 1200]
    for ledger in (trainer, engine):
        assert ledger.peak_bytes >= colocated(100, 1000, state, extra).peak_bytes


def test_lora_shrinks_training_and_the_copy_but_not_generation():
    spec, recipe = ModelSpec.named("Qwen2.5-7B"), RECIPES["bf16_master_bf16_grad"]
    full, adapters = model_state(spec.num_params, recipe), lora(spec, 16, recipe)
    kwargs = {"engine_weights": WEIGHTS, "kv_pool": POOL, "training": NOTHING, "wake": "together"}
    by_full = colocated(trainer_state=shard(full, "fsdp", 8), **kwargs)
    by_lora = colocated(trainer_state=shard(adapters, "fsdp", 8), published=2 * lora_params(spec, 16), **kwargs)
    full_totals, lora_totals = ({p.name: p.total for p in ledger.phases} for ledger in (by_full, by_lora))
    assert lora_totals["train"] < full_totals["train"] / 6
    assert lora_totals["generate"] == full_totals["generate"]
    assert not by_full.fits(80 * GIB)
    assert by_lora.fits(80 * GIB)


def test_two_pools_hold_on_two_devices_what_one_holds_in_turn():
    state, extra = Ledger({"state": 30}), Ledger({"activations": 7})
    pools = disaggregated(100, 1000, state, extra)
    assert {name: ledger.peak_bytes for name, ledger in pools.items()} == {"trainer": 130, "engine": 1200}
    assert pools["trainer"].peak_phase == "sync"
    one = colocated(100, 1000, state, extra)
    assert sum(ledger.peak_bytes for ledger in pools.values()) >= one.peak_bytes


def test_the_table_marks_the_peak(tmp_path):
    ledger = phases([Phase("generate", {"KV": 3 * GIB}), Phase("train", {"state": 2 * GIB, "activations": GIB / 2})])
    lines = str(ledger).splitlines()
    assert lines[0].split() == ["GiB", "generate", "train"]
    assert lines[-2].split() == ["total", "GiB", "3.000", "2.500"]
    assert lines[-3].split() == ["total", "GB", "3.221", "2.684"]
    assert lines[-1].split() == ["peak"]
    assert lines[-1].index("peak") < lines[0].index("train")
    assert "3.000" in ledger._repr_html_()
    ledger.to_csv(tmp_path / "phases.csv")
    rows = list(csv.reader((tmp_path / "phases.csv").open()))
    assert rows[0] == ["phase", "item", "bytes"]
    assert rows[1:] == [
        ["generate", "KV", str(3 * GIB)],
        ["train", "state", str(2 * GIB)],
        ["train", "activations", str(GIB / 2)],
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: phases([]), "needs at least one phase"),
        (lambda: phases(None), "steps=None: needs a list of Phase"),
        (lambda: phases([Phase("a", {}), {"KV": 1}]), r"phases\[1\]={'KV': 1}: needs a Phase"),
        (lambda: phases([Phase("a", {}), Phase("a", {})]), "phases: 'a' occurs twice"),
        (lambda: Phase("a", {"KV": -1}), "KV=-1: needs a finite number of at least 0"),
        (lambda: Phase("a", {"KV": float("nan")}), "KV=nan: needs a finite number of at least 0"),
        (lambda: phases([Phase("a", {})]).fits("80"), "capacity_bytes='80': needs a finite number of at least 0"),
        (
            lambda: colocated(1, 1, NOTHING, NOTHING, wake="kv_first"),
            "wake='kv_first': known are together, weights_first",
        ),
        (lambda: colocated(1, 1, NOTHING, NOTHING, trainer="gone"), "trainer='gone': known are offloaded, resident"),
        (lambda: colocated(-1, 1, NOTHING, NOTHING), "engine_weights=-1: needs a finite number of at least 0"),
        (lambda: colocated(1, 1, NOTHING, NOTHING, published="x"), "published='x': needs a finite number"),
        (lambda: disaggregated(1, None, NOTHING, NOTHING), "kv_pool=None: needs a finite number of at least 0"),
        (
            lambda: colocated(1, 1, Ledger({"a": 1}, "parameters"), NOTHING),
            "trainer_state=.*: needs a Ledger in bytes",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
