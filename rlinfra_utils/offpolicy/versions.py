"""How old the data are: lag in policy versions, by rollout or by token.

Models: lag = trainer's version when the data are consumed - version that sampled the token, so that waiting
in a queue counts as much as an update during generation. Leaves out: age in seconds, and what the lag did to
the probabilities (`ratios.py`). Use: `lags = lag(9, record.version_spans)`; `lags.max()`, `is_fresh(lags, 2)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinfra_utils.doors import LARGEST, listed, short


def lag(
    current_version: int, versions: Any, branch_id: str | None = None, branch_ids: str | Sequence[str] | None = None
) -> Any:
    """Lag in versions of data sampled by `versions` and consumed by a trainer at `current_version`.

    `versions` is one version (an int comes back), an array of versions (an int64 array of its shape), or the
    version spans of one rollout, objects or mappings with `start`, `end`, `version` (an array of shape
    (tokens,), so that `.mean()` and `.max()` are by token).

    A version orders the weights of one branch only: after a restart from version 105, the abandoned branch
    and the restarted one each have a version 106. A branched run passes the trainer's `branch_id` and
    `branch_ids`, one for all or one for each entry of `versions`; data of another branch are refused. Weights
    from before the fork belong to both branches: give their rollouts the id of the branch that trains on.

    Raises ValueError for a version above `current_version`, for an id of another branch, for a branch id on
    one side only, and for spans that do not follow one another from 0.
    """
    current = int(_whole("current_version", current_version, scalar=True))
    spans = isinstance(versions, Sequence) and len(versions) > 0 and _is_span(versions[0])
    numbers = _by_token(versions) if spans else _whole("versions", versions)
    _check_branches(branch_id, branch_ids, len(versions) if spans else numbers.size)
    if (numbers > current).any():
        raise ValueError(
            f"versions: {numbers.max()} is above current_version={current}; "
            "another branch or run (pass branch ids), or a trainer that lost count"
        )
    lags = current - numbers
    return int(lags) if lags.ndim == 0 else lags


def is_fresh(lags: Any, max_lag: int) -> Any:
    """Whether a lag may be trained on: `lags <= max_lag`, by element. A limit of n admits n updates, not n + 1.

    A whole rollout is fresh if its oldest token is: `is_fresh(lags, n).all()`. By token it is a mask for the
    loss. `lags` is one or an array, as is the answer. Raises ValueError for a limit, or lags, that are negative or not
    whole.
    """
    limit = int(_whole("max_lag", max_lag, scalar=True))
    fresh = _whole("lags", lags) <= limit
    return fresh if fresh.ndim else bool(fresh)


def _whole(name: str, values: Any, scalar: bool = False) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: rows of unequal length; take one rollout at a time") from None
    has_bool = isinstance(values, list | tuple) and any(isinstance(value, bool) for value in values)
    if array.dtype.kind not in "iu" or has_bool or array.size == 0 or (scalar and array.ndim):
        what = "one whole number" if scalar else "whole numbers or version spans"
        raise ValueError(f"{name}={short(values)}: needs {what}")
    if (array < 0).any():
        raise ValueError(f"{name}: {array.min()} is negative; versions and lags count from 0")
    if (array > LARGEST).any():
        raise ValueError(f"{name}: {array.max()} is above 2**53; versions and lags are counts")
    return array.astype(np.int64)


def _is_span(entry: Any) -> bool:
    return isinstance(entry, Mapping) or hasattr(entry, "version")


def _by_token(spans: Sequence[Any]) -> np.ndarray:
    """Version of each token, shape (tokens,)."""
    end, versions = 0, []
    for index, span in enumerate(spans):
        try:
            start, stop, version = (
                int(_whole(key, span[key] if isinstance(span, Mapping) else getattr(span, key), scalar=True))
                for key in ("start", "end", "version")
            )
        except (KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"versions[{index}]: needs start, end and version; {error}") from None
        if start != end or stop <= start:
            raise ValueError(f"versions[{index}]: span [{start}, {stop}) must begin at {end} and hold a token")
        versions.append(np.full(stop - start, version))
        end = stop
    return np.concatenate(versions)


def _check_branches(branch_id: str | None, branch_ids: Any, num_versions: int) -> None:
    if branch_id is None and branch_ids is None:
        return
    if branch_id is None or branch_ids is None:
        missing = "branch_id" if branch_id is None else "branch_ids"
        raise ValueError(f"{missing}: missing; versions of a branched run compare only when both sides name the branch")
    ids = [branch_ids] if isinstance(branch_ids, str) else listed("branch_ids", branch_ids, "ids")
    if len(ids) != num_versions and not isinstance(branch_ids, str):
        raise ValueError(f"branch_ids: {len(ids)} for {num_versions} versions; needs one for all or one for each")
    for index, other in enumerate(ids):
        if other != branch_id:
            raise ValueError(
                f"branch_ids[{index}]={other!r}: the trainer is on {branch_id!r}, and versions of two branches "
                "do not compare; leave the rollout out"
            )
