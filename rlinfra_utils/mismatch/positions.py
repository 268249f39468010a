"""Tests of where the difference sits: shifts, mask edges, placeholders, shard boundaries, the first other token.

Models: log-probs that are right but stand at the wrong place, and a few places that are wrong. Needs no logits,
uses them where they are. Leaves out differences spread over all tokens (`processing.py`, `origin.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlinfra_utils.mismatch.case import Case
from rlinfra_utils.mismatch.compare import SAME_MAX
from rlinfra_utils.mismatch.distributions import FULL_SOFTMAX, token_logprobs
from rlinfra_utils.mismatch.findings import Finding
from rlinfra_utils.mismatch.judging import ACCEPT_SHARE, NOISE_FACTOR, judge
from rlinfra_utils.rollouts import Decoding

#: A token stands out when its difference in logits is this many times the median; the tests look for few that do.
_OUTLIER_FACTOR = 10.0
_MAX_OUTLIER_SHARE = 0.49
_MIN_PAIRS = 3
_SHARDS = (*range(2, 17), 32, 64)
_MIN_SHARD_TOKENS = 4
#: F-score of a grid of boundaries: where text repeats, a wrong label is often the right one, so precision weighs more.
_MIN_GRID_SCORE, _GRID_BETA = 0.6, 0.25
#: One boundary of three or more holds at most this share of the outliers at boundaries.
_MAX_AT_ONE_BOUNDARY = 0.7
#: Largest chance that as many outliers fall on the boundaries of some grid without a cause.
_MAX_GRID_CHANCE = 0.001
#: A placeholder leaves at most this share of the difference once its tokens are set aside.
_SENTINEL_LEFT_SHARE = 0.1
_MIN_SIDE_TOKENS = 6
_MIN_CONTRAST = 8.0


def tests(case: Case) -> Iterator[Finding]:
    """Findings of every test of places."""
    yield shift(case)
    outliers = _outliers(case)
    yield sentinel(case, outliers)
    if outliers is None:
        for cause in ("mask", "shard_boundary"):
            yield Finding(cause, "ruled out", "the difference is not one of a few tokens")
    else:
        yield mask_edges(case, outliers)
        yield shard_boundary(case, outliers)
    if case.evidence.engine_tokens is None:
        yield from divergence(case)


def shift(case: Case) -> Finding:
    """Behaviour log-probs moved by one token, or tokens scored by the neighbour's logits."""
    options = []
    answers, positions, length = case.rows, case.positions, case.mask.shape[1]
    for step in (-1, 1):
        moved = positions + step
        inside = (moved >= 0) & (moved < length)
        pair = inside & case.mask[answers, np.where(inside, moved, 0)]
        neighbour = case.behavior[answers[pair], moved[pair]]
        options.append(
            (case.trainer[answers[pair], positions[pair]] - neighbour, f"trainer[t] against behaviour[t{step:+d}]")
        )
        if case.logits is not None:
            rows = case.logits[answers[inside], moved[inside]]
            usable = np.isfinite(rows).all(-1)
            scored = token_logprobs(rows[usable], case.ids[inside][usable], Decoding(temperature=case.temperature))
            options.append((scored - case.behavior_logprobs[inside][usable], f"token t scored by logits[t{step:+d}]"))
    options = [(residual, text) for residual, text in options if len(residual) >= _MIN_PAIRS]
    if not options:
        return Finding("shift", "not excluded", f"{len(case.ids)} tokens are too few to compare neighbours")
    residual, text = min(options, key=lambda option: np.abs(option[0]).mean())
    return judge(case, "shift", residual, text)


