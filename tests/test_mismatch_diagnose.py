"""`diagnose` on the field cases and their kind: the cause that a person would name, and the residual that proves it."""

import math

import numpy as np
import pytest

from rlinfra_utils import mismatch
from rlinfra_utils.mismatch import Evidence
from rlinfra_utils.rollouts import Decoding

PLAIN = Decoding(temperature=1.0)


def log_softmax(z):
    z = np.asarray(z, dtype=np.float64)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sampled(num_answers=3, num_tokens=40, vocab=50, seed=0, scale=3.0):
    """Random logits, tokens drawn from their softmax, and the log-probs over the vocabulary."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(num_answers, num_tokens, vocab))
    gumbel = rng.gumbel(size=logits.shape)
    tokens = (logits + gumbel).argmax(-1)
    return logits, tokens, log_softmax(logits)


def pick(table, tokens):
    return np.take_along_axis(table, tokens[..., None], axis=-1)[..., 0]


def first(*args, **kwargs):
    return mismatch.diagnose(*args, **kwargs)[0]


def found(cause, *args, **kwargs):
    return next(f for f in mismatch.diagnose(*args, **kwargs) if f.cause == cause)


LOGITS3 = np.tile([2.0, 1.0, 0.0], (3, 1))


def test_b16_log_probs_divided_by_temperature_with_decoding():
    raw = log_softmax([2.0, 1.0, 0.0])
    cold = Decoding(temperature=0.5)
    answer = first(LOGITS3, [0, 1, 2], raw / 0.5, [1, 1, 1], cold)
    assert (answer.cause, answer.status) == ("temperature_after_softmax", "confirmed")
    assert answer.residual_max < 1e-12
    compared = mismatch.compare(log_softmax(LOGITS3[0] / 0.5), raw / 0.5, [1, 1, 1])
    assert np.exp(compared.delta) == pytest.approx([1.958699] * 3, abs=1e-6)


def test_b16_one_token_and_no_decoding_cannot_be_told():
    answers = mismatch.diagnose([[2.0, 1.0, 0.0]], [0], [-0.815212], [1])
    assert (answers[0].cause, answers[0].status) == ("undetermined", "cannot be told")
    assert {f.status for f in answers if f.cause in ("temperature", "temperature_after_softmax")} == {"not excluded"}


def test_b17_raw_on_one_side():
    trainer = log_softmax(np.array([2.0, 1.0, 0.0]) / 0.6)
    raw = log_softmax([2.0, 1.0, 0.0])
    assert np.exp(trainer - raw) == pytest.approx([1.227565, 0.630253, 0.323583], abs=1e-6)
    answer = first(LOGITS3, [0, 1, 2], raw, [1, 1, 1], Decoding(temperature=0.6))
    assert (answer.cause, answer.status) == ("temperature", "confirmed")
    assert "behaviour 1, trainer 0.6" in answer.evidence
    assert answer.residual_max < 1e-12
    assert first(LOGITS3, [0, 1, 2], raw, [1, 1, 1], PLAIN).cause == "none"


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.3, 2.5])
def test_an_unrecorded_temperature_is_fitted(temperature):
    logits, tokens, _ = sampled()
    behavior = pick(log_softmax(logits / temperature), tokens)
    answer = first(logits, tokens, behavior, np.ones_like(tokens))
    assert (answer.cause, answer.status) == ("temperature", "confirmed")
    assert f"behaviour {temperature:.4g}, trainer 1" in answer.evidence
    own = pick(log_softmax(logits), tokens)
    behind = first(
        logits, tokens, behavior, np.ones_like(tokens), Decoding(temperature=temperature), trainer_logprobs=own
    )
    assert behind.cause == "temperature"
    assert f"behaviour {temperature:.4g}, trainer 1" in behind.evidence


P18 = np.log([0.5, 0.3, 0.15, 0.05])


def test_b18_top_p_is_renormalised_with_recorded_decoding():
    behavior = np.log(np.array([0.5, 0.3]) / 0.8)
    args = (np.tile(P18, (2, 1)), [0, 1], behavior, [1, 1])
    answer = first(*args, Decoding(temperature=1.0, top_p=0.75), lag=2)
    assert (answer.cause, answer.status) == ("truncation", "confirmed")
    assert answer.residual_max < 1e-9
    assert mismatch.compare(P18[:2], behavior, [1, 1]).delta == pytest.approx([-0.223144] * 2, abs=1e-6)


def test_b18_recorded_set_holds_when_the_trainer_has_moved():
    """The trainer's own nucleus lacks the sampled token; the recorded set still gives 0."""
    moved = np.log([0.9, 0.02, 0.05, 0.03])
    kept = [[0, 1], [0, 1]]
    behavior = np.array([math.log(0.9 / 0.92), math.log(0.02 / 0.92)])
    decoding = Decoding(temperature=1.0, top_p=0.75)
    args = (np.tile(moved, (2, 1)), [0, 1], behavior, [1, 1], decoding, 1)
    assert (first(*args, kept).cause, first(*args, kept).residual_max < 1e-9) == ("truncation", True)
    assert found("truncation", *args).status == "ruled out"


