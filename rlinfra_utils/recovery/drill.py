"""The recovery drill of lesson step 12.5.3 on the real processes, in eight steps with a report: `drill`.

Models: save, fix what the run is, kill, restore, settle the queue, train one control batch, look at it, compare it
with what came before. Leaves out equality to the bit (`story.py`): a distributed run owes its semantics, not its bits.
Use: `print(drill("out/drill", victims=["trainer", "collector0"]))`; seconds, most of them to load torch once.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlinfra_utils import checkpoint, policy
from rlinfra_utils.doors import short
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.recovery.supervisor import Supervisor
from rlinfra_utils.recovery.workers import CHECKPOINTS, worker_names
from rlinfra_utils.tracing import RunData, RunLog, read_run

#: Statistics that the control batch is judged by, where the caller names no ranges.
JUDGED = ("reward", "num_tokens", "gap", "grad_norm")
#: Half width of a range in standard deviations of the batches before; a drill should not cry at a usual batch.
WIDTH_STD = 5.0
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Step:
    """One step of the drill: what it is, what was done, what was found, and whether that is as it must be."""

    name: str
    done: str
    found: str
    ok: bool


@dataclass(frozen=True)
class Report:
    """The eight steps; `ok` if each is. `kept` are the numbers behind step 8: (was lowest, was highest, is)."""

    steps: tuple[Step, ...]
    kept: Mapping[str, tuple[float, float, float]]

    @property
    def ok(self) -> bool:
        """Whether the run may be said to have been continued."""
        return all(step.ok for step in self.steps)

    def __str__(self) -> str:
        rows = [
            f"{number}. {step.name}: {'ok' if step.ok else 'WRONG'}\n   {step.done}; {step.found}"
            for number, step in enumerate(self.steps, start=1)
        ]
        return "\n".join([*rows, "recovered" if self.ok else "not recovered"])

    def _repr_html_(self) -> str:
        head = "<tr><th></th><th>step</th><th>done</th><th>found</th><th>ok</th></tr>"
        cells = [
            [str(number), step.name, step.done, step.found, "yes" if step.ok else "NO"]
            for number, step in enumerate(self.steps, start=1)
        ]
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells)
        return f"<table>{head}{rows}</table>"


def drill(
    folder: str | Path,
    config: RunConfig | None = None,
    queue_policy: str = "restore",
    victims: Sequence[str] = ("trainer", "collector0"),
    allowed: Mapping[str, tuple[float, float]] | None = None,
) -> Report:
    """Interrupt a run of `config` in `folder`, resume it, and report the eight steps of lesson 12.5.3.

    `victims` are killed by SIGKILL; the trainer must be among them, or nothing is restored. `allowed` gives the range
    (low, high) of a statistic of the control batch; else it is the mean of the batches before, plus and minus
    WIDTH_STD of their standard deviations. Raises ValueError for names that are none of this run's, TimeoutError where
    a step does not come, RecoveryError as `Supervisor` does.
    """
    config = RunConfig(num_updates=40, save_every=6) if config is None else config
    unknown = [name for name in victims if name not in worker_names(config)]
    if unknown or "trainer" not in victims:
        raise ValueError(f"victims={list(victims)}: needs the trainer, and names of {', '.join(worker_names(config))}")
    with Supervisor(folder, config, queue_policy) as run:
        path = _until(run, lambda: _saved(run.folder, config.save_every))
        with run.frozen():  # a fast trainer would retire the checkpoint, or finish, while we look
            saved, stored, before = checkpoint.audit(path), checkpoint.load(path), read_run(folder)
            killed = [f"{name} (process {run.pid(name)})" for name in victims if run.kill(name)]
        left = read_run(folder)
        run.tend()
        after = _until(run, lambda: _after_restore(run.folder, len(left.batches)))
    steps = [
        Step("run and save", f"ran {len(before.batches)} updates", f"{path.name}: {saved.verdict}", saved.resumable),
        _fixed(folder, before, config),
        Step("kill", "SIGKILL to " + ", ".join(killed), f"{len(killed)} gone", len(killed) == len(victims)),
        _restored(after, stored, path.name),
        _queue(after, queue_policy),
    ]
    control = after.batches.iloc[len(left.batches)]
    steps.append(_control(after, control, config))
    steps.append(_checked(after, control, stored["versions"], config))
    judged, kept = _compared(before, control, allowed)
    return Report((*steps, judged), kept)


def _until(run: Supervisor, look: Callable[[], Any]) -> Any:
    """What `look` returns once it is something; tends the run meanwhile. Raises TimeoutError where it never is."""
    end_s = time.monotonic() + _TIMEOUT_S
    while True:
        is_last = run.finished or time.monotonic() > end_s  # asked before the look: what came last is seen
        if (found := look()) is not None:
            return found
        if is_last:
            raise TimeoutError(f"{run.folder}: the drill's next step did not come; give a run of more updates")
        run.tend()
        time.sleep(0.02)


def _saved(folder: Path, step: int) -> Path | None:
    """The newest whole checkpoint, from `step` on."""
    path = checkpoint.latest(folder / CHECKPOINTS)
    return path if path is not None and int(path.name.removeprefix("step_")) >= step else None


def _after_restore(folder: Path, num_before: int) -> RunData | None:
    run = read_run(folder)
    if "restored" not in set(run.events["kind"]) or len(run.batches) <= num_before:
        return None
    return read_run(folder)  # once more: a batch's rollouts may have come after the first look at them


def _fixed(folder: str | Path, before: RunData, config: RunConfig) -> Step:
    metrics = pd.DataFrame(list(before.batches["stats"])).mean()
    reopened = RunLog(folder, config.run_id, config.branch_id, config.to_json())
    shown = ", ".join(f"{name} {metrics[name]:.3g}" for name in JUDGED)
    done = f"config_hash {before.config_hash}, means of {len(before.batches)} updates"
    return Step("fix configuration and metrics", done, shown, reopened.config_hash == before.config_hash)


def _restored(after: RunData, stored: Mapping[str, Any], name: str) -> Step:
    """Trainer at the checkpoint's counters, engines at a version that it published, scheduler at its position."""
    event = after.events[after.events["kind"] == "restored"].iloc[-1]
    versions = {int(v) for v in after.events.loc[after.events["kind"] == "published", "version"]}
    syncs = after.events[(after.events["kind"] == "weight_sync") & (after.events["time_unix_s"] > event["time_unix_s"])]
    loaded = {int(version) for version in syncs["version"]}
    counters, position = stored["counters"], stored["data_position"]
    found = (
        f"trainer at optimizer step {event['step']:.0f} in {event['seconds']:.2f} s, engines at versions "
        f"{sorted(loaded) or 'as before'}, scheduler at prompt {position['frontier']}, epoch {position['epoch']}"
    )
    ok = event["step"] >= counters["optimizer_step"] and loaded <= versions
    return Step("restore trainer, engine, scheduler", f"restarted from {name} or later", found, bool(ok))


