"""The manifests in deploy/kubernetes, as `kubectl kustomize` renders them."""

import copy
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from image_steps import last_stage, read_steps, variables

from shapeserve.config import ServeConfig
from shapeserve.protocols import http
from shapeserve.serve import launch
from shapeserve.serve.header_guard import IMPORT_PATH as HEADER_GUARD

ROOT = Path(__file__).parent.parent
KUBERNETES = "1.32"
OVERLAYS = ["cpu", "gpu"]
IMAGE = last_stage(read_steps(ROOT / "Dockerfile"))
Manifest = dict[str, Any]

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("kubectl"), reason="kubectl renders the manifests, and is not installed"
    ),
    # Of Ray's, when it is imported here.
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`"),
]


@cache
def rendered(overlay: str) -> dict[str, Manifest]:
    """Return kind -> object of an overlay; there is one of each."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "deploy" / "kubernetes" / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifests = list(yaml.safe_load_all(done.stdout))
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    assert len(by_kind) == len(manifests)
    return by_kind


def ray_cluster(overlay: str) -> Manifest:
    return dict(rendered(overlay)["RayService"]["spec"]["rayClusterConfig"])


def pods(overlay: str) -> dict[str, Manifest]:
    """Return the pod templates: of the head, of the workers."""
    cluster = ray_cluster(overlay)
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"], "worker": workers["template"]}


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def environment(pod: Manifest) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


def serve_config(overlay: str) -> Manifest:
    return dict(yaml.safe_load(rendered(overlay)["RayService"]["spec"]["serveConfigV2"]))


# --- schemas --------------------------------------------------------------------------------------


def check(manifest: Manifest) -> None:
    """Raise if an API server that knows the CRDs would refuse or prune the object."""
    own = ROOT / "tests" / "data" / "schemas" / f"{manifest['kind'].lower()}.json"
    if not own.exists():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    jsonschema.validate(manifest, json.loads(own.read_text()))
    for template in templates(manifest):
        inside = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(inside, KUBERNETES, strict=True)


def templates(manifest: Any) -> Iterator[Manifest]:
    for key, value in manifest.items():
        if key == "template":
            yield value
        elif isinstance(value, dict):
            yield from templates(value)
        elif isinstance(value, list):
            yield from (t for item in value if isinstance(item, dict) for t in templates(item))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_keeps_to_its_schema(overlay: str) -> None:
    kinds = {"RayService", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"}
    kinds |= {"PersistentVolumeClaim"} if overlay == "gpu" else set()
    assert rendered(overlay).keys() == kinds
    for manifest in rendered(overlay).values():
        check(manifest)
    assert len(list(templates(rendered(overlay)["RayService"]))) == 2


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayService", "spec/serviceUnhealthySecondThreshold"),  # KubeRay ignores it
        ("RayService", "spec/rayClusterConfig/workerGroupSpecs/0/numReplicas"),
        ("RayService", "spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/enviroment"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/timeout"),
        ("PrometheusRule", "spec/groups/0/rules/0/exp"),
        ("NetworkPolicy", "spec/ingress/0/port"),
        ("PodDisruptionBudget", "spec/minReplicas"),
    ],
)
def test_a_field_that_does_not_exist_breaks_the_schema(kind: str, path: str) -> None:
    manifest = copy.deepcopy(rendered("cpu")[kind])
    *parents, last = path.split("/")
    place: Any = manifest
    for step in parents:
        place = place[int(step) if step.isdecimal() else step]
    place[last] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(manifest)


# --- what is served -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_serve_config_is_the_file_beside_it_and_ray_and_we_take_it(overlay: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    content = serve_config(overlay)
    file = ROOT / "deploy" / "kubernetes" / "overlays" / overlay / "serve.yaml"
    assert content == yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(content)
    ours = launch.deploy_schema(ServeConfig.from_dict({"models": [{"path": "/model"}]}))
    for application, expected in zip(content["applications"], ours["applications"], strict=True):
        for key in ("name", "route_prefix", "import_path"):
            assert application[key] == expected[key]
    ServeConfig.from_dict(content["applications"][1]["args"])
    for name in content["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_replicas_find_place_in_the_pods_and_a_successor_too(overlay: str) -> None:
    application = serve_config(overlay)["applications"][1]
    (deployment,) = application["deployments"]
    (model,) = ServeConfig.from_dict(application["args"]).models
    asked = deployment["ray_actor_options"]
    (group,) = ray_cluster(overlay)["workerGroupSpecs"]
    has = container(group["template"])["resources"]["requests"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    surge = deployment.get("max_surge_percent", 0) > 0
    a_pod = -(-deployment["num_replicas"] // group["replicas"]) * (2 if surge else 1)
    assert a_pod * asked["num_cpus"] <= float(has["cpu"])
    assert a_pod * asked.get("num_gpus", 0) == float(has.get("nvidia.com/gpu", 0))
    assert (model.device == "cuda") == ("num_gpus" in asked)
    assert surge or deployment["num_replicas"] > 1  # or an update would leave none


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_ports_of_the_config_are_those_of_the_pods(overlay: str) -> None:
    content = serve_config(overlay)
    ports = {p["name"]: p["containerPort"] for p in container(pods(overlay)["worker"])["ports"]}
    assert ports["serve"] == content["http_options"]["port"] == int(IMAGE["EXPOSE"])
    assert ports["grpc"] == content["grpc_options"]["port"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pods_have_the_flags_that_shapeserve_serve_sets_by_names_that_ray_reads(
    overlay: str, tmp_path: Path
) -> None:
    from ray.serve._private import constants

    head, worker = (environment(pod) for pod in pods(overlay).values())
    assert head == worker
    config = ServeConfig.from_dict({"models": [{"path": "/model"}]})
    ours = launch._flags(config, tmp_path)
    same = (
        *("RAY_USAGE_STATS_ENABLED", "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"),
        *("RAY_SERVE_HAPROXY_METRICS_ENABLED", "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"),
    )
    assert {name: head[name] for name in same} == {name: ours[name] for name in same}
    assert head["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == HEADER_GUARD
    source = inspect.getsource(constants)
    assert [n for n in head if n.startswith("RAY_SERVE_") and n not in source] == []
    scripts = (ROOT / "pyproject.toml").read_text()
    program = Path(head["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert f'\n{program.name} = "shapeserve.serve.haproxy_guard:as_haproxy"' in scripts
    assert IMAGE["ENV"].startswith(f"PATH={program.parent}:")


# --- probes and rights ----------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_is_ready_when_a_replica_is_and_nothing_restarts_it_for_warming_up(
    overlay: str,
) -> None:
    head, worker = (container(pod) for pod in pods(overlay).values())
    assert worker["readinessProbe"]["httpGet"] == {"path": http.READY, "port": 8000}
    # KubeRay deploys only to a head that is ready: it must not wait for what it deploys.
    for probe in (worker["livenessProbe"], head["livenessProbe"], head["readinessProbe"]):
        assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert not {"startupProbe"} & (head.keys() | worker.keys())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pods_run_without_rights_as_the_user_of_the_image(overlay: str) -> None:
    user, _, group = IMAGE["USER"].partition(":")
    for pod in pods(overlay).values():
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(group),
            "fsGroup": int(group),
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_written_lies_on_a_volume(overlay: str) -> None:
    image = variables(IMAGE["ENV"])
    for pod in pods(overlay).values():
        mounts = {m["mountPath"]: m["name"] for m in container(pod)["volumeMounts"]}
        assert mounts.keys() == {"/tmp", image["TORCHINDUCTOR_CACHE_DIR"]}
        assert environment(pod)["HOME"] in mounts
        assert set(mounts.values()) == {volume["name"] for volume in pod["spec"]["volumes"]}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pods("gpu")["worker"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [rendered("gpu")["PersistentVolumeClaim"]["metadata"]["name"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_runs_the_image_that_the_overlay_names(overlay: str) -> None:
    (file,) = yaml.safe_load_all(
        (ROOT / "deploy/kubernetes/overlays" / overlay / "kustomization.yaml").read_text()
    )
    (image,) = file["images"]
    named = f"{image['newName']}:{image['newTag']}"
    assert {container(pod)["image"] for pod in pods(overlay).values()} == {named}


# --- who reaches what -----------------------------------------------------------------------------

OURS = {"app.kubernetes.io/name": "shapeserve"}
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}


def selects(selector: Manifest | None, labels: dict[str, str]) -> bool:
    selector = selector or {}
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert {expression["operator"] for expression in expressions} <= {"In"}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def admits(labels: dict[str, str], namespace: str, port: int) -> bool:
    """Return whether the policy lets such a pod reach a port, as Kubernetes defines it."""
    for rule in rendered("cpu")["NetworkPolicy"]["spec"]["ingress"]:
        ports = [entry["port"] for entry in rule.get("ports", [])]
        peers = [
            selects(peer.get("podSelector"), labels)
            and (
                selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
                if "namespaceSelector" in peer
                else namespace == "own"
            )
            for peer in rule.get("from", [])
        ]
        if (not ports or port in ports) and ("from" not in rule or any(peers)):
            return True
    return False


@pytest.mark.parametrize(
    ("labels", "namespace", "reached"),
    [
        ({"app": "client"}, "own", {8000, 9000}),
        ({"app": "client"}, "other", {8000, 9000}),
        ({"app": "prometheus"}, "monitoring", {8000, 9000, 8080}),
        (OPERATOR, "kuberay", {8000, 9000, 8265}),
        (OURS, "own", {6379, 8000, 8080, 8265, 9000, 10001, 30000, 52365}),
        (OURS, "other", {8000, 9000}),
    ],
)
def test_who_reaches_which_port(labels: dict[str, str], namespace: str, reached: set[int]) -> None:
    ports = (6379, 8000, 8080, 8265, 9000, 10001, 30000, 52365)
    assert {port for port in ports if admits(labels, namespace, port)} == reached


def test_the_policy_holds_for_all_pods_and_lets_out_names_and_each_other() -> None:
    policy = rendered("cpu")["NetworkPolicy"]["spec"]
    for pod in pods("cpu").values():
        assert selects(policy["podSelector"], pod["metadata"]["labels"])
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    peers, names = policy["egress"]
    assert peers == {"to": [{"podSelector": {"matchLabels": OURS}}]}
    assert {entry["port"] for entry in names["ports"]} == {53}


def test_the_monitor_finds_every_pod_and_the_budget_the_workers() -> None:
    monitor = rendered("cpu")["PodMonitor"]["spec"]
    budget = rendered("cpu")["PodDisruptionBudget"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    for name, pod in pods("cpu").items():
        # KubeRay labels the pods so.
        labels = {**pod["metadata"]["labels"], "ray.io/node-type": name}
        assert selects(monitor["selector"], labels)
        assert selects(budget["selector"], pod["metadata"]["labels"]) == (name == "worker")
        ports = {p["name"]: p["containerPort"] for p in container(pod)["ports"]}
        assert ports[endpoint["port"]] == 8080
    assert budget["minAvailable"] < ray_cluster("cpu")["workerGroupSpecs"][0]["replicas"]


# --- HAProxy on a cluster of one's own ------------------------------------------------------------


def test_shapeserve_haproxy_closes_the_statistics_and_becomes_haproxy(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n"
        "    timeout server 1s\nfrontend stats\n    bind *:8404\n    stats enable\n"
    )
    script = tmp_path / "shapeserve-haproxy"
    script.write_text(
        f"#!{sys.executable}\nfrom shapeserve.serve.haproxy_guard import as_haproxy\nas_haproxy()\n"
    )
    script.chmod(0o755)
    # As on a node: Ray finds the script by the variable, and starts it with the variable set.
    environment = {**os.environ, "RAY_SERVE_HAPROXY_BINARY_PATH": str(script)}
    environment["PYTHONPATH"] = str(ROOT)

    def become(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(script), *arguments], env=environment, capture_output=True, text=True, timeout=60
        )

    done = become("-c", "-f", str(config))
    assert done.returncode == 0, done.stderr
    assert become("-v").stdout.startswith("HAProxy version")
    assert "    bind 127.0.0.1:8404\n" in config.read_text()
    assert (tmp_path / "haproxy.pids").read_text().strip().isdecimal()
