"""A server process of our own on loopback: start it, wait for it, talk JSON to it, stop it.

Models: a process group, a log file that is kept, HTTP requests with a limit in seconds. Leaves out what the server
means: `vllm.py` knows that. Every failure is an `EngineError` of one line.
Use: `process = ServerProcess(command, environment, log_path, address, request_s)`; `process.call("/health")`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How long a polite stop may take before the process group is killed.
STOP_S = 15.0
#: How long a process whose connection broke is given to be seen as dead.
DEATH_S = 1.0


class EngineError(RuntimeError):
    """The server did not start, died, does not answer, or refused a request; one line says which."""


class ServerProcess:
    """One server and whatever it starts, in a process group of their own.

    Life: the constructor starts it, `wait` returns once it serves, `close` stops the whole group, as does the end of
    this process; closing twice does nothing. Invariant: nothing that it started outlives `close`. Trap: a process that
    is alive may hang, so each request has its limit, and a limit that passes says nothing about what the server did
    with the request.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log_path: Path, address: str, request_s: float
    ) -> None:
        self.address, self.log_path, self.request_s = address, log_path, request_s
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )
        self._stop = weakref.finalize(self, _stop_group, self._process)

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    def wait(self, serves: Callable[[], None], startup_s: float) -> None:
        """Call `serves` until it raises no EngineError. Raises EngineError after `startup_s`, or if the server died."""
        until_s, reason = time.monotonic() + startup_s, None
        while time.monotonic() < until_s:
            self.require_alive()
            try:
                return serves()
            except EngineError as error:
                reason = error
                time.sleep(0.5)
        raise EngineError(f"vLLM did not serve within {startup_s:g} s ({reason}); its last line: {self._last_line()}")

    def require_alive(self) -> None:
        """Raise EngineError, with exit code and last line of the log, if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise EngineError(f"vLLM ended with exit code {code}; its last line: {self._last_line()}")

    def call(self, path: str, body: dict | None = None, timeout_s: float | None = None) -> Any:
        """GET without a body, POST with one (fields that are None left out); JSON decoded, other text as it is.

        Raises EngineError for a refusal (status 400 up), a server that died or gave no answer within `timeout_s`
        (`request_s` if None), and an answer that is not the JSON it says it is.
        """
        data = None if body is None else json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.request_s) as answer:
                text = answer.read().decode()
                return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            raise EngineError(f"vLLM refused {path} with {error.code}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, TimeoutError):
                self._give_time_to_die()
            self.require_alive()
            raise EngineError(f"vLLM does not answer at {path}: {reason or type(reason).__name__}") from None
        except ValueError as error:
            raise EngineError(f"vLLM answered {path} with something that is not JSON: {error}") from None

    def close(self) -> None:
        """Stop the process group: politely, then after `STOP_S` seconds by force."""
        self._stop()

    def _give_time_to_die(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DEATH_S)

    def _last_line(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()[:300]!r}" if lines else "none"


def _stop_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # who did not listen, and workers that outlived it
    process.wait()
