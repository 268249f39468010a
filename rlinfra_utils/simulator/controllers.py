"""The rules of seven stacks and three textbook ones, so that "staleness 4" of two stacks can be compared.

Models when work starts, what is still used and what an update does to it, as each stack's code had it at the commit
named. Leaves out their buffers' capacity where the rule keeps below it, and rate limits of single engines.
Use: `LoopConfig(controller=CONTROLLERS["areal"](max_lag=4))`, or by name with the stack's own defaults.

Numbers count rollouts of the loop's `Counts`; "batches" are `counts.batch`, or `counts.per_version` where a rule
reads the version. Every constructor raises ValueError by field. Read on the commits' dates, not run.
"""

from __future__ import annotations

from rlinfra_utils.doors import choice, number, short, whole
from rlinfra_utils.pipeline import admission_limit
from rlinfra_utils.simulator.protocol import AT_UPDATE, Controller
from rlinfra_utils.simulator.rules import BoundedQueue, Budget, OneStepOff, Synchronous, take_within


class TRLAsync(Controller):
    """TRL async GRPO: a cap in flight, a bounded queue of rows, stale rows dropped one by one at dequeue.

    `max_inflight` None is max_staleness * rollouts of a step. Age is in weight syncs since the group was scheduled;
    the pause keeps requests. Source: `trl/experimental/async_grpo/async_grpo_config.py:272-293`,
    `async_grpo_trainer.py:277-280,767-769,1113-1141` at f2cd57710ae3, 2026-07-24.
    """

    def __init__(self, max_staleness: int = 4, queue_maxsize: int = 1024, max_inflight: int | None = None):
        self.max_staleness = whole("max_staleness", max_staleness, 1)
        self.queue_maxsize = whole("queue_maxsize", queue_maxsize)
        self.max_inflight = None if max_inflight is None else whole("max_inflight", max_inflight)
        self.counts_batches = max_inflight is None

    def may_start(self, counts):
        """Below the cap in flight, and the queue not full."""
        cap = self.max_inflight or self.max_staleness * counts.batch
        return counts.in_flight < cap and counts.queued < self.queue_maxsize

    def judge(self, group, counts):
        """Drop above `max_staleness` versions."""
        return take_within(counts.version - group.version, self.max_staleness)


class VerlV1(Controller):
    """verl V1 separate_async: batches dispatched ahead, age in global steps since dispatch, counted inclusively.

    "drop" evicts finished groups over the bound and refills them; "wait" lets no batch be taken while a running
    prompt has reached it. A global step has one weight push, so it is a version here. Aborted requests are read
    again under the new weights. That warm-up batches set the lead is derived from their name and default.
    Source: `verl/trainer/config/ppo_trainer.yaml:243-284`, `verl/trainer/ppo/v1/replay_buffer.py:503-537`,
    `verl/checkpoint_engine/base.py:518-556` at 1dda039b9c63, 2026-08-22.
    """

    at_update, counts_batches = "abort", True

    def __init__(self, strategy: str = "drop", max_off_policy_threshold: int = 8, num_warmup_batches: int = 1):
        self.strategy = choice("strategy", strategy, ("drop", "wait"))
        self.threshold = whole("max_off_policy_threshold", max_off_policy_threshold)
        self.warmup = whole("num_warmup_batches", num_warmup_batches, 0)

    def may_start(self, counts):
        """A batch for each version, and the warm-up's; what was dropped is replaced."""
        return counts.offered - counts.discarded < (counts.version + 1 + self.warmup) * counts.per_version

    def may_take(self, counts):
        """With "wait": no running prompt has reached the bound."""
        return self.strategy == "drop" or counts.version - counts.oldest_running_version + 1 < self.threshold

    def judge(self, group, counts):
        """With "drop": steps since dispatch, this one included, are within the bound."""
        if self.strategy == "wait":
            return "take"
        return take_within(counts.version - group.version + 1, self.threshold)


