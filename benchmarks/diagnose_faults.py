"""Faults for `bench_diagnose`: a small model's own samples with one thing wrong, the way it goes wrong in the field.

Models: seventeen faults and a clean pair, each a function that draws a trial and damages it, or returns None where the
damage cannot be told from noise. Leaves out two faults at once, and the trial itself (`diagnose_trials.py`).
Use: `trial, redrawn = draw(temperature, seed=3)`; `mismatch.diagnose(**trial.arguments())`.
"""

from __future__ import annotations

import numpy as np

from benchmarks.diagnose_trials import Trial, chosen, distribution
from rlinfra_utils.mismatch import Evidence
from rlinfra_utils.rollouts import Decoding

#: A fault has to change the log-probs by this many times the engine's noise.
NOISE_FACTOR = 3.0
PAD = 0
PLAIN = Decoding(temperature=1.0)


def away_from_one(rng: np.random.Generator) -> float:
    return float(rng.choice([rng.uniform(0.5, 0.85), rng.uniform(1.2, 1.6)]))


def filters(rng: np.random.Generator, temperature: float = 1.0) -> Decoding:
    options = {
        "top_p": float(rng.uniform(0.5, 0.95)),
        "top_k": int(rng.integers(2, 20)),
        "min_p": float(rng.uniform(0.02, 0.2)),
    }
    name = str(rng.choice(list(options)))
    return Decoding(temperature=temperature, **{name: options[name]})


def none(rng):
    """Clean: float32 on both sides, plain sampling or filters that the trainer applies as well."""
    decoding = [PLAIN, Decoding(temperature=away_from_one(rng)), filters(rng, away_from_one(rng))][rng.integers(3)]
    trial = Trial.draw(rng, decoding)
    trial.behavior = np.where(trial.mask, chosen(trial.model.logits(trial.ids), trial.ids, decoding), 0.0)
    trial.behavior = np.minimum(trial.behavior + 5e-6 * rng.normal(size=trial.ids.shape), 0.0)
    own = np.where(trial.mask, chosen(trial.trainer_logits, trial.ids, decoding), 0.0)
    trial.call["trainer_logprobs"] = own if decoding.top_p or decoding.top_k or decoding.min_p else None
    return trial


def precision(rng):
    trial = Trial.draw(rng, PLAIN)
    trial.engine_logits = trial.model.logits(trial.ids, str(rng.choice(["float16", "bfloat16"])))
    trial.behavior = chosen(trial.engine_logits, trial.ids, PLAIN)
    return trial


def temperature(rng):
    value = away_from_one(rng)
    trial = Trial.draw(rng, Decoding(temperature=value))
    way = rng.integers(3)
    if way == 0:  # raw log-probs recorded
        trial.behavior = chosen(trial.engine_logits, trial.ids, PLAIN)
    elif way == 1:  # no decoding recorded
        trial.call["decoding"] = None
    else:  # the trainer does not scale
        trial.call["trainer_logprobs"] = chosen(trial.trainer_logits, trial.ids, PLAIN)
    return trial


def temperature_after_softmax(rng):
    trial = Trial.draw(rng, Decoding(temperature=away_from_one(rng)))
    trial.behavior = chosen(trial.engine_logits, trial.ids, PLAIN) / trial.decoding.temperature
    if rng.integers(2):
        trial.call["decoding"] = None
    return trial


def truncation(rng):
    way = rng.integers(3)
    trial = Trial.draw(rng, filters(rng, 1.0 if way == 1 else away_from_one(rng)))
    if way == 1:
        trial.call["decoding"] = None
    if way == 2:
        p = distribution(trial.engine_logits, trial.decoding)
        trial.call["kept_ids"] = [[np.flatnonzero(row).tolist() for row in answer] for answer in p]
        trial.call["decoding"] = Decoding(temperature=trial.decoding.temperature)
    return trial


def raw_logprobs(rng):
    trial = Trial.draw(rng, filters(rng))
    processed = trial.behavior
    trial.behavior = chosen(trial.engine_logits, trial.ids, PLAIN)
    away = np.abs(processed - trial.behavior)[trial.mask == 1].mean()
    return trial if away >= NOISE_FACTOR * max(trial.noise(), 1e-4) else None


