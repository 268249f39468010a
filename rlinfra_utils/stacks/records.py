"""The stored records of the seven stacks, and one table of what each of them has.

Models: one small record a kind, made by the stack's own classes (`ci/make_stack_records.py`), with its origin and date.
Leaves out what these classes do with GPUs. Use: `record("verl")["payload"]`; `presence()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rlinfra_utils.rollouts import Rollout
from rlinfra_utils.stacks.adapters import ADAPTERS, adapter_of
from rlinfra_utils.stacks.convert import to_rollout
from rlinfra_utils.stacks.data import load
from rlinfra_utils.stacks.fields import FORBIDS, Gap


def record(stack: str) -> dict[str, Any]:
    """The stored record of a kind: stack, origin, made_on (date), how, payload. Raises ValueError for another kind."""
    adapter_of(stack)  # the door
    return load(f"record_{stack.lower().replace(' ', '_').replace('-', '_')}.json")


def presence(records: Mapping[str, tuple[Rollout, Mapping[str, Gap]]] | None = None) -> pd.DataFrame:
    """Contract fields (rows) by kind of record (columns): "yes", "asserted", "part" (something stands in its place),
    "no", or "-" where the field is of no concern (an environment's version without its tokens).

    `records`: results of `to_rollout` by column name; the stored records where not given.
    """
    if records is None:
        records = {stack: to_rollout(stack, record(stack)["payload"]) for stack in ADAPTERS}
    columns = {name: [_state(field, *result) for field in FORBIDS] for name, result in records.items()}
    frame = pd.DataFrame(columns, index=pd.Index(FORBIDS, name="field"))
    return frame[(frame != "-").any(axis=1)]


def _state(field: str, rollout: Rollout, missing: Mapping[str, Gap]) -> str:
    if field in missing:
        return "part" if missing[field].found else "no"
    asserted = rollout.extra.get("asserted", "").split(", ")
    if field.partition(".")[0] in asserted or (field == "policy_version" and "version_spans" in asserted):
        return "asserted"
    value = rollout.version_spans if field == "policy_version" else None
    value = getattr(rollout, field, None) if value is None else value
    return "-" if value is None else "yes"
