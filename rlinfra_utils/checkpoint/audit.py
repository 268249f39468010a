"""Would this checkpoint resume the same experiment? `audit`.

Models: what is missing, what is corrupt, what has another version today, each with its consequence. Leaves out the
resume itself: a whole checkpoint and a faithful loader are two things. Use:
`print(audit(path, current={"versions": {"tokenizer": "v2"}, "decoding": {...}}))`.

Folders of the transformers and TRL Trainer, torch DCP, verl and SkyRL are read as far as names and headers go
(`foreign.py`).
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinfra_utils.checkpoint.components import COMPONENTS, check, has_tensors, rollout_schema
from rlinfra_utils.checkpoint.foreign import LAYOUTS, recognise
from rlinfra_utils.checkpoint.manifest import COMPLETE, MANIFEST, CheckpointError, Manifest
from rlinfra_utils.checkpoint.reading import load_component, open_manifest
from rlinfra_utils.doors import short
from rlinfra_utils.rollouts import Decoding

#: What follows if a value is another one today, by the start of its name.
DRIFT: Mapping[str, str] = {
    "versions.tokenizer": "stored tokens may spell other text",
    "versions.chat_template": "prompts differ from those that the policy was trained on",
    "versions.verifier": "rewards before and after the restart are not on one scale",
    "versions.environment": "episodes before and after the restart are not of one task",
    "versions.engine": "behaviour log-probs shift for equal weights",
    "versions": "something that the run recorded has another version",
    "decoding": "the behaviour policy changes at the restart, with no change of the weights",
    "rollout_schema": "stored rollouts need conversion before they can be trained on",
    "data_position": "the position counts another dataset and must not be applied",
}
_COMPARED = ("versions", "decoding", "rollout_schema", "data_position")


@dataclass(frozen=True)
class Audit:
    """What was found; each mapping goes from a component or a version's name to one sentence with its consequence."""

    path: Path
    kind: str
    present: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    drift: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_policy_unread: bool = False

    @property
    def verdict(self) -> str:
        """One of "resumable", "weights only" (no continuation of the run), "broken", and "not read".

        "not read": the policy has files, in a layout that is not read here; they may be whole or not.
        """
        if "policy" not in self.present:
            return "not read" if self.is_policy_unread else "broken"
        return "weights only" if self.missing or self.corrupt or self.drift else "resumable"

    @property
    def resumable(self) -> bool:
        """Whether a faithful loader would continue the same experiment."""
        return self.verdict == "resumable"

    def rows(self) -> list[tuple[str, str]]:
        """(what and where, sentence) of each finding."""
        groups = (("missing", self.missing), ("corrupt", self.corrupt), ("drift", self.drift))
        found = [(f"{what} {name}", text) for what, group in groups for name, text in group.items()]
        return found + [("note", text) for text in self.notes]

    def __str__(self) -> str:
        head = f"{self.path} ({self.kind}): {self.verdict}"
        return "\n".join([head, *(f"  {what}: {text}" for what, text in self.rows())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(what)}</td><td>{html.escape(text)}</td></tr>" for what, text in self.rows()
        )
        head = "<tr><th>finding</th><th>what follows</th></tr>"
        return f"<b>{html.escape(str(self.path))}: {self.verdict}</b><table>{head}{rows}</table>"


def audit(path: str | os.PathLike, current: Mapping[str, Mapping[str, Any]] | None = None) -> Audit:
    """Read all of a checkpoint and say whether it would resume the same experiment.

    `current` is what the run would be resumed with: parts of the components "versions", "rollout_schema" (this
    package's, if not given) and "data_position", and "decoding", which is compared whole. What it leaves out is not
    compared. Reads one component at a time into memory. Raises CheckpointError for a path that is no folder of one
    checkpoint, ValueError for a `current` that is no such mapping.
    """
    current, path = _checked(current or {}), Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: is no folder; name the folder of one checkpoint")
    kind = recognise(path)
    return _audit_own(path, current) if kind == "rlinfra" else _audit_foreign(path, kind)


def _audit_own(path: Path, current: Mapping[str, Any]) -> Audit:
    try:
        manifest = open_manifest(path)
    except CheckpointError as error:
        return Audit(path, "rlinfra", corrupt={"manifest": f"{error}; without it nothing in the folder is proven"})
    present, corrupt, drift, notes = [], {}, {}, []
    for name in COMPONENTS:
        if name not in manifest.components:
            continue
        try:
            value = load_component(path, manifest, name)
        except CheckpointError as error:
            corrupt[name] = f"{error}; without it, {COMPONENTS[name].without}"
            continue
        present.append(name)
        drift |= _drift(name, value, current.get(name, {}))
        if name == "optimizer" and not has_tensors(value):
            notes.append("optimizer holds no array: unless it keeps no moments, the resume starts cold")
    missing = {name: part.without for name, part in COMPONENTS.items() if name not in manifest.components}
    notes += [f"{name} lies in the folder unlisted; it is never read" for name in _unlisted(path, manifest)]
    return Audit(path, "rlinfra", tuple(present), missing, corrupt, drift, tuple(notes))


def _audit_foreign(path: Path, kind: str) -> Audit:
    found = LAYOUTS[kind](path)
    missing = {
        name: f"{found.partial[name]}; {part.without}" if name in found.partial else part.without
        for name, part in COMPONENTS.items()
        if name not in found.present and name not in found.corrupt
    }
    corrupt = {name: f"{text}; without it, {COMPONENTS[name].without}" for name, text in found.corrupt.items()}
    present = tuple(name for name in COMPONENTS if name in found.present and name not in corrupt)
    return Audit(path, kind, present, missing, corrupt, {}, tuple(found.notes), "policy" in found.partial)


def _checked(current: Any) -> dict[str, Any]:
    """`current` with its decoding complete, and the record schema of this package where none is given."""
    if not isinstance(current, Mapping) or not all(isinstance(value, Mapping) for value in current.values()):
        raise ValueError(f"current={short(current)}: needs a mapping of mappings, by names of components")
    unknown = [name for name in current if name not in _COMPARED]
    if unknown:
        raise ValueError(f"current: {short(unknown[0])} is not compared; the names are {', '.join(_COMPARED)}")
    whole = {"rollout_schema": rollout_schema(), **current}
    if "decoding" in whole:
        check("decoding", whole["decoding"])
        whole["decoding"] = Decoding.model_validate(whole["decoding"]).model_dump()
    return whole


def _drift(name: str, stored: Any, today: Mapping[str, Any]) -> dict[str, str]:
    """What `today` says otherwise than the checkpoint, by the value's full name."""
    if name not in _COMPARED:
        return {}
    before = dict(_leaves(name, Decoding.model_validate(stored).model_dump() if name == "decoding" else stored))
    found = {}
    for place, value in _leaves(name, today):
        was = before.get(place, "not recorded")
        if was != value:
            effect = next(text for start, text in DRIFT.items() if f"{place}.".startswith(f"{start}."))
            found[place] = f"was {short(was)}, is {short(value)}: {effect}"
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{name}.{key}", entry)
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _unlisted(path: Path, manifest: Manifest) -> list[str]:
    listed = {file.name for files in manifest.components.values() for file in files} | {MANIFEST, COMPLETE}
    return sorted(entry.name for entry in path.iterdir() if entry.name not in listed)
