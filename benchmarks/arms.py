"""What is compared: the names of the arms, and how each server is started."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.environment import MODEL_NAME, MODEL_PACKAGE, model_dir

SHAPESERVE = "shapeserve"
INFINITY = "infinity"
BASELINE_ARMS = ("ray-nobatch", "ray-batch", "ray-batch-compiled")
SERVER_ARMS = (*BASELINE_ARMS, INFINITY, SHAPESERVE)
OFFLINE_ARMS = (
    "offline-eager",
    "offline-sentence-transformers",
    "offline-onnxruntime",
    "offline-shapeserve",
)

# The smallest configuration: everything else is shapeserve's default.
SHAPESERVE_CONFIG = {"models": [{"name": MODEL_NAME, "path": f"package:{MODEL_PACKAGE}"}]}

Proxy = Literal["fast", "default"]


@dataclass(frozen=True)
class Launch:
    """How to start one server and where it answers."""

    command: tuple[str, ...]
    ready_path: str
    path: str = "/v1/embeddings"
    env: dict[str, str] = field(default_factory=dict)


def launch(
    arm: str, port: int, work_dir: Path, baseline_proxy: Proxy, infinity_python: str | None
) -> Launch:
    """Return how to start ``arm`` on ``port``; ``work_dir`` is a short, empty, private path."""
    if arm == SHAPESERVE:
        return shapeserve(SHAPESERVE_CONFIG, port, work_dir)
    if arm == INFINITY:
        return _infinity(port, infinity_python or sys.executable)
    return _baseline(arm, port, work_dir, baseline_proxy)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shapeserve(content: Mapping[str, Any], port: int, work_dir: Path) -> Launch:
    """Return how to start ``shapeserve serve`` with this configuration."""
    config = work_dir / "serve.yaml"
    config.write_text(json.dumps(content))  # JSON is YAML
    # What the `shapeserve` script does; it also works in a checkout that is not installed.
    cli = "from shapeserve.cli import main; main(prog_name='shapeserve')"
    command = (sys.executable, "-c", cli, "serve", str(config))
    return Launch(
        command=(*command, "--port", str(port), "--proxy", "fast"),
        ready_path="/v2/health/ready",
    )


def _baseline(arm: str, port: int, work_dir: Path, proxy: Proxy) -> Launch:
    command = (sys.executable, "-m", "benchmarks.baseline_server", arm)
    return Launch(
        command=(*command, "--port", str(port), "--temp-dir", str(work_dir / "ray")),
        ready_path="/",
        env=_fast_ray(work_dir) if proxy == "fast" else {},
    )


def _fast_ray(work_dir: Path) -> dict[str, str]:
    """Return the flags of Ray's own fast path, with ports and paths of our own for HAProxy."""
    private = work_dir / "haproxy"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(private / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(private / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(private),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(private / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # Nothing is in flight when an arm is stopped: the default would wait 30 s for it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def _infinity(port: int, python: str) -> Launch:
    options = {
        "--model-id": str(model_dir()),
        "--served-model-name": MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--engine": "torch",
        "--device": "cpu",
        "--dtype": "float32",
        "--batch-size": "32",
        "--url-prefix": "/v1",
    }
    arguments = [part for pair in options.items() for part in pair]
    return Launch(
        command=(str(Path(python).with_name("infinity_emb")), "v2", *arguments),
        ready_path="/health",
        env={"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "PYTHONPATH": ""},
    )
