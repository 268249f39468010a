"""What `verify` answers: one check a property, each with its evidence, and one verdict.

Models: passed, failed, or not checked and why; a check that could not have failed is "not_checked".
Leaves out what to do about it, beyond a few words in the evidence. Use: `print(proof)`; `proof.verdict == "proven"`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

#: Checks without which nothing is proven. A fingerprint is more than many engines can give.
NEEDED = ("version", "scoring", "generation")


@dataclass(frozen=True)
class Check:
    """One property. `status`: "pass", "fail" or "not_checked"."""

    name: str
    status: str
    evidence: str


@dataclass(frozen=True)
class Proof:
    """The checks of one engine for one version, in order: version, fingerprint, scoring, generation."""

    version: int
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """ "proven"; "rejected" if a check failed; "unproven" if a needed one could not be made."""
        if any(check.status == "fail" for check in self.checks):
            return "rejected"
        return "proven" if all(self[name].status == "pass" for name in NEEDED) else "unproven"

    @property
    def sentence(self) -> str:
        """The verdict's reason in one line: the likeliest cause of a failure, or what was not checked."""
        failed = {check.name: check.evidence for check in self.checks if check.status == "fail"}
        if not failed:
            left = [f"{check.name}: {check.evidence}" for check in self.checks if check.status == "not_checked"]
            said = f"the engine serves version {self.version}" if self.verdict == "proven" else "cannot be proven"
            return f"{said} ({'; '.join(left)})" if left else said
        if "version" in failed:
            return failed["version"]
        if failed.keys() == {"generation"} and self["scoring"].status == "pass":
            cause = "; prefixes cached by older weights? reset the cache after the load and before the first request"
            hint = cause if "gap" in failed["generation"] else ""
            return f"scores as version {self.version}, generates otherwise: {failed['generation']}{hint}"
        weights = [failed[name] for name in ("scoring", "fingerprint") if name in failed] or [*failed.values()]
        return f"version {self.version} is on the label, other weights behind it: {'; '.join(weights)}"

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        lines = (f"  {check.name}: {check.status}: {check.evidence}" for check in self.checks)
        return "\n".join([f"version {self.version}: {self.verdict}: {self.sentence}", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{check.name}</th><td>{check.status}</td><td>{html.escape(check.evidence)}</td></tr>"
            for check in self.checks
        )
        head = f"<b>version {self.version}: {self.verdict}</b><br>{html.escape(self.sentence)}"
        return f"{head}<table><tr><th>check</th><th>status</th><th>evidence</th></tr>{rows}</table>"
