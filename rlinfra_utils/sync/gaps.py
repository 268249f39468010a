"""What a series of mean log-prob gaps, one a sync, says about the syncs: `read_gaps`, and the lag of cached blocks.

Models: two signatures. Weights that a sync did not change: the gap jumps at the first real update, and no restart
helps. A prefix cache that outlived its weights: the gap grows with updates since the engine started and is gone after
a restart. Leaves out the proof, which is a fingerprint (`verify`): one series is a signature. Use:
`print(read_gaps([.010, .018, .201], reference=[.010, .018, .015], updates=[0, 0, 1]))`.

Sources: huggingface/trl issue 5312 (2026-03), NVIDIA-NeMo/RL pull 4018 (2026-09), prime-rl pull 1650 (2026-01).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rlinfra_utils.doors import listed, number, numbers, whole

#: A gap this many times its reference has broken away from it.
BREAK_RATIO = 3.0
#: A break that reaches this share of the largest gap within its first update is a jump, below it growth.
JUMP_SHARE = 0.5


@dataclass(frozen=True)
class GapReading:
    """`cause`: "stale_weights", "stale_kv", "before_any_update", "no_break" or "cannot_be_told".

    `index`: place of the first broken gap, None without one; `ratio`: that gap over its reference.
    """

    cause: str
    index: int | None
    ratio: float | None
    sentence: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}"


def read_gaps(
    gaps: Sequence[float],
    reference: Sequence[float] | float | None = None,
    restarts: Collection[int] = (),
    updates: Sequence[int] | None = None,
) -> GapReading:
    """Name the likeliest cause of a series of mean |trainer - behaviour| log-prob gaps in nats, one a sync.

    reference: what the gaps would be with a good sync, one for all or one each; without it the first gap. restarts:
    places of the first gap after an engine restart. updates: real updates (learning rate above 0) before each gap,
    rising; without it a gap counts as the first update's if it is `BREAK_RATIO` times the one before. Raises ValueError
    for malformed series.
    """
    series = numbers("gaps", gaps)
    expected = _reference(reference, series)
    done = None if updates is None else _updates(updates, len(series))
    places = listed("restarts", restarts, "places in gaps")
    starts = sorted(whole("restarts", place, 1, len(series) - 1) for place in places)
    ratio = series / expected
    broken = np.flatnonzero(ratio >= BREAK_RATIO)
    if not broken.size:
        largest = ratio.max()
        return GapReading("no_break", None, None, f"no gap reaches {BREAK_RATIO:g}x its reference ({largest:.2g}x)")
    first = int(broken[0])
    seen = f"gap {first + 1} is {ratio[first]:.1f}x its reference"
    if first == 0 or (done is not None and done[first] == done[0]):
        text = f"{seen} before any real update: not a sync; compare precision, decoding and tokens first"
        return GapReading("before_any_update", first, float(ratio[first]), text)
    cause, why = _shape(ratio, done, starts, first)
    return GapReading(cause, first, float(ratio[first]), f"{seen}, {why}")


def hidden_lag(version: int, block_versions: Sequence[int]) -> int:
    """Updates between the declared version and the oldest weights that a request's cached blocks were computed by.

    0: no block is older, so the declared version tells the truth. Otherwise the record is of several versions, and
    the cache has to be reset after each load, before the first request. Raises ValueError for a block that is newer.
    """
    version = whole("version", version, 0)
    blocks = listed("block_versions", block_versions, "versions")
    oldest = [whole(f"block_versions[{place}]", block, 0, version) for place, block in enumerate(blocks)]
    return version - min(oldest, default=version)


def _shape(ratio: np.ndarray, done: np.ndarray | None, restarts: list[int], first: int) -> tuple[str, str]:
    """A jump or growth, and whether a restart took it back."""
    after_break = [place for place in restarts if place > first]
    end = after_break[0] if after_break else len(ratio)
    rise = ratio[first:end]
    healed = bool(after_break) and ratio[after_break[0]] < BREAK_RATIO
    start = max([place for place in restarts if place <= first], default=0)
    if done is None:
        is_first_update = bool(ratio[first] >= BREAK_RATIO * ratio[first - 1])
    else:
        is_first_update = int(done[first - 1]) == int(done[start])
    jumps = is_first_update and (ratio[first] - 1) >= JUMP_SHARE * (rise.max() - 1)
    grows = len(rise) >= 2 and rise[-1] > rise[0] and bool((np.diff(ratio[start:end]) >= 0).all())
    if healed and grows:
        return "stale_kv", "grows with updates and is gone after the restart: a cache that outlived its weights"
    if after_break and not healed:
        return "stale_weights", "and a restart does not take it back: the engine loads other weights"
    if jumps and not after_break:
        when = "at once" if done is None else "right after the first real update"
        return "stale_weights", f"{when}: stale weights, not precision; compare fingerprints"
    if grows:
        return "cannot_be_told", "and grows: a cache or weights that fall behind; restart the engine, look at the gap"
    return "cannot_be_told", "with no shape that tells; restart the engine, look at the gap, compare fingerprints"


def _reference(reference: Sequence[float] | float | None, series: np.ndarray) -> np.ndarray:
    if reference is None:
        reference = float(series[0])
    if isinstance(reference, int | float):
        expected = np.full(len(series), number("reference", reference, above=True))
    else:
        expected = numbers("reference", reference)
    if len(expected) != len(series) or not (expected > 0).all():
        raise ValueError(f"reference={expected.tolist()}: needs {len(series)} gaps above 0, as many as gaps")
    return expected


def _updates(updates: Sequence[int], length: int) -> np.ndarray:
    done = numbers("updates", updates)
    if len(done) != length or (np.diff(done) < 0).any():
        raise ValueError(f"updates={done.tolist()}: needs {length} counts that do not fall, one a gap")
    return done
