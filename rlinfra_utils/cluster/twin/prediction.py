"""The laws of calibrated runs, and any other configuration as a loop of the simulator: `Twin`, `InGroups`.

Models the run's own controller object over a loop that counts groups. Leaves out where the laws come from
(`calibration.py`). Use: `made.figures(made.predict(controller="one_step_off"))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rlinfra_utils.cluster.config import ClusterConfig
from rlinfra_utils.cluster.twin.figures import WARMUP_UPDATES, Figures, figures
from rlinfra_utils.cluster.twin.overlap import share_beside
from rlinfra_utils.doors import number, short
from rlinfra_utils.simulator import Constant, Controller, Counts, LogNormal, LoopConfig, Measured, Run, simulate
from rlinfra_utils.simulator.config import Tools

#: The simulator wants a positive time even where all of it depends on how many share the core.
_NO_TIME_S = 1e-9
#: Batches whose width is drawn for the law of an update's time.
_DRAWN = 400
#: Simulations until the overlap that goes in is the one that comes out, to the noise of a run.
_ROUNDS = 4
_SCALED = ("offered", "in_flight", "queued", "training", "trained", "discarded", "free_slots", "gone_at_update")


class InGroups(Controller):
    """A run's own controller for a loop that counts groups: it is shown rollouts, as in the run."""

    def __init__(self, rule: Controller, group_size: int, at_update: str, tokens_per_step: float) -> None:
        self.rule, self.group_size, self.at_update = rule, group_size, at_update
        self.tokens_per_step = tokens_per_step

    def _shown(self, counts: Counts) -> Counts:
        size = self.group_size
        shown = Counts(counts.batch * size, counts.per_version * size, size, counts.slots * size)
        for name in Counts.__slots__:
            if name not in ("batch", "per_version", "group_size", "slots"):
                value = getattr(counts, name)
                setattr(shown, name, value * size if name in _SCALED else value)
        shown.queued_tokens = counts.queued_tokens * self.tokens_per_step
        return shown

    def may_start(self, counts):
        """The rule's answer."""
        return self.rule.may_start(self._shown(counts))

    def may_take(self, counts):
        """The rule's answer."""
        return self.rule.may_take(self._shown(counts))

    def judge(self, group, counts):
        """The rule's answer."""
        return self.rule.judge(group, self._shown(counts))


class Overlap(NamedTuple):
    """The part of the workers' time in which the trainer works too, and of the trainer's in which a worker does."""

    workers: float
    trainer: float


@dataclass(frozen=True)
class Times:
    """Seconds in one regime; a "step" is one token of each rollout of a group.

    `prefill_s`, `step_s`: of a core, for a group's answers, a straight line. `call_s`: what a call takes beside its
    work, `call_core_s` of it on the worker's core. One update: `train_s`, plus its rollouts and its tokens, padding
    included, at what each takes.
    """

    prefill_s: float
    step_s: float
    call_core_s: float
    call_s: np.ndarray
    verify_s: np.ndarray
    train_s: np.ndarray
    train_s_per_rollout: float
    train_s_per_padded_token: float

    @classmethod
    def median(cls, times: list[Times]) -> Times:
        """The median of each number, all values of each law."""
        return cls(**pooled(cls, times))

    def towards(self, other: Times, share: Overlap) -> Times:
        """The regime in which `share` of the way to `other` is gone; a law keeps the shape that it has in `other`."""
        way = {name: share.trainer if name.startswith("train_s") else share.workers for name in vars(self)}
        return Times(**{name: _between(getattr(self, name), getattr(other, name), way[name]) for name in way})

    def slower(self, workers: float, trainer: float) -> Times:
        """The times with the workers' and the trainer's so many times as long; the verifier's stay."""
        factor = {name: trainer if name.startswith("train_s") else workers for name in vars(self)} | {"verify_s": 1.0}
        return Times(**{name: value * factor[name] for name, value in vars(self).items()})


def pooled(of: type, runs: Sequence[Any]) -> dict[str, Any]:
    """By each field of `of`, the median of its numbers in `runs`, or all values of its laws."""
    every = {field.name: [getattr(run, field.name) for run in runs] for field in fields(of)}
    return {
        name: np.concatenate(values) if isinstance(values[0], np.ndarray) else float(np.median(values))
        for name, values in every.items()
    }


def _between(a: Any, b: Any, share: float) -> Any:
    mean = max(0.0, float(np.mean(a) + share * (np.mean(b) - np.mean(a))))
    return b * (mean / np.mean(b)) if np.mean(b) > 0 else b


@dataclass(frozen=True)
class Common:
    """What is the same whether the two sides are at work at once or in turns."""

    steps: np.ndarray
    tokens_per_step: float
    prompt_tokens: float
    sync_s: np.ndarray
    sync_s_per_worker: float
    checkpoint_s: float


