"""One model sharded over several ranks (FSDP2): the process group, the model, its checkpoints.

Models: data parallelism with sharded parameters, gradients and moments, gloo on the CPU and NCCL on CUDA; a
checkpoint that any number of ranks writes and any other number reads. Leaves out tensor, pipeline and context
parallelism, mixed precision, who starts the processes, and the update itself (`policy.Trainer(model, ranks=ranks)`).

    with init_group(rank, 2, "tcp://127.0.0.1:29500") as ranks:        # the same on each of two processes
        model = shard_model(model, ranks)
        trainer = Trainer(model, ranks=ranks)
        save_sharded(folder, step, model, trainer.optimizer, components, ranks)
"""

from rlinfra_utils.doors import installed

installed("torch", "transformers", extra="torch")

from rlinfra_utils.sharded.group import Ranks, RanksError, init_group
from rlinfra_utils.sharded.loading import load_sharded
from rlinfra_utils.sharded.model import FullState, gather_full, named_tensors, shard_model
from rlinfra_utils.sharded.saving import save_sharded