def test_b18_from_log_probs_alone_needs_decoding():
    mass = np.array([0.8, 0.95, 1.0, 0.9])
    own = np.array([-0.7, -1.1, -0.4, -2.0])
    behavior = own - np.log(mass)
    assert np.exp(mismatch.compare(own, behavior, np.ones(4)).sequence_log_weight) == pytest.approx(0.684)
    args = (None, [1, 2, 3, 4], behavior, np.ones(4))
    with_decoding = mismatch.diagnose(*args, Decoding(temperature=1.0, top_p=0.9), trainer_logprobs=own)
    assert (with_decoding[0].cause, with_decoding[0].status) == ("truncation", "suspected")
    without = mismatch.diagnose(*args, trainer_logprobs=own)
    assert without[0].cause == "undetermined"
    assert {"truncation", "temperature_after_softmax"} <= {f.cause for f in without if f.status == "not excluded"}
    hot_and_cut = mismatch.diagnose(*args, Decoding(temperature=1.3, top_p=0.9), trainer_logprobs=own)
    assert hot_and_cut[0].cause == "undetermined"


@pytest.mark.parametrize(("name", "value"), [("top_k", 4), ("top_p", 0.8), ("min_p", 0.1)])
def test_an_unrecorded_filter_is_fitted(name, value):
    logits, _, table = sampled(2, 60, 30)
    probs = np.exp(table)
    order = -np.sort(-probs, axis=-1)
    if name == "top_k":
        floor = order[..., value - 1]
    elif name == "min_p":
        floor = value * order[..., 0]
    else:
        floor = np.take_along_axis(order, (order.cumsum(-1) < value).sum(-1)[..., None], axis=-1)[..., 0]
    kept = np.where(probs >= floor[..., None], probs, 0.0)
    kept /= kept.sum(-1, keepdims=True)
    rng = np.random.default_rng(1)
    tokens = np.array([[rng.choice(30, p=p) for p in answer] for answer in kept])
    answer = first(logits, tokens, np.log(pick(kept, tokens)), np.ones_like(tokens))
    assert (answer.cause, answer.status) == ("truncation", "confirmed")
    assert name in answer.evidence
    assert answer.residual_mean < 1e-3


def test_raw_log_probs_of_filtered_sampling_agree_and_are_wrong():
    """vLLM's default logprobs_mode: the gap is 0, and the value is not the behaviour policy's."""
    args = (np.tile(P18, (2, 1)), [0, 1], P18[:2], [1, 1])
    answers = mismatch.diagnose(*args, Decoding(temperature=1.0, top_p=0.75))
    assert [f.cause for f in answers] == ["raw_logprobs", "none"]
    assert [f.cause for f in mismatch.diagnose(*args, PLAIN)] == ["none"]


