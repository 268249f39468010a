"""What `validate` answers: findings, the verdict they add up to, and what the trainer demanded.

Models: accept, quarantine or reject, each with the findings behind it, for people (text, HTML) and for
code (`status`, `codes`). Leaves out the rules themselves (`validate.py`, `table.py`).
Use: `verdict = validate(record)`; `print(verdict)`; `if verdict.status == "accept": ...`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from rlinfra_utils.doors import short
from rlinfra_utils.rollouts.codes import CODES, STATUSES

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one field: a code of `CODES`, the field's path, one line on what to do."""

    code: str
    field: str
    message: str

    @property
    def status(self) -> str:
        """The status that this finding alone gives a record: "quarantine" or "reject"."""
        return CODES[self.code].status


@dataclass(frozen=True)
class Verdict:
    """status: "accept", "quarantine" or "reject", the worst of its findings; accepted means none."""

    status: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Verdict:
        """The verdict that `findings` add up to."""
        findings = tuple(findings)
        return cls(max((f.status for f in findings), key=STATUSES.index, default="accept"), findings)

    @property
    def codes(self) -> list[str]:
        """The codes of the findings, each once, in the order of `CODES`."""
        found = {f.code for f in self.findings}
        return [code for code in CODES if code in found]

    def __str__(self) -> str:
        return "\n".join([self.status, *(f"  {f.status} {f.code}: {f.message}" for f in self.findings)])

    def _repr_html_(self) -> str:
        rows = (
            "<tr>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in (f.status, f.code, f.field, f.message))
            + "</tr>"
            for f in self.findings
        )
        head = "<tr><th>status</th><th>code</th><th>field</th><th>message</th></tr>"
        return f"<b>{self.status}</b>" + (f"<table>{head}{''.join(rows)}</table>" if self.findings else "")


@dataclass(frozen=True)
class Demands:
    """What the trainer demands of a record at the moment of use.

    current_version: the trainer's weights version; max_lag: the largest lag admitted, in versions (a record is
    fresh iff lag <= max_lag); partial_rollouts: whether one response may span several versions. Raises ValueError by
    field.
    """

    current_version: int | None = None
    max_lag: int | None = None
    partial_rollouts: bool = False

    def __post_init__(self) -> None:
        for name in ("current_version", "max_lag"):
            value = getattr(self, name)
            is_count = isinstance(value, Integral) and not isinstance(value, bool) and 0 <= value <= _INT64_MAX
            if value is not None and not is_count:
                raise ValueError(f"{name}: {short(value)} is not a non-negative 64-bit integer; pass a version count")
        if self.max_lag is not None and self.current_version is None:
            raise ValueError(f"max_lag: {self.max_lag} needs current_version, the version that the lag is counted from")
        if type(self.partial_rollouts) is not bool:
            raise ValueError(f"partial_rollouts: {short(self.partial_rollouts)} is not a bool; pass True or False")
