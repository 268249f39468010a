"""May this record be trained on? The door to the rules for one record, with a message for each finding.

Models: every code of `CODES` but duplicate_id, which takes two records. A check whose inputs are absent or
unsound is skipped: the finding on its input stands for it. Leaves out tables (`table.py`, same rules).
Use: `verdict = validate(record, current_version=9, max_lag=2)`; `print(verdict)`.
"""

from __future__ import annotations

from typing import Any

from rlinfra_utils.rollouts.checks_policy import policy_findings
from rlinfra_utils.rollouts.checks_tokens import Axes, token_findings
from rlinfra_utils.rollouts.record import Rollout
from rlinfra_utils.rollouts.structure import parse
from rlinfra_utils.rollouts.verdict import Demands, Verdict


def validate(
    record: Any, *, current_version: int | None = None, max_lag: int | None = None, partial_rollouts: bool = False
) -> Verdict:
    """Whether `record`, a mapping or a Rollout, may be trained on, and why not.

    Args: current_version, the trainer's weights version; max_lag, the largest lag admitted, in versions, of the
    oldest token (fresh iff lag <= max_lag); partial_rollouts, whether a response may span several versions.
    Raises ValueError for keywords that make no sense, never for a record.
    """
    return judge(record, Demands(current_version, max_lag, partial_rollouts))[1]


def judge(record: Any, demands: Demands) -> tuple[Rollout | None, Verdict]:
    """The typed record, None where its structure is broken, and the verdict on it."""
    rollout, findings = parse(record)
    if rollout is not None:
        axes = Axes(rollout)
        findings += [*token_findings(rollout, axes), *policy_findings(rollout, axes, demands)]
    return rollout, Verdict.of(findings)
