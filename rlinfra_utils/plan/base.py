"""The door of a plan: checked, frozen mappings whose errors are one line, and YAML or JSON in and out.

Models: pydantic models that refuse unknown fields, wrong types and numbers that are not finite. Leaves out everything a
plan means. YAML is read by PyYAML's safe loader, which builds no objects; aliases and repeated keys are refused, since
the one can blow a small file up and the other hides a line. Use: `RunPlan.from_yaml(text)`; `run_plan.to_yaml()`.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rlinfra_utils.doors import short

MOST_CHARACTERS = 1_000_000


class Checked(BaseModel):
    """A frozen mapping of checked fields. Raises ValueError in one line, with the field and its value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(_line(error)) from None

    @classmethod
    def from_mapping(cls, data: Any) -> Self:
        """The model from what JSON can hold. Raises ValueError for anything else."""
        try:
            return cls.model_validate_json(json.dumps(data, default=_date, allow_nan=False))
        except ValidationError as error:
            raise ValueError(_line(error)) from None
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{cls.__name__}: holds what JSON cannot: {' '.join(str(error).split())}") from None

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """The model from YAML text, of which JSON is a part. Raises ValueError, one line, for text that is no such."""
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            size = f"{len(text):,} characters" if isinstance(text, str) else short(text)
            raise ValueError(f"text: {size}: needs the text of a plan, at most {MOST_CHARACTERS:,} characters")
        try:
            return cls.from_mapping(yaml.load(text, _Loader))
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"text: is no plan in YAML: {' '.join(str(error).split())}") from None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """YAML text in the order of the fields; `from_yaml` gives an equal model back."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True, width=100)

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(self.to_mapping(), indent=1, ensure_ascii=False) + "\n"


class _Loader(yaml.SafeLoader):
    """Safe, and without aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*name); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if repeated is not None:
            raise yaml.YAMLError(f"{short(repeated)} stands twice in one mapping; keep one")
        return super().construct_mapping(node, deep)


def _date(value: Any) -> str:
    """A date that YAML has read out of bare text, as text again."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__}, {short(value)}")


def _line(error: ValidationError) -> str:
    """The first finding in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or error.title
    said = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "value_error":
        return " ".join(f"{where}: {said}".split()) if first["loc"] else " ".join(said.split())
    if first["type"] == "extra_forbidden":
        return f"{where}: is no field here; take it out, or correct its name"
    if first["type"] == "missing":
        return f"{where}: is missing; the plan cannot do without it"
    return " ".join(f"{where}={short(first['input'])}: {said}".split())
