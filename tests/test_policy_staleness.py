"""The delay queue, its clock, the measures and the weights, against brute force, closed forms and the plain loop."""

import heapq
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import offpolicy, pipeline, policy
from rlinfra_utils.engines import HFEngine, teacher_forced_logprobs
from rlinfra_utils.policy import Clock, DelayQueue, Measure, StageCosts, measures
from rlinfra_utils.timers import Trace

COSTS = StageCosts(2.0, 0.5, 0.25)
SMALL = {"prompts_per_step": 3, "group_size": 4, "num_epochs": 2, "minibatches": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors too small to share out: on a busy machine threads that wait for one another cost many times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SpyTrainer(policy.Trainer):
    """Remembers what each update was given, and the weights before it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def update(self, rollouts, advantages, *args, weights=None, **kwargs):
        lr = self.optimizer.param_groups[0]["lr"]
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.seen.append(SimpleNamespace(rollouts=rollouts, lr=lr, weights=weights, model=before))
        return super().update(rollouts, advantages, *args, weights=weights, **kwargs)


def parts(lr=2e-3):
    model, tokenizer = policy.load_warm_start()
    return HFEngine(policy.load_warm_start()[0], tokenizer), SpyTrainer(model, lr=lr), tokenizer


def run(lag, measure, num_updates=4, seed=0, **settings):
    engine, trainer, tokenizer = parts()
    settings = {**SMALL, "num_eval_prompts": 4, "evaluate_every": 2, **settings}
    done = policy.run_with_lag(engine, trainer, tokenizer, lag, measure, COSTS, num_updates, seed=seed, **settings)
    return done, trainer


def equal_weights(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


# The whole loop, on the real policy.


@pytest.fixture(scope="module")
def plain():
    engine, trainer, tokenizer = parts()
    loop = policy.SequentialLoop(engine, trainer, tokenizer, Trace(), **SMALL)
    return trainer, [loop.step() for _ in range(4)]


@pytest.mark.parametrize("name", ["none", "cap", "discard", "balance", "sync phases"])
def test_at_lag_0_it_is_the_plain_loop_to_the_last_bit(plain, name):
    trainer, results = plain
    done, stale = run(0, measures(0)[name])
    assert equal_weights(stale.model, trainer.model)
    totals = [np.mean([policy.total_reward(r.reward) for r in result.records]) for result in results]
    assert done.updates["reward"].tolist() == pytest.approx(totals)
    assert done.updates["sequence_ess"].min() > 1 - 1e-6


@pytest.mark.parametrize("measure", [Measure(max_lag=2), Measure(max_depth=2), Measure(max_depth=3, max_lag=9)])
def test_a_limit_that_is_never_reached_changes_nothing(measure):
    (free, free_trainer), (limited, limited_trainer) = run(2, Measure()), run(2, measure)
    assert equal_weights(free_trainer.model, limited_trainer.model)
    assert free.curve.equals(limited.curve)
    assert limited.discarded.total() == 0


def test_a_limit_that_is_reached_changes_the_run():
    _, free = run(2, Measure())
    for measure in (Measure(max_lag=1), Measure(max_depth=1), Measure(num_epochs=1), Measure(lr_by_ess=True)):
        assert not equal_weights(run(2, measure)[1].model, free.model)


def test_each_batch_was_sampled_as_many_versions_ago_as_declared():
    done, trainer = run(2, Measure(), num_updates=5)
    for version, seen in enumerate(trainer.seen):
        lags = offpolicy.lag(version, [record.policy_version for record in seen.rollouts])
        assert lags.tolist() == [min(version, 2)] * 12
    assert done.updates["mean_lag"].tolist() == done.updates["max_lag"].tolist() == [0, 1, 2, 2, 2]


def test_stale_log_probs_are_those_of_the_weights_that_sampled():
    """Teacher forcing under the weights of the record's version gives its behaviour log-probs back."""
    _, trainer = run(2, Measure(), num_updates=4)
    model = policy.load_warm_start()[0]
    for seen in trainer.seen:
        for record in seen.rollouts[::5]:
            model.load_state_dict(trainer.seen[record.policy_version].model)
            expected = forced(model, record)
            assert record.behavior_logprobs == pytest.approx(expected, abs=1e-5)


def forced(model, record):
    """Log-probs of the response's tokens, one record at a time and without padding."""
    ids = torch.tensor([record.prompt_tokens + record.response_tokens])
    with torch.no_grad():
        return teacher_forced_logprobs(model, ids)[0, len(record.prompt_tokens) - 1 :].tolist()


@pytest.mark.parametrize("name", ["ignore", "token truncate", "sequence mask"])
def test_the_weights_are_those_of_correct_on_the_trainers_own_log_probs(name):
    measure = measures(2)[name]
    _, trainer = run(2, measure, num_updates=4)
    model, farthest = policy.load_warm_start()[0], 0.0
    for seen in trainer.seen:
        model.load_state_dict(seen.model)
        for record, row in zip(seen.rollouts, seen.weights, strict=True):
            d = np.subtract(forced(model, record), record.behavior_logprobs)
            expected = np.ones(len(d))
            if name != "ignore":
                mode, low, high = measure.correction
                expected = offpolicy.correct(d[None], np.ones((1, len(d))), mode, low, high).weights[0]
            start = len(record.prompt_tokens) - 1
            np.testing.assert_allclose(row[start : start + len(d)], expected, atol=1e-4)
            assert row.sum() == pytest.approx(row[start : start + len(d)].sum())
            farthest = max(farthest, np.abs(expected - 1).max())
    assert farthest > 0.1 or name == "ignore"


def test_the_learning_rate_follows_the_ess_and_comes_back():
    done, trainer = run(2, Measure(lr_by_ess=True))
    assert [seen.lr for seen in trainer.seen] == pytest.approx((2e-3 * done.updates["sequence_ess"]).tolist())
    assert done.updates["sequence_ess"].min() < 0.999
    assert trainer.optimizer.param_groups[0]["lr"] == 2e-3


def test_a_seed_repeats_a_run_and_another_one_does_not():
    (first, a), (second, b), (_, c) = (run(2, measures(2)["discard"], seed=seed, long_late=True) for seed in (5, 5, 6))
    assert equal_weights(a.model, b.model)
    assert first.updates.equals(second.updates)
    assert first.curve.equals(second.curve)
    assert not equal_weights(a.model, c.model)


def test_the_books_balance_and_masked_answers_are_counted():
    measure = Measure(max_lag=1, correction=("sequence_mask", 0.95, 1.05))
    done, trainer = run(3, measure, num_updates=5, long_late=True)
    assert done.trained.total() == 5 * 12
    assert done.discarded.total() > 0
    assert done.num_sampled == done.trained.total() + done.discarded.total() + done.num_in_flight
    assert done.trained == Counter(len(r.response_tokens) for seen in trainer.seen for r in seen.rollouts)
    masked = Counter(
        len(record.response_tokens)
        for seen in trainer.seen
        for record, row in zip(seen.rollouts, seen.weights, strict=True)
        if row.max() == 0
    )
    assert done.masked == masked
    assert masked.total() > 0
    num_lost = done.discarded.total() + masked.total()
    assert done.dropped_share == pytest.approx(num_lost / (done.trained.total() + done.discarded.total()))


def test_the_curve_spends_updates_rollouts_and_time():
    done, _ = run(2, Measure(), num_updates=5)
    assert done.curve["num_updates"].tolist() == [0, 2, 4, 5]
    assert done.curve["num_rollouts"].tolist() == [0, 4 * 12, 6 * 12, 7 * 12]  # two batches are under way
    pace_s = [pipeline.pipelined([2.0, 0.5 + 4 * 0.25], n) for n in (2, 4, 5)]
    assert done.curve["time_s"].tolist() == pytest.approx([0, *pace_s])
    first, second = done.curve["correctness"][1:3]
    assert done.at("num_updates", 3) == pytest.approx((first + second) / 2)
    fine = np.linspace(0, 3, 3001)  # a mean over many points of the curve, by another way
    assert done.mean_until("num_updates", 3) == pytest.approx(
        np.mean([done.at("num_updates", value) for value in (fine[1:] + fine[:-1]) / 2])
    )
    with pytest.raises(ValueError, match="value=0"):
        done.mean_until("num_updates", 0)
    with pytest.raises(ValueError, match="value=6 of num_updates"):
        done.at("num_updates", 6)
    with pytest.raises(ValueError, match="budget='tokens'"):
        done.at("tokens", 1)


# The queue alone, with an engine of known answers.


class CountingEngine:
    """Answers of random lengths, each one's single log-prob standing for nothing; `version` is set by hand."""

    version = 0

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def generate(self, prompt_ids, decoding, n, seed):
        lengths = self.generator.integers(1, 7, size=len(prompt_ids) * n).tolist()
        completions = [
            SimpleNamespace(
                prompt_index=row // n,
                prompt_tokens=[1],
                tokens=[3] * length,
                behavior_logprobs=[-1.0] * length,
                stop_reason="length",
                policy_version=self.version,
                version_spans=None,
            )
            for row, length in enumerate(lengths)
        ]
        return SimpleNamespace(completions=completions)


TOKENIZER = policy.make_tokenizer()


def make_queue(num_prompts=2, group_size=2, long_late=False, clock=None):
    clock = Clock(COSTS) if clock is None else clock
    decoding = policy.DECODING
    return DelayQueue(CountingEngine(), TOKENIZER, clock, num_prompts, group_size, decoding, 0, long_late)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(0, 6) | st.none(), st.integers(1, 4), st.booleans(), st.lists(st.integers(0, 5)))
