"""One answer followed to the weights that it moved, and back: `follow`.

Models: the seven identifiers of lesson step 12.5.2, each with the file that said it, or with what its absence
forbids. Leaves out metrics and time. Use: `follow(run, rollout_id)`, `follow(run, optimizer_step=7)`; in a notebook
the result is a picture.

A rollout may have more than one chain: trained on in two branches, or once more after a restore undid the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from rlinfra_utils.doors import instance, short, whole
from rlinfra_utils.tracing.picture import AFTER_TRAINING, chains_svg
from rlinfra_utils.tracing.reading import RunData, require_run

#: The chain's links in order -> what cannot be done without one.
FORBIDS = {
    "prompt_id": "its group's baseline cannot be formed again, nor the prompt's own curve",
    "rollout_id": "the answer itself is gone: no re-scoring, no second look at its masks",
    "behavior_policy_version": "no lag, no importance ratio, no check of freshness",
    "verifier_version": "its reward compares with no other, and a re-scoring has no reference",
    "training_batch_id": "it moved no weights that the log knows of",
    "optimizer_step": "the update cannot be found, undone or repeated",
    "resulting_policy_version": "what came of it cannot be measured",
}
_RECORD = ["prompt_id", "sample_id", "branch_id", "policy_version", "version_spans", "verifier_version"]
_RECORD += ["training_batch_id", "optimizer_step", "resulting_policy_version", "file"]


@dataclass(frozen=True)
class Chain:
    """One rollout's way through one training batch, or as far as it came.

    `links`: value by name of `FORBIDS`; None is missing. `behavior_policy_version` is one version, or the spans as
    text, "6:[0,12) 7:[12,20)". `branch_id`: of the batch, else of the record. `notes`: what else the files say of it.
    """

    links: dict[str, Any]
    branch_id: str | None
    config_hash: str | None
    rolled_back: bool
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> dict[str, str]:
        """What each missing link forbids."""
        return {name: FORBIDS[name] for name, value in self.links.items() if value is None}

    def __str__(self) -> str:
        lines = [f"branch {self.branch_id}, config_hash {self.config_hash}" + (", rolled back" * self.rolled_back)]
        for name, value in self.links.items():
            lines.append(f"  {name:25} {value if value is not None else 'missing: ' + FORBIDS[name]}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


@dataclass(frozen=True)
class Followed:
    """The chains that answer one question, with text and picture; `frame()` has a row a chain."""

    asked: str
    chains: tuple[Chain, ...] = field(repr=False)

    def frame(self) -> pd.DataFrame:
        """One row a chain: the seven links, branch_id, config_hash, rolled_back."""
        about = ("branch_id", "config_hash", "rolled_back")
        return pd.DataFrame([chain.links | {name: getattr(chain, name) for name in about} for chain in self.chains])

    def __str__(self) -> str:
        return "\n".join([f"{self.asked}: {len(self.chains)} chain(s)", *map(str, self.chains)])

    def _repr_html_(self) -> str:
        return chains_svg(self)


def follow(
    run: RunData,
    rollout_id: str | None = None,
    *,
    optimizer_step: int | None = None,
    resulting_policy_version: int | None = None,
    branch_id: str | None = None,
) -> Followed:
    """The chains of one rollout, or of all rollouts behind an optimizer step or a version of the weights.

    `branch_id` keeps the chains of one branch; None is all of them, for a number means something only within one.
    Raises ValueError unless exactly one of the three is asked for, and for one that the run does not hold.
    """
    asked = {
        "rollout_id": rollout_id,
        "optimizer_step": optimizer_step,
        "resulting_policy_version": resulting_policy_version,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"follow: {short(given)} asked for; give one of {', '.join(asked)}")
    require_run(run)
    name, value = next(iter(given.items()))
    question = f"{name}={short(value)}"
    if name == "rollout_id":
        instance(name, value, str, "the sample_id of one record")
    else:
        whole(name, value, 0)
    found = chains_of(run, [value]) if name == "rollout_id" else _of_batches(run, name, value)
    chains = tuple(chain for chain in found if branch_id in (None, chain.branch_id))
    if not chains:
        where = "" if branch_id is None else f" in branch {branch_id!r}"
        raise ValueError(f"{question}: the run {run.run_id!r} holds none{where}; {_held(run, name)}")
    return Followed(question, chains)


def _held(run: RunData, name: str) -> str:
    values = run.rollouts["rollout_id"] if name == "rollout_id" else run.batches[name]
    if values.empty:
        return "it holds nothing of that kind"
    if name == "rollout_id":
        return f"it holds {values.iloc[0]!r} to {values.iloc[-1]!r}"
    return f"it holds {values.min()} to {values.max()}"


def chains_of(run: RunData, rollout_ids: Iterable[str]) -> Iterator[Chain]:
    """The chains of some rollouts, in their order; of those that the run does not hold none."""
    wanted = dict.fromkeys(rollout_ids)
    records = _records(run, wanted)
    batches: dict[str, list[Any]] = {}
    for batch in run.batches.itertuples():
        for rollout_id in batch.rollout_ids:
            if rollout_id in wanted:
                batches.setdefault(rollout_id, []).append(batch)
    notes = _events_of(run)
    for rollout_id in wanted:
        if rollout_id in records or rollout_id in batches:
            for batch in batches.get(rollout_id, [None]):
                yield _chain(rollout_id, records.get(rollout_id), batch, notes.get(rollout_id, ()))


def _of_batches(run: RunData, name: str, value: int) -> Iterator[Chain]:
    batches = list(run.batches[run.batches[name] == value].itertuples())
    records = _records(run, [rollout_id for batch in batches for rollout_id in batch.rollout_ids])
    notes = _events_of(run)
    for batch in batches:
        for rollout_id in batch.rollout_ids:
            yield _chain(rollout_id, records.get(rollout_id), batch, notes.get(rollout_id, ()))


def _records(run: RunData, rollout_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the records say, by rollout_id; of two with one id the first."""
    rows = run.rollouts.loc[run.rollouts["rollout_id"].isin(list(rollout_ids)), _RECORD].to_dict("records")
    return {row["sample_id"]: row for row in reversed(rows)}


