"""The house keeps its shape: floors import downwards only, and floors 1 and 2 stay light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlinfra_utils"
FLOORS = {
    0: ("doors",),
    1: ("timers", "memory", "rollouts", "offpolicy", "pipeline"),
    2: ("limits", "synthetic", "simulator", "mismatch", "stacks", "checkpoint", "tracing"),
    3: ("policy", "engines", "sync", "sharded", "plan"),
    4: ("cluster", "recovery"),
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules}
#: Beside the floors: they serve notebooks; floors 3 and 4 may import them, and they import neither.
BESIDE = ("levels", "exercises", "plots")
HEAVY = ("torch", "transformers", "vllm", "ray")


def stands_on(name: str) -> float:
    return 2.5 if name in BESIDE else FLOOR.get(name, 99)


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def present(floors: tuple[int, ...]) -> list[str]:
    names = {module_of(path) for path in PACKAGE.rglob("*.py")}
    return sorted(name for name in names if FLOOR.get(name) in floors)


def imported(path: Path) -> set[str]:
    """Modules of our package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlinfra_utils"):
            rest = node.module.removeprefix("rlinfra_utils").lstrip(".")
            found |= {rest.split(".")[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rlinfra_utils.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_floors_below(path):
    module = module_of(path)
    others = imported(path) - {module}
    if module in FLOOR:
        assert {name for name in others if stands_on(name) >= FLOOR[module]} == set()
    elif module in BESIDE:
        assert {name for name in others if FLOOR.get(name, 0) >= 3} == set()
    else:
        assert module == "__init__", f"{module} stands on no floor: add it to FLOORS"


def test_every_module_has_a_head_that_says_what_it_is():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_floors_1_and_2_import_without_torch():
    names = ["rlinfra_utils"] + [f"rlinfra_utils.{name}" for name in (*present((0, 1, 2)), "levels", "exercises")]
    code = f"""
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ImportError(f"{{name}} was imported")
sys.meta_path.insert(0, Forbidden())
import importlib
for name in {names}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ranges_admit_what_colab_brings():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("#")[0].strip().split("==")
        for line in (ROOT / "requirements-colab.txt").read_text().splitlines()
        if "==" in line.split("#")[0]
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["torch"]:
        requirement = Requirement(text)
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), f"{text} refuses {pins[requirement.name]}"
