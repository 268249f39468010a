"""The rules of `checks_tokens.py` for a batch of rows: lengths, masks, padding, ids, log-probs, spans.

Models: the same rules on flat arrays with offsets. Rows that a rule does not concern ride along with values
that break nothing. Leaves out messages, and what has no token axis (`table_policy.py`).
Use: `axes = TableAxes(batch, hits)`; `mark_tokens(batch, axes, hits)`. `validate_table` is the door.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlinfra_utils.doors import LOGPROB_TOLERANCE
from rlinfra_utils.rollouts.checks_tokens import FILLER_TEMPERATURE, FILLER_TOKENS, LOGPROB_SENTINEL
from rlinfra_utils.rollouts.columns import Lists, numbers, place
from rlinfra_utils.rollouts.hits import Hits
from rlinfra_utils.rollouts.structure import TOKEN_LISTS


class Running:
    """How many of a boolean axis' entries are set before each position; rows are `offsets` apart."""

    def __init__(self, flags: np.ndarray, offsets: np.ndarray) -> None:
        self.before = np.concatenate([[0], np.cumsum(flags)])
        self.start, self.stop = offsets[:-1], offsets[1:]
        self.flags = flags

    def count(self, first: np.ndarray | int = 0, last: np.ndarray | None = None) -> np.ndarray:
        """Set entries in [first, last) of each row, last None for the row's end; shape (rows,)."""
        stop = self.stop if last is None else self.start + last
        return self.before[stop] - self.before[self.start + first]

    def end(self) -> np.ndarray:
        """One past the last set entry of each row, 0 where none is set."""
        positions = np.concatenate([[0], np.flatnonzero(self.flags)])
        return np.where(self.count() > 0, positions[self.before[self.stop]] - self.start + 1, 0)


class TableAxes:
    """The rows' axes: for each row which parts are sound, and flat masks over the response axis (0 if unsound)."""

    def __init__(self, batch: pa.RecordBatch, hits: Hits) -> None:
        self.prompt, self.response = Lists(batch.column("prompt_tokens")), Lists(batch.column("response_tokens"))
        self.policy_mask, self.env_mask = Lists(batch.column("policy_mask")), Lists(batch.column("env_mask"))
        self.num_response = self.response.lengths
        self.num_tokens = self.prompt.lengths + self.num_response
        self.known = self.prompt.present & self.response.present
        halves = np.stack([self.prompt.lengths, self.num_response], axis=1).ravel()
        self.in_response = np.repeat(np.tile([False, True], batch.num_rows), halves)
        self.sound, self.policy = self._mask(self.policy_mask, hits)
        self.env_sound, self.env = self._mask(self.env_mask, hits)
        self.env_unsound = self.env_mask.present & ~self.env_sound
        self.running = Running(self.policy, self.response.offsets)
        self.num_policy, self.end = self.running.count(), self.running.end()
        self.sampled = Lists(batch.column("sampled_tokens"))
        self.retokenised = self._retokenised()
        self.response_length = length = numbers(batch.column("response_length"))
        in_range = (length.values >= 0) & (length.values <= self.num_response)
        moved = self.retokenised & (self.sampled.lengths != self.num_policy)
        self.has_length = length.present & in_range & ~(moved & (length.values == self.sampled.lengths))
        self.logprobs = Lists(batch.column("behavior_logprobs"))
        self.has_logprobs = self.sound & self.logprobs.present & (self.logprobs.lengths == self.num_response)

    def _mask(self, mask: Lists, hits: Hits) -> tuple[np.ndarray, np.ndarray]:
        """Which rows have a sound mask, and its part over the response as flat booleans."""
        sound = mask.present & self.known & (mask.lengths == self.num_tokens)
        if not mask.present.any():
            return sound, np.zeros(self.response.offsets[-1], bool)
        odd = mask.rows(mask.values.view(np.uint8) > 1)
        hits.mark("mask_not_binary", odd)
        sound[odd] = False
        bits = mask.placed(sound, self.num_tokens, 0).view(bool)
        if mask is self.policy_mask:
            on_prompt = np.flatnonzero(bits & ~self.in_response)
            starts = np.concatenate([[0], np.cumsum(self.num_tokens)])
            hits.mark("mask_on_prompt", np.searchsorted(starts, on_prompt, side="right") - 1)
        return sound, bits[self.in_response]

    def _retokenised(self) -> np.ndarray:
        recorded = self.response.values[self.policy]
        given = self.sampled.present & self.sound
        return given & differ(recorded, self.num_policy, self.sampled.values, self.sampled.lengths, given)


