"""A stack's record as `rollouts.Rollout`, with the list of what it lacks: `to_rollout`.

Models: what the payload says, joined with what the caller asserts from a log of its own; a contradiction between the
two is refused. Leaves out batches (call it row by row) and the verdict (`rollouts.validate`).
Use: `rollout, missing = to_rollout("verl", payload, {"tokenizer_version": "v2"}, row=3)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlinfra_utils.doors import complaint, short
from rlinfra_utils.rollouts import Decoding, Rollout
from rlinfra_utils.stacks.adapters import adapter_of
from rlinfra_utils.stacks.draft import Draft
from rlinfra_utils.stacks.fields import Gap, gaps
from rlinfra_utils.stacks.reader import Reader

#: Fields of the record that are no statement about one rollout.
NOT_ASSERTED = ("schema_version", "extra")


def to_rollout(
    stack: str, payload: Mapping[str, Any], provenance: Mapping[str, Any] | None = None, *, row: int = 0
) -> tuple[Rollout, dict[str, Gap]]:
    """One rollout of a stack's record, and its gaps by field, each with what it forbids.

    Args: stack, a key of `ADAPTERS`; payload, that stack's record as a mapping (`ADAPTERS[stack].record` says how it
    becomes one; token arrays may be lists, numpy arrays or torch tensors); provenance, fields of `rollouts.Rollout`
    that the caller asserts from an immutable log written at collection time, named in `extra["asserted"]`; row, which
    rollout of a batch, from 0.
    Raises ValueError, one line with the field: an unknown stack, a payload without tokens or with lengths or types
    that disagree, provenance that is no field of a rollout or contradicts the payload.
    """
    adapter = adapter_of(stack)
    draft = adapter.read(Reader(stack, payload, row, adapter.rows))
    said = {name: value for name, value in draft.fields.items() if value is not None}
    asserted = _asserted(provenance or {})
    for name in asserted.keys() & said.keys():
        if getattr(_typed({name: said[name]}), name) != asserted[name]:
            ours, theirs = short(asserted[name]), short(said[name])
            raise ValueError(f"provenance.{name}: {ours} contradicts the payload's {theirs}")
    _within(asserted, draft)
    extra = {name: _text(value) for name, value in draft.extra.items() if value is not None}
    if asserted:
        extra["asserted"] = ", ".join(sorted(asserted))
    record = _typed({**said, **asserted, "extra": extra})
    return record, gaps(record, draft.found, stack)


def _asserted(provenance: Any) -> dict[str, Any]:
    """The asserted fields, typed; a null asserts nothing."""
    if not isinstance(provenance, Mapping):
        raise ValueError(f"provenance: {short(provenance)} is no mapping; send fields of a rollout by name")
    for name in provenance:
        if name not in Rollout.model_fields or name in NOT_ASSERTED:
            raise ValueError(f"provenance: {short(name)} is no field of a rollout to assert; see rollouts.Rollout")
    given = {name: value for name, value in provenance.items() if value is not None}
    record = _typed(given, "provenance.")
    return {name: getattr(record, name) for name in given}


def _typed(data: dict[str, Any], prefix: str = "") -> Rollout:
    try:
        return Rollout.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{prefix}{complaint(error)}; send the schema's type") from None


def _within(asserted: Mapping[str, Any], draft: Draft) -> None:
    """Refuse asserted versions that the payload's first and last rule out, and a temperature other than its own."""
    versions = {
        "policy_version": [v for v in (asserted.get("policy_version"),) if v is not None],
        "version_spans": [span.version for span in asserted.get("version_spans") or []],
    }
    for name, given in versions.items():
        if given and not _possible(min(given), max(given), *draft.versions):
            bounds = "first {}, last {}".format(*("unknown" if v is None else v for v in draft.versions))
            raise ValueError(f"provenance.{name}: {short(given)} contradicts the payload's versions, {bounds}")
    decoding: Decoding | None = asserted.get("decoding")
    if decoding is not None and draft.temperature is not None and decoding.temperature not in (None, draft.temperature):
        asked = f"provenance.decoding.temperature: {decoding.temperature}"
        raise ValueError(f"{asked} contradicts the payload's temperatures, {draft.temperature}")


def _possible(low: int, high: int, first: int | None, last: int | None) -> bool:
    """Whether tokens of versions `low` to `high` can be those of a payload whose versions run from `first` to `last`.

    Without a last one the first is a bound from below.
    """
    if last is None:
        return first is None or low >= first
    return high == last and first in (None, low)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=short)
