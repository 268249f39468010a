"""Tests of how logits became log-probs: temperature, filters, raw values, rounding. All of them need logits.

Models: one fault at a time, recomputed from the trainer's logits; a parameter that is not recorded is fitted.
Leaves out: penalties, and a temperature and a filter that are both unrecorded. Use: `for finding in tests(case): ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rlinfra_utils.mismatch.case import Case
from rlinfra_utils.mismatch.compare import SAME_MEAN
from rlinfra_utils.mismatch.distributions import FULL_SOFTMAX, descending, renormalized, token_logprobs
from rlinfra_utils.mismatch.findings import Finding
from rlinfra_utils.mismatch.judging import CONFIRM_SHARE, MIN_FIT_TOKENS, NOISE_FACTOR, is_exact, judge, judge_fit
from rlinfra_utils.rollouts import Decoding

_TEMPERATURES = np.geomspace(0.1, 10.0, 31)
_NUM_GOLDEN_STEPS = 24
#: Of the sampled tokens, this share may fall outside the trainer's own kept set before the filter is no explanation.
_MAX_LOST_SHARE = 0.1


def tests(case: Case) -> Iterator[Finding]:
    """Findings of every test of processing that this record allows."""
    trainer = _trainer_temperature(case)
    if trainer is None:
        yield wrong_entry(case)
        return
    raw = raw_instead_of_processed(case) if case.temperature == 1 else None
    if raw is not None:
        yield raw
    yield temperature(case, trainer)
    yield after_softmax(case, trainer)
    if case.kept is not None:
        recomputed = renormalized(case.scores, case.ids, case.kept, case.temperature)
        yield judge(case, "truncation", recomputed - case.behavior_logprobs, "renormalised over the recorded kept set")
    else:
        yield truncation(case)
    yield precision(case)


def raw_instead_of_processed(case: Case) -> Finding | None:
    """Raw log-probs beside filters in `decoding`: they agree with the trainer and not with the policy that sampled."""
    decoding = case.decoding
    if case.logits is None or decoding is None or decoding.temperature is None or not decoding.filters:
        return None
    processed = token_logprobs(case.scores, case.ids, decoding)
    kept = np.isfinite(processed)
    away = _size(processed[kept] - case.behavior_logprobs[kept]) if kept.any() else np.inf
    if away <= SAME_MEAN:
        return None
    residual = token_logprobs(case.scores, case.ids) - case.behavior_logprobs
    evidence = f"the unfiltered softmax; the policy of {_describe(decoding)} is {away:.3g} nats away"
    return judge(case, "raw_logprobs", residual, evidence, gap=away)


def temperature(case: Case, trainer: float) -> Finding:
    """Behaviour log-probs at another temperature of the logits than `trainer`: 1, the recorded one, or a fitted one."""
    behavior, some = case.behavior_logprobs, case.sample

    def residual(value: float) -> np.ndarray:
        return token_logprobs(case.scores, case.ids, Decoding(temperature=value)) - behavior

    values = {1.0} | ({case.decoding.temperature} - {None} if case.decoding else set())
    if len(np.unique(behavior)) >= MIN_FIT_TOKENS:
        scores, ids = case.scores[some], case.ids[some]
        values.add(_fit(lambda t: token_logprobs(scores, ids, Decoding(temperature=t)), behavior[some]))
    tried = {value: residual(value) for value in values if not _is_near(value, trainer)}
    if not tried:
        return Finding(
            "temperature", "not excluded", f"no temperature but the trainer's {trainer:.4g} fits or is recorded"
        )
    best = min(tried, key=lambda value: _size(tried[value]))
    side = f"behaviour {best:.4g}, trainer {trainer:.4g}"
    if best == 0:
        side += " (greedy: its log-probs are 0)"
    return judge_fit(case, "temperature", tried[best], side)


def after_softmax(case: Case, trainer: float) -> Finding:
    """Behaviour log-probs that are raw log-probs divided by a temperature."""
    raw, behavior = token_logprobs(case.scores, case.ids), case.behavior_logprobs
    used = (behavior < 0) & (raw < 0)
    values = [] if case.decoding is None or not case.decoding.temperature else [case.decoding.temperature]
    if len(np.unique(behavior[used])) >= MIN_FIT_TOKENS:
        values.append(fitted_divisor(raw[used], behavior[used]))
    values = [value for value in values if not _is_near(value, 1.0)]
    if not values:
        text = f"no divisor but 1 fits {used.sum()} tokens or is recorded; the trainer is at {trainer:.4g}"
        return Finding("temperature_after_softmax", "not excluded", text)
    value = min(values, key=lambda t: _size(raw / t - behavior))
    return judge_fit(case, "temperature_after_softmax", raw / value - behavior, f"raw log-prob / {value:.4g}")


def fitted_divisor(logprobs: np.ndarray, behavior: np.ndarray) -> float:
    """The t at which logprobs / t come nearest to `behavior`, by least squares in 1 / t; both (n,) and below 0."""
    return float(np.sum(logprobs**2) / np.sum(logprobs * behavior))


def wrong_entry(case: Case) -> Finding:
    """The sampled token's entry of the logits, where the trainer's log-probs are not it."""
    recomputed = token_logprobs(case.scores, case.ids, case.decoding or FULL_SOFTMAX)
    kept = np.isfinite(recomputed)
    residual = recomputed[kept] - case.behavior_logprobs[kept]
    return judge(case, "wrong_entry", residual, "gathered again from the logits", int((~kept).sum()))


def truncation(case: Case) -> Finding:
    """Behaviour log-probs over a kept set: that of the recorded decoding, else the filter that fits best."""
    recorded = case.decoding
    options = []
    if recorded is not None and cuts(recorded):
        options.append(recorded)
    elif len(np.unique(case.behavior_logprobs)) >= MIN_FIT_TOKENS:
        options = _fit_filters(case)
    if not options:
        return Finding("truncation", "not excluded", f"{len(case.ids)} tokens are too few to fit a filter")
    best, best_residual, best_kept = None, np.array([np.inf]), None
    for option in options:
        recomputed = token_logprobs(case.scores, case.ids, option)
        kept = np.isfinite(recomputed)
        residual = recomputed[kept] - case.behavior_logprobs[kept]
        if kept.mean() >= 1 - _MAX_LOST_SHARE and _size(residual) < _size(best_residual):
            best, best_residual, best_kept = option, residual, kept
    if best is None:
        return Finding("truncation", "ruled out", "sampled tokens lie outside every kept set tried", np.inf, np.inf)
    before, num_lost = case.delta[best_kept], int((~best_kept).sum())
    if best is recorded:
        return judge(case, "truncation", best_residual, f"recorded {_describe(best)}", num_lost, _size(before))
    return judge_fit(case, "truncation", best_residual, f"fitted {_describe(best)}", num_lost, before)


def precision(case: Case) -> Finding:
    """Log-probs of rounded logits; else a difference of that size without a bias."""
    left = {dtype: case.delta + added for dtype, added in case.rounding.items()}
    best = min(left, key=lambda dtype: _size(left[dtype]))
    finding = judge(case, "precision", left[best], f"logits rounded to {best}")
    if is_exact(finding) and finding.status == "confirmed":
        return finding
    times = case.gap / case.noise
    bias = abs(case.delta.mean()) / (case.delta.std() / np.sqrt(len(case.delta)) + 1e-12)
    evidence = f"{times:.2g} times what rounding these logits to bfloat16 brings, bias {bias:.1f} standard errors"
    is_noise = times <= NOISE_FACTOR and (bias <= 5 or abs(case.delta.mean()) <= 0.3 * case.gap)
    status = "suspected" if is_noise else "ruled out"
    return Finding("precision", status, evidence, case.gap, float(np.abs(case.delta).max()))


def _trainer_temperature(case: Case) -> float | None:
    """The temperature at which the logits give the trainer's log-probs; None where there is none."""
    if not case.is_trainer_given:
        return case.temperature
    trainer, some = case.trainer[case.mask], case.sample

    def recompute(value: float) -> np.ndarray:
        return token_logprobs(case.scores[some], case.ids[some], Decoding(temperature=value))

    values = [case.temperature, 1.0]
    if len(np.unique(trainer)) >= MIN_FIT_TOKENS:
        values.append(_fit(recompute, trainer[some]))
    is_noise = case.gap <= NOISE_FACTOR * case.noise
    tolerance = max(SAME_MEAN, case.gap * (1.0 if is_noise else CONFIRM_SHARE))
    for value in values:
        if _size(recompute(value) - trainer[some]) <= tolerance:
            return value
    processed = token_logprobs(case.scores[some], case.ids[some], case.decoding or FULL_SOFTMAX)
    return case.temperature if _size(processed - trainer[some]) <= tolerance else None


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= 0.01 * other


