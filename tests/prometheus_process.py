"""A real Prometheus for the tests: on a free port, with its data in a directory of the test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from service_process import eventually, free_port

MONITORING = Path(__file__).parent.parent / "deploy" / "prometheus"
INTERVAL_S = 1

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
)

Labels = frozenset[tuple[str, str]]


def labels(**words: str) -> Labels:
    return frozenset(words.items())


def committed_config(name: str, targets: Iterable[str]) -> dict[str, Any]:
    """A committed configuration that scrapes ``targets``, and does so every second."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / name).read_text())
    config["global"] = dict.fromkeys(config["global"], f"{INTERVAL_S}s")
    config["rule_files"] = [str(MONITORING / file) for file in config["rule_files"]]
    for job in config["scrape_configs"]:
        for discovery in [key for key in job if key.endswith("_sd_configs")]:
            del job[discovery]
        job["static_configs"] = [{"targets": list(targets)}]
        if "scrape_timeout" in job:
            job["scrape_timeout"] = f"{INTERVAL_S}s"
    return config


class Prometheus:
    """Starts in the constructor; call :meth:`stop`."""

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        port = free_port()
        self._log = (directory / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        eventually(self._ready)

    def _ready(self) -> bool:
        assert self.process.poll() is None, Path(self._log.name).read_text()
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **params: Any) -> Any:
        response = self.http.get(f"/api/v1/{path}", params=params)
        content = response.json()
        assert content["status"] == "success", f"{params}: {content.get('error')}"
        return content["data"]

    def query(self, expr: str, at_s: float | None = None) -> dict[Labels, float]:
        """Return labels (without the name) -> value of an instant vector."""
        data = self.get("query", query=expr, **({} if at_s is None else {"time": at_s}))
        assert data["resultType"] == "vector", expr
        found = {}
        for series in data["result"]:
            named = {k: v for k, v in series["metric"].items() if k != "__name__"}
            found[frozenset(named.items())] = float(series["value"][1])
        return found

    def range(self, expr: str, start_s: float, end_s: float) -> list[float]:
        """Return every value of every series, second by second."""
        data = self.get("query_range", query=expr, start=start_s, end=end_s, step=1)
        return [float(value) for series in data["result"] for _, value in series["values"]]

    def scrapes(self, job: str, seconds: int = 300) -> list[float]:
        """Return when a job was scraped with success, oldest first."""
        data = self.get("query", query=f'up{{job="{job}"}}[{seconds}s]')
        values = [value for series in data["result"] for value in series["values"]]
        return sorted(float(at) for at, up in values if up == "1")

    def await_scrapes(self, job: str, more: int) -> float:
        """Wait for ``more`` good scrapes of a job from now on; return when the last began."""
        seen = len(self.scrapes(job))
        return eventually(
            lambda: found[-1] if len(found := self.scrapes(job)) >= seen + more else 0.0
        )

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(30)
        self._log.close()
