"""Closed forms for the loop: overlapped time, stragglers, queues, pool splits, staleness.

Models averages of a steady loop with known stage times. Leaves out transients, retries, tool turns and the
rules by which a controller starts and drops work: those need the simulator.

    pipelined([45, 30], n=8)                                        # 390 s
    rho, stable = queue_check(Rate(8_000, "tokens/s"), Rate(10_000, "tokens/s"))
    best_split({"generate": {32: 357, 64: 151}, "train": {32: 270, 64: 133}}, num_gpus=128)
    mean_staleness(in_flight=256, batch=64, mean_queued=32, trainer_utilization=0.8, tail=tail(lengths_tokens))
"""

from rlinfra_utils.pipeline.pacing import admission_limit, consumed_mix, kept_share, paced_period_s, versions_published
from rlinfra_utils.pipeline.queues import (
    QueueCheck,
    Rate,
    littles_law,
    md1_wait_s,
    mg1_wait_s,
    mm1_wait_s,
    queue_check,
)
from rlinfra_utils.pipeline.split import Split, best_split, scaling_curve
from rlinfra_utils.pipeline.stages import (
    StageGain,
    amdahl,
    pipelined,
    sequential,
    speedup,
    stage_gain,
    stage_utilization,
)
from rlinfra_utils.pipeline.staleness import (
    Staleness,
    Tail,
    loop_period_s,
    mean_staleness,
    staleness_at_limit,
    tail,
)
from rlinfra_utils.pipeline.stragglers import group_s, informative_groups_per_s, mean_group_s, scv, utilization
