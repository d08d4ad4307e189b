"""The Serve config files in deploy/serve: what they hold, and how a running service is updated."""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray_cluster import RayCluster, SteadyLoad
from service_process import eventually, free_port

from shapeserve.config import ServeConfig, parse_policy
from shapeserve.protocols import http
from shapeserve.serve import launch

FILES = sorted((Path(__file__).parent.parent / "deploy" / "serve").glob("*.yaml"))
NAMES = [path.stem for path in FILES]
HEALTH = "shapeserve-health"


def content_of(name: str) -> dict[str, Any]:
    text = FILES[NAMES.index(name)].read_text()
    return dict(yaml.safe_load(text))


def deployments(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return application -> the options of its deployment."""
    return {a["name"]: a["deployments"][0] for a in content["applications"] if "args" in a}


# --- what the files say ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_file_deploys_what_shapeserve_serve_deploys(name: str) -> None:
    content = content_of(name)
    ours = launch.deploy_schema(ServeConfig.from_dict({"models": [{"path": "/model"}]}))
    assert content.keys() == ours.keys()
    assert content["logging_config"] == ours["logging_config"]
    health, *applications = content["applications"]
    assert health.items() <= ours["applications"][0].items()
    assert len({a["route_prefix"] for a in applications}) == len(applications) > 0
    for application in applications:
        assert application.keys() == ours["applications"][1].keys()
        assert application["import_path"] == ours["applications"][1]["import_path"]
        (deployment,) = application["deployments"]
        assert deployment["name"] == launch.DEPLOYMENT


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_ray_takes_a_file_and_we_its_args(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    content = content_of(name)
    ServeDeploySchema.model_validate(content)
    for application in content["applications"][1:]:
        config = ServeConfig.from_dict(application["args"])
        (deployment,) = application["deployments"]
        # Else each would take its share of all the cores of the cluster, or share a core.
        assert {model.threads for model in config.models} == {
            deployment["ray_actor_options"]["num_cpus"]
        }
        wants_gpu = {model.device for model in config.models} == {"cuda"}
        assert ("num_gpus" in deployment["ray_actor_options"]) == wants_gpu


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_how_a_policy_is_swapped_and_how_a_single_replica_is_replaced(
    name: str,
) -> None:
    for deployment in deployments(content_of(name)).values():
        assert deployment["user_config"] == {"policies": {}}
        assert deployment["num_replicas"] > 1 or deployment["max_surge_percent"] == 100


def test_the_policy_in_the_comment_is_one() -> None:
    (line,) = [
        line for line in FILES[NAMES.index("cpu")].read_text().splitlines() if "{seq" in line
    ]
    said = yaml.safe_load(line.partition("# in place: ")[2])
    assert list(said) == ["all-MiniLM-L6-v2"]
    parse_policy(said["all-MiniLM-L6-v2"])


# --- a running service, updated under load --------------------------------------------------------


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., RayCluster]]:
    """Starts clusters; stops them when the test is over."""
    made: list[tuple[RayCluster, Path]] = []

    def start(serving: dict[str, Any], **options: Any) -> RayCluster:
        private = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        config = ServeConfig.from_dict({"models": [{"path": "/model"}], "serve": serving})
        flags = launch._flags(config, private)
        made.append((RayCluster(private, flags=flags, **options), private))
        return made[-1][0]

    yield start
    for cluster, private in made:
        cluster.stop()
        shutil.rmtree(private, ignore_errors=True)


def replicas(cluster: RayCluster) -> set[int]:
    return cluster.pids("ray::ServeReplica:shapeserve:")


def swap(cluster: RayCluster, file: dict[str, Any], load: SteadyLoad, policy: Any) -> None:
    """Deploy a policy, and wait until it serves, in the same processes."""
    before = replicas(cluster)
    cluster.deploy(changed(file, user_config={"policies": {"all-MiniLM-L6-v2": policy}}))
    eventually(lambda: load.counted("policy_swaps_total", "result") == {"applied": 1})
    assert replicas(cluster) == before


def replace_and_roll_back(cluster: RayCluster, file: dict[str, Any], load: SteadyLoad) -> None:
    """Add a replica and take it back, then replace the model and deploy the earlier file."""
    cluster.deploy(changed(file, num_replicas=2))
    cluster.settle({HEALTH: 1, "shapeserve": 2})
    both = replicas(cluster)
    cluster.deploy(file)
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    eventually(lambda: len(replicas(cluster)) == 1)
    before = replicas(cluster)
    assert before < both

    cluster.deploy(renamed(file, "another"))
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    eventually(lambda: load.served_by("another"))
    eventually(lambda: not replicas(cluster) & before)  # a moment after its routes are gone

    cluster.deploy(file)
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    eventually(lambda: load.served_by("all-MiniLM-L6-v2"))


def faked(name: str, port: int) -> dict[str, Any]:
    """Return the file with models that start in seconds, on a port of this test's.

    They swap a policy only while requests come.
    """
    content = content_of(name)
    content["http_options"] = {"host": "127.0.0.1", "port": port}
    for application in content["applications"][1:]:
        application["import_path"] = "fake_app:app"
        for model in application["args"]["models"]:
            model.update(path="fake:busy", aliases=["any"])
    return content


def changed(content: dict[str, Any], application: str = "shapeserve", **options: Any) -> Any:
    """Return the file with other options of an application's deployment."""
    new = copy.deepcopy(content)
    deployments(new)[application].update(options)
    return new


def renamed(content: dict[str, Any], model: str, application: str = "shapeserve") -> Any:
    """Return the file with another model in place of an application's; its alias stays."""
    new = copy.deepcopy(content)
    (found,) = [a for a in new["applications"] if a["name"] == application]
    found["args"]["models"][0]["name"] = model
    return new


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("proxy", ["default", "fast"])
def test_updates_of_one_replica_in_place_fail_no_request(
    start_cluster: Callable[..., RayCluster], proxy: str
) -> None:
    port = free_port()
    cluster = start_cluster({"port": port, "proxy": proxy, "drain_s": 5}, cpus=2)
    file = faked("cpu", port)
    cluster.deploy(file)
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    with SteadyLoad(f"http://127.0.0.1:{port}", {"model": "any", "input": "a b"}) as load:
        swap(cluster, file, load, {"seq": {"explicit": [8, 24]}})
        replace_and_roll_back(cluster, file, load)
    assert load.failures() == []
    assert len(load.answers) > 100
    # What the liveness probes of deploy/kubernetes ask, without a token.
    assert httpx.get(f"http://127.0.0.1:{cluster.agent_port}/api/healthz").status_code == 200

    draining = changed(file, user_config={"draining": True})
    draining["applications"][0]["deployments"] = [
        {"name": launch.HEALTH_DEPLOYMENT, "user_config": {"draining": True}}
    ]
    cluster.deploy(draining)
    ready = f"http://127.0.0.1:{port}{http.READY}"
    eventually(lambda: httpx.get(ready).json()["state"] == "draining")
    refused = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json={"input": "a"})
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    cluster.deploy(file)  # and back
    eventually(lambda: httpx.get(ready).status_code == 200)
    body = {"model": "any", "input": "a"}
    assert httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body).status_code == 200


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("proxy", ["default", "fast"])
def test_four_gpus_are_enough_for_the_file_and_for_its_updates(
    start_cluster: Callable[..., RayCluster], proxy: str
) -> None:
    """The GPUs are numbers that Ray deals out; nothing runs on them."""
    port = free_port()
    cluster = start_cluster({"port": port, "proxy": proxy, "drain_s": 5}, cpus=10, gpus=4)
    file = faked("four-gpus", port)
    running = {HEALTH: 1, "queries": 1, "documents": 3}
    cluster.deploy(file)
    cluster.settle(running)
    body = {"model": "any", "input": "a b"}
    url = f"http://127.0.0.1:{port}"
    with (
        SteadyLoad(url + "/queries", body) as queries,
        SteadyLoad(url + "/documents", body) as load,
    ):
        cluster.deploy(renamed(file, "another", "queries"))
        cluster.settle(running)
        eventually(lambda: queries.served_by("another"))
        cluster.deploy(renamed(file, "another", "documents"))
        cluster.settle(running)
        eventually(lambda: load.served_by("another") and queries.served_by("queries"))
    assert queries.failures() == load.failures() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_cpu_file_serves_minilm_and_is_updated_without_a_failed_request(
    start_cluster: Callable[..., RayCluster],
) -> None:
    port = free_port()
    cluster = start_cluster({"port": port, "proxy": "fast"}, cpus=2)
    file = content_of("cpu")
    file["http_options"] = {"host": "127.0.0.1", "port": port}
    model = file["applications"][1]["args"]["models"][0]
    model["aliases"] = ["any"]
    cluster.deploy(file)
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    url = f"http://127.0.0.1:{port}"
    with SteadyLoad(url, {"model": "any", "input": "a text"}, pause_s=0.2) as load:
        swap(cluster, file, load, {"seq": {"explicit": [24, 256]}})
        replace_and_roll_back(cluster, file, load)
    assert load.failures() == []
    assert len(json.loads(load.answers[-1][2])["data"][0]["embedding"]) == 384
