"""A proposed policy goes to a service that runs, and nothing else of it changes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_engine import FakeEngine
from frontend_server import serving

from shapeserve.cli import main
from shapeserve.config import ModelConfig, policy_to_dict
from shapeserve.errors import ConfigError, RolloutFailed
from shapeserve.metrics import Metrics
from shapeserve.serve.admin import TOKEN_VARIABLE, Guard
from shapeserve.serve.deployed import change
from shapeserve.serve.rollout import roll_out

POLICY = {"seq": {"explicit": [8, 16]}}
OTHER = {"seq": {"explicit": [8, 24]}}


def details(user_config: Any = None, **models: Any) -> dict[str, Any]:
    """What Ray says of a service (as 2.60 was seen to), and of somebody else's application."""
    deployment = {"name": "ShapeServe", **({} if user_config is None else user_config)}
    config = {
        "name": "shapeserve",
        "import_path": "shapeserve.serve:app",
        "route_prefix": "/",
        "args": {"models": [{"name": "tiny", "path": "m"}], **models},
        "runtime_env": {"env_vars": {"A": "b"}},
        "deployments": [{"name": "Else", "num_replicas": 3}, deployment],
    }
    other = {"name": "other", "import_path": "a:b", "logging_config": {"encoding": "JSON"}}
    replicas = [{"replica_id": "a", "pid": 1}, {"replica_id": "b", "pid": 2}]
    up = {"ShapeServe": {"status": "HEALTHY", "replicas": replicas}, "Else": {}}
    return {
        "controller_info": {"node_ip": "10.0.0.1"},
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8123},
        "grpc_options": {"port": 9000},
        "target_capacity": None,
        "proxies": {"n": {"node_ip": "10.0.0.1"}},
        "applications": {
            "other": {"status": "RUNNING", "deployed_app_config": other, "deployments": {"B": {}}},
            "by-hand": {"status": "RUNNING", "deployed_app_config": None, "deployments": {"C": {}}},
            "shapeserve": {
                "status": "RUNNING",
                "message": "",
                "route_prefix": "/",
                "deployed_app_config": config,
                "deployments": up,
            },
        },
    }


def deployment_of(app: Mapping[str, Any]) -> dict[str, Any]:
    (deployment,) = (d for d in app["deployments"] if d["name"] == "ShapeServe")
    return dict(deployment)


def policies(schema: Mapping[str, Any]) -> Any:
    (app,) = (a for a in schema["applications"] if a["name"] == "shapeserve")
    return deployment_of(app)["user_config"]["policies"]


# --- what is deployed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [None, {"user_config": None}, {"user_config": {"policies": {"more": OTHER, "tiny": OTHER}}}],
    ids=["none", "null", "others"],
)
def test_only_the_policy_of_the_model_changes(before: Any) -> None:
    given = details(before)
    untouched = copy.deepcopy(given)
    made = change(given, "tiny", POLICY)
    assert given == untouched
    more = {"more": OTHER} if before and before["user_config"] else {}
    assert (made.app, made.model, made.new) == ("shapeserve", "tiny", True)
    assert made.before == (OTHER if more else None)
    was = {n: app["deployed_app_config"] for n, app in untouched["applications"].items()}
    other_deployment, ours = was["shapeserve"]["deployments"]
    changed = {**ours, "user_config": {"policies": {**more, "tiny": POLICY}}}
    assert made.schema == {
        **{key: given[key] for key in ("proxy_location", "http_options", "grpc_options")},
        # What was not deployed by a file is not Serve's to end, and stays.
        "applications": [
            was["other"],
            {**was["shapeserve"], "deployments": [other_deployment, changed]},
        ],
    }


def test_a_policy_that_is_deployed_is_not_new_and_taking_it_back_removes_it() -> None:
    given = details({"user_config": {"policies": {"tiny": POLICY}, "draining": False}})
    assert not change(given, "tiny", POLICY).new
    back = change(given, "tiny", None)
    assert policies(back.schema) == {}
    assert '"draining": false' in json.dumps(back.schema)


def test_the_only_model_needs_no_name() -> None:
    assert change(details(), None, POLICY).model == "tiny"


def without(name: str) -> dict[str, Any]:
    given = details()
    given["applications"].pop(name)
    return given


def by_hand() -> dict[str, Any]:
    given = details()
    given["applications"]["shapeserve"]["deployed_app_config"] = None
    return given


def two() -> dict[str, Any]:
    given = details()
    given["applications"]["second"] = given["applications"]["shapeserve"]
    return given


def hidden() -> dict[str, Any]:
    given = details()
    config = given["applications"]["shapeserve"]["deployed_app_config"]
    config["runtime_env"]["env_vars"]["A"] = "<redacted>"
    return given


