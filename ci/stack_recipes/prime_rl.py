"""PRIME-RL's record: a TrainingSample by its own class, loaded from the file of a checkout.

Leaves out the orchestrator: the fields that its sink fills, temperatures and advantages, are filled here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec

from ci.stack_recipes import Answers, write


def main() -> None:
    """One answer, there and back through the stack's wire format."""
    path = Path(sys.argv[3]) / "src/prime_rl/transports/rollouts/types.py"
    spec = importlib.util.spec_from_file_location("prime_types", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["prime_types"] = module
    spec.loader.exec_module(module)
    given = Answers.given()
    before, after = [0.0] * len(given.prompt), [1.0] * len(given.tokens[0])
    sample = module.TrainingSample(
        token_ids=given.prompt + given.tokens[0],
        mask=[False] * len(before) + [True] * len(after),
        logprobs=before + given.logprobs[0],
        temperatures=[1.0] * len(before + after),
        env_name="add",
        advantages=before + [0.7] * len(after),
    )
    wire = msgspec.msgpack.encode(sample)
    sample = msgspec.msgpack.decode(wire, type=module.TrainingSample)
    record = {name: getattr(sample, name) for name in sample.__struct_fields__}
    write(record, "an answer of the tiny policy in the stack's TrainingSample, through its msgpack form")


if __name__ == "__main__":
    main()
