"""Synthetic run folders with known content, clean or with one incident that a rule must find."""

import numpy as np

from rlinfra_utils import synthetic
from rlinfra_utils.synthetic import LogNormal, Workload
from rlinfra_utils.tracing import RunLog

T0_UNIX_S = 1_700_000_000.0
STEP_S, NUM_STEPS, ROLLOUTS, GROUP = 120.0, 20, 48, 4
#: The step at which an incident begins.
ONSET = 8
WORKERS = ("collector-0", "collector-1", "collector-2")
CONFIG = {"lr": 1e-4, "max_new_tokens": 96}
#: Incident -> the rule that must fire.
INCIDENTS = {
    "lag": "lag",
    "ess": "ess",
    "degenerate": "degenerate_groups",
    "truncation": "truncation",
    "silent": "dead_producer",
    "died": "dead_producer",
    "queue": "queue_growth",
    "checkpoint": "checkpoint_age",
    "length": "length_jump",
}


def workload(step, incident):
    """What the rollouts of a step are like; the policy of version 10 + step trains on them."""
    hit = step >= ONSET
    return Workload(
        lengths=LogNormal(64 if hit and incident == "length" else 24, 0.5),
        prompt_lengths=LogNormal(8, 0.2),
        max_tokens={"length": 400, "truncation": 26}.get(incident, 96) if hit else 96,
        time_limit_s=None,
        tool_share=0,
        degenerate_share=0.9 if hit and incident == "degenerate" else 0.05,
        group_size=GROUP,
        lag_shares=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0) if hit and incident == "lag" else (0.6, 0.3, 0.1),
        straddle_share=0.1,
        current_version=10 + step,
    )


def records(rng, seed, step, incident, branch_id):
    """The rollouts of a step, with the trainer's log-probs beside the engine's."""
    sigma = 2.0 if step >= ONSET and incident == "ess" else 0.05
    made = []
    for record in synthetic.rollouts(ROLLOUTS, 1000 * seed + step, workload(step, incident)):
        behavior = np.array(record.behavior_logprobs)
        trainer = np.minimum(behavior + sigma * rng.standard_normal(len(behavior)), 0.0)
        side = np.concatenate([np.zeros(len(record.prompt_tokens)), trainer])
        update = {
            "run_id": f"run-{seed}",
            "branch_id": branch_id,
            "per_token": {"trainer_logprobs": side[:, None].tolist()},
        }
        made.append(record.model_copy(update=update))
    return made


def make_run(folder, seed, incident=None, num_steps=NUM_STEPS, changed_config=None):
    """Write a run; with `changed_config`, a second branch goes on from ONSET. Returns the records by step."""
    rng = np.random.default_rng(seed)
    logs = {"main": RunLog(folder, f"run-{seed}", "main", CONFIG)}
    by_step = []
    for step in range(num_steps):
        branch_id = "main" if changed_config is None or step < ONSET else "second"
        if branch_id not in logs:
            logs[branch_id] = RunLog(folder, f"run-{seed}", branch_id, changed_config)
        log, done_unix_s = logs[branch_id], T0_UNIX_S + (step + 1) * STEP_S
        by_step.append(records(rng, seed, step, incident, branch_id))
        _events(log, rng, step, incident)
        log.rollouts(by_step[-1], name=f"step-{step:04d}", time_unix_s=done_unix_s - 40)
        ids = [record.sample_id for record in by_step[-1]]
        stats = {"kl": 0.001 * step, "entropy": 3.0, "loss": 0.5 - 0.01 * step}
        log.batch(f"b{step:04d}", step + 1, ids, 10 + step, 11 + step, stats, done_unix_s)
        log.event("weight_sync", "trainer", done_unix_s + 0.5, version=11 + step, seconds=0.5)
        if step % 3 == 0 and not (incident == "checkpoint" and step >= 3):
            log.event("checkpoint_saved", "trainer", done_unix_s + 1, step=step + 1, seconds=1.5)
    return by_step


def _events(log, rng, step, incident):
    start_unix_s = T0_UNIX_S + step * STEP_S
    hit = step >= ONSET
    drift = 0.0
    for beat in range(int(STEP_S // 10)):
        at_unix_s = start_unix_s + 10 * beat
        for place, worker in enumerate(WORKERS):
            if not (hit and incident in ("silent", "died") and place == 1):
                log.event("heartbeat", worker, at_unix_s + rng.uniform(0, 3))
        drift = 0.8 * drift + 6 * rng.standard_normal()
        depth = max(int(40 + drift), 0) + (8 * (12 * (step - ONSET) + beat) if hit and incident == "queue" else 0)
        log.event("queue", "buffer", at_unix_s, depth_rollouts=depth, depth_tokens=30 * depth)
    if incident == "died" and step == ONSET:
        log.event("worker_died", WORKERS[1], start_unix_s, cause="SIGKILL")
    log.event("memory", "trainer", start_unix_s, peak_bytes=1_000_000 + step)
