"""Does this engine serve the weights that its version number says? `verify`.

Models: four questions, from the cheapest to the one that cannot be answered by a label: the number, a fingerprint,
scores of held sequences, log-probs of what the engine samples. Leaves out sampling filters (temperature 1, no filter)
and why an engine is slow. Use: `print(verify(engine, 7, control(score, sequences, 7)))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlinfra_utils.doors import instance, short, whole
from rlinfra_utils.rollouts import Decoding
from rlinfra_utils.sync.control import Control, checked_rows, mean_gap
from rlinfra_utils.sync.prints import HASH_OF_NOTHING, Fingerprint, differences
from rlinfra_utils.sync.proof import Check, Proof

_SEED = 0


def verify(engine: Any, version: int, control: Control) -> Proof:
    """Check one engine against the trainer's own answers for `version`.

    The engine's `version`, and where it has them `fingerprint()` or `weight_checksums()` (tensor name -> SHA-256),
    `control_logprobs(sequences)` (log-probs of tokens 1..n-1) and `generate(prompts, decoding, n=1, seed=...)`. An
    engine that raises or answers nonsense fails that check. Raises ValueError for a control of another version, or one
    whose trainer has gone on since.
    """
    version = whole("version", version, 0)
    instance("control", control, Control, "as sync.control gives")
    if control.version != version:
        raise ValueError(f"control.version={control.version}: cannot prove version {version}; make a control of it")
    control.check_still_holds()
    checks = {
        "version": _version,
        "fingerprint": _fingerprint,
        "scoring": _scoring,
        "generation": _generation,
    }
    return Proof(version, tuple(_answered(name, check, engine, control) for name, check in checks.items()))


def _answered(name: str, check: Callable[[Any, Control], tuple[str, str]], engine: Any, control: Control) -> Check:
    """One check; whatever the engine raises is its answer."""
    try:
        return Check(name, *check(engine, control))
    except Exception as error:
        return Check(name, "fail", f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _version(engine: Any, control: Control) -> tuple[str, str]:
    if engine.version == control.version and not isinstance(engine.version, bool):
        return "pass", f"the engine says {control.version}; a label proves no weights"
    return "fail", f"the engine says version {engine.version!r}, not {control.version}"


def _fingerprint(engine: Any, control: Control) -> tuple[str, str]:
    if control.fingerprint is None:
        return "not_checked", "the control has no fingerprint"
    if hasattr(engine, "fingerprint"):
        given = engine.fingerprint()
        if not isinstance(given, Fingerprint):
            return "not_checked", f"the engine gave {short(given)}, not what sync.fingerprint gives"
        if found := differences(control.fingerprint, given):
            return "fail", f"{len(found)} of {len(control.fingerprint.tensors)} tensors differ, first {found[0]}"
        return "pass", f"{given}, equal to the trainer's"
    if hasattr(engine, "weight_checksums"):
        return _checksums(engine.weight_checksums(), control.fingerprint)
    return "not_checked", "the engine gives no fingerprint"


def _checksums(given: Mapping[str, str], expected: Fingerprint) -> tuple[str, str]:
    """Judge an engine's own checksums, whose layout may be another: only equal names can be compared."""
    if not given:
        return "not_checked", "the engine gave no checksums: proves nothing"
    hollow = sum(digest == HASH_OF_NOTHING for digest in given.values())
    if hollow == len(given):
        return (
            "not_checked",
            f"all {hollow} checksums hash nothing ({HASH_OF_NOTHING[:8]}...): proves nothing",
        )
    alias = expected.aliases
    by_name = {name.rsplit(":", 1)[-1]: digest for name, digest in given.items() if digest != HASH_OF_NOTHING}
    known = {name: expected.tensors.get(alias.get(name, name)) for name in by_name}
    compared = {name: print_ for name, print_ in known.items() if print_ is not None}
    other = [name for name, print_ in compared.items() if print_.sha256 != by_name[name]]
    counts = f"{len(compared)} of {len(expected.tensors)} tensors have a checksum to compare"
    if hollow:
        counts += f"; {hollow} are the SHA-256 of nothing and prove nothing"
    if other:
        return "fail", f"{len(other)} checksums differ, first {other[0]}; {counts}"
    whole_model = expected.tensors.keys() <= {alias.get(name, name) for name in compared}
    return ("pass" if whole_model else "not_checked"), counts


def _scoring(engine: Any, control: Control) -> tuple[str, str]:
    """Held sequences, nearest to which weights: those to be proven, or one of the references?"""
    if not hasattr(engine, "control_logprobs"):
        return "not_checked", "the engine has no control_logprobs"
    rows = checked_rows("control_logprobs", engine.control_logprobs(control.sequences), control.sequences)
    gap = mean_gap(rows, control.logprobs)
    # Weights that score as the new ones do, bit for bit, are no alternative: a learning rate of 0 is not a fault.
    others = {name: reference for name, reference in control.references.items() if reference != control.logprobs}
    gaps = {name: mean_gap(rows, reference) for name, reference in others.items()}
    nearest = min(gaps, key=gaps.__getitem__, default=None)
    said = f"mean |gap| {gap:.2g} nats to version {control.version}"
    if nearest is not None:
        said += f", {gaps[nearest]:.2g} to {nearest}"
        if gaps[nearest] < gap / 2:
            if gaps[nearest] <= control.tolerance_nats:
                return "fail", f"these are the log-probs of {nearest}: {said}"
            return "fail", f"nearest to {nearest}, but not its either (some tensors left behind?): {said}"
    if gap > control.tolerance_nats:
        return "fail", f"these are the log-probs of no weights in the control: {said}"
    if nearest is not None and gaps[nearest] <= 2 * gap:
        return "not_checked", f"cannot be told from {nearest}: {said}"
    return "pass", said


def _generation(engine: Any, control: Control) -> tuple[str, str]:
    """What the engine samples after the held prompts, scored by the trainer: the way that goes through its caches."""
    if not hasattr(engine, "generate"):
        return "not_checked", "the engine has no generate"
    decoding = Decoding(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logprobs_mode="processed",
        max_new_tokens=control.max_new_tokens,
        ignore_eos=True,  # an answer that ends at once, and surely, would show nothing
    )
    answers = engine.generate(control.sequences, decoding, n=1, seed=_SEED).completions
    if len(answers) != len(control.sequences) or not all(answer.tokens for answer in answers):
        return "fail", f"{len(answers)} answers to {len(control.sequences)} prompts, or an empty one"
    labels = {answer.policy_version for answer in answers}
    if labels != {control.version}:
        return "fail", f"answers are labelled with versions {sorted(map(str, labels))}, not {control.version}"
    full = [prompt + list(answer.tokens) for prompt, answer in zip(control.sequences, answers)]
    trainer = [row[-len(answer.tokens) :] for row, answer in zip(control.score(full), answers)]
    sampled = [answer.behavior_logprobs for answer in answers]
    gap, surprise = mean_gap(sampled, trainer), -float(np.concatenate(sampled).mean())
    said = f"mean |gap| {gap:.2g} nats over {sum(map(len, trainer))} sampled tokens, mean log-prob {-surprise:.2g}"
    if not gap <= control.tolerance_nats:
        return "fail", f"{said}, tolerance {control.tolerance_nats:g}"
    if surprise <= control.tolerance_nats:
        return "not_checked", f"{said}: the policy is sure of its tokens, no cache could show; use other prompts"
    return "pass", said
