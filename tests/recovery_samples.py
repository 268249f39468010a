"""Small runs for the tests of `recovery`: a config, its workers by turns, and a run in one process."""

from pathlib import Path

import pyarrow as pa

from rlinfra_utils import rollouts
from rlinfra_utils.recovery.config import RunConfig
from rlinfra_utils.recovery.workers import make_worker, worker_names

TINY = RunConfig(num_updates=5, prompts_per_step=2, group_size=2, num_prompts=6, warmup_updates=3)


class Turns:
    """The workers of a run in this process; `crash` forgets them all, as a kill between two turns would."""

    def __init__(self, folder: Path, config: RunConfig = TINY) -> None:
        self.folder, self.config = folder, config
        self.start()

    def start(self, queue_policy: str = "restore") -> None:
        names = worker_names(self.config)
        self.workers = [make_worker(name, self.folder, self.config, queue_policy) for name in names]
        *self.collectors, self.verifier, self.trainer = self.workers

    def crash(self) -> None:
        self.trainer.close()

    def turn(self) -> bool:
        return any(worker.turn() for worker in self.workers)

    def until(self, version: int) -> None:
        """Go on until the trainer has that version, and its collectors and verifier have nothing to do."""
        while self.trainer.learner.version < version:
            assert self.turn()

    def fill_queue(self) -> Path:
        """Sample and reward what can be; the file of the next batch to train."""
        while any(worker.turn() for worker in (*self.collectors, self.verifier)):
            pass
        return self.trainer.handover.batch(self.trainer.learner.version)

    def finish(self) -> None:
        self.until(self.config.num_updates)
        self.trainer.close()


def rewrite(path: Path, change) -> None:
    """Replace the records of a Parquet file by `change` of them (a list of dicts)."""
    rows = change(rollouts.read(path).to_pylist())
    rollouts.write(pa.Table.from_pylist(rows, schema=rollouts.SCHEMA), path)
