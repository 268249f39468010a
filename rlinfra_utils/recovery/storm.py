"""Kill the real loop again and again, and look after each kill whether anything was lost: `storm`.

Models: SIGKILL at seeded instants, some of them aimed at a moment that matters, and disks that fill up at a seeded
byte. Leaves out power cuts (the page cache survives here) and machines that lie about flushing.
Use: `print(storm("out/storm", RunConfig(), num_kills=20))`. Needs Linux for the full disk.

The instants are drawn from a seed, but what a process is doing at that instant is the machine's: two storms of one
seed differ, and neither may lose anything. A full disk is a limit on the size of files (RLIMIT_FSIZE): the kernel
stops the write at that byte, with EFBIG in place of ENOSPC.
"""

from __future__ import annotations

import errno
import html
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlinfra_utils.doors import whole
from rlinfra_utils.recovery.config import RecoveryError, RunConfig
from rlinfra_utils.recovery.folder import QUEUE
from rlinfra_utils.recovery.story import Story, broken, tell
from rlinfra_utils.recovery.supervisor import Supervisor
from rlinfra_utils.recovery.workers import CHECKPOINTS, worker_names
from rlinfra_utils.tracing import read_run

#: Kinds of accident, and the longest wait from the moment aimed at to the blow, in seconds.
KINDS = {
    "collector": 0.15,
    "trainer after a save": 0.05,
    "trainer during a save": 0.01,
    "verifier with a half-written batch": 0.001,
    "any worker": 0.15,
    "full disk": 0.0,
}
#: Kinds that wait for a moment before they draw the time of the blow.
_AIMED = ("trainer after a save", "trainer during a save", "verifier with a half-written batch")
#: Limits on a worker's files are drawn below these sizes: about a checkpoint's largest file, and a batch's.
_TRAINER_BYTES, _OTHERS_BYTES = 2_000_000, 8_000
_POLL_S = 0.0002
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Accident:
    """One blow: its kind, whom it hit, whether half a file or folder stayed under a hidden name, and what was wrong."""

    kind: str
    worker: str
    left_half: bool
    problems: tuple[str, ...]


@dataclass
class StormReport:
    """All accidents of a storm, and what was wrong at the end of each of its runs.

    `num_repeated` counts updates that were undone by a kill and trained again.
    """

    num_updates: int
    accidents: list[Accident] = field(default_factory=list)
    num_runs: int = 0
    num_repeated: int = 0
    final_problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def num_kills(self) -> int:
        """SIGKILLs that hit a living worker; full disks are not among them."""
        return sum(accident.kind != "full disk" for accident in self.accidents)

    @property
    def problems(self) -> list[str]:
        """Everything that was wrong, at any time."""
        return [p for accident in self.accidents for p in accident.problems] + self.final_problems

    def rows(self) -> list[tuple[str, int, int, int]]:
        """(kind, accidents, those that left half a file, those after which something was wrong)."""
        of = {kind: [accident for accident in self.accidents if accident.kind == kind] for kind in KINDS}
        return [
            (kind, len(hits), sum(hit.left_half for hit in hits), sum(bool(hit.problems) for hit in hits))
            for kind, hits in of.items()
            if hits
        ]

    @property
    def summary(self) -> str:
        """One line: how much ran, and whether it was what the uninterrupted run did."""
        plural = "" if self.num_runs == 1 else "s"
        runs = f"{self.num_runs} run{plural} of {self.num_updates} updates, {self.num_repeated} updates repeated"
        verdict = f"wrong: {self.problems[0]}" if self.problems else "events and weights as uninterrupted"
        return f"{self.num_kills} kills, {runs}, {self.wall_s:.0f} s: {verdict}"

    def __str__(self) -> str:
        head = f"{'accident':<36}{'number':>8}{'half a file':>13}{'wrong':>7}"
        return "\n".join(
            [head, *(f"{kind:<36}{n:>8}{half:>13}{bad:>7}" for kind, n, half, bad in self.rows()), self.summary]
        )

    def _repr_html_(self) -> str:
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in self.rows())
        head = "<tr><th>accident</th><th>number</th><th>left half a file</th><th>something wrong</th></tr>"
        return f"<table>{head}{rows}</table><p>{html.escape(self.summary)}</p>"