@dataclass(frozen=True)
class Twin(Common):
    """Laws of measured runs of one configuration.

    `alone`: times where trainer and workers take turns. `beside`: where both are at work for the parts of their time in
    `overlap`. What lies between, and a little beyond, is taken to be a straight line. Workers that share a core cost
    each other its caches: a twin of such workers is none of workers with a core each, nor the other way round.
    Trap: where generation and training take about the same time, a tenth on either side decides whether the queue is
    full, and with it the lag; throughput hardly changes.
    """

    config: ClusterConfig
    num_cores: int
    alone: Times
    beside: Times
    overlap: Overlap

    def times(self, overlap: Overlap) -> Times:
        """The times where the two sides overlap so much."""
        share = Overlap(overlap.workers / self.overlap.workers, overlap.trainer / self.overlap.trainer)
        return self.alone.towards(self.beside, share)

    def slower(self, workers: float = 1.0, trainer: float = 1.0) -> Twin:
        """The same on a machine whose workers, and whose trainer, take so many times as long; below 1 they are faster.

        Verifier, weight sync and checkpoints stay. For how much a prediction hangs on its calibration. Raises
        ValueError unless both are finite and above 0.
        """
        for name, value in (("workers", workers), ("trainer", trainer)):
            number(name, value, above=True)
        return replace(self, alone=self.alone.slower(workers, trainer), beside=self.beside.slower(workers, trainer))

    def loop_config(self, overlap: Overlap, **changes: Any) -> LoopConfig:
        """The loop of the run's configuration with `changes`, in groups. Raises ValueError for what is not modelled."""
        config = replace(self.config, **changes)
        if config.engine != "hf" or config.placement != "disaggregated" or config.model != self.config.model:
            raise ValueError(f"changes={short(changes)}: the twin models HFEngine, disaggregated, on the same model")
        cores = min(self.num_cores, config.num_workers)
        if config.num_workers % cores:
            raise ValueError(f"num_workers={config.num_workers}: {cores} cores would be shared unevenly")
        shares, times = self._share_cores(config), self.times(overlap)
        if shares != self._share_cores(self.config):
            here, there = ("share cores", "do not") if shares else ("have a core each", "share them")
            raise ValueError(
                f"num_workers={config.num_workers}: these workers {here}, those of the calibration {there}, and what "
                "sharing costs is not in its runs; calibrate on runs that are alike in this"
            )
        others = (config.num_workers - self.config.num_workers) * self.sync_s_per_worker
        on_core_s = times.call_core_s if shares else 0.0  # a core of its own waits for the call's end anyway
        return LoopConfig(
            controller=InGroups(
                config.make_controller(), config.group_size, config.at_update, self._tokens_per_step(config)
            ),
            num_replicas=cores,
            slots_per_replica=config.num_workers // cores,
            lengths_tokens=self._lengths(config),
            max_tokens=config.max_new_tokens,
            prompt_tokens=1,
            token_s=_NO_TIME_S if shares else times.step_s,
            token_s_per_active=times.step_s if shares else 0.0,
            prefill_s_per_token=times.prefill_s + on_core_s,
            tools=Tools(calls=1, call_s=Measured(np.maximum(0.0, times.call_s - on_core_s))),
            verify_s=Measured(times.verify_s),
            batch_rollouts=config.prompts_per_step,
            train_s=Measured(self.update_s(times, config)),
            sync_interval=config.sync_interval,
            sync_s=Measured(np.maximum(0.0, self.sync_s + others)),
            checkpoint_interval=config.save_every,
            checkpoint_s=self.checkpoint_s,
            num_steps=config.num_updates,
            seed=config.seed,
        )

    def _share_cores(self, config: ClusterConfig) -> bool:
        return config.num_workers > self.num_cores

    def _tokens_per_step(self, config: ClusterConfig) -> float:
        return self.tokens_per_step * config.group_size / self.config.group_size

    def update_s(self, times: Times, config: ClusterConfig) -> np.ndarray:
        """Seconds of updates on drawn batches: a batch is as wide as its longest answer."""
        rng = np.random.default_rng(config.seed)
        drawn = self._lengths(config).draw(rng, _DRAWN * config.prompts_per_step)
        longest = np.clip(drawn, 1, config.max_new_tokens).reshape(_DRAWN, -1).max(axis=1)
        padded = config.batch_rollouts * (self.prompt_tokens + longest)
        by_size_s = times.train_s_per_rollout * config.batch_rollouts + times.train_s_per_padded_token * padded
        return by_size_s + rng.choice(times.train_s, _DRAWN)

    def _lengths(self, config: ClusterConfig) -> Any:
        if config.forced_tokens is None:
            return Measured(self.steps)
        if config.forced_sigma == 0:
            return Constant(config.forced_tokens)
        return LogNormal(config.forced_tokens, config.forced_sigma)

    def predict(self, **changes: Any) -> Run:
        """The simulated run of the configuration with `changes`, at the overlap that it has itself.

        Found by simulating again with the overlap of the run before. Raises ValueError for a loop that ends too early.
        """
        overlap = self.overlap
        for _ in range(_ROUNDS):
            run = simulate(self.loop_config(overlap, **changes))
            if run.status != "done":
                raise ValueError(f"changes={short(changes)}: the simulated loop is {run.status}: {run.reason}")
            work = run.rollouts[["start_s", "end_s"]].dropna().to_numpy(dtype=float)
            updates = run.steps[["taken_s", "trained_s"]].to_numpy(dtype=float)
            overlap = Overlap(share_beside(work, updates), share_beside(updates, work))
        return run

    def figures(self, run: Run, warmup: int = WARMUP_UPDATES) -> Figures:
        """A simulated run in the figures that `measure` takes from a real one."""
        steps, rows = run.steps, run.rollouts
        ends_s = steps["trained_s"].to_numpy()
        scale = run.config.controller.tokens_per_step
        rows = rows[(rows["outcome"] == "trained") & (rows["taken_step"] >= warmup)]
        lags, tokens = rows["taken_version"] - rows["start_version"], rows["tokens"]
        queue = run.queue
        depth = queue["rollouts"].to_numpy() / run.config.batch_rollouts
        return figures(ends_s, steps["tokens"].to_numpy() * scale, lags, tokens, queue["time_s"], depth, warmup)