def shift(rng):
    trial = Trial.draw(rng, PLAIN)
    step = int(rng.choice([-1, 1]))
    if rng.integers(2):
        trial.behavior = np.where(trial.mask, np.roll(trial.behavior, step, axis=1), 0.0)
        trial.behavior[:, trial.num_prompt] = trial.behavior[:, trial.num_prompt + 1]
    else:
        trial.call["trainer_logits"] = np.roll(trial.trainer_logits, step, axis=1)
    return trial


def shard_boundary(rng):
    trial = Trial.draw(rng, PLAIN, response=(48, 96))
    shards = int(rng.choice([2, 4, 8]))
    labels = trial.ids.reshape(len(trial.ids), shards, -1)
    wrong = np.roll(labels, 1, axis=-1).reshape(trial.ids.shape)
    first = np.arange(trial.ids.shape[1]) % labels.shape[-1] == 0
    ids = np.where(first, wrong, trial.ids)
    trial.call["trainer_logprobs"] = np.where(trial.mask, chosen(trial.trainer_logits, ids, PLAIN), 0.0)
    if rng.integers(2):
        trial.call["trainer_logits"] = None
    return trial


def wrong_entry(rng):
    """The trainer gathers the entry beside the sampled token's."""
    trial = Trial.draw(rng, PLAIN)
    ids = (trial.ids + 1) % len(trial.model.embed)
    trial.call["trainer_logprobs"] = np.where(trial.mask, chosen(trial.trainer_logits, ids, PLAIN), 0.0)
    return trial


def mask(rng):
    trial = Trial.draw(rng, PLAIN)
    num = int(rng.integers(1, 4))
    if rng.integers(2):  # the mask begins inside the prompt, where the engine reports 0
        trial.mask[:, trial.num_prompt - num : trial.num_prompt] = 1
    else:  # the mask runs into padding
        trial.ids[:, -num:] = PAD
        trial.trainer_logits = trial.model.logits(trial.ids)
        trial.engine_logits = trial.model.logits(trial.ids, trial.number_format)
        trial.behavior[:, -num:] = 0.0
    return trial


def sentinel(rng):
    trial = Trial.draw(rng, PLAIN)
    share = float(rng.choice([0.05, 0.2, 1.0]))
    value = 0.0 if share == 1.0 else float(rng.choice([0.0, -100.0, -9999.0]))
    trial.behavior = np.where(rng.random(trial.ids.shape) < share, value, trial.behavior)
    return trial


def other_tokens(rng):
    trial = Trial.draw(rng, PLAIN, response=(48, 96))
    theirs = trial.ids.copy()
    vocab = len(trial.model.embed)
    if rng.integers(2):  # the template drifted: another prompt
        theirs[:, :3] = rng.integers(1, vocab, size=(len(theirs), 3))
        trial.call["evidence"] = Evidence(engine_tokens=theirs)
    else:  # retokenised from some token on: several ids of the context are others
        at = int(rng.integers(trial.num_prompt + 10, trial.ids.shape[1] - 12))
        theirs[:, at - 8 : at] = rng.integers(1, vocab, size=(len(theirs), 8))
    engine = trial.model.logits(theirs, trial.number_format)
    if "evidence" not in trial.call:  # only what follows was computed in the other context
        engine = np.where((np.arange(trial.ids.shape[1]) >= at)[None, :, None], engine, trial.engine_logits)
    trial.behavior = np.where(trial.mask, chosen(engine, trial.ids, PLAIN), 0.0)
    return trial


def quantized_weights(rng):
    trial = Trial.draw(rng, PLAIN)
    engine = trial.model.quantized(int(rng.choice([4, 8])))
    trial.behavior = chosen(engine.logits(trial.ids, trial.number_format), trial.ids, PLAIN)
    if rng.integers(2):
        trial.call["evidence"] = Evidence(logits={"quantized_weights": engine.logits(trial.ids)})
    else:
        trial.call["evidence"] = Evidence(gap_by_step=trial.gap() * rng.uniform(0.85, 1.15, size=8))
        return trial if trial.gap() > 8 * bfloat16_noise(trial) else None
    return trial


def bfloat16_noise(trial):
    delta = chosen(trial.model.logits(trial.ids, "bfloat16"), trial.ids, PLAIN) - chosen(
        trial.trainer_logits, trial.ids, PLAIN
    )
    return max(float(np.abs(delta[trial.mask == 1]).mean()), 1e-4)