def storm(
    folder: str | Path,
    config: RunConfig,
    num_kills: int,
    seed: int = 0,
    kinds: Sequence[str] = tuple(KINDS),
    queue_policy: str = "restore",
) -> StormReport:
    """Runs of `config`, one after the other, until `num_kills` have hit; each is compared with one left in peace.

    `folder` gets "reference" and the last run. Raises ValueError for a senseless argument, FileExistsError for a
    folder that is there, TimeoutError for a run that does not go on, RecoveryError as `Supervisor` does.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or set(kinds) <= {"full disk"}:
        raise ValueError(f"kinds={list(kinds)}: needs names of KINDS, at least one of a kill: {', '.join(KINDS)}")
    whole("num_kills", num_kills)
    folder, start_s = Path(folder), time.perf_counter()
    folder.mkdir(parents=True)
    with Supervisor(folder / "reference", config) as run:
        run.wait(_TIMEOUT_S)
    weather = _Weather(tell(folder / "reference"), random.Random(seed), tuple(kinds), num_kills)
    report = StormReport(config.num_updates)
    while report.num_kills < num_kills:
        shutil.rmtree(folder / "run", ignore_errors=True)
        with Supervisor(folder / "run", config, queue_policy) as run:
            _strike(run, weather, report)
            run.wait(_TIMEOUT_S)
        report.num_runs += 1
        report.num_repeated += int(read_run(run.folder).batches["rolled_back"].sum())
        report.final_problems += broken(run.folder, config, weather.reference, finished=True)
    report.wall_s = time.perf_counter() - start_s
    return report


@dataclass(frozen=True)
class _Weather:
    """What the runs of a storm share."""

    reference: Story
    draw: random.Random
    kinds: tuple[str, ...]
    num_kills: int


def _strike(run: Supervisor, weather: _Weather, report: StormReport) -> None:
    """Accidents to one run, until it is finished or there were enough."""
    while report.num_kills < weather.num_kills:
        kind = weather.draw.choice(weather.kinds)
        hit = _fill_disk(run, weather.draw) if kind == "full disk" else _kill(run, kind, weather.draw)
        if hit is None:
            return
        with run.frozen():
            problems = broken(run.folder, run.config, weather.reference)
        report.accidents.append(Accident(kind, *hit, tuple(problems)))
        if kind == "full disk":
            run.start()
        else:
            run.tend()


def _kill(run: Supervisor, kind: str, draw: random.Random) -> tuple[str, bool] | None:
    """Kill at the kind's moment; whom, and whether half a file stayed. None where the run finished before."""
    names = [
        name for name in worker_names(run.config) if kind == "any worker" or kind.startswith(name.rstrip("0123456789"))
    ]
    worker = draw.choice(names)
    place, hidden = (CHECKPOINTS, ".step_") if worker == "trainer" else (QUEUE, ".s")
    before = set(_names(run.folder / place))  # with what the blow before left, until its worker clears it up

    def is_half(name: str) -> bool:
        return name.startswith(hidden) and name not in before

    def moment() -> bool:
        names = _names(run.folder / place)
        if kind == "trainer after a save":
            return any(name.startswith("step_") and name not in before for name in names)
        return any(map(is_half, names))

    if kind in _AIMED and not _await(run, moment):
        return None
    _sleep(_wait_s(kind, draw))
    if not run.kill(worker):
        return None
    return worker, any(map(is_half, _names(run.folder / place)))


def _wait_s(kind: str, draw: random.Random) -> float:
    """From the moment to the blow; aimed ones evenly over two powers of ten, as a write is short on a fast machine."""
    return KINDS[kind] * 10 ** draw.uniform(-2, 0) if kind in _AIMED else draw.uniform(0, KINDS[kind])


def _fill_disk(run: Supervisor, draw: random.Random) -> tuple[str, bool] | None:
    """Let a worker's files end at a drawn byte, until it stops; None where the run finished before it mattered."""
    worker = draw.choice(worker_names(run.config))
    limit_bytes = draw.randrange(_TRAINER_BYTES if worker == "trainer" else _OTHERS_BYTES)
    with suppress(ProcessLookupError):  # the trainer, at the end of the run
        resource.prlimit(run.pid(worker), resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    try:
        _await(run, lambda: False)
    except RecoveryError as error:
        if os.strerror(errno.EFBIG) not in str(error) and "is the disk full" not in str(error):
            raise
        return worker, False
    return None


def _await(run: Supervisor, moment: Callable[[], bool]) -> bool:
    """Tend the run until the moment has come; False where the run finished first."""
    end_s, tend_s = time.monotonic() + _TIMEOUT_S, 0.0
    while not moment():
        if time.monotonic() > tend_s:
            if run.finished:
                return False
            run.tend()
            tend_s = time.monotonic() + 0.01
        if time.monotonic() > end_s:
            raise TimeoutError(f"{run.folder}: the moment to strike did not come within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return True


def _sleep(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:  # time.sleep is too coarse for the width of one write
        pass


def _names(place: Path) -> list[str]:
    return os.listdir(place) if place.exists() else []
