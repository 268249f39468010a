"""The bootstrap cell: one text for every notebook, which gets the package into a Colab runtime.

Leaves out: anything but Colab; elsewhere the cell only says what to install. The repository's address
comes from pyproject.toml. `python -m ci.badges` writes the cell into the notebooks.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_ADDRESS = re.compile(r"https://github\.com/[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+")

_CELL = """\
# Makes rlinfra_utils importable. In Colab it installs the package alone and checks that what Colab
# brings stays as it was; on your own machine it changes nothing. Standard library only.
import contextlib, importlib.metadata, importlib.util, os, subprocess, sys

source = os.environ.get("RLINFRA_SOURCE") or "git+@REPOSITORY@"

def colab_versions():
    importlib.invalidate_caches()
    found = {}
    for name in ("torch", "numpy", "pandas", "transformers"):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found

if importlib.util.find_spec("rlinfra_utils") is None:
    if "COLAB_RELEASE_TAG" not in os.environ:
        raise ModuleNotFoundError("rlinfra_utils is not installed here: run `make lab`, or pip install " + source)
    before = colab_versions()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", source]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError("pip could not install " + source + "\\n" + "\\n".join(done.stdout.splitlines()[-8:]))
    if moved := sorted(before.items() ^ colab_versions().items()):
        raise RuntimeError(f"the install moved {moved} (before and after): delete this runtime and start again")
"""


def require_address(repository: str) -> str:
    """Return `repository` if it is https://github.com/owner/name; raise ValueError with the value otherwise."""
    if (
        not isinstance(repository, str)
        or _ADDRESS.fullmatch(repository) is None
        or repository.endswith((".git", "/.", "/.."))
    ):
        raise ValueError(f"repository {repository!r} is not of the form https://github.com/owner/name")
    return repository


def repository(pyproject: Path = ROOT / "pyproject.toml") -> str:
    """The repository's address, from the one place where it stands: [project.urls] Repository."""
    try:
        address = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    except KeyError as missing:
        raise ValueError(f"{pyproject.name} has no [project.urls] Repository: {missing} is absent") from None
    return require_address(address)


def cell_source(repository: str) -> str:
    """The source of the bootstrap cell for the repository at `repository` (no newline at the end)."""
    return _CELL.replace("@REPOSITORY@", require_address(repository)).rstrip("\n")