def sentinel(case: Case, outliers: np.ndarray | None) -> Finding:
    """One value, repeated to the last bit, at the tokens that differ: a placeholder."""
    size = np.abs(case.delta)
    best = Finding("sentinel", "ruled out", "no value is repeated where the log-probs differ")
    trainer = case.trainer[case.mask]
    sides = (("behaviour", case.behavior_logprobs, trainer), ("trainer", trainer, case.behavior_logprobs))
    for name, values, others in sides:
        distinct, group, counts = np.unique(values, return_inverse=True, return_counts=True)
        likeliest = int(np.bincount(group, weights=size).argmax())
        value, is_it = distinct[likeliest], group == likeliest
        is_lone = counts[likeliest] == 1 and value.is_integer() and value != 0
        left = size[~is_it]
        if not left.size and case.gap <= NOISE_FACTOR * case.noise:  # equal throughout, and close throughout
            continue
        is_odd = value.is_integer() and left.size > 0
        if not is_lone and not is_odd and np.ptp(others[is_it]) <= SAME_MAX:
            continue
        is_all_of_it = left.sum() <= _SENTINEL_LEFT_SHARE * size.sum()
        stands_out = outliers is not None and counts[likeliest] >= _MIN_PAIRS and outliers[is_it].all()
        if size[is_it].mean() <= SAME_MAX or not (is_all_of_it or stands_out):
            continue
        text = f"{name} log-prob is {value:g} at {counts[likeliest]} of {len(values)} tokens"
        left_out = int(is_it.sum())
        found = judge(case, "sentinel", left if left.size else np.zeros(1), text, left_out)
        best = min(best, found, key=lambda f: f.status == "ruled out")
    return best


def filled_with_zeros(case: Case) -> Finding | None:
    """Log-probs of 0.0 at every token where decoding is not greedy: a field that was never filled."""
    if (case.decoding is not None and case.decoding.temperature == 0) or _is_certain(case):
        return None
    for name, values in (("behaviour", case.behavior_logprobs), ("trainer", case.trainer[case.mask])):
        if (values == 0.0).all():
            also = "" if case.decoding else "; greedy decoding, or a filter that keeps one token, would say so too"
            text = f"{name} log-prob is 0.0 at each of {len(values)} tokens{also}"
            status = "confirmed" if len(values) > 1 and case.decoding else "suspected"
            return Finding("sentinel", status, text, num_left_out=len(values))
    return None


def _is_certain(case: Case) -> bool:
    """Whether log-probs of 0.0 are right: by these logits and this decoding no other token could have been drawn."""
    if case.logits is None:
        return False
    processed = token_logprobs(case.scores, case.ids, case.decoding or FULL_SOFTMAX)
    return bool(np.abs(processed).max() <= SAME_MAX)


def mask_edges(case: Case, outliers: np.ndarray) -> Finding:
    """The tokens that differ open or close the masked stretch of their answer."""
    at_edge = np.zeros(len(outliers), dtype=bool)
    for answer in np.unique(case.rows):
        mine = np.flatnonzero(case.rows == answer)
        others = np.flatnonzero(~outliers[mine])
        first, last = (others[0], others[-1]) if others.size else (len(mine), len(mine) - 1)
        tail = mine[last + 1 :]
        at_edge[mine[:first]] = True
        if len(tail) <= 2 or len(np.unique(case.ids[tail])) == 1:
            at_edge[tail] = True
    size = np.abs(case.delta)
    if size[at_edge].sum() <= ACCEPT_SHARE * size[outliers].sum():
        return Finding("mask", "ruled out", "the tokens that differ are not at the ends of answers")
    text = f"{at_edge.sum()} tokens at the ends of {len(np.unique(case.rows[at_edge]))} answers hold the difference"
    return judge(case, "mask", case.delta[~at_edge], text, int(at_edge.sum()), reaches_noise=True)