class VerlFullyAsync(Controller):
    """verl fully-async: a share of a sync window beyond it; what is left over at a sync counts; nothing is dropped.

    The threshold is no number of versions. The message queue, which drops the oldest when full, has the same size
    and so does not fill. Source: `verl/experimental/fully_async_policy/fully_async_rollouter.py:491-508,594-605`
    and its config:12-19 at 1dda039b9c63, 2026-08-22; limit: `pipeline.admission_limit`.
    """

    at_update, counts_batches = "abort", True

    def __init__(self, staleness_threshold: float = 0.1):
        self.threshold = number("staleness_threshold", staleness_threshold)

    def may_start(self, counts):
        """Dispatched since the last sync, and outstanding then, < window * (1 + threshold)."""
        return counts.offered - counts.gone_at_update < admission_limit(counts.per_version, 1, self.threshold)


class OpenRLHF(Controller):
    """OpenRLHF async: whole batches, one generated at a time, `queue_size` of them begun and not yet taken.

    A lock keeps generation and broadcast apart, so requests finish first; with `partial_rollout` they are kept.
    No version, nothing dropped. Source: `openrlhf/trainer/ppo_trainer_async.py:19-35,128-140,227-297` at
    3c3be6234e0c, 2026-08-13.
    """

    counts_batches = True

    def __init__(self, queue_size: int = 1, partial_rollout: bool = False):
        self.queue_size = whole("queue_size", queue_size)
        self.at_update = "keep" if partial_rollout else "finish"

    def may_start(self, counts):
        """Within a batch that has begun; or the last has ended and a token of the pool is free."""
        if (counts.offered - counts.discarded) % counts.batch:
            return True
        return not counts.in_flight and counts.queued <= (self.queue_size - 1) * counts.batch


class NeMoRL(Budget):
    """NeMo RL async GRPO (legacy), and the in_order sampler of its SingleController with at_update="keep".

    Each group is made for a named step, at most `max_age` ahead; a step trains on its own groups only and waits for
    them, so that a group that fails blocks it. All pending work ends before a refit by default.
    Source: `nemo_rl/algorithms/async_utils/trajectory_collector.py:189-217,295-320,636-700`,
    `replay_buffer.py:196-300`, `staleness_sampler.py:241-300` at 7ea279abfbeb, 2026-08-22.
    """

    def __init__(self, max_age: int = 1, at_update: str = "finish"):
        super().__init__(max_age, at_update)

    def may_start(self, counts):
        """The next group's step is at most `max_age` ahead."""
        return counts.offered < (counts.step + 1 + self.max_lag) * counts.batch

    def judge(self, group, counts):
        """Take the step's own groups; hold those of later ones."""
        return "take" if group.index * counts.group_size // counts.batch <= counts.step else "hold"


class NeMoRLWindowed(Controller):
    """NeMo RL SingleController, windowed sampler: starts are not gated by age, aged groups are dropped.

    Back-pressure: `max_inflight_prompts` and `max_buffered` groups. The abort of doomed requests in flight only saves
    their compute and is left out. Source: `nemo_rl/algorithms/async_utils/staleness_sampler.py:355-430`,
    `single_controller_utils/config.py:391-417` at 7ea279abfbeb, 2026-08-22.
    """

    def __init__(self, max_staleness_versions: int = 1, max_inflight_prompts: int = 32, max_buffered: int = 64):
        self.max_lag = whole("max_staleness_versions", max_staleness_versions, 0)
        self.max_inflight = whole("max_inflight_prompts", max_inflight_prompts)
        self.max_buffered = whole("max_buffered", max_buffered)

    def may_start(self, counts):
        """Both counts, of groups, are below their limits."""
        size = counts.group_size
        return counts.in_flight < self.max_inflight * size and counts.queued < self.max_buffered * size

    def judge(self, group, counts):
        """Drop above the window."""
        return take_within(counts.version - group.version, self.max_lag)