def _events_of(run: RunData) -> dict[str, tuple[str, ...]]:
    """What events say of a rollout, by its id."""
    notes: dict[str, tuple[str, ...]] = {}
    named = run.events[run.events["rollout_id"].notna()] if "rollout_id" in run.events else run.events[:0]
    for event in named.itertuples():
        note = f"{event.kind} at {event.time_unix_s:.3f} s by {event.worker or 'nobody named'}"
        notes[str(event.rollout_id)] = (*notes.get(str(event.rollout_id), ()), note)
    return notes


def _chain(rollout_id: str, record: dict[str, Any] | None, batch: Any, notes: tuple[str, ...]) -> Chain:
    """The chain of a rollout through `batch`; without one, as far as the record's own words go."""
    said = {name: value for name, value in (record or {}).items() if _is_there(value)}
    links = {
        "prompt_id": said.get("prompt_id"),
        "rollout_id": rollout_id if record else None,
        "behavior_policy_version": _behavior(said),
        "verifier_version": said.get("verifier_version"),
        **{name: said.get(name) if batch is None else getattr(batch, name) for name in AFTER_TRAINING},
    }
    found = [*notes]
    if record is None:
        found.append(f"{rollout_id!r} is named by the batch and stored nowhere")
    if batch is None:
        if any(name in said for name in AFTER_TRAINING):
            found.append("batches.jsonl has no line of it: the last links are the record's own word")
        return Chain(links, said.get("branch_id"), None, False, tuple(found))
    found += [
        f"the record says {name}={said[name]}, the batch {links[name]}"
        for name in AFTER_TRAINING
        if name in said and said[name] != links[name]
    ]
    newest = max(_versions(said), default=0)
    if newest > batch.trained_policy_version:
        found.append(f"sampled by version {newest}, trained at {batch.trained_policy_version}: from another branch?")
    return Chain(links, batch.branch_id, batch.config_hash, bool(batch.rolled_back), tuple(found))


def _is_there(value: Any) -> bool:
    return hasattr(value, "__len__") or (value is not None and value == value)


def _versions(said: dict[str, Any]) -> list[int]:
    spans = said.get("version_spans")
    if spans is not None and len(spans):
        return [span["version"] for span in spans]
    return [said["policy_version"]] if "policy_version" in said else []


def _behavior(said: dict[str, Any]) -> int | str | None:
    spans = said.get("version_spans")
    if spans is not None and len(spans):
        return " ".join(f"{span['version']}:[{span['start']},{span['end']})" for span in spans)
    return said.get("policy_version")
