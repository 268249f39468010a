"""What happened to one rollout and to the whole run, from the files that the run wrote itself.

Models: the run folder (written here, by any number of processes), the chain of identifiers from a prompt to the
weights that came out, four groups of metrics, alerts. Leaves out: a server, sampling, profiles (`timers`).

    log = RunLog("out/run", run_id="run7", branch_id="main", config={"lr": 1e-4})
    log.rollouts(records); log.batch("b0001", 1, ids, 0, 1, stats={"loss": 0.3}); log.event("heartbeat", worker="c0")
    run = read_run("out/run")                              # .rollouts .batches .events .problems
    follow(run, rollout_id); follow(run, optimizer_step=7)  # the chain, both ways; a picture in a notebook
    metrics(run).frame(); print(alerts(run)); dashboard(run, "out/run.html"); to_prometheus(metrics(run))

The chain's rollout_id is `Rollout.sample_id`: one answer, by whichever name a stack calls it.
"""

from rlinfra_utils.tracing.chain import FORBIDS, Chain, Followed, follow
from rlinfra_utils.tracing.dashboard import dashboard
from rlinfra_utils.tracing.folder import RunFolderError, config_hash
from rlinfra_utils.tracing.lines import BatchLine, EventLine
from rlinfra_utils.tracing.measure import per_batch, per_rollout
from rlinfra_utils.tracing.metrics import metrics
from rlinfra_utils.tracing.opentelemetry import export_spans
from rlinfra_utils.tracing.prometheus import to_prometheus
from rlinfra_utils.tracing.reading import RunData, read_run
from rlinfra_utils.tracing.rules import RULES, Alert, Alerts, Rule, alerts
from rlinfra_utils.tracing.runlog import RunLog
from rlinfra_utils.tracing.sheet import Metric, Metrics