def differ(a: np.ndarray, a_lengths: np.ndarray, b: np.ndarray, b_lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether row i of flat `a` differs from row i of flat `b`, in length or in an entry, for each of `rows`."""
    result = rows & (a_lengths != b_lengths)
    equal = rows & ~result
    if equal.any():
        unlike = a[np.repeat(equal, a_lengths)] != b[np.repeat(equal, b_lengths)]
        result[np.repeat(np.flatnonzero(equal), a_lengths[equal])[unlike]] = True
    return result


def mark_tokens(batch: pa.RecordBatch, axes: TableAxes, hits: Hits) -> None:
    """Mark every code that sits on a token axis."""
    decoding = batch.column("decoding")
    _lengths(batch, axes, hits)
    _token_ids(batch, decoding, hits)
    _masks(batch, decoding, axes, hits)
    engine = Lists(batch.column("engine_prompt_tokens"))
    prompt, both = axes.prompt, axes.prompt.present & engine.present
    hits.mark("prompt_mismatch", differ(prompt.values, prompt.lengths, engine.values, engine.lengths, both))
    hits.mark("retokenised", axes.retokenised)
    _logprobs(decoding, axes, hits)
    _spans(Lists(batch.column("version_spans")), axes, hits)


def _lengths(batch: pa.RecordBatch, axes: TableAxes, hits: Hits) -> None:
    for mask in (axes.policy_mask, axes.env_mask):
        hits.mark("length_mismatch", mask.present & axes.known & (mask.lengths != axes.num_tokens))
    per_token = Lists(batch.column("per_token"))
    owner = np.repeat(np.arange(batch.num_rows), per_token.lengths)
    entries = Lists(pc.struct_field(per_token.flat, "value")).lengths
    hits.mark("length_mismatch", owner[axes.known[owner] & (entries != axes.num_tokens[owner])])
    has_response = axes.response.present
    logprobs, length = axes.logprobs, axes.response_length
    wrong = logprobs.present & has_response & (logprobs.lengths != axes.num_response)
    hits.mark("length_mismatch", wrong & ~(axes.retokenised & (logprobs.lengths == axes.sampled.lengths)))
    wrong = length.present & has_response & ~axes.has_length
    hits.mark("length_mismatch", wrong & ~(axes.retokenised & (length.values == axes.sampled.lengths)))


def _token_ids(batch: pa.RecordBatch, decoding: pa.Array, hits: Hits) -> None:
    for array in [batch.column(name) for name in TOKEN_LISTS] + [pc.struct_field(decoding, "banned_token_ids")]:
        ids = Lists(array)
        if ids.values.min(initial=0) < 0:
            hits.mark("token_out_of_range", ids.rows(ids.values < 0))
    hits.mark("token_out_of_range", numbers(batch.column("eos_token_id")).values < 0)


def _masks(batch: pa.RecordBatch, decoding: pa.Array, axes: TableAxes, hits: Hits) -> None:
    mask = axes.policy_mask
    marks_any = Running(mask.values != 0, mask.offsets).count() > 0
    hits.mark("no_policy_tokens", axes.response.present & (axes.num_response == 0))
    hits.mark("no_policy_tokens", mask.present & ~marks_any)
    hits.mark("mask_overlap", axes.response.rows(axes.policy & axes.env))
    marked = axes.running if not axes.env.any() else Running(axes.policy | axes.env, axes.response.offsets)
    rows = axes.sound & ~axes.env_unsound
    length = np.where(axes.has_length, axes.response_length.values, 0)
    hits.mark("mask_past_length", rows & axes.has_length & (marked.count(first=length) > 0))
    length = np.where(axes.has_length, length, np.where(axes.env_sound, marked.end(), 0))
    hits.mark("mask_drops_token", rows & (marked.count(last=length) < length))
    unexplained = ~axes.env_mask.present & ~axes.response_length.present
    hits.mark("mask_zero_ambiguous", rows & unexplained & (axes.num_policy < axes.num_response))
    _eos(batch, decoding, axes, marked.flags, rows, hits)


def _eos(batch, decoding: pa.Array, axes: TableAxes, marked: np.ndarray, rows: np.ndarray, hits: Hits) -> None:
    eos = numbers(batch.column("eos_token_id"))
    is_eos, is_stop = (
        np.asarray(pc.equal(batch.column("stop_reason"), word).fill_null(False)) for word in ("eos", "stop")
    )
    ended = is_eos | (is_stop & (Lists(pc.struct_field(decoding, "stop")).lengths == 0))
    limit = np.where(axes.has_length, axes.response_length.values, axes.num_response)
    counted = axes.has_length | ~axes.response_length.present
    rows = np.flatnonzero(rows & ended & eos.present & counted & (axes.end > 0) & (axes.end < limit))
    follows = axes.response.offsets[rows] + axes.end[rows]
    ids, wanted = axes.response.values, eos.values[rows]
    hits.mark("eos_outside_mask", rows[(ids[follows] == wanted) & ~marked[follows] & (ids[follows - 1] != wanted)])


def _logprobs(decoding: pa.Array, axes: TableAxes, hits: Hits) -> None:
    rows, response = axes.has_logprobs, axes.response
    x = axes.logprobs.placed(rows, axes.num_response, -1.0)
    given = axes.policy if rows.all() else axes.policy & np.repeat(rows, axes.num_response)
    num_given = np.where(rows, axes.num_policy, 0)
    if axes.logprobs.flat.null_count:
        null = np.asarray(axes.logprobs.flat.is_null())
        null = place(null, axes.logprobs.lengths, rows, axes.num_response, False)
        num_null = Running(given & null, response.offsets).count()
        hits.mark("missing_field", (num_null > 0) & (num_null == num_given))
        hits.mark("logprob_missing", (num_null > 0) & (num_null < num_given))
        given, num_given = given & ~null, num_given - num_null
    suspect = np.flatnonzero(given & ~((x <= LOGPROB_TOLERANCE) & (x > LOGPROB_SENTINEL)))
    finite = np.isfinite(x[suspect])
    hits.mark("logprob_not_finite", response.rows(suspect[~finite]))
    hits.mark("logprob_positive", response.rows(suspect[finite & (x[suspect] > 0)]))
    hits.mark("logprob_sentinel", response.rows(suspect[finite & (x[suspect] < 0)]))
    num_zero = Running(given & (x == 0.0), response.offsets).count()
    hits.mark("logprob_all_zero", (num_given >= FILLER_TOKENS) & (num_zero == num_given) & _draws_freely(decoding))


def _draws_freely(decoding: pa.Array) -> np.ndarray:
    temperature, top_p, top_k, min_p = (
        numbers(pc.struct_field(decoding, name)) for name in ("temperature", "top_p", "top_k", "min_p")
    )
    filters = (top_k.values > 0) | (min_p.values > 0)
    filters |= Lists(pc.struct_field(decoding, "banned_token_ids")).lengths > 0
    return (temperature.values >= FILLER_TEMPERATURE) & (top_p.values == 1.0) & ~filters


def _spans(spans: Lists, axes: TableAxes, hits: Hits) -> None:
    hits.mark("bad_spans", spans.present & (spans.lengths == 0))
    rows = np.flatnonzero(spans.lengths)
    if not len(rows):
        return
    start, end, version = span_columns(spans)
    first, last = spans.offsets[rows], spans.offsets[rows + 1] - 1
    due = np.concatenate([[0], end[:-1]])
    due[first] = 0
    before = np.concatenate([version[:1], version[:-1]])
    before[first] = version[first]
    hits.mark("bad_spans", spans.rows((start != due) | (end <= start) | (version < before)))
    beyond = axes.response.present[rows] & (end[last] > axes.num_response[rows])
    of_sampled = axes.retokenised[rows] & (end[last] == axes.sampled.lengths[rows])
    hits.mark("bad_spans", rows[(beyond | (axes.end[rows] > end[last])) & ~of_sampled])


def span_columns(spans: Lists) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """start, end and version of all spans, each flat."""
    return tuple(numbers(pc.struct_field(spans.flat, name)).values for name in ("start", "end", "version"))
