"""Weights from a trainer to its engines: publish them whole, and prove that they arrived.

Models: versions in a folder, replicas that confirm before anyone is told, four checks of an engine, the paths that
weights take and what each costs. Leaves out collective transfer between GPUs. Imports no torch itself.

    publisher = Publisher("run/weights", replicas=[engine])
    held = control(score, sequences, 7, fingerprint(model.state_dict()), {"version 6": held.logprobs})
    publisher.publish(model.state_dict(), 7, held)          # or: print(verify(engine, 7, held))
    weights = read("run/weights")                            # from any process, at any time
"""

from rlinfra_utils.sync.adapters import Adapter, attached, load_adapter, merge, save_adapter
from rlinfra_utils.sync.control import Control, control
from rlinfra_utils.sync.gaps import GapReading, hidden_lag, read_gaps
from rlinfra_utils.sync.manifest import SyncError, write_pointer
from rlinfra_utils.sync.paths import (
    Transfer,
    adapter_only,
    in_memory_copy,
    in_memory_pointers,
    table,
    through_folder,
    through_shared_memory,
)
from rlinfra_utils.sync.prints import HASH_OF_NOTHING, Difference, Fingerprint, TensorPrint, differences, fingerprint
from rlinfra_utils.sync.proof import Check, Proof
from rlinfra_utils.sync.publisher import Publication, Publisher
from rlinfra_utils.sync.reading import Held, Weights, hold, read
from rlinfra_utils.sync.verify import verify
