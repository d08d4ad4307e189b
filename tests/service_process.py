"""A service in a process group of its own, as a terminal would run it, and a client for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openapi_check import Document
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
# Two busy cores and a cold disk: nothing here measures time, this only ends a hang.
PATIENCE_S = 150.0
ADMIN_TOKEN = "token-of-the-tests"

T = TypeVar("T")


# Below those that the kernel deals out by itself, and those of launch.PORT_RANGE: some are asked
# for when a module is imported, and must still be free minutes later.
_PORTS = iter(secrets.SystemRandom().sample(range(10_240, 20_000), 2_000))


def free_port() -> int:
    """Return a port on which nobody listens, another one each time."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port is left")


def eventually(look: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Return the first true value of ``look``."""
    deadline_s = time.monotonic() + patience_s
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"never: {look}"
        time.sleep(0.05)


def listening(pids: list[int]) -> list[str]:
    """Return the IPv4 addresses on which these processes listen, one for each socket."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    addresses = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:  # 0A = LISTEN
            number = int(local.partition(":")[0], 16)
            addresses.append(socket.inet_ntoa(number.to_bytes(4, sys.byteorder)))
    return addresses


class ServiceProcess:
    """Starts ``run_service.py`` and reads what it says."""

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        self.directory = directory
        path = directory / "service.json"
        path.write_text(json.dumps(config))
        self.log = directory / "service.log"
        paths = os.pathsep.join([str(HERE), str(HERE.parent)])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "run_service.py"), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": paths,
                    "SERVICE_OF": str(directory),
                    "SHAPESERVE_ADMIN_TOKEN": ADMIN_TOKEN,
                },
            )
        self.events: list[dict[str, Any]] = []
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://127.0.0.1:{config['serve']['port']}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self._queue.put(json.loads(line))
        self._queue.put({"event": "ended"})

    def until(self, event: str) -> dict[str, Any]:
        """Return the next event of that name; whatever comes before it is kept."""
        while True:
            said = self._queue.get(timeout=PATIENCE_S)
            self.events.append(said)
            if said["event"] == event:
                return said
            assert said["event"] != "ended", f"{self.events}\n{self.log.read_text()}"

    def do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        while True:
            said = self._queue.get(timeout=PATIENCE_S)
            self.events.append(said)
            if said["event"] in ("done", "error"):
                return said
            assert said["event"] != "ended", f"{self.events}\n{self.log.read_text()}"

    def embed(
        self, value: Any, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        content = {"model": "fake", "input": value, **fields}
        return self.http.post("/v1/embeddings", json=content, headers=headers)

    def is_as_documented(self) -> None:
        """Assert that the document is served, with the administrator's route, and kept."""
        document = Document(self.http.get("/openapi.json").json())
        compiles = "/v2/models/fake/compile"
        token = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        told = [
            *(self.http.get(path) for path in ("/v1/models", "/v2", "/metrics", "/v1/nothing")),
            *(self.http.get(f"/v2/health/{path}") for path in ("live", "ready", "nothing")),
            *(self.http.get(compiles, headers=headers) for headers in (token, {})),
            *(self.embed(text) for text in ("a", "fallback", "", "nan")),
            # Ray would answer this one with a plain 500.
            self.embed("a", headers={b"x-request-id": b"caf\xe9"}),  # type: ignore[dict-item]
        ]
        for response in told:
            document.check(response)
        statuses = [response.status_code for response in told]
        assert statuses == [200, 200, 200, 404, 200, 200, 404, 200, 404, 200, 200, 400, 500, 400]
        assert told[7].json()["replica"] in self.replicas()

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Return status and content of ``/v2/health/ready``; status 0 while it does not answer."""
        try:
            response = httpx.get(self.url + "/v2/health/ready", timeout=10)
        except httpx.TransportError:
            return 0, {}
        return response.status_code, response.json()

    def watch_warming(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Return what health says until it is ready: status of live, status and body of ready."""
        seen: list[tuple[int, int, dict[str, Any]]] = []
        while not seen or seen[-1][1] != 200:
            live = httpx.get(self.url + "/v2/health/live", timeout=10).status_code
            seen.append((live, *self.ready()))
        return seen

    def samples(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Return ``/metrics``: sample name -> sorted labels -> value."""
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                key = tuple(sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[key] = sample.value
        return found

    def total(self, name: str, **labels: str) -> float:
        """Sum a metric over all replicas and all labels that are not given."""
        series = self.samples().get(f"shapeserve_{name}", {})
        return sum(v for key, v in series.items() if labels.items() <= dict(key).items())

    def replicas(self) -> set[str]:
        series = self.samples()["shapeserve_queue_rows"]
        return {dict(key)["replica"] for key in series}

    def pids(self, title: str) -> list[int]:
        """Return the processes that this service started whose command holds ``title``."""
        mine = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                environ = (entry / "environ").read_bytes()
                if self._token() in environ and title.encode() in (entry / "cmdline").read_bytes():
                    mine.append(pid)
        return mine

    def _token(self) -> bytes:
        return f"{self.log.parent}".encode()

    def interrupt_group(self) -> None:
        """Ctrl-C in a terminal: SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def stop(self) -> int:
        """End it and everything that it started; return its exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._reader.join(5)
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
