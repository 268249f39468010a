"""Fill what a record lacks from the log that was written when it was collected: `recover`.

Models: the log as the one authority on the past. Leaves out judging the result, which `validate` does anew.
Use: `verdict = validate(recover(record, log), current_version=9)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.intake import jsonable
from rlinfra_utils.rollouts.record import Rollout


def recover(record: Rollout | Mapping, log: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of `record` with its absent fields filled from `log`, the entry of the same sample_id.

    The log maps sample_id to fields that were written when the rollout was collected, and never changed since.
    Never make entries from today's configuration: the tokenizer, template, decoder or verifier may have moved on
    since, and the record would then claim a behaviour policy that did not sample it. Nothing present is changed.
    Validate the result: a recovered record is not an accepted one.

    Raises TypeError for what is no record or no log; ValueError, in one line, for a record without sample_id, an id
    that the log lacks, a field outside the schema or of another type, and a value that contradicts the record's.
    """
    if not isinstance(record, Rollout | Mapping) or not isinstance(log, Mapping):
        raise TypeError(f"recover: {type(record).__name__} and {type(log).__name__} given; pass a record and a mapping")
    data = record.model_dump(exclude_unset=True) if isinstance(record, Rollout) else dict(record)
    sample_id = data.get("sample_id")
    if not isinstance(sample_id, str) or not sample_id:
        raise ValueError(f"sample_id: {short(sample_id)} names no entry of the log; without an id nothing is recovered")
    entry = log.get(sample_id)
    if not isinstance(entry, Mapping):
        raise ValueError(f"sample_id: the log has no entry for {short(sample_id)}; keep the record in quarantine")
    return _filled(data, entry, "")


def _filled(data: Mapping, entry: Mapping, prefix: str) -> dict[str, Any]:
    """`data` with what it lacks from `entry`; decoding is filled field by field."""
    result = dict(data)
    for name, logged in entry.items():
        own = result.get(name)
        if logged is None:
            continue
        if isinstance(own, BaseModel):
            own = own.model_dump(exclude_unset=True)
        if name == "decoding" and isinstance(own, Mapping) and isinstance(logged, Mapping):
            result[name] = _filled(own, logged, "decoding.")
            continue
        logged_json = _as_stored(name, logged, prefix)
        if _is_absent(name, own):
            result[name] = logged
        elif _as_stored(name, own, prefix) != logged_json:
            raise ValueError(
                f"{prefix}{name}: the record says {short(own)}, the log {short(logged)}; find out which is wrong"
            )
    return result


def _is_absent(name: str, value: Any) -> bool:
    empty = isinstance(value, str | dict | list) and not value
    return value is None or (empty and (name == "prompt_tokens" or not isinstance(value, list)))


def _as_stored(name: str, value: Any, prefix: str) -> str:
    """The text that a field's value is stored as, equal for equal values (1 and 1.0, arrays and lists)."""
    fields = {"decoding": {name: value}} if prefix else {name: value}
    try:
        return json.dumps(jsonable(Rollout.model_validate(fields)))
    except ValidationError as error:
        problem = error.errors()[0]["msg"].lower()
        raise ValueError(f"{prefix}{name}: {short(value)}: {problem}; no value of this field") from None
