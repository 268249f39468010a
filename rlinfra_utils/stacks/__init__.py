"""Seven stacks for online RL on language models: a dated map, their records as ours, a choice by requirement.

Models: TRL, verl, OpenRLHF, NeMo RL, PRIME-RL, SkyRL and AReaL as their code stood at one commit each. Leaves out
their speed and what came after these commits. Nothing of them needs to be installed.

    stacks.table(axis="synchrony")
    rollout, missing = stacks.to_rollout("verl", payload, {"tokenizer_version": "v2"}, row=3)
    print(stacks.choose(stacks.Requirements(nodes="many", trainer="megatron", synchrony="async")))
"""

from rlinfra_utils.stacks.adapters import ADAPTERS
from rlinfra_utils.stacks.atlas import AXES, AXIS_TITLES, STACKS, Table, table, words
from rlinfra_utils.stacks.choice import Candidate, Choice, Reason, Requirements, choose
from rlinfra_utils.stacks.convert import to_rollout
from rlinfra_utils.stacks.fields import FORBIDS, Gap
from rlinfra_utils.stacks.records import presence, record
