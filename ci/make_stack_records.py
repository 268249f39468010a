"""Make the stored records of the seven stacks: each stack's own classes, in a throwaway environment, no GPU.

Leaves out engines and clusters; what stands in for them is said in each recipe (`ci/stack_recipes/`).
Use: `python -m ci.make_stack_records "TRL sync" verl`, or without names for all (about ten minutes, 4 GB on disk).
The environment borrows torch from the one that runs this. PRIME-RL and NeMo RL are on no package index: name a
checkout, `--checkout "PRIME-RL=path"`. `--environments FOLDER` keeps the environments and takes those it finds there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci.stack_recipes import Answers

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "rlinfra_utils" / "data" / "stacks"
NUM_ANSWERS = 4


@dataclass(frozen=True)
class Recipe:
    """`package` is installed without its dependencies, which ask for CUDA; `others` are those that are needed.

    `commit`: of the checkout, for a stack that is on no package index.
    """

    module: str
    package: str
    others: str
    commit: str = ""

    @property
    def made_by(self) -> str:
        """Package and version."""
        return self.package.replace("==", " ") or f"{self.module.replace('_', '-')} at {self.commit[:12]}"


#: Pins found to work together on 2026-11-29, Python 3.11, torch 2.13 for the CPU.
RECIPES = {
    "TRL sync": Recipe("trl_sync", "trl==1.16.0", "accelerate datasets"),
    "TRL async": Recipe("trl_async", "trl==1.16.0", "accelerate datasets aiohttp"),
    "verl": Recipe(
        "verl",
        "verl==0.9.1",
        "tensordict>=0.8,!=0.9.0,<=0.10 ray transformers>=5.5.3,<5.11 omegaconf hydra-core pillow codetiming datasets "
        "cachetools uvicorn fastapi",
    ),
    "OpenRLHF": Recipe("openrlhf", "openrlhf==0.11.2", "transformers>=5.5,<5.25 pylatexenc aiohttp"),
    "NeMo RL": Recipe(
        "nemo_rl",
        "",
        "transformers>=5.5,<5.9 pillow requests tensordict datasets ray torchdata pyzmq nvidia-ml-py uvicorn fastapi "
        "mlflow tensorboard",
        commit="7ea279abfbeb698b092856d0dab61e7cf39bc909",
    ),
    "PRIME-RL": Recipe("prime_rl", "", "msgspec", commit="559b44772e471d1538537b8805cc77f3824a5e64"),
    "SkyRL": Recipe(
        "skyrl",
        "skyrl==0.4.0",
        "jaxtyping loguru cloudpathlib tqdm skyrl-gym aiohttp orjson pybase64 rich torchdata ray "
        "transformers>=5.6.1,<=5.16.1 datasets",
    ),
    "AReaL": Recipe(
        "areal",
        "areal==1.0.4",
        "transformers>=5.0,<=5.3 pillow aiohttp colorlog tenacity flask torchdata lark uvloop hydra-core ray numba "
        "orjson einops aiofiles openai",
    ),
}


def environment(folder: Path, recipe: Recipe) -> Path:
    """The Python of an environment with the recipe's packages, made unless `folder` has one."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        ours = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "zz_ours.pth"
        ours.write_text(sysconfig.get_paths()["purelib"] + "\n")  # last on the path: its own packages come first
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        if recipe.package:  # SkyRL declares Python 3.12 and runs on 3.11
            subprocess.run([*pip, "--no-deps", "--ignore-requires-python", recipe.package], check=True)
        subprocess.run([*pip, *recipe.others.split()], check=True)
    return python


def make(stack: str, environments: Path, checkout: str = "") -> Path:
    """Run one recipe and store its record; returns the file."""
    recipe = RECIPES[stack]
    if recipe.commit and not checkout:
        raise SystemExit(f'{stack} is on no package index: give --checkout "{stack}=path" at {recipe.commit}')
    python = environment(environments / recipe.module, recipe)
    out, given = environments / f"{recipe.module}.json", environments / "answers.json"
    given.write_text(json.dumps(dataclasses.asdict(Answers.sample(NUM_ANSWERS))))
    command = [python, "-m", f"ci.stack_recipes.{recipe.module}", out, given, *([checkout] if checkout else [])]
    subprocess.run(command, cwd=ROOT, check=True)
    made = json.loads(out.read_text())
    origin = {"origin": f"made by {recipe.made_by}", "made_on": datetime.date.today().isoformat()}
    path = FOLDER / f"record_{recipe.module}.json"
    path.write_text(json.dumps({"stack": stack, **origin, **made}) + "\n")
    return path


def main() -> int:
    """Make the records asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stacks", nargs="*", help=f"kinds of record, all if none is named: {', '.join(RECIPES)}")
    parser.add_argument("--environments", type=Path, help="keep the environments here")
    parser.add_argument("--checkout", action="append", default=[], metavar="STACK=PATH")
    args = parser.parse_args()
    if unknown := set(args.stacks) - RECIPES.keys():
        parser.error(f"{sorted(unknown)[0]!r} is none of {', '.join(RECIPES)}")
    checkouts = dict(text.split("=", 1) for text in args.checkout)
    with tempfile.TemporaryDirectory() as throwaway:
        folder = args.environments or Path(throwaway)
        folder.mkdir(parents=True, exist_ok=True)
        for stack in args.stacks or RECIPES:
            print(make(stack, folder.resolve(), checkouts.get(stack, "")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
