"""The four groups of metrics of lesson step 12.5.2, from a run's own files: `metrics`.

Models: data, policy, system, reliability, for one branch, so that each row has one configuration hash. A value that
the files do not hold is a row without value and with the reason; it is never 0. Leaves out limits (`rules.py`).
Use: `metrics(run).frame()`; `metrics(run)["truncation_share"]`.
"""

from __future__ import annotations

from rlinfra_utils.doors import short
from rlinfra_utils.tracing import groups
from rlinfra_utils.tracing.measure import per_batch, per_rollout
from rlinfra_utils.tracing.reading import RunData, require_run
from rlinfra_utils.tracing.sheet import Metrics, Sheet


def metrics(run: RunData, branch_id: str | None = None, now_unix_s: float | None = None) -> Metrics:
    """All metrics of one branch, units by row; None is the run's last one. Batches that a restore undid are left out.

    `now_unix_s` is what ages are counted up to; None is the latest stamp in the files, so that a finished run reads
    the same tomorrow. Raises ValueError for a branch that the run does not have.
    """
    branches = require_run(run).description.branches
    branch_id = run.description.branch_id if branch_id is None else branch_id
    if branch_id not in branches:
        raise ValueError(f"branch_id={short(branch_id)}: the run has {', '.join(branches)}")
    now_unix_s = run.last_unix_s if now_unix_s is None else now_unix_s
    rollouts = per_rollout(run)
    every_batch = per_batch(run, rollouts)
    refused = every_batch.attrs["refused"]
    batches = every_batch[(every_batch["branch_id"] == branch_id) & ~every_batch["rolled_back"].astype(bool)]
    rollouts = rollouts[rollouts["branch_id"] == branch_id]
    events = run.events[run.events["branch_id"] == branch_id]
    hash_ = branches[branch_id].config_hash
    data = Sheet("data", f"branch {branch_id}, {len(rollouts)} rollouts", hash_)
    groups.data(data, rollouts, batches)
    policy = Sheet("policy", f"branch {branch_id}, {len(batches)} batches", hash_)
    groups.policy(policy, batches, rollouts, refused)
    system = Sheet("system", f"branch {branch_id}, whole", hash_)
    groups.system(system, rollouts, batches, events)
    spans = Sheet("system", "trace.json, all branches", hash_)
    groups.spans(spans, run.spans)
    reliability = Sheet("reliability", f"branch {branch_id}, up to {now_unix_s} unix s", hash_)
    groups.reliability(reliability, every_batch, events, now_unix_s)
    sheets = (data, policy, system, spans, reliability)
    return Metrics(run.run_id, branch_id, tuple(row for sheet in sheets for row in sheet.rows))
