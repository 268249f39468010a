"""The wheel and the sdist: what is in them, and what the wheel does alone, with its core dependencies and no torch.

pip fetches the build backend and the dependencies, at the versions pinned in requirements-cpu.txt where it names them.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_house import FLOORS

from ci import recipes

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEED_TORCH = ("policy", "engines", "sharded", "recovery", "cluster")
LIGHT = sorted(
    {name for floor in (0, 1, 2) for name in FLOORS[floor]} | {"levels", "exercises", "plots", "sync", "plan"}
)
pytestmark = pytest.mark.slow


def ran(*command, **settings):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments):
    return ran(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def files(folder):
    """Files under a folder of the tree that belong to the repository, by their path in the tree."""
    return {
        str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist and the wheel of this tree, and the wheel that the sdist gives."""
    folder = tmp_path_factory.mktemp("built")
    pip("install", "-q", "--no-compile", "--target", folder / "backend", *PROJECT["build-system"]["requires"])
    environment = {**os.environ, "PYTHONPATH": str(folder / "backend")}

    def build(tree, target, kind):
        ran(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=tree, env=environment)
        (made,) = target.iterdir()
        return made

    sdist = build(ROOT, folder / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
        names = {name.partition("/")[2] for name in archive.getnames()}
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel, again = build(ROOT, folder / "wheel", "wheel"), build(unpacked, folder / "again", "wheel")
    return SimpleNamespace(sdist_names=names, wheel=wheel, wheel_of_sdist=again)


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The interpreter of an environment that has the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    found = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip("--python", found, "install", "-q", "--no-compile", "-c", ROOT / "requirements-cpu.txt", built.wheel)
    return found


def test_the_wheel_holds_the_package_its_data_and_the_stored_results_and_nothing_else(built):
    expected = files(ROOT / "rlinfra_utils") | {f"rlinfra_utils/{name}" for name in files(ROOT / "results")}
    inside = {name for name in members(built.wheel) if ".dist-info/" not in name}
    assert inside == expected


def test_the_wheel_says_what_it_is(built):
    name = f"rlinfra_utils-{PROJECT['project']['version']}.dist-info"
    inside = members(built.wheel)
    metadata = inside[f"{name}/METADATA"].decode().split("\n\n")[0].splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in metadata if line.startswith("Requires-Dist")]
    assert sorted(line for line in required if "extra ==" not in line) == sorted(PROJECT["project"]["dependencies"])
    assert f"Version: {PROJECT['project']['version']}" in metadata
    assert inside[f"{name}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_gives_the_same_wheel(built):
    assert members(built.wheel_of_sdist) == members(built.wheel)


def test_the_sdist_holds_the_sources_and_no_build_output(built):
    assert built.sdist_names >= files(ROOT / "tests") | files(ROOT / "ci") | files(ROOT / "docs")
    heads = {name.partition("/")[0] for name in built.sdist_names}
    assert not heads & {"build", "dist", "out", ".venv", ".venv-vllm", ".venv-colab", ".git"}


def test_the_wheel_brings_no_torch(python):
    installed = ran(sys.executable, "-m", "pip", "--python", python, "list", "--format", "freeze").lower()
    assert "rlinfra" in installed
    assert not {"torch", "transformers", "vllm", "ray"} & {line.partition("==")[0] for line in installed.splitlines()}


def test_what_needs_no_torch_imports_without_it_and_finds_its_data(python, tmp_path):
    code = f"""
import importlib, sys
import rlinfra_utils
for name in {LIGHT}:
    importlib.import_module(f"rlinfra_utils.{{name}}")
assert "torch" not in sys.modules
from rlinfra_utils import exercises, levels, memory, stacks
assert memory.known_models() and stacks.STACKS and exercises.PROBLEMS
print(levels.stored("twin") is not None, rlinfra_utils.__version__)
"""
    assert ran(python, "-c", code, cwd=tmp_path).split() == ["True", PROJECT["project"]["version"]]


@pytest.mark.parametrize(
    "recipe", [each for each in recipes.read() if not each.needs_torch], ids=lambda each: each.title
)
def test_a_recipe_prints_the_same_there(python, tmp_path, recipe):
    assert recipes.run(recipe, tmp_path, str(python)) == recipe.output


@pytest.mark.parametrize("name", NEED_TORCH)
def test_what_needs_torch_says_in_its_last_line_what_to_install(python, tmp_path, name):
    done = subprocess.run([python, "-c", f"import rlinfra_utils.{name}"], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ModuleNotFoundError: torch is not installed")
    assert "pip install 'rlinfra-utils[torch]'" in last