def test_every_group_leaves_once_and_none_is_older_than_allowed(depth, max_lag, num_prompts, long_late, later_depths):
    queue, out = make_queue(num_prompts, long_late=long_late), []
    for version, depth_now in enumerate([depth] * 6 + later_depths):
        queue.engine.version = version
        fresh, stale = queue.take(depth_now, version, max_lag)
        assert len(fresh) == num_prompts
        limit = math.inf if max_lag is None else max_lag
        assert all(version - group.version <= limit for group in fresh)
        assert all(version - group.version > limit for group in stale)
        out += fresh + stale
    assert len({id(group) for group in out + queue.groups}) == len(out) + len(queue.groups)
    assert len(out) + len(queue.groups) == queue.num_batches * num_prompts
    names = {group.records[0].group_id for group in out + queue.groups}
    assert len(names) == queue.num_batches * num_prompts


@given(st.integers(0, 6), st.integers(1, 4))
def test_long_answers_late_is_a_priority_queue_with_the_lag_as_its_mean_delay(lag, num_prompts):
    queue, heap, num_sent, lags = make_queue(num_prompts, long_late=True), [], 0, []
    for version in range(30):
        queue.engine.version = version
        fresh, _ = queue.take(lag, version)
        while num_sent <= version + lag:
            sent = [g for g in fresh + queue.groups if g.records[0].group_id.startswith(f"b{num_sent:04d}")]
            longest = [max(len(record.response_tokens) for record in group.records) for group in sent]
            for group, length in zip(sent, longest, strict=True):
                delay = lag * length / (sum(longest) / len(longest))
                heapq.heappush(heap, (num_sent + delay, group.records[0].group_id))
            num_sent += 1
        expected = [heapq.heappop(heap)[1] for _ in range(num_prompts)]
        assert [group.records[0].group_id for group in fresh] == expected
        lags += [version - group.version for group in fresh]
    assert len(queue.groups) == lag * num_prompts  # so that by Little's law the mean lag of a long run is `lag`
    assert np.mean(lags) <= lag


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 12), *[st.floats(0.01, 5)] * 3, st.integers(1, 4))
def test_the_clock_is_sequential_without_lag_and_pipelined_with_it(lag, num, generate_s, update_s, step_s, num_steps):
    clock = Clock(StageCosts(generate_s, update_s, step_s))
    queue = make_queue(1, clock=clock)
    for version in range(num):
        queue.engine.version = version
        (group,), _ = queue.take(lag, version)
        clock.train(group.ready_s, num_steps)
    stages = [generate_s, update_s + num_steps * step_s]
    expected_s = pipeline.pipelined(stages, num) if lag else pipeline.sequential(stages, num)
    assert clock.trainer_s == pytest.approx(expected_s)