def test_b19_exact_ratio_of_a_long_answer():
    behavior = np.full(100, -1.0)
    answers = mismatch.diagnose(None, np.zeros(100, int), behavior, np.ones(100), trainer_logprobs=behavior + 0.012)
    assert (answers[0].cause, answers[0].status) == ("exact_ratio", "confirmed")
    assert "3.32" in answers[0].evidence
    assert "geometric mean 1.01207 a token" in answers[0].evidence  # 1.012072 to six digits
    long = np.full(9000, -1.0)
    answer = first(None, np.zeros(9000, int), long, np.ones(9000), trainer_logprobs=long - 3.1334e-4)
    assert answer.cause == "exact_ratio"
    assert "0.999687" in answer.evidence
    assert "0.0596" in answer.evidence


def test_b23_shift_by_one_from_log_probs_alone():
    trainer, behavior = [-0.7, -1.3, -0.05, -0.9], [-0.1, -0.7, -1.3, -0.05]
    assert mismatch.compare(trainer, behavior, np.ones(4)).summary.token.mean_abs_log == pytest.approx(0.825)
    answer = first(None, [5, 6, 7, 8], behavior, np.ones(4), trainer_logprobs=trainer)
    assert (answer.cause, answer.residual_max) == ("shift", 0.0)
    assert "behaviour[t+1]" in answer.evidence


@pytest.mark.parametrize("step", [-1, 1])
def test_logits_of_the_neighbour(step):
    logits, tokens, table = sampled()
    answer = first(np.roll(logits, step, axis=1), tokens, pick(table, tokens), np.ones_like(tokens), PLAIN)
    assert (answer.cause, answer.status) == ("shift", "confirmed")
    assert f"logits[t{step:+d}]" in answer.evidence
    assert answer.residual_max < 1e-9


def test_b25_rounded_logits_are_precision():
    logits = np.array([[20.06, 20.0, 10.0]] * 2)
    behavior = log_softmax([20.0, 20.0, 10.0])[:2]
    answer = first(logits, [0, 1], behavior, [1, 1], PLAIN)
    assert (answer.cause, answer.status) == ("precision", "confirmed")
    assert "bfloat16" in answer.evidence


@pytest.mark.parametrize("behavior", [np.linspace(-1.5, -0.5, 10), np.full(10, -1.0)])
def test_b28_at_lag_zero_staleness_is_ruled_out(behavior):
    """Log-probs that are equal throughout are no placeholder where the trainer's are close to them."""
    delta = np.array([0, 0.01, -0.02, 0.25, -0.3, 0.05, 0, 0, 0, 0])
    answers = mismatch.diagnose(
        None,
        range(10),
        behavior,
        np.ones(10),
        PLAIN,
        trainer_logprobs=behavior + delta,
        evidence=Evidence(fingerprints=("a", "a")),
    )
    by_cause = {f.cause: f.status for f in answers}
    assert by_cause["policy_lag"] == by_cause["stale_weights"] == "ruled out"
    assert answers[0].cause == "precision"


def drifted(seed=0):
    logits, tokens, _ = sampled(seed=seed)
    old = logits + np.random.default_rng(9).normal(size=logits.shape)
    return logits, tokens, pick(log_softmax(old), tokens), np.ones_like(tokens), old


def test_b52_stale_weights_by_fingerprint_history_or_logits():
    *args, old = drifted()
    assert first(*args).cause == "undetermined"
    told = first(*args, evidence=Evidence(fingerprints=("F3", "F0")))
    assert (told.cause, told.status) == ("stale_weights", "confirmed")
    jump = first(*args, evidence=Evidence(gap_by_step=[0.010, 0.018, 0.201]))
    assert (jump.cause, jump.status) == ("stale_weights", "suspected")
    assert "step 2" in jump.evidence
    shown = first(*args, evidence=Evidence(logits={"stale_weights": old}))
    assert (shown.cause, shown.status) == ("stale_weights", "confirmed")
    assert shown.residual_max < 1e-9


