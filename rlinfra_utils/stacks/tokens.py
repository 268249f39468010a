"""Token axes of a stack's record: cut, aligned and split into prompt and response.

Models: the border between prompt and response, masks by author and masks by loss, fillers, version spans. Padding is
what the stack's own mask says, never a token value. Leaves out where a stack keeps these (`adapters.py`).
Use: `fields = unsplit(tokens, mask, by_author=False)`.
"""

from __future__ import annotations

from typing import Any


def split(prompt: list[int], response: list[int], mask: list[int] | None, by_author: bool) -> dict[str, Any]:
    """Token fields from a mask over the response. `by_author`: whether its zeros mean "the environment wrote it"."""
    fields: dict[str, Any] = {"prompt_tokens": prompt, "response_tokens": response}
    if mask is None:
        return fields
    fields["policy_mask"] = [0] * len(prompt) + mask
    if 0 not in mask or by_author:
        fields["response_length"] = len(response)
    if 0 in mask and by_author:
        fields["env_mask"] = [0] * len(prompt) + [1 - bit for bit in mask]
    return fields


def unsplit(tokens: list[int], mask: list[int], by_author: bool) -> dict[str, Any]:
    """Token fields of a record without a border between prompt and response: it lies where the mask begins."""
    start = mask.index(1) if 1 in mask else len(mask)
    return split(tokens[:start], tokens[start:], mask[start:], by_author)


def behaviour(logprobs: list[float | None] | None, mask: list[int] | None) -> list[float | None] | None:
    """Log-probs over the response; the filler off the mask is no measurement, and becomes None."""
    if logprobs is None or mask is None:
        return logprobs
    kept = [x if bit else None for x, bit in zip(logprobs, mask, strict=True)]
    return None if 1 in mask and all(x is None for x in kept) else kept


def last(values: list | None, like: list) -> list | None:
    """The end of `values` that lies over the response `like`."""
    return None if values is None else values[len(values) - len(like) :]


def keep(values: list | None, bits: list[int]) -> list | None:
    """The `values` whose bit is 1; None stays None."""
    return None if values is None else [v for v, bit in zip(values, bits, strict=True) if bit]


def spans(versions: list[int], mask: list[int]) -> dict[str, Any]:
    """`policy_version` where all sampled tokens have one, else `version_spans`.

    Spans may leave no gap, so a token off the mask, which no weights sampled, goes with the one before it.
    """
    found: list[dict[str, int]] = []
    for i, (version, bit) in enumerate(zip(versions, mask, strict=True)):
        if found and (not bit or version == found[-1]["version"]):
            found[-1]["end"] = i + 1
        elif bit:
            found.append({"start": i, "end": i + 1, "version": version})
    if len(found) > 1:
        return {"version_spans": found}
    return {"policy_version": found[0]["version"]} if found else {}
