"""Which packages of an environment are not at their pins: what moved since the requirements were written.

Compares the environment that runs it with requirements files; it asks no index and installs nothing. A weekly job
installs the newest versions that pyproject.toml's ranges allow, prints this, and runs the tests: where they fail, the
cause is on the list. Use: `python -m ci.drift [FILES...]`, the environment's own python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


class Move(NamedTuple):
    """One package: its pin and what is installed, "-" for none."""

    package: str
    pinned: str
    installed: str

    @property
    def kind(self) -> str:
        """How far it moved, by the first number that differs."""
        if self.pinned == "-":
            return "not pinned"
        if self.installed == "-":
            return "not installed"
        was, found = Version(self.pinned), Version(self.installed)
        if found < was:
            return "older"
        for name in ("major", "minor", "micro"):
            if getattr(was, name) != getattr(found, name):
                return name
        return "other"


def pins(text: str) -> dict[str, str]:
    """Version by package of a requirements file's lines; comments and options (`-r`, `--index-url`) are passed over.

    Raises ValueError for a line that is not `name==version`.
    """
    found = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line or line.startswith("-"):
            continue
        try:
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            is_pin = specifier.operator == "==" and bool(Version(specifier.version))
        except ValueError:  # packaging's own errors are of this kind
            is_pin = False
        if not is_pin:
            raise ValueError(f"line {line!r} is not a pin of the form name==version")
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def installed() -> dict[str, str]:
    """Version by package of this environment, without this project and the installers."""
    found = {canonicalize_name(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    return {name: version for name, version in found.items() if name not in ("rlinfra-utils", "pip", "setuptools")}


def moves(pinned: dict[str, str], found: dict[str, str]) -> list[Move]:
    """What differs, by name. A build's label (`+cpu`) is no difference."""
    listed = [Move(name, pinned.get(name, "-"), found.get(name, "-")) for name in sorted(pinned.keys() | found.keys())]
    return [move for move in listed if "-" in move[1:] or Version(move.pinned) != _public(move.installed)]


def _public(version: str) -> Version:
    return Version(Version(version).public)


def table(found: list[Move]) -> str:
    """The list as Markdown, which a job's summary and a log both show."""
    if not found:
        return "Every package is at its pin."
    lines = [
        f"Packages that are not at their pins: {len(found)}.",
        "",
        "| package | pinned | installed | moved |",
        "|---|---|---|---|",
    ]
    return "\n".join(lines + [f"| {move.package} | {move.pinned} | {move.installed} | {move.kind} |" for move in found])


def main(arguments: list[str] | None = None) -> int:
    """Print the list: 0 whatever moved, 2 for a file that holds no pins."""
    parser = argparse.ArgumentParser(prog="python -m ci.drift", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "requirements-cpu.txt"], help="files of pins")
    try:
        pinned: dict[str, str] = {}
        for path in parser.parse_args(arguments).files:
            pinned |= pins(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    print(table(moves(pinned, installed())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
