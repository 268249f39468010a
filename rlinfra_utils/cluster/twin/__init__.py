"""The twin of a cluster run: its stage times from a short run, then another configuration predicted by the simulator.

Models groups as the simulator's rollouts: one HFEngine call is one, a worker is a slot, workers that share a core share
its speed. CPU seconds, not wall seconds, are what a call costs; how much of its core a worker gets is measured too.
Leaves out vLLM engines (they batch groups) and models other than the calibrated run's. Use:

    made = twin.calibrate("out/run")                        # of a run with pin_cores=True
    predicted = made.predict(sync_interval=4)               # other fields of ClusterConfig -> simulator.Run
    print(twin.compare(made.figures(predicted), twin.measure("out/other")))
"""

from rlinfra_utils.cluster.twin.calibration import calibrate
from rlinfra_utils.cluster.twin.figures import BARS, WARMUP_UPDATES, Figures, compare, measure, median
from rlinfra_utils.cluster.twin.prediction import InGroups, Twin