def test_costs_are_sums_of_medians_of_a_trace():
    trace = Trace()
    for step, factor in enumerate((1, 3, 2)):  # the median is the last
        start_s, clock_s = 100.0 * step, 100.0 * step
        with trace.span("step"):
            for stage, seconds in (
                *(("prepare", 1), ("prefill", 2), ("decode", 4), ("verifier", 8), ("records", 16)),
                *(("logprob_recompute", 0.5), ("forward_backward", 5), ("optimizer_step", 0.1)),
                *(("forward_backward", 5), ("optimizer_step", 0.1), ("weight_sync", 0.25), ("records", 16)),
            ):
                trace.add(stage, clock_s, clock_s + factor * seconds)
                clock_s += factor * seconds
        assert clock_s > start_s
    costs = StageCosts.measured(trace)
    assert (costs.generate_s, costs.update_s, costs.step_s) == pytest.approx((2 * 47, 2 * 0.75, 2 * 5.1))
    with pytest.raises(ValueError, match="trace: has no span of prepare, prefill"):
        StageCosts.measured(Trace())


# The measures as values.


def test_depths_are_as_the_measures_say():
    def depths(name, lag, num):
        return [measures(lag)[name].depth(lag, version) for version in range(num)]

    assert depths("none", 8, 3) == depths("discard", 8, 3) == [8, 8, 8]
    assert depths("cap", 8, 3) == [4, 4, 4]
    assert depths("balance", 4, 9) == [4, 4, 3, 3, 2, 2, 1, 1, 1]
    assert depths("balance", 0, 3) == [0, 0, 0]
    assert depths("sync phases", 2, 14) == [2] * 6 + [0] * 6 + [2] * 2


