"""From data as received to a typed `Rollout`: the first half of `validate`, on structure alone.

Models: size limits, text that is no Unicode, types, 64-bit integers, unknown fields, schema version. Null
means absent. Leaves out what the fields say about one another (`validate.py`).
Use: `rollout, findings = parse(record)`; rollout is None where the structure admits no further check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.record import SCHEMA, SCHEMA_VERSION, Rollout
from rlinfra_utils.rollouts.verdict import Finding

IDENTIFIER_BYTES = 1024
TEXT_BYTES = 64 * 1024
LIST_ENTRIES = 10_000_000

DECODING_SCHEMA = pa.schema(list(SCHEMA.field("decoding").type))
#: Column names by kind, for the two schemas that hold scalars and lists.
TEXTS = [f.name for f in SCHEMA if pa.types.is_string(f.type)]
LISTS = [f.name for f in SCHEMA if pa.types.is_list(f.type)]
MAPS = [f.name for f in SCHEMA if pa.types.is_map(f.type)]
INTEGERS = [f.name for f in SCHEMA if pa.types.is_int64(f.type)]
TOKEN_LISTS = [f.name for f in SCHEMA if f.type == pa.list_(pa.int64())]


def parse(record: Any) -> tuple[Rollout | None, list[Finding]]:
    """The typed record, or None, and the structural findings on it. Never raises."""
    try:
        return _parse(record)
    except Exception as error:  # foreign objects may raise anything when they are looked at
        message = f"record: looking at it raised {short(error)}; send plain numbers, text, lists and mappings"
        return None, [Finding("wrong_type", "record", message)]


def _parse(record: Any) -> tuple[Rollout | None, list[Finding]]:
    if not isinstance(record, Rollout | Mapping):
        message = f"record: {short(record)} is a {type(record).__name__}; send a mapping or a Rollout"
        return None, [Finding("not_a_record", "record", message)]
    data = present_fields(record)
    if too_large := list(_oversized(data)):
        return None, too_large
    rollout, findings = _typed(data)
    if rollout is not None:
        findings += [*_not_unicode(data), *_beyond_int64(rollout)]
    if any(f.code == "wrong_type" for f in findings):
        return None, findings
    if rollout.schema_version != SCHEMA_VERSION:
        message = f"schema_version: {rollout.schema_version} is not {SCHEMA_VERSION}; convert the record first"
        return None, [*findings, Finding("schema_version", "schema_version", message)]
    return rollout, findings


def present_fields(record: Rollout | Mapping) -> dict[str, Any]:
    """The record as a dict without its nulls; nested models become dicts, so that all is checked again."""
    data = record.model_dump(warnings=False) if isinstance(record, BaseModel) else dict(record)
    data = {name: value for name, value in data.items() if value is not None}
    if isinstance(data.get("decoding"), BaseModel | Mapping):
        decoding = data["decoding"]
        decoding = decoding.model_dump(warnings=False) if isinstance(decoding, BaseModel) else dict(decoding)
        data["decoding"] = {name: value for name, value in decoding.items() if value is not None}
    if isinstance(data.get("version_spans"), list):
        spans = data["version_spans"]
        data["version_spans"] = [s.model_dump(warnings=False) if isinstance(s, BaseModel) else s for s in spans]
    return data


def _texts(data: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(field, text, limit in bytes) of every text in a known field."""
    decoding = data["decoding"] if isinstance(data.get("decoding"), dict) else {}
    found = [(name, data.get(name), IDENTIFIER_BYTES) for name in TEXTS]
    found.append(("decoding.logprobs_mode", decoding.get("logprobs_mode"), IDENTIFIER_BYTES))
    stop = decoding.get("stop")
    found += [("decoding.stop", text, TEXT_BYTES) for text in (stop if isinstance(stop, list) else [])]
    for name in MAPS:
        for key, value in data[name].items() if isinstance(data.get(name), dict) else ():
            found += [(f"{name} key", key, IDENTIFIER_BYTES), (name, value, TEXT_BYTES)]
    return ((field, text, limit) for field, text, limit in found if isinstance(text, str))


