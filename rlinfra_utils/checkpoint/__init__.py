"""Checkpoints that resume the same experiment: save, find, load, audit, and how often to save.

Models: all that an RL run needs beside the weights, in a folder that is there whole or not at all; nothing is
unpickled. Leaves out sharded writing, the processes around it and the training itself.

    with Writer("run/checkpoints", keep=3) as writer:
        writer.save_async(90, {"policy": ..., "optimizer": ..., ...})      # one value for each of COMPONENTS
    components = load(latest("run/checkpoints"))
    print(audit("run/checkpoints/step_00000090", current={"versions": {"tokenizer": "v2"}}))
"""

from rlinfra_utils.checkpoint.audit import Audit, audit
from rlinfra_utils.checkpoint.components import COMPONENTS, Component, rollout_schema
from rlinfra_utils.checkpoint.interval import SimulatedOverhead, overhead, simulate_overhead, young_interval
from rlinfra_utils.checkpoint.manifest import CheckpointError
from rlinfra_utils.checkpoint.position import DataPosition, dataset_fingerprint
from rlinfra_utils.checkpoint.reading import CheckpointWarning, latest, load
from rlinfra_utils.checkpoint.writing import Writer, save
