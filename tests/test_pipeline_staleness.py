"""Mean staleness in closed form against a SimPy loop that knows nothing of it: it only counts versions."""

from dataclasses import dataclass

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from rlinfra_utils import pipeline
from rlinfra_utils.pipeline import Tail, mean_staleness, staleness_at_limit, tail

DRAWS = np.random.default_rng(12).random(4096)
#: Durations in seconds, drawn with replacement, so that the law's moments are those of the row.
POOLS = {
    "uniform": 5 + 10 * DRAWS,
    "exponential": -10 * np.log1p(-DRAWS),
    "lognormal": np.exp(2 + np.random.default_rng(3).standard_normal(4096)),
    "pareto, capped": np.minimum(3 * (1 - DRAWS) ** (-1 / 1.3), 300.0),
}


@dataclass
class Loop:
    """An asynchronous loop in SimPy: slots, groups, a queue, a trainer that takes whole batches, versions."""

    pool_s: np.ndarray
    slots: int
    batch: int
    train_s: float
    group_size: int = 1
    steps_per_version: int = 1
    limit: int | None = None  # on rollouts admitted and not returned
    returned_at: str = "take"  # when the limit gets a batch back: "take" or "publish"
    room: float = float("inf")  # of the queue; a slot keeps its rollout while there is none

    def run(self, steps: int, warm_up: int, seed: int = 0) -> "Loop":
        self.rng, self.env = np.random.default_rng(seed), simpy.Environment()
        self.queue = simpy.Store(self.env, capacity=self.room)
        self.permits = simpy.Container(self.env, init=self.limit) if self.limit else None
        self.version, self.started, self.ready, self.groups = 0, 0, 0, {}
        self.published_s, self.taken, self.area, self.changed_s = [], [], 0.0, 0.0
        for _ in range(self.slots):
            self.env.process(self.slot())
        self.env.run(self.env.process(self.trainer(steps, warm_up)))
        return self

    def count_ready(self, more):
        self.area += self.ready * (self.env.now - self.changed_s)
        self.ready, self.changed_s = self.ready + more, self.env.now

    def slot(self):
        while True:
            if self.permits:
                yield self.permits.get(1)
            group, self.started = self.started // self.group_size, self.started + 1
            start_s, version, duration_s = self.env.now, self.version, float(self.rng.choice(self.pool_s))
            yield self.env.timeout(duration_s)
            members = self.groups.setdefault(group, [])
            members.append((start_s, duration_s, version))
            if len(members) == self.group_size:
                self.count_ready(self.group_size)
                for rollout in self.groups.pop(group):
                    yield self.queue.put(rollout)

    def trainer(self, steps, warm_up):
        for step in range(warm_up + steps):
            if step == warm_up:
                self.area, self.changed_s, self.since_s, self.busy_s = 0.0, self.env.now, self.env.now, 0.0
            batch = []
            for _ in range(self.batch):
                batch.append((yield self.queue.get()))
            self.count_ready(-self.batch)
            if self.permits and self.returned_at == "take":
                yield self.permits.put(self.batch)
            if step >= warm_up:
                self.taken += [(*rollout, self.version, step) for rollout in batch]
                self.busy_s += self.train_s
            yield self.env.timeout(self.train_s)
            if (step + 1) % self.steps_per_version == 0:
                self.version += 1
                self.published_s.append(self.env.now)
                if self.permits and self.returned_at == "publish":
                    yield self.permits.put(self.batch * self.steps_per_version)
        self.count_ready(0)
        self.elapsed_s = self.env.now - self.since_s

    @property
    def utilization(self):
        return self.busy_s / self.elapsed_s

    @property
    def mean_queued(self):
        return self.area / self.elapsed_s

    def measured(self, count):
        """Mean staleness of what the trainer took, from the versions and instants that were written down."""
        lags, weights = [], []
        for start_s, duration_s, version, trainer_version, _ in self.taken:
            at_start = trainer_version - version
            if count == "token":  # each later publication before the end moves the rest of the tokens on
                later_s = np.array(self.published_s[version:trainer_version]) - start_s
                at_start = np.minimum(later_s / duration_s, 1).sum()
            lags.append(at_start)
            weights.append(1 if count == "rollout" else duration_s)
        return np.average(lags, weights=weights)

    def measured_steps(self):
        return np.mean([step - version * self.steps_per_version for _, _, version, _, step in self.taken])


