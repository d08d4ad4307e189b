"""Starting a service: what can be wrong before Ray starts, and what Ray is told. No Ray here."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shapeserve.config import ServeConfig
from shapeserve.errors import ConfigError, ModelError
from shapeserve.serve import haproxy_guard, launch, sizing


def config(**serve: Any) -> ServeConfig:
    model = {"name": "mini", "path": "/models/mini", "aliases": ["ada"]}
    return ServeConfig.from_dict({"models": [model], "serve": serve})


# --- before anything starts -----------------------------------------------------------------------


def test_a_port_in_use_is_a_clear_error_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        before = set(Path("/tmp").glob("ss-*"))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} cannot be used .*in use"):
            launch.start(config(port=port))
        assert set(Path("/tmp").glob("ss-*")) - before == set()


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"serve\.port: 203\.0\.113\.1:8000 cannot be used"):
        launch._check_port("203.0.113.1", 8000)


def test_a_grpc_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.grpc_port: 127\.0\.0\.1:{port} cannot"):
            launch.start(config(port=launch._free_block(1), grpc_port=port))


@pytest.mark.parametrize("has", [True, False])
def test_a_process_that_imported_ray_with_other_flags_is_refused(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    constants = SimpleNamespace(RAY_SERVE_ENABLE_HA_PROXY=has)
    monkeypatch.setitem(sys.modules, "ray.serve._private.constants", constants)  # type: ignore[arg-type]
    launch._check_flags({"RAY_SERVE_ENABLE_HA_PROXY": str(int(has))})
    with pytest.raises(ConfigError, match="start it in a fresh process"):
        launch._check_flags({"RAY_SERVE_ENABLE_HA_PROXY": str(int(not has))})


# --- what Ray is told -----------------------------------------------------------------------------


def test_haproxy_and_the_replicas_get_ports_and_files_of_their_own(tmp_path: Path) -> None:
    flags = launch._flags(config(), tmp_path)
    ports = {v for k, v in flags.items() if k.endswith("_PORT")}
    files = [v for k, v in flags.items() if k.endswith(("_PATH", "_LOC", "_BASE", "_FILE"))]
    files.remove(flags["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    assert len(ports) == 8
    assert len(files) == 6
    assert [file for file in files if not Path(file).is_relative_to(tmp_path)] == []
    assert Path(flags["RAY_SERVE_HAPROXY_BINARY_PATH"]).stat().st_mode & 0o777 == 0o700


def test_a_block_of_ports_with_a_taken_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = launch._free_block(5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        tries = iter([taken - 3, taken, free])
        monkeypatch.setattr("random.randrange", lambda *_: next(tries))
        assert launch._free_block(5) == free


def test_the_python_proxy_gets_no_haproxy_flags(tmp_path: Path) -> None:
    flags = launch._flags(config(proxy="default"), tmp_path)
    assert flags["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert not [name for name in flags if name.startswith("RAY_SERVE_HAPROXY")]


@pytest.mark.parametrize("imported", [False, True])
def test_ray_gets_a_token_of_its_own_unless_it_has_read_one(
    monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "restored")  # so that monkeypatch puts everything back
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    if not imported:
        monkeypatch.delitem(sys.modules, "ray")
    launch._set_token()
    assert ("RAY_AUTH_TOKEN" in os.environ) is not imported


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPESERVE_TEST_A", "mine")
    with launch._environment({"SHAPESERVE_TEST_A": "x", "SHAPESERVE_TEST_B": "y"}):
        assert os.environ["SHAPESERVE_TEST_A"] == "x"
    assert os.environ["SHAPESERVE_TEST_A"] == "mine"
    assert "SHAPESERVE_TEST_B" not in os.environ


def test_the_deployed_args_are_the_configuration() -> None:
    schema = launch.deploy_schema(config(replicas=2), policies={"mini": {"seq": {}}})
    health, app = schema["applications"]
    assert (health["route_prefix"], app["route_prefix"]) == ("/v2/health", "/")
    assert ServeConfig.from_dict(app["args"]) == config(replicas=2)
    (deployment,) = app["deployments"]
    assert deployment == {
        "name": "ShapeServe",
        "user_config": {"policies": {"mini": {"seq": {}}}},
    }


@pytest.mark.parametrize(
    ("serve", "function"),
    [
        ({}, "add_to_local_server"),
        ({"proxy": "default"}, "add_to_local_server"),
        ({"proxy": "default", "host": "0.0.0.0"}, "add_to_server"),
        # HAProxy is what all interfaces reach; behind it is this machine.
        ({"host": "0.0.0.0"}, "add_to_local_server"),
    ],
)
def test_rays_grpc_servers_let_in_whom_the_host_lets_in(serve: Any, function: str) -> None:
    options = launch.deploy_schema(config(grpc_port=9, **serve))["grpc_options"]
    assert options["port"] == 9
    (path,) = options["grpc_servicer_functions"]
    module, _, name = path.rpartition(".")
    assert name == function
    assert callable(getattr(importlib.import_module(module), name))


def test_without_a_grpc_port_there_is_no_grpc(tmp_path: Path) -> None:
    assert "grpc_options" not in launch.deploy_schema(config())
    assert not [name for name in launch._flags(config(), tmp_path) if name.endswith("MESSAGE_SIZE")]


@pytest.mark.parametrize(("body", "message"), [(1 << 20, 64 << 20), (1 << 29, 4 << 29)])
def test_grpc_reads_no_message_far_above_the_limit(tmp_path: Path, body: int, message: int) -> None:
    flags = launch._flags(config(grpc_port=9, max_body_bytes=body), tmp_path)
    assert int(flags["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"]) == min(message, 2**31 - 1)


def test_the_documented_grpc_options_are_those_of_the_command() -> None:
    text = (Path(__file__).parent.parent / "docs" / "grpc.md").read_text()
    documented = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    deployed = launch.deploy_schema(config(proxy="default", host="0.0.0.0", grpc_port=8001))
    assert documented["grpc_options"] == deployed["grpc_options"]


@pytest.mark.parametrize(
    ("replicas", "cpus", "threads", "asked"),
    [(1, 2, 2, 2.0), (2, 2, 1, 1.0), (4, 2, 1, 0.5), (3, 8, 2, 2.0), (3, 1, 1, 0.33)],
)
def test_replicas_share_the_cores_and_all_find_a_place(
    replicas: int, cpus: int, threads: int, asked: float
) -> None:
    sized = config(replicas=replicas)
    assert sizing.threads_per_replica(sized, cpus) == threads
    assert sizing.cpus_per_replica(sized, cpus) == asked
    assert replicas * asked <= cpus


def test_what_one_model_says_of_threads_holds_for_all() -> None:
    models = [{"path": "/models/a"}, {"path": "/models/b", "threads": 3}]
    sized = ServeConfig.from_dict({"models": models})
    assert sizing.threads_per_replica(sized, 8) == 3
    assert sizing.cpus_per_replica(sized, 8) == 3.0


def test_the_example_of_two_applications_has_one_model_each_and_our_health() -> None:
    text = (Path(__file__).parent.parent / "deploy/examples/two-applications.yaml").read_text()
    health, *applications = yaml.safe_load(text)["applications"]
    ours = launch.deploy_schema(config())["applications"]
    assert health.items() <= ours[0].items()
    assert len(applications) == 2
    for application in applications:
        (model,) = ServeConfig.from_dict(application["args"]).models
        assert application["route_prefix"] == f"/{model.name}"
        assert application["import_path"] == ours[1]["import_path"]
        assert [d["name"] for d in application["deployments"]] == [launch.DEPLOYMENT]


def test_configured_threads_win() -> None:
    model = {"path": "/models/mini", "threads": 3}
    sized = ServeConfig.from_dict({"models": [model], "serve": {"replicas": 2}})
    assert sizing.threads_per_replica(sized, 2) == 3
    assert sizing.cpus_per_replica(sized, 2) == 1.0


@pytest.mark.parametrize(
    ("device", "gpus", "replicas", "asked"),
    [
        ("auto", 0, 1, 0),
        ("cpu", 4, 1, 0),
        ("auto", 4, 2, 1),
        ("auto", 1, 2, 0.5),
        ("cuda", 0, 1, 1),
    ],
)
def test_replicas_share_the_gpus(device: str, gpus: int, replicas: int, asked: float) -> None:
    data = {"models": [{"path": "/m", "device": device}], "serve": {"replicas": replicas}}
    assert sizing.gpus_per_replica(ServeConfig.from_dict(data), gpus) == asked


def test_serve_lets_more_requests_in_than_the_queue_has_rows() -> None:
    assert sizing.max_ongoing_requests(config()) > config().models[0].limits.max_queue_rows


# --- waiting for readiness ------------------------------------------------------------------------


class FakeService(launch.Service):
    """A service whose health endpoint says what the test wants, one answer a look."""

    def __init__(self, answers: list[tuple[int, dict[str, Any]]], **serve: Any) -> None:
        super().__init__(config(**serve), launch.IMPORT_PATH, Path("/nonexistent"))
        self._answers = iter(answers)

    def _health(self) -> tuple[int, dict[str, Any]]:
        return next(self._answers)

    def _raise_if_deploy_failed(self) -> None:
        pass


def replica(**report: Any) -> dict[str, Any]:
    base = {"replica": "a", "state": "warming", "stage": "", "detail": "", "message": ""}
    return {**base, "fresh": True, **report}


def test_waiting_reports_every_look_and_ends_when_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0)
    warming = replica(stage="verify", detail="batch=8,seq=16")
    service = FakeService(
        [
            (0, {}),
            (503, {"state": "warming", "done": 3, "total": 9, "replicas": [warming]}),
            (200, {"state": "ready", "done": 9, "total": 9, "replicas": []}),
        ]
    )
    seen: list[tuple[int, int, str]] = []
    service.wait_ready(lambda *step: seen.append(step))
    assert seen == [(0, 0, "starting"), (3, 9, "verify batch=8,seq=16"), (9, 9, "ready")]


def test_a_replica_that_failed_ends_the_wait_with_its_own_reason() -> None:
    failed = replica(state="failed", message="ModelError: no model there")
    service = FakeService([(503, {"state": "failed", "replicas": [failed]})])
    with pytest.raises(ModelError, match="replica a failed to start: ModelError: no model there"):
        service.wait_ready()


def test_waiting_has_an_end_if_asked_for() -> None:
    service = FakeService([(503, {"state": "starting"})])
    with pytest.raises(TimeoutError, match="not ready after 0 s"):
        service.wait_ready(timeout_s=0)


def test_whoever_waits_is_told_when_a_replica_goes_and_comes_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "WATCH_S", 0)
    up, dead, new = replica(state="ready"), replica(state="ready", fresh=False), replica()
    looks = [[up, up], [up, dead], [up, dead], None, [up, dead, new], [up, up], [dead, dead]]
    answers = [(0, {}) if look is None else (200, {"replicas": look}) for look in looks]
    told: list[int] = []
    with pytest.raises(StopIteration):
        FakeService(answers, replicas=2).wait(told.append)
    assert told == [1, 2, 0]
    with pytest.raises(StopIteration):  # the others are still warming up
        FakeService(answers[2:], replicas=2).wait(told.append)
    assert told[3:] == [1, 2, 0]


# --- the guard around haproxy ---------------------------------------------------------------------

HAPROXY_CONFIG = """global
    maxconn 4096
