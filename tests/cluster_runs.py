"""Runs of a cluster for the tests: what a sound run folder is, and a Ray in this process, `Inline`.

`Inline` plays `session.Session` and the module ray: actors are plain objects here, a call is done when somebody waits
for it, one at a time and in order. So a run takes a second, and a test says who hangs (`hangs`) and who dies.
"""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

from rlinfra_utils.cluster import session
from rlinfra_utils.rollouts import validate_table
from rlinfra_utils.tracing import read_run

SMALL = {"prompts_per_step": 4, "group_size": 4, "num_updates": 4, "save_every": 2}


def sound(folder, num_updates, config):
    """The run, once it is sure that its log is whole and that each prompt was trained once."""
    found = read_run(folder)
    assert found.problems == []
    standing = found.batches[~found.batches["rolled_back"]]
    assert len(standing) == num_updates
    ids = [name for names in standing["rollout_ids"] for name in names]
    assert len(ids) == len(set(ids)) == num_updates * config.batch_rollouts
    stored = found.rollouts.set_index("rollout_id").loc[ids]
    groups = stored.groupby("group_id").size()
    assert set(groups) == {config.group_size}
    numbers = {name.split("-p")[1].split("-a")[0] for name in groups.index}
    assert len(numbers) == len(groups), "a prompt was trained twice"
    assert set(validate_table(found.table)["status"].to_pylist()) == {"accept"}
    return found


def kinds(found, kind):
    """Events of one kind."""
    return found.events[found.events["kind"] == kind]


def processes_of(run_id):
    """Processes with a run's marker in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{session.MARKER}={run_id}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def nobody_left(run_id, within_s=120.0):
    """Whether no process of a run is there, or none is any more within some seconds."""
    until_s = time.monotonic() + within_s
    while processes_of(run_id) and time.monotonic() < until_s:
        time.sleep(0.2)
    return processes_of(run_id) == []


class RayError(Exception):
    """Ray's names, for the code under test."""


class ActorDiedError(RayError):
    """An actor that was killed."""


class GetTimeoutError(RayError):
    """Nothing within the limit."""


class _Ref:
    """An answer to come: `run` makes it; `of` is the actor that owes it, None for a value that is there."""

    def __init__(self, of=None, run=None, value=None):
        self.of, self._run, self._value, self._error = of, run, value, None

    @property
    def can_be_done(self):
        return self.of is None or self._run is None or not self.of.is_silent(self)

    def look(self):
        if self._run is not None:
            run, self._run = self._run, None
            try:
                self._value = self.of.work(run)
            except RayError as error:
                self._error = error
            except Exception as error:
                self._error = RayError(f"{type(error).__name__}: {error}")
        if self._error is not None:
            raise self._error
        return self._value


class _Actor:
    """An actor: built at its first call; `session.hangs` has (name, method) of calls that never end."""

    def __init__(self, owner, name, kind, arguments):
        self._owner, self.name, self._build = owner, name, lambda: kind(*arguments)
        self.plain, self.killed = None, False

    def is_silent(self, ref):
        return not self.killed and (self.name, ref.method) in self._owner.hangs

    def work(self, run):
        if self.killed:
            raise ActorDiedError(f"{self.name} was killed")
        if self.plain is None:
            self.plain = self._build()
        return run(self.plain)

    def __getattr__(self, method):
        def remote(*arguments, parts=1):
            given = [a.look() if isinstance(a, _Ref) else a for a in arguments]
            whole = _Ref(self, lambda plain: getattr(plain, method)(*given))
            whole.method = method
            if parts == 1:
                return whole
            rest = [_Ref(self, lambda plain, i=i: whole.look()[i]) for i in range(1, parts)]
            first = _Ref(self, lambda plain: whole.look()[0])
            for ref in (first, *rest):
                ref.method = method
            return [first, *rest]

        options = lambda num_returns=1: SimpleNamespace(remote=lambda *a: remote(*a, parts=num_returns))  # noqa: E731
        return SimpleNamespace(remote=remote, options=options)


class Inline:
    """A session and its ray, for a run in this process."""

    hangs: frozenset[tuple[str, str]] = frozenset()
    exceptions = SimpleNamespace(
        RayError=RayError, ActorDiedError=ActorDiedError, RayActorError=ActorDiedError, GetTimeoutError=GetTimeoutError
    )

    def __init__(self, config=None, address=None):
        self.ray, self.actors = self, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for actor in self.actors:
            self.kill(actor)

    def actor(self, name, kind, *arguments, at_once=1):
        self.actors.append(_Actor(self, name, kind, arguments))
        return self.actors[-1]

    def kill(self, actor):
        """What the end of its process would take along goes as well."""
        if actor.plain is not None and not actor.killed:
            actor.plain.close()
        actor.killed = True

    def put(self, value):
        return _Ref(value=value)

    def get(self, refs, timeout=None):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if not refs.can_be_done:
            raise GetTimeoutError(f"nothing within {timeout:g} s")
        return refs.look()

    def wait(self, refs, num_returns=1, timeout=None):
        done = list(itertools.islice((ref for ref in refs if ref.can_be_done), num_returns))
        if len(done) < num_returns:
            time.sleep(min(timeout, 0.01))
        for ref in done:
            try:
                ref.look()
            except Exception:
                continue  # it is raised again for whoever gets it
        return done, [ref for ref in refs if ref not in done]
