"""A real Ray cluster with a dashboard: a tuned policy is rolled out under load, in place."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from service_process import ADMIN_TOKEN, eventually, free_port
from tiny import text_of, write_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
MODEL = {
    "name": "tiny",
    "compile": {"tier": "eager"},
    "policy": {"seq": {"explicit": [8, 32]}, "batch": {"explicit": [1, 4]}},
}


class Cluster:
    """``ray start --head`` on ports of its own, and the commands that talk to it."""

    def __init__(self, directory: Path) -> None:
        token = directory / "token"
        token.write_text(secrets.token_hex(32))
        self.env = {
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "SHAPESERVE_ADMIN_TOKEN": ADMIN_TOKEN,
        }
        self.dashboard = f"http://127.0.0.1:{(dashboard := free_port())}"
        agents = {f"--dashboard-agent-{kind}-port": free_port() for kind in ("listen", "grpc")}
        ports = {
            **agents,
            "--dashboard-port": dashboard,
            "--port": free_port(),
            "--ray-client-server-port": free_port(),
            "--metrics-export-port": free_port(),
        }
        self.log = directory / "ray.log"
        self._log = self.log.open("wb")
        self._temp = Path("/tmp") / f"ss-{os.getpid()}"  # short: unix socket paths
        self.process = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
                *(f"{name}={port}" for name, port in ports.items()),
                *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--num-cpus=4"),
                *("--object-store-memory=100000000", f"--temp-dir={self._temp}"),
            ],
            env=self.env,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )

    def is_up(self) -> bool:
        return self.run("ray.serve.scripts", "status", "-a", self.dashboard).returncode == 0

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._log.close()
            shutil.rmtree(self._temp, ignore_errors=True)


class Load:
    """Sends requests one after the other, and keeps what was not answered."""

    def __init__(self, url: str) -> None:
        self.answered, self.failed = 0, list[Any]()
        self.buckets: set[str] = set()
        self._url, self._end = url, threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _send(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._end.is_set():
                body = {"model": "tiny", "input": text_of(3 + self.answered % 30)}
                response = client.post("/v1/embeddings", json=body)
                if response.status_code == 200:
                    self.answered += 1
                    self.buckets.add(response.headers["x-shapeserve-buckets"])
                else:
                    self.failed.append(response.text)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = _started(tmp_path_factory)
    try:
        yield made
    finally:
        made.stop()


def _started(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Ray gives up if its node takes more than 30 s to start, which a busy machine may."""
    for _ in range(3):
        made = Cluster(tmp_path_factory.mktemp("ray"))
        eventually(lambda made=made: made.is_up() or made.process.poll() is not None)
        if made.process.poll() is None:
            return made
        made.stop()
    pytest.fail(f"ray start failed: {made.log.read_text()}")


@pytest.fixture(scope="module")
def url(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("service")
    port = free_port()
    application = {
        "name": "shapeserve",
        "import_path": "shapeserve.serve:app",
        "args": {
            "models": [{**MODEL, "path": str(write_model(directory))}],
            "serve": {"replicas": 2},
        },
    }
    config = directory / "serve.yaml"
    http = {"host": "127.0.0.1", "port": port}
    config.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    done = cluster.run("ray.serve.scripts", "deploy", str(config), "-a", cluster.dashboard)
    assert done.returncode == 0, done.stderr
    address = f"http://127.0.0.1:{port}"
    eventually(lambda: len(serving(address)) == 2)
    return address


def serving(url: str) -> dict[str, list[int]]:
    """Replica -> sizes that it serves."""
    headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    try:
        answer = httpx.get(f"{url}/v2/models/tiny/policy", headers=headers, timeout=60)
        states = answer.json()["replicas"]
    except (httpx.TransportError, ValueError, KeyError):
        return {}
    return {state["replica"]: state["policy"]["seq"]["explicit"] for state in states}


def test_a_tuned_policy_is_rolled_out_under_load_and_no_request_fails(
    cluster: Cluster, url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,len\n" + "".join(f"{i},{1 + i % 24}\n" for i in range(240)))
    tune = ("shapeserve.cli", "tune", "--trace", str(trace), "-k", "4", "--json", "-")
    before = serving(url)
    with Load(url) as load:
        eventually(lambda: load.answered > 3)
        done = cluster.run(*tune, "--max-length", "32", "--apply", cluster.dashboard)
        assert done.returncode == 0, done.stderr
        sizes = json.loads(done.stdout)["buckets"]
        assert "2 replicas serve grid" in done.stderr
        assert "no replica was restarted" in done.stderr
        assert serving(url) == dict.fromkeys(before, sizes)
        # 24 is less than the 32 that the model takes: it is refused, and taken back.
        done = cluster.run(*tune, "--max-length", "24", "--apply", cluster.dashboard)
        assert done.returncode == 1
        assert "deployed and taken back" in done.stderr
        assert serving(url) == dict.fromkeys(before, sizes)
        before_end = load.answered
        eventually(lambda: load.answered > before_end + 30)
    assert load.failed == []
    assert {f"batch=1,seq={size} x1" for size in sizes} <= load.buckets