frontend prometheus
    bind :20298
frontend http_frontend
    bind *:8000
listen stats
  bind *:20299
  stats enable
"""


def test_only_the_open_ports_of_haproxy_move_to_the_loopback_interface() -> None:
    assert haproxy_guard.keep_local(HAPROXY_CONFIG, ["20298", "20299"]) == (
        HAPROXY_CONFIG.replace(" :20298", " 127.0.0.1:20298").replace("*:20299", "127.0.0.1:20299")
    )


GRPC_CONFIG = """frontend grpc_frontend
    bind 127.0.0.1:9000 proto h2
    acl is_grpc-health req.hdr(application) -m str shapeserve-health
    use_backend grpc-health if is_grpc-health
"""
GRPC_APP = "    acl is_grpc-app req.hdr(application) -m str shapeserve\n"


@pytest.mark.parametrize("is_up", [True, False])
def test_grpc_without_an_application_is_led_to_ours(is_up: bool) -> None:
    before = GRPC_CONFIG + GRPC_APP * is_up
    after = haproxy_guard.route_grpc(before, "shapeserve", "shapeserve-health")
    assert after.startswith("frontend grpc_frontend\n    acl names_application ")
    assert after.endswith(before.removeprefix("frontend grpc_frontend\n"))
    assert "set-header application shapeserve if !asks_health !names_application\n" in after
    assert ("grpc-status 14" in after) is not is_up


def test_the_guard_knows_the_methods_that_the_ingress_leads_to_health() -> None:
    from shapeserve.serve.grpc_ingress import HEALTH_METHODS, SERVICE

    paths = re.findall(r"acl asks_health path (\S+)", haproxy_guard.GRPC_RULES)
    assert paths == [f"/{SERVICE}/{method}" for method in HEALTH_METHODS]


def test_a_config_without_grpc_stays_as_it_is() -> None:
    assert haproxy_guard.route_grpc(HAPROXY_CONFIG, "a", "b") == HAPROXY_CONFIG


def test_haproxy_survives_a_ctrl_c_but_not_its_parent(tmp_path: Path) -> None:
    (tmp_path / "haproxy.cfg").write_text(HAPROXY_CONFIG)
    guard = [sys.executable, "-I", "-S", haproxy_guard.__file__]
    # "haproxy" is a sleep that ignores the rest of its arguments; its parent is a shell.
    binary = tmp_path / "sleeper"
    binary.write_text("#!/bin/sh\nexec sleep 600\n")
    binary.chmod(0o700)
    pids = tmp_path / "pids"
    command = [
        *guard,
        str(binary),
        str(pids),
        "20298,20299",
        "app",
        "health",
        "-f",
        str(tmp_path / "haproxy.cfg"),
    ]
    parent = subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", *command])
    try:
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        pid = int(pids.read_text())
        while os.getsid(pid) != pid:
            time.sleep(0.01)
        assert "127.0.0.1:20299" in (tmp_path / "haproxy.cfg").read_text()
        while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)


def test_leftovers_are_killed_by_pid_and_strangers_are_not(tmp_path: Path) -> None:
    mine = subprocess.Popen(["sh", "-c", "sleep 600; :", str(tmp_path / "haproxy.cfg")])
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (tmp_path / "haproxy.pids").write_text(f"{mine.pid}\n{stranger.pid}\n999999999\n")
        launch._kill_leftovers(tmp_path)
        assert mine.wait() == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