def test_a_sync_phase_ends_at_lag_0_and_a_shrinking_queue_at_lag_1():
    for name, last in (("sync phases", [2, 2, 0, 0, 0, 0]), ("balance", [1] * 6)):
        queue, lags = make_queue(), []
        for version in range(12):
            queue.engine.version = version
            fresh, _ = queue.take(measures(2)[name].depth(2, version), version)
            lags.append({version - group.version for group in fresh})
        assert lags[-6:] == [{lag} for lag in last]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_depth": -1}, "max_depth=-1"),
        ({"max_lag": 1.5}, "max_lag=1.5"),
        ({"shrink_every": 0}, "shrink_every=0"),
        ({"num_epochs": True}, "num_epochs=True"),
        ({"sync_every": 5}, "num_sync=0"),
        ({"sync_every": 5, "num_sync": 5}, "num_sync=5"),
        ({"num_sync": 2}, "num_sync=2"),
        ({"correction": ("token", None, 2.0)}, "correction's mode='token'"),
        ({"correction": ("token_mask", None, None)}, "low=None, high=None"),
        ({"correction": ("token_mask", 3.0, 2.0)}, "low=3.0"),
    ],
)
def test_a_malformed_measure_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Measure(**fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lag": -1}, "lag=-1"),
        ({"lag": 1.5}, "lag=1.5"),
        ({"num_updates": 0}, "num_updates=0"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"seed": -1}, "seed=-1"),
        ({"group_size": 1}, "group_size=1"),
        ({"prompts_per_step": 0}, "num=0"),
        ({"num_eval_prompts": 0}, "num=0"),
    ],
)
def test_a_malformed_run_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run(**{"lag": 1, "measure": Measure(), **settings})


def test_a_trainer_that_has_trained_before_is_refused():
    engine, trainer, tokenizer = parts()
    trainer.version = 3
    with pytest.raises(ValueError, match=r"engine.version=0, trainer.version=3"):
        policy.run_with_lag(engine, trainer, tokenizer, 1, Measure(), COSTS)
    with pytest.raises(ValueError, match="generate_s=nan"):
        StageCosts(math.nan, 0, 0)


# The trainer's weights.


def some_records(num=6):
    engine, trainer, tokenizer = parts()
    queue = DelayQueue(engine, tokenizer, Clock(COSTS), num, 2, policy.DECODING, seed=3)
    fresh, _ = queue.take(0, 0)
    records = [record for group in fresh for record in group.records]
    drifted = [r.model_copy(update={"behavior_logprobs": [p - 0.3 for p in r.behavior_logprobs]}) for r in records]
    return trainer, drifted


def test_weighted_it_is_the_plain_update_on_the_trainers_own_log_probs_and_scaled_advantages():
    trainer, records = some_records()
    rng = np.random.default_rng(0)
    advantages, scale = rng.normal(size=len(records)), rng.uniform(0, 2, size=len(records)).round(1)
    width = policy.collate(records, trainer.model.config.vocab_size).mask.shape
    trainer.update(records, advantages, 2, 2, weights=np.broadcast_to(scale[:, None], width))
    other = policy.Trainer(policy.load_warm_start()[0], lr=2e-3)
    own = [r.model_copy(update={"behavior_logprobs": forced(other.model, r)}) for r in records]
    other.update(own, advantages * scale, 2, 2)
    for left, right in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=2e-4, rtol=0)


def test_a_weighted_first_step_has_the_gradient_of_weight_times_advantage_times_log_prob():
    trainer, records = some_records()
    batch = policy.collate(records, trainer.model.config.vocab_size)
    rng = np.random.default_rng(1)
    advantages, weights = rng.normal(size=len(records)), rng.uniform(0, 2, size=batch.mask.shape)
    weights[2] = 0.0
    model, loss = policy.load_warm_start()[0], 0.0
    for record, advantage, row in zip(records, advantages, weights, strict=True):
        ids = torch.tensor([record.prompt_tokens + record.response_tokens])
        start = len(record.prompt_tokens) - 1
        logprobs = teacher_forced_logprobs(model, ids)[0, start:]
        loss = loss - advantage * (torch.tensor(row[start : start + len(logprobs)]) * logprobs).sum()
    (loss / batch.mask.sum()).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    assert trainer.update(records, advantages, weights=weights).grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], r"weights has shape \(11, \d+\): expected \(12, \d+\)"),
        (lambda w: w * np.nan, r"weights\[0, 0\]=nan"),
        (lambda w: w - 2, r"weights\[0, 0\]=-1"),
        (lambda w: w / 0.0, r"weights\[0, 0\]=inf"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_malformed_weights_are_refused_and_nothing_is_trained(change, message):
    trainer, records = some_records()
    before = policy.load_warm_start()[0]
    weights = np.ones(policy.collate(records, trainer.model.config.vocab_size).mask.shape)
    with pytest.raises(ValueError, match=message):
        trainer.update(records, [1.0] * len(records), weights=change(weights))
    assert equal_weights(trainer.model, before)
    assert trainer.version == 0
