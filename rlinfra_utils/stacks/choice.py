"""From requirements to candidates among seven stacks, each with its reasons and the questions that stay open.

Models: a requirement is met, not met, or unknown at the commit that was read; what is unknown is open, never a no.
Leaves out speed, price and taste: there is no score and no winner. Use: `choose(Requirements(engine="sglang"))`.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlinfra_utils.doors import complaint, short
from rlinfra_utils.stacks.atlas import NOT_STATED, STACKS, cell
from rlinfra_utils.stacks.data import FOLDER, load

STANDINGS = ("candidate", "open", "ruled out")


class Requirements(BaseModel):
    """What the run and the team need; a field left out asks for nothing. Raises ValueError, naming the field.

    max_lag: the largest lag admitted, 0 for none (the unit is each stack's own, and a question); over_age: what is to
    happen to older data; debugging: "processes" if the team cannot look into Ray, "ray" if it can.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    nodes: Literal["one", "many"] | None = None
    update: Literal["full", "lora"] | None = None
    turns: Literal["single", "multi"] | None = None
    synchrony: Literal["sync", "async"] | None = None
    max_lag: int | None = Field(None, ge=0)
    over_age: Literal["drop", "wait", "train"] | None = None
    trainer: Literal["fsdp", "megatron", "deepspeed"] | None = None
    engine: Literal["vllm", "sglang"] | None = None
    recovery: tuple[Literal["optimizer", "rng", "queue"], ...] = ()
    telemetry: tuple[Literal["version_per_token", "ess", "rollout_trace", "prometheus"], ...] = ()
    debugging: Literal["processes", "ray"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Requirements:
        if self.synchrony == "async" and self.max_lag == 0:
            raise ValueError("max_lag=0 contradicts synchrony='async'; ask for synchrony='sync'")
        if self.synchrony == "sync" and (self.max_lag or self.over_age):
            raise ValueError("max_lag and over_age contradict synchrony='sync', where nothing lags; leave them out")
        return self

    def needs(self) -> list[str]:
        """The needs by name, such as "trainer.fsdp": the keys of the questions and of the answers."""
        names = ("nodes", "update", "turns", "synchrony", "over_age", "trainer", "engine")
        needs = [f"{name}.{value}" for name in names if (value := getattr(self, name)) is not None]
        if self.max_lag == 0 and self.synchrony is None:
            needs.append("synchrony.sync")
        if self.max_lag:
            needs.append("lag.bounded")
        needs += [f"recovery.{what}" for what in self.recovery] + [f"telemetry.{what}" for what in self.telemetry]
        return needs + (["debugging.processes"] if self.debugging == "processes" else [])


@dataclass(frozen=True)
class Reason:
    """One need and one stack: the answer ("yes", "no", "open"), the map's statement behind it, what to check."""

    need: str
    answer: str
    statement: str
    source: str
    commit: str
    date_checked: str
    question: str


@dataclass(frozen=True)
class Candidate:
    """A stack, its standing (one of `STANDINGS`) and a reason for each need."""

    stack: str
    standing: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Choice:
    """The seven stacks, candidates first, then open ones, then those ruled out; by name within each."""

    stacks: tuple[Candidate, ...]

    def by_standing(self, standing: str) -> list[str]:
        """Names of the stacks of one standing."""
        return [c.stack for c in self.stacks if c.standing == standing]

    def frame(self) -> pd.DataFrame:
        """One row a stack and need."""
        rows = [{"stack": c.stack, "standing": c.standing, **vars(r)} for c in self.stacks for r in c.reasons]
        return pd.DataFrame(rows, columns=["stack", "standing", *Reason.__dataclass_fields__])

    def __str__(self) -> str:
        return "\n".join(line for c in self.stacks for line in _lines(c))

    def _repr_html_(self) -> str:
        parts = []
        for c in self.stacks:
            cells = ((r.answer, r.need, r.statement, f"{r.source} at {r.commit[:12]}", r.question) for r in c.reasons)
            rows = "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in cells)
            head = "<tr><th>met</th><th>need</th><th>statement</th><th>read in</th><th>check in your version</th></tr>"
            opened = " open" if c.standing == "candidate" else ""
            title = f"<summary><b>{html.escape(c.stack)}</b>: {c.standing}</summary>"
            parts.append(f"<details{opened}>{title}<table>{head}{rows}</table></details>")
        return "".join(parts)


def choose(requirements: Requirements | Mapping[str, Any]) -> Choice:
    """The stacks' standings under `requirements` (a `Requirements` or its fields as a mapping).

    Raises ValueError, one line with the field, for requirements that are unknown or contradict one another.
    """
    needs = _checked(requirements).needs()
    found = [_judge(stack, needs) for stack in STACKS]
    return Choice(tuple(sorted(found, key=lambda c: (STANDINGS.index(c.standing), c.stack.lower()))))


def _checked(requirements: Any) -> Requirements:
    if isinstance(requirements, Requirements):
        return requirements
    if not isinstance(requirements, Mapping):
        raise ValueError(f"requirements: {short(requirements)} is no mapping; send Requirements or its fields by name")
    data = {name: tuple(v) if isinstance(v, list) else v for name, v in requirements.items()}
    try:
        return Requirements.model_validate(data)
    except ValidationError as error:
        unknown = error.errors(include_url=False)[0]["type"] == "extra_forbidden"
        advice = f"; the fields are {', '.join(Requirements.model_fields)}" if unknown else ""
        raise ValueError(complaint(error) + advice) from None


def _judge(stack: str, needs: list[str]) -> Candidate:
    reasons = tuple(_reason(stack, need, needs) for need in needs)
    answers = {r.answer for r in reasons}
    standing = "ruled out" if "no" in answers else "open" if "open" in answers else "candidate"
    return Candidate(stack, standing, reasons)


def _reason(stack: str, need: str, needs: list[str]) -> Reason:
    """The answer given the other needs: one that holds in their company goes before the general one."""
    rows = [row for row in _answers() if row["stack"] == stack and row["need"] == need]
    row = next((r for r in rows if r["given"] in needs), None) or next(r for r in rows if not r["given"])
    at = cell(row["cell"])
    question = load("questions.json")[need]
    if at["config_key"] != NOT_STATED:
        question += f" (There: {at['config_key']}, default {at['default']}.)"
    return Reason(need, row["answer"], at["value"], at["source"], at["commit"], at["date_checked"], question)


@cache
def _answers() -> list[dict[str, str]]:
    with (FOLDER / "answers.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")


def _lines(c: Candidate) -> Iterator[str]:
    yield f"{c.stack}: {c.standing}"
    for r in c.reasons:
        yield f"  {r.answer:<4} {r.need}: {r.statement} [{r.source} at {r.commit[:12]}, checked {r.date_checked}]"
        yield f"       check: {r.question}"
