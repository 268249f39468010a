"""The loop as discrete events: pools, groups, a queue, a trainer, weight updates, and the rules that hold them.

Models rollouts, groups, batches and versions, one event a stage. Leaves out the network, single kernels and what
is learned: rewards and gradients. Same seed, same events; the n-th rollout is the same whatever the configuration.

    run = simulate(LoopConfig(controller="areal", slots_per_replica=64, batch_rollouts=64, num_steps=200))
    run.status, run.summary(), run.lag, run.queue, run.length_bias, run.events; run.to_perfetto("loop.json")
    sweep([replace(config, sync_interval=k) for k in (1, 2, 4)], workers=2)
"""

from rlinfra_utils.simulator.calibration import calibrate
from rlinfra_utils.simulator.config import Faults, LoopConfig, Tools
from rlinfra_utils.simulator.controllers import CONTROLLERS
from rlinfra_utils.simulator.laws import Constant, Exponential, LogNormal, Measured, Pareto
from rlinfra_utils.simulator.loop import simulate
from rlinfra_utils.simulator.protocol import Controller, Counts, Group
from rlinfra_utils.simulator.run import Run
from rlinfra_utils.simulator.sweeps import sweep