def bound_by_generation(pool, slots, batch, utilization, group_size=1, steps_per_version=1):
    pool_s = POOLS[pool]
    train_s = utilization * batch * pool_s.mean() / slots
    return Loop(pool_s, slots, batch, train_s, group_size, steps_per_version)


SETTINGS = {  # law, slots, batch, trainer utilization, group size, steps per version
    "short tail": ("uniform", 256, 64, 0.8, 8),
    "half busy": ("exponential", 64, 32, 0.5, 1),
    "less than a batch in flight": ("lognormal", 48, 96, 0.9, 1),
    "groups, heavy tail": ("pareto, capped", 256, 64, 0.8, 8),
    "groups, lognormal": ("lognormal", 128, 64, 0.7, 4),
    "two steps a version": ("pareto, capped", 128, 32, 0.3, 4, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_closed_form_is_what_simpy_counts(name):
    loop = bound_by_generation(*SETTINGS[name])
    loop.run(steps=32_000 // loop.batch, warm_up=160)  # the longest rollouts take over 100 steps
    shape = tail(loop.pool_s, loop.group_size)
    # Nothing measured goes in: load and queue are predicted as well.
    period_s = pipeline.loop_period_s(loop.slots, loop.batch, loop.pool_s.mean(), loop.train_s)
    utilization, queued = loop.train_s / period_s, (loop.batch - loop.group_size) / 2
    for count in pipeline.staleness.COUNTS:
        predicted = mean_staleness(loop.slots, loop.batch, queued, utilization, shape, count, loop.steps_per_version)
        assert predicted.versions == pytest.approx(loop.measured(count), rel=0.03), count
    rollouts = mean_staleness(loop.slots, loop.batch, queued, utilization, shape, "rollout", loop.steps_per_version)
    assert rollouts.steps == pytest.approx(loop.measured_steps(), rel=0.03)


@pytest.mark.parametrize("pool", ["exponential", "lognormal"])
def test_near_saturation_the_measured_queue_goes_in(pool):
    loop = bound_by_generation(pool, 256, 64, 0.97).run(steps=700, warm_up=150)
    assert loop.mean_queued > 0.55 * loop.batch  # more than a batch that fills evenly
    shape = tail(loop.pool_s)
    for count in ("rollout", "token"):
        predicted = mean_staleness(loop.slots, loop.batch, loop.mean_queued, loop.utilization, shape, count)
        assert predicted.versions == pytest.approx(loop.measured(count), rel=0.02), count


@pytest.mark.parametrize(
    ("limits", "outstanding"),
    [
        ({"limit": 160}, 160),
        ({"limit": 128, "returned_at": "publish"}, 128 - 32),  # AReaL's rule with max_head_offpolicyness 3
        ({"room": 64}, 256 + 64),
    ],
    ids=["limit until taken", "limit until published", "bounded queue"],
)
def test_a_full_loop_holds_its_limit_at_each_publication(limits, outstanding):
    # The trainer needs twice the time in which the slots could make a batch.
    loop = Loop(POOLS["exponential"], slots=256, batch=32, train_s=30.0, **limits).run(steps=150, warm_up=40)
    assert loop.utilization == pytest.approx(1)
    assert loop.measured("rollout") == pytest.approx(staleness_at_limit(outstanding, 32), rel=0.02)


def test_verls_admission_limit_leaves_its_threshold_outstanding():
    limit = pipeline.admission_limit(batch=16, sync_interval=2, staleness_threshold=0.5)
    loop = Loop(POOLS["uniform"], 256, 16, 40.0, steps_per_version=2, limit=limit, returned_at="publish")
    assert loop.run(steps=200, warm_up=40).measured("rollout") == pytest.approx(0.5, abs=0.01)


def test_equal_durations_come_in_waves_and_are_outside():
    loop = Loop(np.full(1, 10.0), slots=48, batch=96, train_s=18.0).run(steps=100, warm_up=20)
    assert loop.utilization == pytest.approx(0.9)
    predicted = mean_staleness(48, 96, loop.mean_queued, loop.utilization, tail([10.0]))
    assert abs(predicted.versions / loop.measured("rollout") - 1) > 0.1


@given(
    in_flight=st.floats(1, 1e4),
    batch=st.integers(1, 1000),
    queued=st.floats(0, 1e4),
    utilization=st.floats(0, 1),
    lengths=st.lists(st.floats(0.1, 1e3), min_size=1, max_size=20),
    group_size=st.integers(1, 16),
    count=st.sampled_from(pipeline.staleness.COUNTS),
)
def test_staleness_grows_with_all_that_is_outstanding(
    in_flight, batch, queued, utilization, lengths, group_size, count
):
    shape = tail(lengths, group_size)
    base = mean_staleness(in_flight, batch, queued, utilization, shape, count)
    assert min(base.in_flight, base.queued, base.group + 1e-9) >= 0
    assert mean_staleness(in_flight + 1, batch, queued, utilization, shape, count).versions > base.versions
    assert mean_staleness(in_flight, batch, queued + 1, utilization, shape, count).versions >= base.versions
    assert mean_staleness(in_flight, batch, queued, 1, shape, count).versions >= base.versions
    doubled = mean_staleness(in_flight, batch, queued, utilization, shape, count, steps_per_version=2)
    assert doubled.versions == pytest.approx(base.versions / 2)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4), group_size=st.integers(1, 4))
def test_tail_is_the_mean_over_all_groups(lengths, group_size):
    groups = np.stack(np.meshgrid(*[lengths] * group_size), axis=-1).reshape(-1, group_size)
    own, slowest, mean = groups[:, 0], groups.max(axis=1), np.mean(lengths)
    shape = tail(lengths, group_size)
    assert shape.scv == pytest.approx(pipeline.scv(lengths), abs=1e-12)
    assert shape.slowest == pytest.approx(slowest.mean() / mean)
    assert shape.slowest == pytest.approx(pipeline.mean_group_s(lengths, group_size) / mean)
    assert shape.weighted_slowest == pytest.approx((own * slowest).mean() / mean**2)


def test_tail_of_a_known_law():
    # Exponential: scv 1, slowest of 4 in mean 1 + 1/2 + 1/3 + 1/4, alone E[L^2] / E[L]^2 = 2.
    lengths = -np.log1p(-(np.arange(100_000) + 0.5) / 100_000)
    shape = tail(lengths, 4)
    assert (shape.scv, shape.slowest) == pytest.approx((1, 25 / 12), rel=1e-3)
    assert tail(lengths).weighted_slowest == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_flight": 0}, "in_flight=0"),
        ({"in_flight": float("nan")}, "in_flight=nan"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 64.5}, "batch=64.5"),
        ({"mean_queued": -1}, "mean_queued=-1"),
        ({"trainer_utilization": 1.2}, "trainer_utilization=1.2"),
        ({"trainer_utilization": 80}, "trainer_utilization=80"),
        ({"tail": 1.0}, "tail=1.0"),
        ({"count": "tokens"}, "count='tokens'"),
        ({"steps_per_version": 0}, "steps_per_version=0"),
    ],
)
def test_bad_numbers_are_refused(change, message):
    good = {"in_flight": 256, "batch": 64, "mean_queued": 32, "trainer_utilization": 0.8, "tail": tail([1, 2])}
    mean_staleness(**good)
    with pytest.raises(ValueError, match=message) as refused:
        mean_staleness(**(good | change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tail(float("inf"), 1, 1), "scv=inf: without a variance"),
        (lambda: Tail(float("nan"), 1, 1), "scv=nan"),
        (lambda: Tail(1, 0.5, 2), "slowest=0.5"),
        (lambda: Tail(1, 1, 1), "weighted_slowest=1"),
        (lambda: tail([]), r"durations=\[\]"),
        (lambda: tail([0, 0]), r"durations=\[0, 0\]: all are 0"),
        (lambda: tail([1, float("inf")]), r"durations\[1\]=inf"),
        (lambda: tail([1, 2], 0), "group_size=0"),
        (lambda: staleness_at_limit(-1, 8), "outstanding=-1"),
        (lambda: staleness_at_limit(8, 0), "batch=0"),
        (lambda: pipeline.loop_period_s(0, 8, 1, 1), "in_flight=0"),
        (lambda: pipeline.loop_period_s(8, 8, 0, 1), "rollout_s=0"),
        (lambda: pipeline.loop_period_s(8, 8, 1, float("nan")), "train_s=nan"),
    ],
)
def test_bad_tails_and_limits_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)