def stale_weights(rng):
    trial = Trial.draw(rng, PLAIN)
    old = trial.model.moved(rng, float(rng.uniform(0.05, 0.4)))
    trial.behavior = chosen(old.logits(trial.ids, trial.number_format), trial.ids, PLAIN)
    series = [trial.gap() / rng.uniform(8, 20)] * 3 + [trial.gap()]
    options = [
        Evidence(fingerprints=("9f3a", "0c11")),
        Evidence(gap_by_step=series),
        Evidence(logits={"stale_weights": old.logits(trial.ids)}),
    ]
    trial.call["evidence"] = options[rng.integers(3)]
    return trial if trial.gap() > 8 * bfloat16_noise(trial) else None


def stale_kv(rng):
    trial = Trial.draw(rng, PLAIN)
    old = trial.model.moved(rng, float(rng.uniform(0.3, 1.0)))
    logits = trial.model.logits(trial.ids, trial.number_format, old=old, cached=trial.num_prompt)
    trial.behavior = chosen(logits, trial.ids, PLAIN)
    rise = list(trial.gap() * np.linspace(0.2, 1.0, 6))
    options = [Evidence(hidden_kv_lag=17), Evidence(gap_by_step=[*rise, rise[0], rise[0] * 1.4], restarts=[6])]
    trial.call["evidence"] = options[rng.integers(2)]
    return trial if trial.gap() > 8 * bfloat16_noise(trial) else None


def policy_lag(rng):
    trial = Trial.draw(rng, PLAIN)
    old = trial.model.moved(rng, float(rng.uniform(0.05, 0.4)))
    trial.behavior = chosen(old.logits(trial.ids, trial.number_format), trial.ids, PLAIN)
    trial.call["lag"] = int(rng.integers(1, 33))
    return trial if trial.gap() > 0.06 else None


def exact_ratio(rng):
    trial = Trial.draw(rng, PLAIN, answers=2, response=(200, 400))
    old = trial.model.moved(rng, float(rng.uniform(0.003, 0.02)))
    trial.behavior = chosen(old.logits(trial.ids), trial.ids, PLAIN)
    trial.call["lag"] = 1
    sums = ((chosen(trial.trainer_logits, trial.ids, PLAIN) - trial.behavior) * trial.mask).sum(-1)
    return trial if trial.gap() < 0.045 and np.abs(sums).max() > 0.6 else None


def undetermined(rng):
    way = rng.integers(3)
    if way == 0:  # old weights, and nothing in the record that says so
        trial = stale_weights(rng)
        if trial is not None:
            trial.call["evidence"] = None
        return trial
    trial = Trial.draw(rng, filters(rng) if way == 1 else PLAIN)
    own = chosen(trial.model.logits(trial.ids), trial.ids, PLAIN)
    if way == 1:  # sampled values alone: a kept set, decoding not recorded
        trial.behavior = chosen(trial.trainer_logits, trial.ids, trial.decoding)
    else:  # the same picture from values divided by a temperature above 1
        hot = float(rng.uniform(1.2, 1.6))
        trial.behavior, own = own / hot, chosen(trial.trainer_logits, trial.ids, Decoding(temperature=hot))
        away = (own - trial.behavior)[trial.mask == 1]
        if away.max() > 1e-4:
            return None
    trial.call |= {"trainer_logits": None, "decoding": None, "trainer_logprobs": np.where(trial.mask, own, 0.0)}
    return trial


CAUSES = (none, precision, temperature, temperature_after_softmax, truncation, raw_logprobs, shift, shard_boundary)
CAUSES += (mask, sentinel, other_tokens, quantized_weights, stale_weights, stale_kv, policy_lag, exact_ratio)
CAUSES += (undetermined, wrong_entry)
FREE = (none, precision, raw_logprobs, exact_ratio)


def draw(cause, seed: int) -> tuple[Trial, int]:
    """A trial of `cause` whose fault stands out of the noise, and how many draws did not."""
    rng = np.random.default_rng([seed, CAUSES.index(cause)])
    for attempt in range(200):
        trial = cause(rng)
        if trial is None:
            continue
        trial.behavior = np.where(trial.mask, trial.behavior, 0.0)
        low = 3e-4 if cause is precision else 0.0 if cause in FREE else NOISE_FACTOR * max(trial.noise(), 1e-4)
        if trial.gap() >= low:
            return trial, attempt
    raise RuntimeError(f"{cause.__name__}, seed {seed}: no draw stands out of the noise")
