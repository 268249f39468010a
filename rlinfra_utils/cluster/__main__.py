"""The command line of a cluster run: `python -m rlinfra_utils.cluster --out out/run`.

Models: the settings people change as options, all others by --set, a progress line, exit codes: 0 done, 1 failed (one
line says why), 130 interrupted with a checkpoint. Leaves out everything else: see `running.run`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from rlinfra_utils.cluster.config import DEVICES, ENGINES, PLACEMENTS, ClusterConfig, ClusterError
from rlinfra_utils.cluster.running import run
from rlinfra_utils.simulator import CONTROLLERS
from rlinfra_utils.tracing import RunFolderError
from rlinfra_utils.tracing.folder import DESCRIPTION, describe

EPILOG = """
examples:
  python -m rlinfra_utils.cluster --out out/run --updates 20 --controller one_step_off
  python -m rlinfra_utils.cluster --out out/run --controller bounded_queue --limit max_rollouts=128 --limit drop_lag=4
  python -m rlinfra_utils.cluster --out out/run --resume
  python -m rlinfra_utils.cluster --out /shared/run --address auto --trainers 4 --workers 12 --device cuda

several machines: `ray start --head` on one, `ray start --address=HOST:6379` on the others, then --address auto (or
HOST:6379); --out must be a folder that all of them see.

without Ray: the trainer group is torch's own, so a script of yours runs under `torchrun --nproc-per-node 2 step.py`,
and engines anywhere load what `sync.hold("weights")` gives. One step of it:

{step}
Ctrl-C saves a checkpoint with the queue and ends; a second one ends at once, and --resume then goes on from the
checkpoint before. With HFEngine an update always waits for running groups, whatever the controller says.
"""

#: One step of a trainer group that torchrun starts: what --help shows, and what a test runs.
STEP = """\
import os
from rlinfra_utils import policy, sharded, sync
from rlinfra_utils.engines import HFEngine

rank, world_size, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 16
with sharded.init_group(rank, world_size, "env://", "cpu") as ranks:
    model, tokenizer = policy.load_warm_start()
    engine = HFEngine(policy.load_warm_start()[0], tokenizer)
    trainer = policy.Trainer(sharded.shard_model(model, ranks), ranks=ranks)
    prompt, names = policy.prompts(1, seed=0)[0], [f"rollout{i}" for i in range(size)]
    records, _ = policy.answer_prompt(engine, tokenizer, prompt.text, policy.DECODING, names, seed=0)
    records = policy.reward_records(records, prompt.answer, tokenizer)
    totals = [policy.total_reward(record.reward) for record in records]
    trainer.update(records, policy.group_advantages(totals, size).values)  # the same batch on each rank
    full = sharded.gather_full(trainer.model, ranks)
    if rank == 0:
        with sync.Publisher("weights", []) as publisher:
            publisher.publish(full.tensors, trainer.version)
"""

#: Option -> field of ClusterConfig, its type or choices, and what it is.
OPTIONS: dict[str, tuple[str, Any, str]] = {
    "--trainers": ("num_trainers", int, "ranks of the trainer (FSDP2 above 1)"),
    "--workers": ("num_workers", int, "rollout workers, one engine each"),
    "--controller": ("controller", tuple(CONTROLLERS), "rule between generation and training"),
    "--updates": ("num_updates", int, "optimizer updates in all, those before a resume included"),
    "--duration": ("duration_s", float, "seconds, from the start of the processes, after which the run saves and ends"),
    "--sync-interval": ("sync_interval", int, "updates between two publications of weights"),
    "--model": ("model", str, '"tiny", or a folder that transformers loads'),
    "--engine": ("engine", ENGINES, "what samples"),
    "--device": ("device", DEVICES, "of trainers and engines"),
    "--placement": ("placement", PLACEMENTS, "trainers and workers apart, or in turns on the same places"),
    "--seed": ("seed", int, "of prompts, lengths and samples"),
}


def parser() -> argparse.ArgumentParser:
    """The options, with the defaults of ClusterConfig."""
    about = "Run asynchronous GRPO on Ray: rollout workers, verifier, bounded queue, trainer group, weight sync."
    made = argparse.ArgumentParser(
        "rlinfra_utils.cluster",
        description=about,
        epilog=EPILOG.format(step=textwrap.indent(STEP, "    ")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="run folder")
    made.add_argument("--resume", action="store_true", help="go on with the run in --out, as it was configured")
    made.add_argument("--address", help="Ray cluster to join: auto, or HOST:PORT; default: one of its own")
    for option, (name, kind, what) in OPTIONS.items():
        typed = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        default = getattr(ClusterConfig, name)
        made.add_argument(option, dest=name, help=f"{what} (default: {default})", **typed)
    pair = {"action": "append", "default": [], "metavar": "NAME=VALUE", "type": _pair}
    made.add_argument("--limit", help="argument of the controller, such as max_rollouts=128; repeatable", **pair)
    made.add_argument("--set", help="any other field of ClusterConfig, such as group_size=16; repeatable", **pair)
    return made


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: needs NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def configure(options: argparse.Namespace) -> ClusterConfig:
    """The configuration that the options ask for; with --resume, that of the run with what they change."""
    held: dict[str, Any] = {}
    if options.resume and (options.out / DESCRIPTION).exists():
        held = describe(options.out).config
    given = {name: getattr(options, name) for name, *_ in OPTIONS.values() if getattr(options, name) is not None}
    if "controller" in given and given["controller"] != held.get("controller"):
        held = {**held, "controller_options": {}}
    limits = {**held.get("controller_options", {}), **dict(options.limit)}
    return ClusterConfig.from_json({**held, **given, **dict(options.set), "controller_options": limits})


def main(arguments: list[str] | None = None) -> int:
    """Run, and return the exit code."""
    options = parser().parse_args(arguments)
    start_s = time.perf_counter()

    def show(line: str) -> None:
        print(f"{time.perf_counter() - start_s:7.1f} s  {line}", flush=True)

    try:
        config = configure(options)
        rule = type(config.make_controller()).__name__
        show(f"{config.num_trainers} trainers, {config.num_workers} workers, {rule}, at update: {config.at_update}")
        outcome = run(config, options.out, options.resume, options.address, show)
    except (ClusterError, RunFolderError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: ended at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    show(f"{outcome.status}: {outcome.num_updates} updates, version {outcome.version}, {outcome.restarts} restarts")
    return 130 if outcome.status == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
