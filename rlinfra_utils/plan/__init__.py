"""From a reader's brief to a run plan that is data: drawn up, graded, put into the words of seven stacks, printed.

Models: memory by phase, the split of GPUs, a rule chosen on the simulator's front, contract, sync, recovery, alerts.
Leaves out launching anything: `cluster` runs, a stack of your own reads the keys.

    run_plan = draw_up(Brief.from_yaml(Path("brief.yaml").read_text()))
    print(grade(run_plan)); print(keys(run_plan, "verl"))
    Path("plan.yaml").write_text(run_plan.to_yaml()); report(run_plan, "plan.html")
    tracing.alerts(run, alert_rules(run_plan))            # the plan's thresholds over a real run folder
"""

from rlinfra_utils.plan.brief import FACTS, Brief, Lengths, Stage, Target
from rlinfra_utils.plan.choosing import front, pick, rules, sweep_rules
from rlinfra_utils.plan.drawing import alert_rules, draw_up, memory_of, split_of, splits
from rlinfra_utils.plan.grading import Line, Rubric, grade
from rlinfra_utils.plan.page import report
from rlinfra_utils.plan.runplan import PREFLIGHT, RunPlan
from rlinfra_utils.plan.stackkeys import Keys, keys
