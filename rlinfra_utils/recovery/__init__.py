"""A tiny real run that may be killed anywhere and loses nothing, and the drills that show it.

Models: collectors, verifier and trainer as processes over one run folder, deterministic although asynchronous; SIGKILL
and full disks; resumes from all or part of a checkpoint. Leaves out several machines and sharded trainers.

    print(drill("out/drill"))                             # the eight steps of lesson 12.5.3
    print(storm("out/storm", RunConfig(), num_kills=20))  # accidents at seeded instants, and what was wrong after each
    found = branches("out/branches")                      # continuous, resumed in full, resumed from the weights

A script that starts processes needs `if __name__ == "__main__":`; a notebook does not.
"""

from rlinfra_utils.doors import installed

installed("torch", "transformers", extra="torch")

from rlinfra_utils.recovery.branches import Branches, MemoryLoop, branches, without_each
from rlinfra_utils.recovery.config import RecoveryError, RunConfig
from rlinfra_utils.recovery.drill import Report, drill
from rlinfra_utils.recovery.explain import Explanation, explain
from rlinfra_utils.recovery.storm import KINDS, StormReport, storm
from rlinfra_utils.recovery.story import Story, broken, tell
from rlinfra_utils.recovery.supervisor import Supervisor
from rlinfra_utils.recovery.workers import run_in_turns