def test_b52_a_failed_sync_is_named_before_it_shows_in_the_numbers():
    logits, tokens, table = sampled()
    args = (logits, tokens, pick(table, tokens), np.ones_like(tokens), PLAIN)
    answers = mismatch.diagnose(*args, evidence=Evidence(fingerprints=("F3", "F0")))
    assert [f.cause for f in answers] == ["stale_weights", "none"]


def test_b53_stale_kv_by_version_or_by_reset_at_restart():
    *args, _ = drifted()
    assert first(*args, evidence=Evidence(hidden_kv_lag=17)).cause == "stale_kv"
    series = [0.02, 0.04, 0.07, 0.11, 0.15, 0.02, 0.03]
    reset = first(*args, evidence=Evidence(gap_by_step=series, restarts=[5]))
    assert (reset.cause, reset.status) == ("stale_kv", "suspected")
    unclear = mismatch.diagnose(*args, evidence=Evidence(gap_by_step=series[:5]))
    assert unclear[0].cause == "undetermined"
    assert {"stale_kv", "stale_weights"} <= {f.cause for f in unclear if f.status == "not excluded"}


def test_quantised_weights_by_their_logits_or_by_a_flat_history():
    *args, old = drifted()
    shown = first(*args, evidence=Evidence(logits={"quantized_weights": old}))
    assert (shown.cause, shown.status) == ("quantized_weights", "confirmed")
    flat = first(*args, evidence=Evidence(gap_by_step=[0.5, 0.52, 0.49, 0.51]))
    assert (flat.cause, flat.status) == ("quantized_weights", "suspected")


def test_lag_is_named_only_where_the_contract_holds():
    *args, _ = drifted()
    assert first(*args, PLAIN, 4).cause == "policy_lag"
    logits, tokens, table = sampled()
    behavior = pick(table, tokens)
    shifted = np.roll(behavior, 1, axis=1)
    assert first(logits, tokens, shifted, np.ones_like(tokens), PLAIN, 4).cause == "shift"


def test_lag_by_token_confirms_where_fresh_tokens_agree():
    logits, tokens, behavior, mask, _ = drifted()
    lag = np.where(np.arange(tokens.shape[1]) < 20, 0, 3)[None, :].repeat(len(tokens), 0)
    exact = pick(log_softmax(logits), tokens)
    answer = first(logits, tokens, np.where(lag == 0, exact, behavior), mask, PLAIN, lag)
    assert answer.status in ("confirmed", "suspected")
    assert answer.cause == "policy_lag"


def test_placeholders():
    logits, tokens, table = sampled()
    ones, exact = np.ones_like(tokens), pick(table, tokens)
    every = first(logits, tokens, np.zeros(tokens.shape), ones, PLAIN)
    assert (every.cause, every.status) == ("sentinel", "confirmed")
    assert "0.0 at each" in every.evidence
    holes = np.where(np.random.default_rng(2).random(tokens.shape) < 0.1, -100.0, exact)
    some = first(logits, tokens, holes, ones, PLAIN)
    assert (some.cause, some.num_left_out) == ("sentinel", int((holes == -100).sum()))
    trainer = first(logits, tokens, exact, ones, PLAIN, trainer_logprobs=np.zeros(tokens.shape))
    assert trainer.cause == "sentinel"
    assert trainer.evidence.startswith("trainer")


def test_greedy_zeros_are_no_placeholder():
    logits, _, _ = sampled()
    tokens = logits.argmax(-1)
    answer = first(logits, tokens, np.zeros(tokens.shape), np.ones_like(tokens), Decoding(temperature=0.0))
    assert answer.cause == "temperature"
    assert "greedy" in answer.evidence


