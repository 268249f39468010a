"""What `diagnose` answers: findings, ranked, for people (text, HTML) and for code (`cause`, `status`).

Models: a cause, how sure it is, the residual under it, what to do and what to record. Leaves out the tests.
Use: `findings = diagnose(...)`; `findings[0].cause`; `print(findings)`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import NamedTuple

#: From sure to excluded. "cannot be told": the record does not hold what would decide.
STATUSES = ("confirmed", "suspected", "cannot be told", "not excluded", "ruled out")


class Cause(NamedTuple):
    """A cause in words: what it is, what to do about it, what to record so that the next record decides."""

    title: str
    action: str
    record: str


_ALL_DECODING = "the full decoding parameters and logprobs_mode"
#: Every cause that `diagnose` knows, the more specific first: of two that explain a record alike, the earlier wins.
CAUSES = {
    "other_tokens": Cause(
        "engine and trainer read other tokens (retokenised, or the chat template drifted)",
        "train on the engine's own token ids; never decode and encode again",
        "the engine's prompt and sampled token ids, tokenizer and template version",
    ),
    "mask": Cause(
        "the mask begins or ends at the wrong token (prompt, EOS, padding)",
        "build the mask from the sampled ids and the stop reason, not from the pad id",
        "policy mask, response length, stop reason",
    ),
    "sentinel": Cause(
        "a placeholder stands where a log-prob should be",
        "mask these tokens or quarantine the record; write null, not a number, for what is missing",
        "null for a log-prob that was not computed",
    ),
    "shard_boundary": Cause(
        "log-probs are wrong where sequence shards meet",
        "shift labels before the sequence is split, and exchange the token across shards",
        "the sequence-parallel size and its padding",
    ),
    "shift": Cause(
        "token, logit or mask index is off by one",
        "logits[t] predicts token t + 1: drop the first mask entry, not the last",
        "log-probs on the response axis, one a token",
    ),
    "wrong_entry": Cause(
        "the trainer's log-probs are not those of its own logits: another entry was gathered",
        "gather the sampled token's entry of log_softmax(logits / temperature), and no other",
        "logits and gathered log-probs of one answer",
    ),
    "raw_logprobs": Cause(
        "raw log-probs are recorded for processed sampling",
        "record processed log-probs (vLLM: --logprobs-mode processed_logprobs): those of the policy that sampled",
        _ALL_DECODING,
    ),
    "temperature": Cause(
        "another temperature on each side",
        "divide the trainer's logits by the temperature of sampling, and record processed log-probs",
        _ALL_DECODING,
    ),
    "temperature_after_softmax": Cause(
        "log-probs, not logits, were divided by the temperature",
        "divide the logits; of sampled tokens alone it cannot be undone: quarantine the record",
        _ALL_DECODING,
    ),
    "truncation": Cause(
        "behaviour is normalised over the kept set (top-p, top-k, min-p), the trainer over all tokens",
        "renormalise the trainer over the recorded kept set, or sample without filters",
        "the ids kept at each position",
    ),
    "quantized_weights": Cause(
        "the engine runs quantised weights",
        "score the rollouts with the engine's own weights, or correct for the difference and watch the ESS",
        "quantisation of the engine and a fingerprint of its weights",
    ),
    "stale_weights": Cause(
        "the engine's weights are older than its version says",
        "reject the sync and quarantine rollouts since; compare fingerprints, not version numbers",
        "fingerprints of both sides and the mean gap by step",
    ),
    "stale_kv": Cause(
        "cached prefixes were computed by older weights",
        "reset the prefix cache after the load and before the first request",
        "oldest version in the KV cache, engine restarts, the mean gap by step",
    ),
    "precision": Cause(
        "numerical noise of a narrower format or another kernel: not a contract bug",
        "no quarantine; keep it as a number of its own beside lag, correct for it or use one format on both sides",
        "dtype and kernels of both sides",
    ),
    "exact_ratio": Cause(
        "token ratios agree; the exact sequence ratio is far from 1 because the answer is long: not a bug",
        "report token, sequence and geometric statistics apart; the geometric mean is another estimator",
        "log weights before any clamp",
    ),
    "policy_lag": Cause(
        "the policy has moved since these tokens were sampled",
        "correct for it or bound the lag; to exclude a contract bug, compare one batch at zero lag",
        "versions or version spans of each token",
    ),
    "undetermined": Cause(
        "this record cannot tell the cause",
        "record more, then compare one batch at zero lag",
        f"full logits of a few answers, {_ALL_DECODING}, the engine's token ids, fingerprints, KV version, gap by step",
    ),
    "none": Cause("trainer and engine agree", "nothing", "nothing more"),
}


@dataclass(frozen=True)
class Finding:
    """One cause put to the test.

    cause: a key of `CAUSES`. status: one of `STATUSES`. evidence: one line. residual_mean, residual_max: |delta|
    (nats) left once the cause is undone; NaN where nothing could be recomputed. num_left_out: tokens set aside by it.
    """

    cause: str
    status: str
    evidence: str
    residual_mean: float = float("nan")
    residual_max: float = float("nan")
    num_left_out: int = 0

    @property
    def title(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause].title

    @property
    def action(self) -> str:
        """What to do."""
        return CAUSES[self.cause].action

    @property
    def record(self) -> str:
        """What to record so that the next record decides."""
        return CAUSES[self.cause].record

    def __str__(self) -> str:
        left = "" if self.residual_mean != self.residual_mean else f" [left: {self._residual()}]"
        text = f"{self.status} {self.cause}: {self.evidence}{left}"
        if self.status in STATUSES[:3]:
            text += f"\n    {self.title}\n    do: {self.action}\n    record: {self.record}"
        return text

    def _residual(self) -> str:
        if self.residual_mean != self.residual_mean:
            return ""
        return f"mean {self.residual_mean:.2g}, max {self.residual_max:.2g}"

    def _row(self) -> str:
        cells = (self.status, self.cause, self.evidence, self._residual(), self.action, self.record)
        return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"

    def _repr_html_(self) -> str:
        return Diagnosis([self])._repr_html_()


class Diagnosis(list[Finding]):
    """Findings, the likeliest first; a list that prints well."""

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self)

    def _repr_html_(self) -> str:
        names = ("status", "cause", "evidence", "|delta| left (nats)", "do", "record")
        head = "".join(f"<th>{name}</th>" for name in names)
        return f"<table><tr>{head}</tr>{''.join(finding._row() for finding in self)}</table>"
