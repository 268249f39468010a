"""Stored results: what a level-B or level-C cell measured, with its date, hardware, versions and cost.

Leaves out: arrays and large tables; a stored result is a few numbers. `store` writes one JSON file,
`stored` reads it back checked, from the installed package or from the checkout's `results/`.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import os
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinfra_utils.doors import complaint
from rlinfra_utils.levels import cost
from rlinfra_utils.levels.machine import detect, version

VERSIONED = ("rlinfra-utils", "numpy", "torch", "transformers", "ray")
NAME = r"^[a-z0-9_]{1,80}$"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Hardware(_Model):
    cpu_model: str
    cpu_count: int = Field(ge=1)
    memory_bytes: int | None
    num_accelerators: int = Field(ge=0)
    gpu_name: str | None
    capability: tuple[int, int] | None
    gpu_memory_bytes: int | None


class _Cost(_Model):
    seconds: float = Field(ge=0)
    peak_memory_bytes: int | None


class _Stored(_Model):
    name: str = Field(pattern=NAME)
    date: datetime.date
    level: Literal["A", "B", "C"]
    hardware: _Hardware
    versions: dict[str, str]
    parameters: dict[str, Any]
    result: dict[str, Any] = Field(min_length=1)
    cost: _Cost | None = None  # of the level cell that stored it


class Table:
    """Rows of (label, text): a table in a notebook, aligned lines elsewhere."""

    def __init__(self, rows: list[tuple[str, str]]):
        self.rows = rows

    def __repr__(self) -> str:
        width = max(len(label) for label, _ in self.rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in self.rows)

    def _repr_html_(self) -> str:
        style = ' style="text-align:left"'
        cells = [f"<th{style}>{html.escape(a)}</th><td{style}>{html.escape(b)}</td>" for a, b in self.rows]
        return "<table>" + "".join(f"<tr>{pair}</tr>" for pair in cells) + "</table>"


def store(
    name: str,
    result: dict,
    folder: str | Path,
    *,
    level: str = "B",
    parameters: dict | None = None,
    peak_memory_bytes: int | None = None,
) -> Path:
    """Write `result` as `folder`/`name`.json with today's date (UTC), this machine and its versions.

    From a `%%level B name` cell it takes along what the cell has cost so far, in seconds and bytes of memory: those of
    this process and its children, or `peak_memory_bytes` where others did the work, as Ray's do.
    `result` and `parameters` hold plain values: str, bool, int, finite float, None, lists and dicts of these.
    The file is written aside and renamed, so a reader never sees half of it. Returns its path.
    Raises ValueError naming the field that is not plain, and for a name outside [a-z0-9_]+.
    """
    parameters = {} if parameters is None else parameters
    _require_plain("result", result)
    _require_plain("parameters", parameters)
    machine = asdict(detect())
    cell = cost.spent(name)
    if cell is not None and peak_memory_bytes is not None:
        cell = cell._replace(peak_memory_bytes=peak_memory_bytes)
    found = {distribution: version(distribution) for distribution in VERSIONED}
    try:
        record = _Stored(
            name=name,
            date=datetime.datetime.now(datetime.UTC).date(),
            level=level,
            hardware={field: machine[field] for field in _Hardware.model_fields},
            versions={"python": platform.python_version()} | {k: v for k, v in found.items() if v is not None},
            parameters=parameters,
            result=result,
            cost=None if cell is None else _Cost(**cell._asdict()),
        )
    except ValidationError as error:
        raise ValueError(f"cannot store result {name!r}: {complaint(error)}") from None
    text = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_bytes(text.encode())
    os.replace(aside, path)
    return path


def stored(name: str) -> dict:
    """The stored result `name` as a dict: name, date, level, hardware, versions, parameters, result,
    cost (None where no level cell stored it).

    Raises FileNotFoundError where there is none, ValueError naming the file and field where it is malformed.
    """
    return _read(name).model_dump(mode="json")


def _read(name: str) -> _Stored:
    if not isinstance(name, str) or re.fullmatch(NAME, name) is None:
        raise ValueError(f"name={name!r} of a stored result is not of the form [a-z0-9_]{{1,80}}")
    path = _folder() / f"{name}.json"
    try:
        record = _Stored.model_validate_json(path.read_bytes())
        _require_plain("result", record.result)
        _require_plain("parameters", record.parameters)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no stored result {name!r}") from None
    except ValidationError as error:
        raise ValueError(f"stored result results/{path.name}: {complaint(error)}") from None
    except ValueError as error:
        raise ValueError(f"stored result results/{path.name}: {error}") from None
    if record.name != name:
        raise ValueError(f"stored result results/{path.name}: name is {record.name!r}")
    return record


def describe(name: str) -> tuple[str, Table]:
    """The stored result `name` for a reader: a line with its date and hardware, and a table of its values.

    Raises as `stored` does.
    """
    record = _read(name)
    rows = [(label, _text(value)) for label, value in record.result.items()]
    rows += [(f"parameter {label}", _text(value)) for label, value in record.parameters.items()]
    if record.cost is not None:
        rows.append(("took", str(cost.Cost(**record.cost.model_dump()))))
    versions = ", ".join(f"{package} {number}" for package, number in record.versions.items())
    rows += [("date", record.date.isoformat()), ("hardware", _hardware_text(record.hardware)), ("versions", versions)]
    return f"Stored result of {record.date.isoformat()}, {_hardware_text(record.hardware)}:", Table(rows)


def foretell(name: str) -> str:
    """What running the cell `name` took where its stored result comes from: time, memory, date, machine.

    Raises ValueError for a stored result that is malformed.
    """
    try:
        record = _read(name)
    except FileNotFoundError:
        record = None
    if record is None or record.cost is None:
        return "its time and memory are not stored"
    took = cost.Cost(**record.cost.model_dump())
    return f"about {took}, measured {record.date.isoformat()} on {_hardware_text(record.hardware)}"


def _folder() -> Path:
    package = Path(__file__).parents[1]
    packaged = package / "results"  # where the wheel puts them; a checkout has them beside the package
    return packaged if packaged.is_dir() else package.parent / "results"


def _require_plain(field: str, value: Any) -> None:
    try:
        _walk(field, value)
    except RecursionError:
        raise ValueError(f"{field} contains itself, or nests too deeply to be stored") from None


def _walk(field: str, value: Any) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}: only finite numbers are stored")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{field} has the key {key!r}: keys are strings")
            _walk(f"{field}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _walk(f"{field}[{index}]", item)
    else:
        raise ValueError(f"{field} is a {type(value).__name__}: store plain numbers, text, lists and dicts")


def _hardware_text(hardware: _Hardware) -> str:
    text = f"{hardware.cpu_count} CPU cores ({hardware.cpu_model})"
    if hardware.memory_bytes is not None:
        text += f", {hardware.memory_bytes / 2**30:.1f} GiB"
    if hardware.gpu_name is None:
        return text
    memory = "" if hardware.gpu_memory_bytes is None else f" with {hardware.gpu_memory_bytes / 2**30:.2f} GiB"
    return f"{hardware.num_accelerators} x {hardware.gpu_name}{memory}, {text}"


def _text(value: Any) -> str:
    """A stored value on one line: four digits a number, a dict as its keys and values."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 240 else f"{text[:239]}…"
