"""Level C: the asynchronous loop as real processes on Ray, under the simulator's own rules, and its twin.

Models: rollout workers (HFEngine or a vLLM server each), a verifier, a bounded queue, a trainer group (FSDP2; gloo or
NCCL), publication with proof, checkpoints, traces; one machine or a Ray cluster. Leaves out elastic numbers of workers
and weight transfer between GPUs without a disk.

    outcome = run(ClusterConfig(controller="bounded_queue", controller_options={"max_rollouts": 128}), "out/run")
    print(alerts(read_run("out/run")))                    # the run folder is that of `tracing`

From a shell: `python -m rlinfra_utils.cluster --help`.
"""

from rlinfra_utils.cluster.book import Book
from rlinfra_utils.cluster.config import ClusterConfig, ClusterError
from rlinfra_utils.cluster.running import Outcome, run
from rlinfra_utils.cluster.tasks import Dataset, Task
