"""Seeded rollouts and traces in which every law is known, so that a measurement has a right answer.

Models: heavy-tailed lengths, tool turns, retries, limits, degenerate groups, versions, honest log-probs.
Leaves out: language. Use: `rollouts(8, seed=0)`, `rollout_table(1_000_000, seed=0)`, `trace(64, seed=0)`.
"""

from rlinfra_utils.synthetic.behaviour import EOS, NUM_CONTEXTS, Policy, policy
from rlinfra_utils.synthetic.spans import Stages, trace
from rlinfra_utils.synthetic.table import rollout_table, rollouts
from rlinfra_utils.synthetic.workload import LogNormal, Pareto, Workload
