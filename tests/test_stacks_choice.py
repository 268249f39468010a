"""Requirements to candidates: known answers, unknown is open, contradictions are named."""

import csv
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import stacks
from rlinfra_utils.stacks.data import FOLDER, load

ANSWERS = list(csv.DictReader((FOLDER / "answers.csv").read_text().splitlines()))
FIELDS = {
    "nodes": ["one", "many"],
    "update": ["full", "lora"],
    "turns": ["single", "multi"],
    "synchrony": ["sync", "async"],
    "over_age": ["drop", "wait", "train"],
    "trainer": ["fsdp", "megatron", "deepspeed"],
    "engine": ["vllm", "sglang"],
    "recovery": [("optimizer",), ("rng",), ("queue", "rng")],
    "telemetry": [("ess",), ("version_per_token",), ("rollout_trace", "prometheus")],
    "debugging": ["processes", "ray"],
}


def test_every_need_has_one_general_answer_for_every_stack():
    needs = set(load("questions.json"))
    assert needs == {row["need"] for row in ANSWERS}
    for need, stack in itertools.product(needs, stacks.STACKS):
        rows = [r for r in ANSWERS if (r["need"], r["stack"]) == (need, stack)]
        assert [r["given"] for r in rows].count("") == 1
        assert len({r["given"] for r in rows}) == len(rows)
    for row in ANSWERS:
        assert row["answer"] in ("yes", "no", "open")
        assert row["given"] in needs | {""}
        assert row["cell"].startswith(row["stack"] + "/")
        assert row["cell"] in set(stacks.AXES["cell"])


def test_every_value_of_a_requirement_is_a_need():
    asked = {f"{name}.{v}" for name, values in FIELDS.items() for value in values
             for v in (value if isinstance(value, tuple) else [value])}  # fmt: skip
    assert asked - {"debugging.ray"} | {"lag.bounded"} == set(load("questions.json"))


requirements = st.fixed_dictionaries({}, optional={name: st.sampled_from(v) for name, v in FIELDS.items()})


@settings(max_examples=40, deadline=None)
@given(asked=requirements, max_lag=st.sampled_from([None, 0, 3]))
def test_standing_follows_from_the_answers_and_unknown_is_never_no(asked, max_lag):
    lags = asked.get("synchrony") == "async" and max_lag == 0
    idle = asked.get("synchrony") == "sync" and (max_lag or "over_age" in asked)
    if lags or idle:
        with pytest.raises(ValueError, match="contradict"):
            stacks.choose({**asked, "max_lag": max_lag})
        return
    choice = stacks.choose({**asked, "max_lag": max_lag})
    assert {c.stack for c in choice.stacks} == set(stacks.STACKS)
    for c in choice.stacks:
        answers = [r.answer for r in c.reasons]
        assert (c.standing == "ruled out") == ("no" in answers)
        assert (c.standing == "candidate") == (set(answers) <= {"yes"})
        for r in c.reasons:
            assert r.source
            assert r.question.rstrip(")").endswith(("?", "."))
            assert any(
                row["need"] == r.need and row["stack"] == c.stack and row["answer"] == r.answer for row in ANSWERS
            )
    order = [(["candidate", "open", "ruled out"].index(c.standing), c.stack.lower()) for c in choice.stacks]
    assert order == sorted(order)


def test_what_the_sources_say_rules_out():
    assert stacks.choose({}).by_standing("candidate") == sorted(stacks.STACKS, key=str.lower)
    assert set(stacks.choose({"engine": "sglang"}).by_standing("ruled out")) == {"OpenRLHF", "PRIME-RL", "SkyRL", "TRL"}
    assert stacks.choose({"telemetry": ["version_per_token"]}).by_standing("candidate") == ["AReaL"]
    assert set(stacks.choose({"trainer": "deepspeed"}).by_standing("candidate")) == {"OpenRLHF", "TRL"}
    both = stacks.choose({"trainer": "deepspeed", "synchrony": "async"})
    assert both.by_standing("candidate") == ["OpenRLHF"]
    assert "PRIME-RL" in stacks.choose({"synchrony": "sync"}).by_standing("open")


def test_lora_on_areal_depends_on_its_trainer():
    assert "AReaL" in stacks.choose({"update": "lora", "trainer": "fsdp"}).by_standing("candidate")
    assert "AReaL" in stacks.choose({"update": "lora", "trainer": "megatron"}).by_standing("ruled out")


def test_there_is_no_score():
    columns = stacks.choose({"nodes": "many"}).frame().columns
    assert not [name for name in columns if "score" in name or "rank" in name]
    assert {"stack", "standing", "need", "answer", "source", "commit", "date_checked", "question"} <= set(columns)


def test_faces_name_every_stack_and_question():
    choice = stacks.choose(stacks.Requirements(nodes="many", trainer="megatron"))
    for face in (str(choice), choice._repr_html_()):
        assert all(stack in face for stack in stacks.STACKS)
        assert "Which launcher does your cluster have" in face
    assert len(choice.frame()) == 2 * len(stacks.STACKS)
    assert stacks.choose({}).frame().empty


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"node": "many"}, "node"),
        ({"nodes": "three"}, "nodes"),
        ({"max_lag": -1}, "max_lag"),
        ({"max_lag": 1.5}, "max_lag"),
        ({"max_lag": True}, "max_lag"),
        ({"recovery": "queue"}, "recovery"),
        ({"telemetry": ["speed"]}, "telemetry"),
        ({"synchrony": "async", "max_lag": 0}, "max_lag"),
        ({"synchrony": "sync", "max_lag": 2}, "max_lag"),
        ({"engine": None, "trainer": 7}, "trainer"),
        ("many nodes", "requirements"),
        (None, "requirements"),
        ({3: "many"}, "3"),
    ],
)
def test_requirements_that_make_no_sense_are_named(asked, field):
    with pytest.raises(ValueError, match=field) as error:
        stacks.choose(asked)
    assert "\n" not in str(error.value)
