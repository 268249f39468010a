"""What this machine can run: detection, levels A, B and C, the `%%level` cell magic, stored results.

Leaves out: Apple and Intel accelerators, and whether the model hub answers (nothing here uses the
network). A notebook calls `levels.activate(LEVEL)` after its parameters; cells below begin with
`%%level B name` where they need more than a CPU.
"""

from rlinfra_utils.levels.accelerator import choose_dtype, native_bfloat16, supports, vllm_options
from rlinfra_utils.levels.machine import Machine, detect, free_port
from rlinfra_utils.levels.results import store, stored
from rlinfra_utils.levels.session import LEVELS, LevelError, Session, activate, missing, resolve
