"""The twin of a cluster run: its stage times from two short runs, then another configuration by the simulator.

Models groups as the simulator's rollouts: one HFEngine call is one, a worker is a slot, workers that share a core share
its speed. Trainer and workers slow each other down where they are at work at once, by as much as was measured. Leaves
out vLLM engines (they batch groups) and models other than the calibrated runs'. Use:

    made = twin.calibrate(["out/async"], ["out/sync"])      # of runs with pin_cores=True
    predicted = made.predict(sync_interval=4)               # other fields of ClusterConfig -> simulator.Run
    print(twin.compare(made.figures(predicted), twin.measure("out/other")))
"""

from rlinfra_utils.cluster.twin.calibration import calibrate, read_times
from rlinfra_utils.cluster.twin.figures import BARS, WARMUP_UPDATES, Figures, compare, measure, median
from rlinfra_utils.cluster.twin.prediction import InGroups, Overlap, Times, Twin