def shard_boundary(case: Case, outliers: np.ndarray) -> Finding:
    """The tokens that differ stand at multiples of tokens / shards, or one before."""
    best_score, best, text = 0.0, None, ""
    length = case.mask.shape[1]
    sizes = {shards: -(-length // shards) for shards in _SHARDS if length / shards > _MIN_SHARD_TOKENS - 1}
    for shards, size in sizes.items():
        for offset, side in ((0, "first"), (-1, "last")):
            here = ((case.positions - offset) % size == 0) & (case.positions - offset > 0)
            score = _grid_score(case, outliers, here, 2 * len(sizes))
            if score > best_score:
                best_score, best, text = score, here, f"{side} tokens of {shards} shards of {size} tokens"
    if best is None or best_score < _MIN_GRID_SCORE:
        return Finding("shard_boundary", "ruled out", "the tokens that differ follow no shard boundary")
    return judge(case, "shard_boundary", case.delta[~best], text, int(best.sum()))


def _grid_score(case: Case, outliers: np.ndarray, here: np.ndarray, num_grids: int) -> float:
    """F-score of the boundary tokens `here` as the place of the difference; 0 where chance would do as well."""
    hit = here & outliers
    num_hits, num_outliers = int(hit.sum()), int(outliers.sum())
    if num_hits < 2:
        return 0.0
    log_ways = math.lgamma(num_outliers + 1) - math.lgamma(num_hits + 1) - math.lgamma(num_outliers - num_hits + 1)
    log_chance = math.log(num_grids) + log_ways + num_hits * math.log(here.mean())
    num_boundaries = len(np.unique(case.positions[here]))
    most = np.bincount(case.positions[hit]).max()
    is_spread = num_boundaries < 3 or most <= _MAX_AT_ONE_BOUNDARY * num_hits
    if log_chance > math.log(_MAX_GRID_CHANCE) or not is_spread:
        return 0.0
    size = np.abs(case.delta)
    precision, recall = size[here].sum() / size.sum(), num_hits / here.sum()
    return (1 + _GRID_BETA**2) * precision * recall / (_GRID_BETA**2 * precision + recall)


def divergence(case: Case) -> Iterator[Finding]:
    """Answers that agree up to one token and differ from it on: the context was another one from there."""
    size = _in_logits(case)
    left, num_after, places, num_answers = [], 0, [], 0
    for answer in np.unique(case.rows):
        mine = np.flatnonzero(case.rows == answer)
        num_answers += 1
        at = _change_point(size[mine])
        left.append(np.abs(case.delta[mine[:at]]))
        if at < len(mine):
            num_after += len(mine) - at
            places.append((int(answer), int(case.positions[mine[at]])))
    if len(places) < max(1, num_answers / 2):
        return
    text = f"equal before, different from (answer, token) {places[0]} on; weights swapped there would look the same"
    finding = judge(case, "other_tokens", np.concatenate(left), text, num_after)
    if finding.status == "confirmed":
        yield replace(finding, status="suspected")


def _change_point(size: np.ndarray) -> int:
    """Index from which `size` is larger by `_MIN_CONTRAST` at least; its length where there is none."""
    num = len(size)
    at = np.arange(_MIN_SIDE_TOKENS, num - _MIN_SIDE_TOKENS + 1)
    if not at.size:
        return num
    total = size.cumsum()
    before, after = total[at - 1] / at + 1e-7, (total[-1] - total[at - 1]) / (num - at) + 1e-7
    best = int((at * np.log(before) + (num - at) * np.log(after)).argmin())
    cut = int(at[best])
    is_step = after[best] >= _MIN_CONTRAST * before[best] and np.median(size[cut:]) > size[:cut].max()
    return cut if is_step else num


def _outliers(case: Case) -> np.ndarray | None:
    """Tokens that stand out, shape (n,); None where there are none or too many to be a few places."""
    size = _in_logits(case)
    outliers = (np.abs(case.delta) > SAME_MAX) & (size > _OUTLIER_FACTOR * float(np.median(size)))
    return outliers if 0 < outliers.mean() <= _MAX_OUTLIER_SHARE else None


def _in_logits(case: Case) -> np.ndarray:
    """|delta| over the most that a unit of a logit moves either log-prob, shape (n,): noise is alike at all tokens."""
    less_likely = np.minimum(case.trainer[case.mask], case.behavior_logprobs)
    return np.abs(case.delta) / (1.0 - np.exp(less_likely) + 1e-3)