@pytest.mark.parametrize("where", [slice(0, 2), slice(-3, None)])
def test_a_mask_that_reaches_into_prompt_or_padding(where):
    logits, tokens, table = sampled()
    tokens[:, -3:] = 7
    behavior = pick(table, tokens)
    behavior[:, where] = 0.0
    answer = first(logits, tokens, behavior, np.ones_like(tokens), PLAIN)
    assert (answer.cause, answer.status) == ("mask", "confirmed")
    assert answer.residual_max < 1e-9


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shard_boundaries(shards):
    logits, tokens, table = sampled(4, 64)
    behavior = pick(table, tokens)
    wrong = tokens.copy()
    size = 64 // shards
    wrong[:, size - 1 :: size] = tokens[:, ::size]  # the last label of a shard is taken from its own first token
    mask = np.ones_like(tokens)
    mask[:, :3] = mask[:, -1] = 0
    own = pick(table, wrong)
    answer = first(None, tokens, behavior, mask, PLAIN, trainer_logprobs=own)
    assert answer.cause == "shard_boundary"
    assert f"of {shards} shards" in answer.evidence
    assert first(logits, tokens, behavior, mask, PLAIN, trainer_logprobs=own).cause == "shard_boundary"


def test_shard_boundaries_of_a_large_batch():
    """Thousands of outliers: the number of ways to place them is beyond a float."""
    rng = np.random.default_rng(0)
    own = -rng.exponential(size=(800, 128))
    behavior = own + 1e-5 * rng.normal(size=own.shape)
    behavior[:, 32::32] -= rng.exponential(size=(800, 3))
    answer = first(None, np.zeros(own.shape), np.minimum(behavior, 0), np.ones(own.shape), trainer_logprobs=own)
    assert answer.cause == "shard_boundary"
    assert "of 4 shards" in answer.evidence
    scattered = np.where(rng.random(own.shape) < 0.05, own - 2.0, own)
    assert (
        first(None, np.zeros(own.shape), scattered, np.ones(own.shape), trainer_logprobs=own).cause != "shard_boundary"
    )


def test_another_entry_is_gathered():
    logits, tokens, table = sampled()
    own = pick(table, (tokens + 1) % 50)
    answer = first(logits, tokens, pick(table, tokens), np.ones_like(tokens), PLAIN, trainer_logprobs=own)
    assert (answer.cause, answer.status) == ("wrong_entry", "confirmed")


def test_b29_engine_tokens_come_before_everything():
    logits, tokens, behavior, mask, _ = drifted()
    theirs = tokens.copy()
    theirs[1, 4] = (theirs[1, 4] + 1) % 50
    answers = mismatch.diagnose(logits, tokens, behavior, mask, evidence=Evidence(engine_tokens=theirs))
    assert [f.cause for f in answers] == ["other_tokens"]
    assert "answer 1, token 4" in answers[0].evidence
    short = first(None, [3], [-0.7], [1], trainer_logprobs=[-0.1], evidence=Evidence(engine_tokens=[1, 2]))
    assert short.cause == "other_tokens"
    assert "engine 1, record 3" in short.evidence
    same = mismatch.diagnose(logits, tokens, behavior, mask, evidence=Evidence(engine_tokens=tokens))
    assert (
        found("other_tokens", logits, tokens, behavior, mask, evidence=Evidence(engine_tokens=tokens)).status
        == "ruled out"
    )
    assert same[0].cause == "undetermined"


def test_answers_that_part_at_one_token_read_another_context():
    logits, tokens, behavior, mask, _ = drifted()
    exact = pick(log_softmax(logits), tokens)
    behavior[:, :18] = exact[:, :18]
    answer = first(logits, tokens, behavior, mask, PLAIN)
    assert (answer.cause, answer.status) == ("other_tokens", "suspected")
    assert "(0, 18)" in answer.evidence


def test_one_answer_and_a_batch_say_the_same():
    logits, tokens, table = sampled(1)
    behavior = np.roll(pick(table, tokens), 1, axis=1)
    mask = np.ones_like(tokens)
    assert first(logits[0], tokens[0], behavior[0], mask[0]) == first(logits, tokens, behavior, mask)


def test_what_stands_off_the_mask_is_never_read():
    logits, tokens, table = sampled()
    behavior, mask = pick(table, tokens), np.ones_like(tokens)
    mask[:, :5] = 0
    clean = first(logits, tokens, behavior, mask, PLAIN)
    logits[:, :5], behavior[:, :5], tokens[:, :5] = np.nan, 7.0, 10**6
    assert first(logits, tokens, behavior, mask, PLAIN) == clean
    assert clean.cause == "none"