UNCLEAR = {
    "no service": (without("shapeserve"), "tiny", "no application .* there are: by-hand, other"),
    "by hand": (by_hand(), "tiny", "was not deployed with a configuration file"),
    "two services": (two(), "tiny", "applications second, shapeserve could serve it"),
    "unnamed": (details(models=[{"path": "m"}]), None, "give the name that GET /v1/models says"),
    "two models": (
        details(models=[{"name": "a"}, {"name": "b"}]),
        None,
        r"does not tell it \(it names a, b\)",
    ),
    "hidden": (hidden(), "tiny", "the cluster hides parts of its configuration"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_not_clear_is_refused_before_anything_is_deployed(name: str) -> None:
    given, model, message = UNCLEAR[name]
    with pytest.raises(ConfigError, match=message):
        change(given, model, POLICY)


# --- what becomes of it --------------------------------------------------------------------------


class FakeCluster:
    """Replicas that swap when they have been asked for their metrics ``slow`` times since."""

    def __init__(self, slow: int = 2, result: str = "applied") -> None:
        self.now = details()
        self.deployed: list[Any] = []
        self.slow, self.result = slow, result
        self.swaps = {
            replica: {"applied": 1, "unchanged": 0, "rejected": 0, "failed": 0} for replica in "ab"
        }
        self.asked = 0
        self.time_s = 0.0

    def details(self) -> dict[str, Any]:
        return copy.deepcopy(self.now)

    def deploy(self, schema: Mapping[str, Any]) -> None:
        self.deployed.append(copy.deepcopy(schema))
        self.asked = 0
        for app in copy.deepcopy(schema)["applications"]:
            self.now["applications"][app["name"]]["deployed_app_config"] = app

    def metrics(self, address: str) -> str | None:
        assert address == "http://10.0.0.1:8123/metrics"
        self.asked += 1
        if self.deployed and self.asked in (self.slow, self.slow + 1):  # one after the other
            self.swaps["ab"[self.asked - self.slow]][self.result] += 1
        grid = {r: "new" if swaps["applied"] > 1 else "old" for r, swaps in self.swaps.items()}
        lines = ["# TYPE shapeserve_policy_swaps counter", "# TYPE shapeserve_grid_info gauge"]
        for replica, swaps in self.swaps.items():
            label = f'replica="{replica}",model="tiny"'
            lines.append(f'shapeserve_grid_info{{{label},version="{grid[replica]}"}} 1')
            lines += [
                f'shapeserve_policy_swaps_total{{{label},result="{result}"}} {count}'
                for result, count in swaps.items()
            ]
        lines.append('shapeserve_grid_info{replica="a",model="more",version="x"} 1')
        return "\n".join(sorted(lines)) + "\n"

    def wait(self, seconds: float) -> None:
        self.time_s += seconds

    def roll_out(self, read_metrics: Any = None) -> Any:
        return roll_out(
            self,
            "tiny",
            POLICY,
            read_metrics or self.metrics,
            timeout_s=60,
            sleep=self.wait,
            now=lambda: self.time_s,
        )


def test_a_rollout_ends_when_every_replica_has_swapped() -> None:
    cluster = FakeCluster()
    done = cluster.roll_out()
    assert (done.changed, done.restarted, done.grids) == (True, False, {"a": "new", "b": "new"})
    assert len(cluster.deployed) == 1
    assert cluster.asked == 3  # at the second one only one replica had
    assert not cluster.roll_out().changed
    assert len(cluster.deployed) == 1


def test_replicas_that_had_it_from_the_administrator_have_it() -> None:
    assert FakeCluster(result="unchanged").roll_out().changed


@pytest.mark.parametrize("result", ["rejected", "failed"])
def test_a_policy_that_a_replica_refuses_is_taken_back(result: str) -> None:
    cluster = FakeCluster(result=result)
    with pytest.raises(RolloutFailed, match=f"deployed and taken back: replica a says {result}"):
        cluster.roll_out()
    assert [policies(schema) for schema in cluster.deployed] == [{"tiny": POLICY}, {}]


def test_replicas_that_take_too_long_are_named_and_the_policy_stays() -> None:
    cluster = FakeCluster(slow=10_000)
    with pytest.raises(RolloutFailed, match="replicas that have not: a, b; Serve says RUN"):
        cluster.roll_out()
    assert len(cluster.deployed) == 1


def test_a_replica_that_is_replaced_meanwhile_is_told() -> None:
    cluster = FakeCluster()
    deploy = cluster.deploy

    def deploy_and_restart(schema: Mapping[str, Any]) -> None:
        deploy(schema)
        up = cluster.now["applications"]["shapeserve"]["deployments"]["ShapeServe"]
        up["replicas"][0]["replica_id"] = "c"

    cluster.deploy = deploy_and_restart  # type: ignore[method-assign]
    assert cluster.roll_out().restarted


def test_somebody_else_who_deploys_at_the_same_time_is_told() -> None:
    cluster = FakeCluster()
    deploy = cluster.deploy

    def deploy_and_lose(schema: Mapping[str, Any]) -> None:
        deploy(schema)
        cluster.now["applications"]["other"]["deployed_app_config"]["import_path"] = "c:d"

    cluster.deploy = deploy_and_lose  # type: ignore[method-assign]
    with pytest.raises(RolloutFailed, match="configuration of other is not the one that was sent"):
        cluster.roll_out()


def test_without_a_way_to_the_service_serves_word_is_taken_and_the_replicas_are_not_claimed() -> (
    None
):
    cluster = FakeCluster()
    waits = iter(["UPDATING", "UPDATING", "HEALTHY"])
    up = cluster.now["applications"]["shapeserve"]["deployments"]["ShapeServe"]
    wait = cluster.wait

    def go_on(seconds: float) -> None:
        wait(seconds)
        up["status"] = next(waits)

    cluster.wait = go_on  # type: ignore[method-assign]
    done = cluster.roll_out(read_metrics=lambda address: None)
    assert (done.changed, done.grids, cluster.time_s) == (True, {}, 3)


# --- the command, with servers -------------------------------------------------------------------


class FakeDashboard(BaseHTTPRequestHandler):
    """Ray's dashboard in front of a ``FakeCluster``; ``/metrics`` is the service's."""

    cluster: FakeCluster

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._say((self.cluster.metrics("http://10.0.0.1:8123/metrics") or "").encode())
        elif self.path == "/api/ray/version":
            self._say(b'{"ray_version": "2.60.0"}')
        elif self.path == "/api/serve/applications/":
            self._say(json.dumps(self.cluster.details()).encode())
        else:
            self.send_error(404)

    def do_PUT(self) -> None:
        self.cluster.deploy(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._say(b"")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def dashboard(cluster: FakeCluster) -> Iterator[str]:
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Bound", (FakeDashboard,), {"cluster": cluster})
    )
    cluster.now["http_options"] = {"host": "127.0.0.1", "port": server.server_port}
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("t_s,len\n" + "".join(f"{i},{1 + i % 16}\n" for i in range(64)))
    return path


def tune(trace: Path, *arguments: str) -> Result:
    line = ["tune", "--trace", str(trace), "-k", "2", "--max-length", "16", *arguments]
    return CliRunner().invoke(main, line, catch_exceptions=False)


def test_apply_deploys_what_was_proposed(cluster: FakeCluster, dashboard: str, trace: Path) -> None:
    result = tune(trace, "--apply", dashboard, "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert "2 replicas serve grid new; no replica was restarted" in result.stderr
    (deployed,) = cluster.deployed
    assert policies(deployed)["tiny"]["seq"]["explicit"] == json.loads(result.stdout)["buckets"]


def test_apply_of_a_policy_that_is_refused_exits_with_1(
    cluster: FakeCluster, dashboard: str, trace: Path
) -> None:
    cluster.result = "rejected"
    result = tune(trace, "--apply", dashboard)
    assert result.exit_code == 1
    assert "taken back: replica a says rejected" in result.stderr
    assert "Traceback" not in result.stderr


def test_apply_to_what_is_no_dashboard_exits_with_2(
    cluster: FakeCluster, dashboard: str, trace: Path
) -> None:
    for address in (f"{dashboard}/elsewhere", "http://127.0.0.1:9"):
        result = tune(trace, "--apply", address)
        assert result.exit_code == 2
        assert "cannot be reached as a Ray dashboard" in result.stderr
    assert cluster.deployed == []


TOKEN = "token"


@pytest.fixture
def service() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine(ModelConfig(name="org/mini", path="x"), Metrics()).start()
    with serving({"org/mini": engine}, guard=Guard(TOKEN)) as host:  # type: ignore[dict-item]
        yield f"http://{host}", engine


def test_apply_admin_gives_it_to_the_replicas_and_says_how_long_it_lasts(
    service: tuple[str, FakeEngine], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine = service
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    result = tune(trace, "--apply-admin", url + "/")
    assert result.exit_code == 0, result.stderr
    assert f"org/mini: 1 replica serves grid {engine.grid.version}" in result.stdout
    assert "it lasts until these replicas end" in result.stdout
    assert policy_to_dict(engine.policy)["seq"]["explicit"][-1] == 16
    assert tune(trace, "--apply-admin", url, "--model", "org/mini").exit_code == 0


def test_what_apply_admin_meets_is_told(
    service: tuple[str, FakeEngine], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine = service
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    result = tune(trace, "--apply-admin", url)
    assert result.exit_code == 2
    assert f"was started with {TOKEN_VARIABLE}, and that this is its token" in result.stderr
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    result = tune(trace, "--apply-admin", url, "--max-length", "1024")
    assert result.exit_code == 1
    assert "org/mini: the service answered 400: the policy was not applied" in result.stderr
    assert "1024 is above the model's 512" in result.stderr
    assert engine.policy == {}
    monkeypatch.delenv(TOKEN_VARIABLE)
    result = tune(trace, "--apply-admin", url)
    assert (result.exit_code, result.stdout) == (2, "")  # before anything is fitted
    assert f"{TOKEN_VARIABLE} is not set" in result.stderr
    assert tune(trace, "--apply-admin", url, "--apply", url).exit_code == 2
    assert "must be an address such as" in tune(trace, "--apply", "localhost:8265").stderr