def _queue(after: RunData, queue_policy: str) -> Step:
    event = after.events[after.events["kind"] == "restored"].iloc[-1]
    lost = int((after.events["kind"] == "rollout_lost").sum())
    kept, dropped = int(event["kept_rollouts"]), int(event["dropped_rollouts"])
    found = f"{kept} waiting rollouts kept, {dropped} dropped to be made again, {lost} lost"
    ok = event["queue_policy"] == queue_policy and lost == 0 and (kept if queue_policy == "drop" else dropped) == 0
    return Step("settle the queue", f"declared policy: {queue_policy}", found, bool(ok))


def _control(after: RunData, control: Any, config: RunConfig) -> Step:
    """The first batch after the restore must be the one that the restored state was waiting for."""
    event = after.events[after.events["kind"] == "restored"].iloc[-1]
    versions = f"version {control['trained_policy_version']} -> {control['resulting_policy_version']}"
    found = f"{len(control['rollout_ids'])} rollouts, {versions}, optimizer step {control['optimizer_step']}"
    ok = control["optimizer_step"] == event["step"] + config.minibatches
    return Step("control batch", f"trained {control['training_batch_id']}", found, bool(ok))


def _checked(after: RunData, control: Any, versions: Mapping[str, str], config: RunConfig) -> Step:
    """Losses finite, version one on, prompts that still spell the same tokens, and the batch that was ordered."""
    records = after.rollouts[after.rollouts["training_batch_id"] == control["training_batch_id"]]
    tokenizer = policy.make_tokenizer()
    texts = [tokenizer.decode(ids[1:]) for ids in records["prompt_tokens"]]
    checks = {
        "losses finite": all(math.isfinite(value) for value in control["stats"].values()),
        "version one on": control["resulting_policy_version"] == control["trained_policy_version"] + 1,
        "tokenizer as saved": set(records["tokenizer_version"]) == {versions["tokenizer"]},
        "prompts tokenised alike": all(
            tokenizer(text).input_ids == list(ids) for text, ids in zip(texts, records["prompt_tokens"])
        ),
        "one verifier, as saved": set(records["verifier_version"]) == {versions["verifier"]},
        "whole groups": list(records["group_id"].value_counts()) == [config.group_size] * config.prompts_per_step,
        "no rollout of another batch": sorted(records["rollout_id"]) == sorted(control["rollout_ids"]),
    }
    wrong = [name for name, ok in checks.items() if not ok]
    found = f"not so: {', '.join(wrong)}" if wrong else "all so"
    return Step("look at the control batch", ", ".join(checks), found, not wrong)


def _compared(
    before: RunData, control: Any, allowed: Mapping[str, tuple[float, float]] | None
) -> tuple[Step, dict[str, tuple[float, float, float]]]:
    stats = pd.DataFrame(list(before.batches["stats"]))
    ranges = {name: _range(stats[name].to_numpy()) for name in JUDGED} if allowed is None else dict(allowed)
    unknown = [name for name in ranges if name not in control["stats"]]
    if unknown:
        raise ValueError(f"allowed: {short(unknown[0])} is no statistic of a batch: {', '.join(control['stats'])}")
    kept = {name: (low, high, control["stats"][name]) for name, (low, high) in ranges.items()}
    outside = [name for name, (low, high, value) in kept.items() if not low <= value <= high]
    shown = ", ".join(f"{name} {value:.3g} in [{low:.3g}, {high:.3g}]" for name, (low, high, value) in kept.items())
    done = "ranges as given" if allowed is not None else f"ranges of {len(stats)} updates before the kill"
    found = shown + (f"; outside: {', '.join(outside)}" if outside else "")
    return Step("compare with the allowed range", done, found, not outside), kept


def _range(values: np.ndarray) -> tuple[float, float]:
    middle, width = values.mean(), WIDTH_STD * values.std(ddof=1)
    low = middle - width if values.min() < 0 else max(0.0, middle - width)  # what is never negative stays so
    return float(low), float(middle + width)