def test_findings_print_what_to_do():
    *args, _ = drifted()
    answers = mismatch.diagnose(*args)
    text, page = str(answers), answers._repr_html_()
    assert text.startswith("cannot be told undetermined")
    assert "record:" in text
    assert page.count("<tr>") == len(answers) + 1
    assert "<th>" in answers[0]._repr_html_()
    assert isinstance(answers, list)


def test_a_penalty_that_cannot_be_recomputed_is_said():
    *args, _ = drifted()
    answer = first(*args, Decoding(temperature=1.0, repetition_penalty=1.2))
    assert answer.cause == "undetermined"
    assert "repetition_penalty 1.2" in answer.evidence


def test_what_the_docstring_promises_of_a_constant_gap():
    """A constant behaviour beside a varying trainer is a placeholder; two constants are not."""
    trainer = np.linspace(-3.0, -0.2, 20)
    args = (None, range(20), np.full(20, -1.0), np.ones(20))
    assert first(*args, trainer_logprobs=trainer).cause == "sentinel"
    assert first(*args, trainer_logprobs=np.full(20, -1.5)).cause != "sentinel"


def test_a_fault_under_noise_is_still_named():
    """Ten times the noise of bfloat16 is left: suspected, not confirmed. Of forty times a fitted value says nothing."""
    logits, tokens, _ = sampled(scale=2.0)
    noise = np.random.default_rng(4).normal(size=logits.shape)

    def named(size):
        behavior = pick(log_softmax((logits + size * noise) / 0.8), tokens)
        answer = first(logits, tokens, behavior, np.ones_like(tokens), PLAIN)
        return answer.cause, answer.status

    assert named(0.05) == ("temperature", "suspected")
    assert named(0.2) == ("undetermined", "cannot be told")


def test_noise_at_the_size_of_bfloat16_is_precision():
    logits, tokens, _ = sampled(8, 100)
    rng = np.random.default_rng(5)
    behavior = pick(log_softmax(logits + 0.01 * rng.normal(size=logits.shape)), tokens)
    assert first(logits, tokens, behavior, np.ones_like(tokens), PLAIN).cause == "precision"


def test_two_last_tokens_of_any_kind_are_a_mask_edge():
    logits, tokens, table = sampled()
    tokens[:, -2:] = [8, 9]
    behavior = pick(table, tokens)
    behavior[:, -2:] = np.random.default_rng(3).uniform(-30, -20, size=(len(tokens), 2))
    answer = first(logits, tokens, behavior, np.ones_like(tokens), PLAIN)
    assert (answer.cause, answer.num_left_out) == ("mask", 2 * len(tokens))


def test_a_ratio_that_is_never_above_1_is_no_exact_ratio():
    """Small gaps and a large sum, but the mean ratio of two policies over the same tokens is 1."""
    own = -np.linspace(0.5, 3.0, 100)
    answers = mismatch.diagnose(
        None, range(100), own + np.linspace(0.005, 0.02, 100), np.ones(100), trainer_logprobs=own
    )
    assert answers[0].cause == "undetermined"
    assert next(f for f in answers if f.cause == "exact_ratio").status == "not excluded"


def test_proportional_log_probs_are_told_without_logits():
    own = -np.linspace(0.5, 3.0, 12)
    answer = first(None, range(12), own / 0.7, np.ones(12), trainer_logprobs=own)
    assert (answer.cause, answer.status) == ("temperature_after_softmax", "confirmed")
    assert "/ 0.7" in answer.evidence


def test_an_early_token_that_differs_speaks_against_a_point_of_parting():
    logits, tokens, behavior, mask, _ = drifted()
    exact = pick(log_softmax(logits), tokens)
    behavior[:, :30] = exact[:, :30]
    assert first(logits, tokens, behavior, mask, PLAIN).cause == "other_tokens"
    behavior[:, 4] = exact[:, 4] - 1.5
    assert first(logits, tokens, behavior, mask, PLAIN).cause == "undetermined"
