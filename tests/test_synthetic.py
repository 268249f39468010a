"""Synthetic rollouts against closed forms: every law, share and log-prob is computed a second time here."""

import math
from itertools import groupby, pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinfra_utils import rollouts, synthetic
from rlinfra_utils.synthetic import LogNormal, Pareto, Stages, Workload

#: Lengths alone: no limits, turns, updates or lag.
PLAIN = Workload(max_tokens=None, time_limit_s=None, tool_share=0, straddle_share=0, lag_shares=(1.0,))
NUM = 40_000


def plain(**changes):
    return Workload(**{**{f: getattr(PLAIN, f) for f in PLAIN.__dataclass_fields__}, **changes})


def column(table, name):
    return table[name].to_numpy(zero_copy_only=False)


def flat(table, name):
    """All values of a list column, one after another."""
    return table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def assert_share(hits, share, sigmas=4.5):
    """`hits` is a boolean array of independent draws with probability `share`."""
    tolerance = sigmas * math.sqrt(share * (1 - share) / len(hits))
    assert np.mean(hits) == pytest.approx(share, abs=max(tolerance, 1e-12))


def cdf(law, tokens):
    """P(X < tokens) of the continuous law."""
    if isinstance(law, LogNormal):
        return NormalDist(math.log(law.median_tokens), law.sigma).cdf(math.log(tokens)) if tokens else 0.0
    return 1 - (law.minimum_tokens / tokens) ** law.alpha if tokens > law.minimum_tokens else 0.0


def hazard(law, position):
    """P(the response ends at this policy token, given that it comes so far)."""
    return (cdf(law, position) - cdf(law, position - 1)) / (1 - cdf(law, position - 1))


# Lengths


@pytest.mark.parametrize(
    "law", [LogNormal(48, 0.8), LogNormal(200.5, 0.3), Pareto(16, 1.2), Pareto(20.5, 3.0)], ids=lambda law: f"{law}"
)
def test_lengths_have_the_quantiles_of_their_law(law):
    lengths = column(synthetic.rollout_table(NUM, 1, plain(lengths=law)), "response_length")
    for tokens in (20, 30, 48, 100, 300, 1000):
        assert_share(lengths <= tokens, cdf(law, tokens))


def test_half_of_log_normal_lengths_are_at_most_the_median():
    lengths = column(synthetic.rollout_table(NUM, 2, plain(lengths=LogNormal(64, 1.1))), "response_length")
    assert_share(lengths <= 64, 0.5)


def test_pareto_mean_is_alpha_over_alpha_minus_one():
    law = Pareto(100, 4.0)
    lengths = column(synthetic.rollout_table(NUM, 3, plain(lengths=law)), "response_length")
    mean = 100 * 4 / 3
    assert law.mean_tokens == pytest.approx(mean)
    sd = 100 * math.sqrt(4 / ((4 - 1) ** 2 * (4 - 2)))
    slack = 4.5 * sd / math.sqrt(NUM)
    assert mean - slack < lengths.mean() < mean + 1 + slack  # a started token counts whole


def test_log_normal_mean_is_median_times_exp_half_sigma_squared():
    law = LogNormal(100, 0.5)
    lengths = column(synthetic.rollout_table(NUM, 4, plain(lengths=law)), "response_length")
    mean = 100 * math.exp(0.125)
    slack = 4.5 * mean * math.sqrt(math.exp(0.25) - 1) / math.sqrt(NUM)
    assert law.mean_tokens == pytest.approx(mean)
    assert mean - slack < lengths.mean() < mean + 1 + slack


def test_token_limit_cuts_the_tail_even_of_an_infinite_mean():
    table = synthetic.rollout_table(NUM, 5, plain(lengths=Pareto(16, 0.7), max_tokens=256))
    lengths, stop = column(table, "response_length"), column(table, "stop_reason")
    assert lengths.max() == 256
    assert_share(stop == "length", (16 / 256) ** 0.7)
    assert (column(table, "truncated") == (stop == "length")).all()
    assert set(lengths[stop == "length"]) == {256}


