"""Start a server as a process, wait for its first answers, stop it and all that it started.

Every process of an arm inherits a marker in its environment. That is how the ones that outlive
their parent (a Ray worker after a crash) are found and stopped, and no process of anybody else.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MARKER = "SHAPESERVE_BENCHMARK_RUN"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_TAIL_LINES = 30


class ArmError(Exception):
    """An arm did not start, died, or answered nonsense; the run goes on with the next one."""


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every child: this repository importable, no network, no usage."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **extra,
    }


def run_module(module: str, *arguments: str, stdin: str = "", timeout_s: float) -> str:
    """Run ``python -m module`` to its end; return its standard output."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
            env=child_environment({}),
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        raise ArmError(f"{module} did not end within {timeout_s:.0f} s") from late
    except subprocess.CalledProcessError as failed:
        raise ArmError(f"{module} failed:\n{last_lines(failed.stderr)}") from failed
    return done.stdout


def last_lines(text: str) -> str:
    """Return the end of a log."""
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


class ServerProcess:
    """A server under test; a context manager, so that it is stopped whatever happens."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self._command = list(command)
        self._run_id = uuid.uuid4().hex
        self._env = child_environment({**env, MARKER: self._run_id})
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0

    def __enter__(self) -> ServerProcess:
        self.started_s = time.perf_counter()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=self._env,
                start_new_session=True,  # Ctrl-C of the benchmark is not the server's
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log_tail(self) -> str:
        """Return the last lines that the server wrote."""
        return last_lines(self._log_path.read_text(errors="replace"))

    def check_alive(self) -> None:
        """Raise if the server has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ArmError(f"the server ended with exit code {code}")

    def wait_ready(self, port: int, path: str) -> float:
        """Return the seconds from the start to the first 200 at ``path``."""
        deadline_s = self.started_s + START_TIMEOUT_S
        while time.perf_counter() < deadline_s:
            self.check_alive()
            if _status(port, path) == 200:
                return time.perf_counter() - self.started_s
            time.sleep(POLL_S)
        raise ArmError(f"not ready after {START_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """SIGTERM to the server; SIGKILL to what is left of its processes after a while."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in marked_processes(self._run_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process = None


def marked_processes(run_id: str) -> list[int]:
    """Return the living processes that carry this run's marker."""
    wanted = f"{MARKER}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or not ours to read
            continue
    return found


def _status(port: int, path: str) -> int | None:
    """Return the status of a GET; None if there is no answer (yet)."""
    # 2 s: a path of Ray Serve whose replica is still being constructed does not answer at all.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
