"""A Ray cluster of its own, as an administrator would start it, and clients that never stop asking.

``ray stop`` would end every cluster of the machine: this one is ended by its process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from service_process import PATIENCE_S, eventually, free_port

from shapeserve.metrics import parse_samples

HERE = Path(__file__).parent
# Beside the interpreter, or wherever else Ray lies.
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
SETTLE_S = 3 * PATIENCE_S  # several replicas start, one after the other


def program(name: str) -> str:
    """Return where one of Ray's programs is."""
    found = shutil.which(name, path=PROGRAMS)
    assert found is not None, f"{name} is not installed"
    return found


class RayCluster:
    """One node, from ``ray start --head``; what it serves comes from ``serve deploy``.

    Args:
        private: a directory with a short path, because Ray makes unix sockets in it.
        cpus: what the node says it has; nothing measures time here.
        gpus: as well, without any being there.
        flags: Ray's environment.
    """

    def __init__(
        self, private: Path, *, cpus: int, gpus: int = 0, flags: Mapping[str, str] | None = None
    ) -> None:
        self._private = private
        self.agent_port = free_port()
        self._dashboard = f"http://127.0.0.1:{free_port()}"
        self.environment = {
            **os.environ,
            **(flags or {}),
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
            ),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DASHBOARD_ADDRESS": self._dashboard,
        }
        self.log = private / "ray.log"
        self._started = 0
        self._start(cpus, gpus)
        eventually(lambda: self._is_up(cpus, gpus), SETTLE_S)

    def _start(self, cpus: int, gpus: int) -> None:
        self._started += 1
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(cpus, gpus),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )

    def _command(self, cpus: int, gpus: int) -> list[str]:
        numbers = {
            "port": free_port(),
            "ray-client-server-port": free_port(),
            "dashboard-port": self._dashboard.rpartition(":")[2],
            "dashboard-agent-listen-port": self.agent_port,
            "metrics-export-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": cpus,
            "num-gpus": gpus,
            "object-store-memory": 80 << 20,
        }
        return [
            *(program("ray"), "start", "--head", "--block", "--include-dashboard=true"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={self._private}"),
            *(f"--{name}={value}" for name, value in numbers.items()),
        ]

    def _is_up(self, cpus: int, gpus: int) -> bool:
        if self.process.poll() is not None:  # Ray gives its node 30 s, which a busy machine needs
            assert self._started < 3, self.log.read_text()
            self._start(cpus, gpus)
        try:
            return bool(self._ask_dashboard().is_success)
        except httpx.TransportError:
            return False

    def _ask_dashboard(self) -> httpx.Response:
        """What ``serve status`` asks; the command takes seconds to import Ray."""
        token = {"authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        return httpx.get(self._dashboard + "/api/serve/applications/", headers=token, timeout=30)

    def call(self, *command: str) -> str:
        """Run a command as the cluster's administrator; return what it prints."""
        done = subprocess.run(
            [program(command[0]), *command[1:]],
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, content: Mapping[str, Any]) -> None:
        """``serve deploy`` of a file with this content."""
        path = self._private / "deploy.yaml"
        path.write_text(yaml.safe_dump(dict(content)))
        self.call("serve", "deploy", str(path))

    def applications(self) -> dict[str, Any]:
        """Return what Serve says of each application."""
        return dict(self._ask_dashboard().raise_for_status().json()["applications"])

    def settle(self, replicas: Mapping[str, int]) -> None:
        """Wait until every application runs, with so many replicas and no other."""

        def settled() -> bool:
            found = self.applications()
            assert "DEPLOY_FAILED" not in {a["status"] for a in found.values()}, found
            return {
                name: [
                    replica["state"] for d in a["deployments"].values() for replica in d["replicas"]
                ]
                for name, a in found.items()
                if a["status"] == "RUNNING"
            } == {name: ["RUNNING"] * count for name, count in replicas.items()}

        eventually(settled, SETTLE_S)

    def pids(self, title: str) -> set[int]:
        """Return its processes whose command holds ``title``."""
        mine = set()
        token = self.environment["RAY_AUTH_TOKEN"].encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                command = (entry / "cmdline").read_bytes()
                if title.encode() in command and token in (entry / "environ").read_bytes():
                    mine.add(pid)
        return mine

    def stop(self) -> None:
        """End it and everything that it started."""
        for pid in self.pids(""):  # a stop in good order takes Ray half a minute
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


class SteadyLoad:
    """Clients that ask one after another until told to stop; every answer is kept.

    Two keep their connection, two make a new one for every request: a proxy that changes its routes
    treats them differently.

    Args:
        url: of the application, without a path.
        body: of every request for embeddings.
        pause_s: between an answer and the next request.
    """

    def __init__(self, url: str, body: Mapping[str, Any], *, pause_s: float = 0.02) -> None:
        self.answers: list[tuple[float, int, str]] = []  # when it came, status, body
        self.longest_s = 0.0
        self._url, self._body, self._pause_s = url, dict(body), pause_s
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(keep,)) for keep in (True, True, False, False)
        ]

    def __enter__(self) -> SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self, keep: bool) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._ended.wait(self._pause_s):
                headers = {} if keep else {"connection": "close"}
                began_s = time.monotonic()
                try:
                    got = client.post(
                        self._url + "/v1/embeddings", json=self._body, headers=headers
                    )
                    answer = got.status_code, got.text
                except httpx.TransportError as error:
                    answer = 0, repr(error)
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - began_s)
                self.answers.append((now_s, *answer))

    def metrics(self) -> str:
        """Return what the service says of itself."""
        return httpx.get(self._url + "/metrics", timeout=PATIENCE_S).text

    def counted(self, metric: str, label: str) -> dict[str, float]:
        """Return the value of a label -> the sum of a metric's samples with it, without zeros."""
        sums: dict[str, float] = {}
        for sample in parse_samples(self.metrics()):
            if sample.name == f"shapeserve_{metric}":
                value = sample.labels[label]
                sums[value] = sums.get(value, 0.0) + sample.value
        return {value: n for value, n in sums.items() if n}

    def failures(self) -> list[tuple[int, str]]:
        """Return every answer that is not 200."""
        return [(status, text[:300]) for _, status, text in list(self.answers) if status != 200]

    def served_by(self, model: str) -> bool:
        """Whether the last answers came from this model."""
        last = list(self.answers)[-8:]
        return len(last) == 8 and all(json.loads(t).get("model") == model for _, _, t in last)