def test_time_limit_cuts_where_length_times_speed_exceeds_it():
    workload = plain(lengths=LogNormal(400, 0.8), decode_s_per_token=0.01, speed_sigma=0.6, time_limit_s=10.0)
    table = synthetic.rollout_table(20_000, 6, workload)
    # The product of two independent log-normals is log-normal: median 4 s, sigma 1.
    assert_share(column(table, "stop_reason") == "timeout", 1 - NormalDist().cdf(math.log(10 / 4)), sigmas=5.5)


def test_only_a_response_that_ended_by_itself_ends_with_eos():
    table = synthetic.rollout_table(4_000, 7)
    assert set(column(table, "stop_reason")) == {"eos", "length", "timeout"}
    for record in rollouts.from_table(table):
        assert (record.response_tokens[-1] == synthetic.EOS) == (record.stop_reason == "eos")
        assert synthetic.EOS not in record.response_tokens[:-1]
        assert record.truncated == (record.stop_reason != "eos")


# Log-probs


def test_each_logprob_is_the_log_of_the_written_down_distribution():
    seed = 11
    law = Pareto(4, 1.1)
    workload = Workload(lengths=law, max_tokens=200, version_drift_nats=0.5)
    behaviour = synthetic.policy(seed, workload)
    for record in synthetic.rollouts(64, seed, workload):
        position = 0
        by_policy = record.policy_mask[len(record.prompt_tokens) :]
        for token, logprob, mine, version in zip(
            record.response_tokens, record.behavior_logprobs, by_policy, record.versions()
        ):
            if not mine:
                assert logprob is None
                continue
            position += 1
            logits = behaviour.logits[version - behaviour.oldest_version, position % synthetic.NUM_CONTEXTS]
            stop = hazard(law, position)
            others = [(1 - stop) * math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
            assert sum(others) + stop == pytest.approx(1)
            assert math.exp(logprob) == pytest.approx(stop if token == synthetic.EOS else others[token - 1], rel=1e-9)


def test_tokens_follow_their_distribution():
    workload = plain(vocab_size=8)
    table = synthetic.rollout_table(NUM, 12, workload)
    tokens, position = (
        flat(table, "response_tokens"),
        1 + np.concatenate([np.arange(n) for n in column(table, "response_length")]),
    )
    logits = synthetic.policy(12, workload).logits[-1]
    for context in range(synthetic.NUM_CONTEXTS):
        drawn = tokens[(position % synthetic.NUM_CONTEXTS == context) & (tokens != synthetic.EOS)]
        expected = len(drawn) * np.exp(logits[context]) / np.exp(logits[context]).sum()
        chi_square = ((np.bincount(drawn, minlength=8)[1:] - expected) ** 2 / expected).sum()
        assert chi_square < 6 + 6 * math.sqrt(2 * 6)  # mean and six standard deviations for 6 degrees of freedom


def test_responses_end_as_often_as_their_probabilities_say():
    """Ends minus their summed probabilities is a martingale, limits or not."""
    law = LogNormal(48, 0.8)
    table = synthetic.rollout_table(NUM, 13, Workload(lengths=law, max_tokens=60, time_limit_s=1.0, tool_share=0))
    hazards = np.array([hazard(law, position) for position in range(1, 61)])
    at_risk = np.bincount(column(table, "response_length"), minlength=61)[::-1].cumsum()[::-1][1:]
    expected, variance = (at_risk * hazards).sum(), (at_risk * hazards * (1 - hazards)).sum()
    ends = (column(table, "stop_reason") == "eos").sum()
    assert abs(ends - expected) < 5 * math.sqrt(variance)


def test_importance_ratios_to_the_current_policy_average_to_one():
    workload = Workload(tool_share=0, lag_shares=(0.0, 0.0, 1.0), version_drift_nats=0.3)
    table = synthetic.rollout_table(4_000, 14, workload)
    position = 1 + np.concatenate([np.arange(n) for n in column(table, "response_length")])
    current = np.full(position.size, workload.current_version)
    log_ratio = synthetic.policy(14, workload).logprobs(current, position, flat(table, "response_tokens")) - flat(
        table, "behavior_logprobs"
    )
    ratio = np.exp(log_ratio)
    assert ratio.std() > 0.1
    assert ratio.mean() == pytest.approx(1, abs=4.5 * ratio.std() / math.sqrt(ratio.size))


def test_policy_refuses_what_it_does_not_have():
    behaviour = synthetic.policy(0)
    one = np.array([1])
    for name, arguments in {
        "versions": (one * 101, one, one),
        "positions": (one * 100, one * 0, one),
        "tokens": (one * 100, one, one * 64),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            behaviour.logprobs(*arguments)


# Groups, turns, retries, versions, times


def test_degenerate_groups_and_only_they_have_equal_rewards():
    share = 0.35
    workload = Workload(lengths=LogNormal(4, 0.1), degenerate_share=share, group_size=4)
    table = synthetic.rollout_table(NUM, 21, workload)
    rewards = table["reward"].combine_chunks()
    assert set(rewards.keys.to_pylist()) == {"correctness"}
    by_group = rewards.items.to_numpy().reshape(-1, 4)
    equal = by_group.min(axis=1) == by_group.max(axis=1)
    assert_share(equal, share)
    assert_share(by_group[equal].max(axis=1) == 1, 0.5)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_degenerate_share_is_exact_at_its_ends(share):
    records = synthetic.rollouts(80, 22, Workload(degenerate_share=share))
    for _, group in groupby(records, key=lambda record: record.group_id):
        assert (len({record.reward["correctness"] for record in group}) == 1) == share


def test_a_group_is_one_prompt_and_only_the_last_may_be_cut_off():
    records = synthetic.rollouts(43, 23, Workload(group_size=5))
    groups = [list(group) for _, group in groupby(records, key=lambda record: record.group_id)]
    assert [len(group) for group in groups] == [5] * 8 + [3]
    assert all(len({(r.prompt_id, tuple(r.prompt_tokens)) for r in group}) == 1 for group in groups)
    assert len({record.sample_id for record in records}) == 43


def runs(mask):
    """Runs of equal values: [(value, length)]."""
    return [(value, len(list(run))) for value, run in groupby(mask)]


def test_tool_turns_are_environment_tokens_between_policy_tokens():
    workload = Workload(lengths=LogNormal(100, 0.1), tool_share=0.4, max_tool_calls=3, mean_observation_tokens=9.0)
    table = synthetic.rollout_table(5_000, 24, workload)
    calls, observations = [], []
    for record in rollouts.from_table(table):
        num_prompt = len(record.prompt_tokens)
        assert not any(record.policy_mask[:num_prompt] + record.env_mask[:num_prompt])
        turns = runs(record.policy_mask[num_prompt:])
        assert turns[0][0] == turns[-1][0] == 1
        assert [1 - bit for bit in record.policy_mask[num_prompt:]] == record.env_mask[num_prompt:]
        calls.append(len(turns) // 2)
        observations += [length for value, length in turns if value == 0]
        assert (record.environment_version is not None) == (len(turns) > 1)
    calls = np.array(calls)
    assert_share(calls > 0, 0.4)
    for number in (1, 2, 3):
        assert_share(calls[calls > 0] == number, 1 / 3)
    sd = math.sqrt(9 * 8)  # geometric: variance mean * (mean - 1)
    assert np.mean(observations) == pytest.approx(9, abs=4.5 * sd / math.sqrt(len(observations)))


def test_retries_are_failed_attempts_before_the_one_that_counts():
    table = synthetic.rollout_table(NUM, 25, Workload(lengths=LogNormal(4, 0.1), retry_share=0.2))
    retries = column(table, "num_retries")
    for number in (1, 2, 3):
        assert_share(retries >= number, 0.2**number)


def test_lags_have_their_shares_and_some_responses_straddle_an_update():
    workload = Workload(lengths=LogNormal(20, 0.1), lag_shares=(0.5, 0.2, 0.3), straddle_share=0.25, tool_share=0)
    records = synthetic.rollouts(4_000, 26, workload)
    newest = np.array([max(record.versions()) for record in records])
    for lag, share in enumerate(workload.lag_shares):
        assert_share(newest == workload.current_version - lag, share)
    straddlers = [record for record in records if record.version_spans]
    assert_share(np.array([record.version_spans is not None for record in records]), 0.25)
    for record in straddlers:
        first, second = record.version_spans
        assert record.policy_version is None
        assert (first.start, second.end) == (0, record.response_length)
        assert 0 < first.end == second.start < record.response_length
        assert second.version == first.version + 1
    assert workload.current_version - min(min(r.versions()) for r in straddlers) == workload.max_lag == 3


def test_a_group_starts_when_the_one_before_has_ended():
    records = synthetic.rollouts(40, 27)
    groups = [list(group) for _, group in groupby(records, key=lambda record: record.group_id)]
    for before, after in pairwise(groups):
        assert {r.started_s for r in after} == {max(r.finished_s for r in before)}
    assert all(record.finished_s > record.started_s for record in records)


# The two forms, and the contract


def test_the_same_seed_gives_the_same_data_in_both_forms():
    table = synthetic.rollout_table(100, 31)
    table.validate(full=True)
    assert table.schema == rollouts.SCHEMA
    assert table.equals(synthetic.rollout_table(100, 31))
    assert not table.equals(synthetic.rollout_table(100, 32))
    records = synthetic.rollouts(100, 31)
    assert records == synthetic.rollouts(100, 31)
    assert rollouts.to_table(records).combine_chunks().equals(table.combine_chunks())


@pytest.mark.parametrize("chunk_tokens", [1, 500])
def test_a_table_made_in_chunks_joins_up(monkeypatch, chunk_tokens):
    from rlinfra_utils.synthetic import table as module

    whole = synthetic.rollout_table(50, 33)
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk_tokens)
    pieces = synthetic.rollout_table(50, 33)
    pieces.validate(full=True)
    assert pieces["response_tokens"].num_chunks > whole["response_tokens"].num_chunks == 1
    drawn_by_token = ["response_tokens", "behavior_logprobs"]  # these follow the order of the draws
    assert pieces.drop_columns(drawn_by_token).equals(whole.drop_columns(drawn_by_token))
    assert accepted(pieces, Workload())


def accepted(table, workload):
    verdicts = rollouts.validate_table(table, current_version=workload.current_version, partial_rollouts=True)
    return set(verdicts["status"].to_pylist()) == {"accept"}


def test_the_contract_accepts_all_of_it():
    workload = Workload()
    assert accepted(synthetic.rollout_table(5_000, 41), workload)
    for record in synthetic.rollouts(200, 41):
        verdict = rollouts.validate(record, current_version=workload.current_version, partial_rollouts=True)
        assert verdict.status == "accept", str(verdict)


def test_the_contract_tells_stale_and_partial_records_apart():
    workload = Workload(lag_shares=(0.0, 0.0, 1.0), straddle_share=0)
    for record in synthetic.rollouts(8, 42, workload):
        assert rollouts.validate(record, current_version=100, max_lag=2).status == "accept"
        assert "stale" in rollouts.validate(record, current_version=100, max_lag=1).codes
    for record in synthetic.rollouts(8, 42, Workload(straddle_share=1, lengths=Pareto(8, 1.5))):
        assert rollouts.validate(record, current_version=100, partial_rollouts=False).status == "reject"


shares = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
laws = st.builds(LogNormal, st.floats(0.01, 300), st.floats(1e-6, 3)) | st.builds(
    Pareto, st.floats(0.01, 300), st.floats(0.05, 50)
)


@st.composite
def workloads(draw):
    weights = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    return Workload(
        lengths=draw(laws),
        prompt_lengths=LogNormal(draw(st.floats(0.01, 40)), draw(st.floats(1e-6, 1))),
        max_tokens=draw(st.integers(1, 400)),
        time_limit_s=draw(st.none() | st.floats(0.001, 100)),
        tool_share=draw(shares),
        max_tool_calls=draw(st.integers(1, 12)),
        mean_observation_tokens=draw(st.floats(1, 30)),
        mean_tool_s=draw(st.floats(0, 10)),
        retry_share=draw(st.floats(0, 0.99)),
        group_size=draw(st.integers(2, 40)),
        degenerate_share=draw(shares),
        current_version=draw(st.integers(5, 10**9)),
        lag_shares=tuple(weight / sum(weights) for weight in weights),
        straddle_share=draw(shares),
        version_drift_nats=draw(st.floats(0, 1)),
        vocab_size=draw(st.integers(3, 50)),
    )


@settings(deadline=None, max_examples=80)
@given(workloads(), st.integers(1, 60), st.integers(0, 2**53))
def test_any_workload_gives_records_that_the_contract_accepts(workload, num, seed):
    table = synthetic.rollout_table(num, seed, workload)
    table.validate(full=True)
    assert table.num_rows == num
    assert accepted(table, workload)
    logprobs = flat(table, "behavior_logprobs")
    logprobs = logprobs[~np.isnan(logprobs)]
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


# The door

BAD = {
    "median_tokens": [lambda v: LogNormal(v, 1), [0, -1, math.nan, math.inf, "64", None, True]],
    "sigma": [lambda v: LogNormal(64, v), [0, -0.1, math.nan, math.inf]],
    "minimum_tokens": [lambda v: Pareto(v, 2), [0, -1, math.nan]],
    "alpha": [lambda v: Pareto(16, v), [0, -1, math.nan, [2]]],
    "lengths": [lambda v: Workload(lengths=v), [None, 64, "lognormal"]],
    "prompt_lengths": [lambda v: Workload(prompt_lengths=v), [None, Pareto(16, 1.0)]],
    "max_tokens": [lambda v: Workload(max_tokens=v), [0, -5, 2.5, math.nan, "512"]],
    "time_limit_s": [lambda v: Workload(time_limit_s=v), [0, -1, math.nan]],
    "decode_s_per_token": [lambda v: Workload(decode_s_per_token=v), [0, -1, math.nan]],
    "speed_sigma": [lambda v: Workload(speed_sigma=v), [-1, 6, math.nan]],
    "tool_share": [lambda v: Workload(tool_share=v), [-0.01, 1.01, math.nan, "x" * 10_000_000]],
    "max_tool_calls": [lambda v: Workload(max_tool_calls=v), [0, 1.5]],
    "mean_observation_tokens": [lambda v: Workload(mean_observation_tokens=v), [0, 0.5, math.nan]],
    "mean_tool_s": [lambda v: Workload(mean_tool_s=v), [-1, math.nan]],
    "retry_share": [lambda v: Workload(retry_share=v), [-0.1, 1, math.nan]],
    "group_size": [lambda v: Workload(group_size=v), [0, 1, 8.0]],
    "degenerate_share": [lambda v: Workload(degenerate_share=v), [-0.1, 2]],
    "straddle_share": [lambda v: Workload(straddle_share=v), [-0.1, 2]],
    "version_drift_nats": [lambda v: Workload(version_drift_nats=v), [-0.1, math.nan]],
    "vocab_size": [lambda v: Workload(vocab_size=v), [0, 1, 2, 64.0]],
    "current_version": [lambda v: Workload(current_version=v), [-1, 1, 7.5]],
    "lag_shares": [lambda v: Workload(lag_shares=v), [(), (0.5, 0.4), [1.0], 1.0]],
    r"lag_shares\[1\]": [lambda v: Workload(lag_shares=(1.0, v)), [-0.5, math.nan, "0"]],
    "num": [lambda v: synthetic.rollouts(v, 0), [0, -1, 2.0, None, "8"]],
    "seed": [lambda v: synthetic.rollouts(8, v), [-1, 0.5, None, "0"]],
    "workload": [lambda v: synthetic.rollouts(8, 0, v), [None, {"group_size": 4}]],
    "stages": [lambda v: synthetic.trace(8, 0, stages=v), [None, {}]],
    "num_engine_slots": [lambda v: Stages(num_engine_slots=v), [0, 2.0]],
    "batch_rollouts": [lambda v: Stages(batch_rollouts=v), [0, -1]],
    "verifier_median_s": [lambda v: Stages(verifier_median_s=v), [0, -1, math.nan]],
    "weight_sync_s": [lambda v: Stages(weight_sync_s=v), [-1, math.nan, "0"]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (_, values) in BAD.items() for value in values])
def test_a_bad_parameter_is_one_line_with_field_and_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}: ") as error:
        BAD[field][0](value)
    assert str(value)[:20] in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_an_infinite_mean_needs_a_cap():
    with pytest.raises(ValueError, match=r"^lengths: Pareto\(minimum_tokens=16, alpha=1\.0\) has an infinite mean"):
        Workload(lengths=Pareto(16, 1.0), max_tokens=None)
    assert Workload(lengths=Pareto(16, 1.0), max_tokens=512).lengths.mean_tokens == math.inf


def test_more_tokens_than_memory_holds_are_refused_before_they_are_made():
    with pytest.raises(ValueError, match=r"^num: 1000 such rollouts hold .* tokens"):
        synthetic.rollout_table(1000, 0, plain(lengths=LogNormal(1e9, 1.0)))


# Traces


def test_a_trace_tells_the_time_of_the_same_rollouts():
    num, seed = 48, 51
    frame = synthetic.trace(num, seed).frame()
    records = {record.sample_id: record for record in synthetic.rollouts(num, seed)}
    generation = frame[frame.stage.isin(["decode", "environment"])].groupby("sample_id").dur_s.sum()
    assert set(generation.index) == set(records)
    for sample_id, record in records.items():
        assert generation[sample_id] == pytest.approx(record.finished_s - record.started_s, abs=1e-6)
    decode = frame[frame.stage == "decode"].set_index("sample_id").tokens
    assert all(decode[sample_id] == sum(record.policy_mask) for sample_id, record in records.items())


def test_stages_of_a_track_do_not_overlap_and_only_the_queue_waits():
    frame = synthetic.trace(60, 52, stages=Stages(num_engine_slots=4)).frame()
    assert set(frame.track) == {"verifier", "trainer", *(f"engine-{slot}" for slot in range(4))}
    for _, track in frame.sort_values("start_s").groupby("track"):
        assert (track.end_s.to_numpy()[:-1] <= track.start_s.to_numpy()[1:] + 1e-9).all()
    assert set(frame[frame.wait.fillna(False).astype(bool)].stage) == {"queue_wait"}


def test_causes_come_before_effects_and_batches_are_whole():
    frame = synthetic.trace(40, 53, stages=Stages(batch_rollouts=16)).frame()
    verified = frame[frame.stage == "verifier"].set_index("sample_id")
    generated = frame[frame.stage.isin(["decode", "environment"])].groupby("sample_id").end_s.max()
    assert (verified.start_s >= generated[verified.index] - 1e-9).all()
    training = frame[frame.stage == "logprob_recompute"].sort_values("start_s")
    ready = np.sort(verified.end_s)
    assert len(training) == 3
    assert (training.start_s.to_numpy() >= ready[[15, 31, 39]] - 1e-9).all()


def test_the_critical_path_of_one_slot_and_slow_verifier_is_the_sum_of_its_work():
    """With one rollout nothing overlaps: the path is every span, and its length the sum of them."""
    spans = synthetic.trace(1, 54, Workload(tool_share=0))
    frame, path = spans.frame(), spans.critical_path()
    work = frame[frame.stage != "queue_wait"]
    assert path[~path.wait].dur_s.sum() == pytest.approx(work.dur_s.sum())


def test_the_same_seed_gives_the_same_trace():
    columns = ["stage", "track", "start_s", "end_s", "sample_id"]
    first, again, other = (synthetic.trace(16, seed).frame()[columns] for seed in (55, 55, 56))
    assert first.equals(again)
    assert not first.equals(other)