def _fit(recompute: Callable[[float], np.ndarray], target: np.ndarray) -> float:
    """The temperature of least mean residual: a coarse grid, then golden sections on the log axis."""

    def cost(log_t: float) -> float:
        return _size(recompute(float(np.exp(log_t))) - target)

    grid = np.log(_TEMPERATURES)
    best = int(np.argmin([cost(x) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (np.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    cost_left, cost_right = cost(left), cost(right)
    for _ in range(_NUM_GOLDEN_STEPS):
        if cost_left < cost_right:
            high, right, cost_right = right, left, cost_left
            left = high - golden * (high - low)
            cost_left = cost(left)
        else:
            low, left, cost_left = left, right, cost_right
            right = low + golden * (high - low)
            cost_right = cost(right)
    return float(np.exp((low + high) / 2))


def _fit_filters(case: Case) -> list[Decoding]:
    """top_k, top_p and min_p that agree with the most tokens, at the recorded temperature.

    A kept set is a head of the sorted vocabulary, and its mass is exp(trainer - behaviour): each token thus says how
    long the head was, and with it a range of each parameter. The value within the most ranges is the candidate.
    """
    some = case.sample
    z = np.asarray(case.scores[some], dtype=np.float64) / case.temperature
    _, probs = descending(z)
    heads = probs.cumsum(-1)
    full = token_logprobs(case.scores[some], case.ids[some], Decoding(temperature=case.temperature))
    mass = np.exp(np.minimum(full - case.behavior_logprobs[some], 0.0))
    last = np.abs(heads - mass[:, None]).argmin(-1)
    at = np.arange(len(some))
    informative = last < probs.shape[-1] - 1
    if not informative.any():
        return []
    before = heads[at, last] - probs[at, last]
    relative = probs[at, last] / probs[:, 0]
    beyond = probs[at, np.minimum(last + 1, probs.shape[-1] - 1)] / probs[:, 0]
    top_k = int(_most_agreed(last[informative] + 0.5, last[informative] + 1.5))
    top_p = _most_agreed(before, heads[at, last])
    min_p = _most_agreed(beyond, relative)
    candidates = [Decoding(temperature=case.temperature, top_k=max(top_k, 1))]
    if 0 < top_p < 1:
        candidates.append(Decoding(temperature=case.temperature, top_p=float(top_p)))
    if 0 < min_p <= 1:
        candidates.append(Decoding(temperature=case.temperature, min_p=float(min_p)))
    return candidates


def _most_agreed(low: np.ndarray, high: np.ndarray) -> float:
    """The middle of the stretch that lies in the most intervals [low, high]."""
    edges = np.unique(np.concatenate([low, high]))
    if len(edges) == 1:
        return float(edges[0])
    middles = (edges[:-1] + edges[1:]) / 2
    inside = np.searchsorted(np.sort(low), middles, side="right") - np.searchsorted(np.sort(high), middles, side="left")
    return float(middles[inside.argmax()])


def cuts(decoding: Decoding) -> bool:
    """Whether decoding leaves tokens out."""
    has_top_p = decoding.top_p is not None and decoding.top_p < 1
    return has_top_p or (decoding.top_k or 0) > 0 or decoding.min_p > 0 or bool(decoding.banned_token_ids)


def _describe(decoding: Decoding) -> str:
    shown = {
        "temperature": decoding.temperature,
        "min_p": decoding.min_p,
        "top_k": decoding.top_k,
        "top_p": decoding.top_p,
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value not in (None, 0))


def _size(residual: np.ndarray) -> float:
    """Mean |residual|; a value that cannot be is as bad as can be."""
    return float(np.abs(residual).mean()) if residual.size else np.inf