def _oversized(data: dict[str, Any]) -> Iterator[Finding]:
    for field, text, limit in _texts(data):
        num_bytes = len(text.encode(errors="replace"))
        if num_bytes > limit:
            message = f"{field}: {num_bytes:,} bytes exceed {limit:,}; keep the text elsewhere and store its name"
            yield Finding("too_large", field, message)
    decoding = data["decoding"] if isinstance(data.get("decoding"), dict) else {}
    per_token = data["per_token"] if isinstance(data.get("per_token"), dict) else {}
    lists = {
        **{name: data.get(name) for name in LISTS},
        **{f"decoding.{name}": decoding.get(name) for name in ("banned_token_ids", "stop")},
        **{f"per_token.{name}": rows for name, rows in per_token.items()},
    }
    for field, value in lists.items():
        if hasattr(value, "__len__") and len(value) > LIST_ENTRIES:
            message = f"{field}: {len(value):,} entries exceed {LIST_ENTRIES:,}; split the episode"
            yield Finding("too_large", field, message)


def _typed(data: dict[str, Any]) -> tuple[Rollout | None, list[Finding]]:
    """The Rollout without its unknown fields; one finding for each of these and for each ill-typed field."""
    try:
        return Rollout.model_validate(data), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    unknown = [e["loc"] for e in errors if e["type"] == "extra_forbidden"]
    findings = [
        Finding("unknown_field", _path(loc), f"{_path(loc)}: is no field of the schema; put it in extra as text")
        for loc in unknown
    ]
    ill_typed: dict[Any, dict] = {}
    for e in errors:
        if e["type"] != "extra_forbidden":
            ill_typed.setdefault(e["loc"][0], e)
    for e in ill_typed.values():
        field = _path(e["loc"])
        message = f"{field}: {short(e['input'])}: {e['msg'].lower()}; send the schema's type"
        findings.append(Finding("wrong_type", field, message))
    if ill_typed:
        return None, findings
    for loc in unknown:
        data = _without(data, loc)
    return Rollout.model_validate(data), findings


def _path(loc: tuple[int | str, ...]) -> str:
    """('decoding', 'stop', 3) -> "decoding.stop[3]"."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return short("".join(parts).lstrip("."))[1:-1]


def _without(node: Any, loc: tuple[int | str, ...]) -> Any:
    """A copy of nested dicts and lists without the entry at `loc`."""
    copy = node.copy()
    if len(loc) == 1:
        del copy[loc[0]]
    else:
        copy[loc[0]] = _without(node[loc[0]], loc[1:])
    return copy


def _not_unicode(data: dict[str, Any]) -> Iterator[Finding]:
    for field, text, _ in _texts(data):
        try:
            text.encode()
        except UnicodeEncodeError:
            yield Finding("wrong_type", field, f"{field}: {short(text)} is no Unicode text; decode its bytes anew")


def _beyond_int64(rollout: Rollout) -> Iterator[Finding]:
    integers = {name: [getattr(rollout, name)] for name in INTEGERS}
    integers |= {name: getattr(rollout, name) or [] for name in TOKEN_LISTS}
    if decoding := rollout.decoding:
        integers["decoding.top_k"] = [decoding.top_k]
        integers["decoding.max_new_tokens"] = [decoding.max_new_tokens]
        integers["decoding.banned_token_ids"] = decoding.banned_token_ids
    integers["version_spans"] = [n for s in rollout.version_spans or [] for n in (s.start, s.end, s.version)]
    for field, values in integers.items():
        values = [v for v in values if v is not None]
        if values and not -(2**63) <= min(values) <= max(values) < 2**63:
            worst = max(values, key=abs)
            message = f"{field}: {short(worst)} does not fit 64 bits; send the engine's own id"
            yield Finding("wrong_type", field, message)