class PrimeRL(Controller):
    """PRIME-RL: dispatch up to a cap in flight, paused while a whole batch lies ahead; the stale are swept out.

    Age is versions since dispatch, queue time included; engines keep requests and their cache. The lead (TARGET_LAG)
    is a constant of the code. Source: `src/prime_rl/orchestrator/train_sink.py:166-203`,
    `orchestrator.py:101-104,662-678,970-1000`, `inference/vllm/server.py:70-81` at 559b44772e47, 2026-08-21.
    """

    TARGET_LAG = 1
    counts_batches = True

    def __init__(self, max_off_policy_steps: int = 8, max_inflight: int = 1024):
        self.max_lag = whole("max_off_policy_steps", max_off_policy_steps, 0)
        self.max_inflight = whole("max_inflight", max_inflight)

    def may_start(self, counts):
        """Below the cap, and less than the lead in the queue."""
        return counts.in_flight < self.max_inflight and counts.queued < self.TARGET_LAG * counts.batch

    def judge(self, group, counts):
        """Drop above `max_off_policy_steps` versions."""
        return take_within(counts.version - group.version, self.max_lag)


class SkyRL(Budget):
    """SkyRL fully async: (max_staleness + step) * batch - (accepted + running) may start; violators are trained.

    Steps count from 1 there. At most `num_workers` groups run. Source: `skyrl/train/fully_async_trainer.py:117-187`,
    `skyrl/train/config/config.py:949-966` at a9564572eb8e, 2026-08-21.
    """

    def __init__(self, max_staleness_steps: int = 4, num_workers: int = 768):
        super().__init__(max_staleness_steps, "keep")
        self.num_workers = whole("num_workers", num_workers)

    def may_start(self, counts):
        """Within the capacity, and a worker is free."""
        ahead = (counts.step + 1 + self.max_lag) * counts.batch
        running = counts.in_flight < self.num_workers * counts.group_size
        return running and counts.offered - counts.discarded < ahead


class AReaL(Budget):
    """AReaL: min(concurrency - running, (max_lag + version + 1) * batch - (accepted + running)); default 0.

    Enforced at submission only. `concurrency` None is a batch. Aborted requests are read again under the new weights.
    Source: `areal/infra/staleness_manager.py:80-112`, `areal/api/cli_args.py:2024-2046`,
    `areal/infra/remote_inf_engine.py:785-840` at 4aef98d8d818, 2026-05-21.
    """

    def __init__(self, max_lag: int = 0, concurrency: int | None = None):
        super().__init__(max_lag, "abort")
        self.concurrency = None if concurrency is None else whole("concurrency", concurrency)

    def may_start(self, counts):
        """Within the concurrency and the budget."""
        return counts.in_flight < (self.concurrency or counts.batch) and super().may_start(counts)


#: Constructors by name; `CONTROLLERS[name]()` has the stack's own defaults.
CONTROLLERS: dict[str, type[Controller]] = {
    "synchronous": Synchronous,
    "one_step_off": OneStepOff,
    "bounded_queue": BoundedQueue,
    "trl_async": TRLAsync,
    "verl_v1": VerlV1,
    "verl_fully_async": VerlFullyAsync,
    "openrlhf": OpenRLHF,
    "nemo_rl": NeMoRL,
    "nemo_rl_windowed": NeMoRLWindowed,
    "prime_rl": PrimeRL,
    "skyrl": SkyRL,
    "areal": AReaL,
}


def as_controller(value: str | Controller) -> Controller:
    """The controller itself, or the named one. Raises ValueError for an unknown name and for anything else."""
    if isinstance(value, str):
        return CONTROLLERS[choice("controller", value, CONTROLLERS)]()
    if not isinstance(value, Controller):
        raise ValueError(f"controller={short(value)}: needs a name or a Controller; is it a class without ()?")
    choice("controller.at_update", value.at_update, AT_UPDATE)
    return value
