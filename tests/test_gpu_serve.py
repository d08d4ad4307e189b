"""The Serve config file for a GPU, on a GPU: deployed, updated under load, rolled back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ray_cluster import RayCluster, SteadyLoad
from service_process import eventually, free_port
from test_deploy_serve import HEALTH, changed, content_of, renamed, replicas, start_cluster, swaps

__all__ = ["start_cluster"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def counted(exposition: str, metric: str, label: str) -> dict[str, float]:
    """Return the value of a label -> the sum of the metric's samples with it."""
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        if line.startswith(f"shapeserve_{metric}{{"):
            value = line.partition(f'{label}="')[2].partition('"')[0]
            sums[value] = sums.get(value, 0.0) + float(line.rpartition(" ")[2])
    return {value: n for value, n in sums.items() if n}


@pytest.mark.timeout(900)
def test_the_gpu_file_serves_graphs_and_is_updated_without_a_failed_request(
    start_cluster: Callable[..., RayCluster],
) -> None:
    port = free_port()
    cluster = start_cluster({"port": port, "proxy": "fast"}, cpus=8, gpus=1)
    file: dict[str, Any] = content_of("one-gpu")
    file["http_options"] = {"host": "127.0.0.1", "port": port}
    file["applications"][1]["args"]["models"][0]["aliases"] = ["any"]
    cluster.deploy(file)
    cluster.settle({HEALTH: 1, "shapeserve": 1})
    first = replicas(cluster)
    body = {"model": "any", "input": ["a text", "a somewhat longer text " * 20]}
    with SteadyLoad(f"http://127.0.0.1:{port}", body) as load:
        policy = {"all-MiniLM-L6-v2": {"tokens": {"explicit": [96, 1000, 8192]}}}
        cluster.deploy(changed(file, user_config={"policies": policy}))
        eventually(lambda: swaps(load) == 1)
        assert replicas(cluster) == first
        exposition = load.metrics()
        assert set(counted(exposition, "rows_total", "mode")) == {"graph"}
        assert counted(exposition, "recompiles_total", "reason") == {}
        assert counted(exposition, "variants", "tier") == {"graph": 3.0}

        cluster.deploy(changed(file, num_replicas=2))  # each has half of the GPU
        cluster.settle({HEALTH: 1, "shapeserve": 2})
        cluster.deploy(file)
        cluster.settle({HEALTH: 1, "shapeserve": 1})
        cluster.deploy(renamed(file, "another"))
        cluster.settle({HEALTH: 1, "shapeserve": 1})
        eventually(lambda: load.served_by("another"))
        cluster.deploy(file)
        cluster.settle({HEALTH: 1, "shapeserve": 1})
        eventually(lambda: load.served_by("all-MiniLM-L6-v2"))
        exposition = load.metrics()
        assert set(counted(exposition, "rows_total", "mode")) == {"graph"}
    print(len(load.answers), "requests, longest", f"{load.longest_s:.2f} s")
    assert load.failures() == []
    assert len(json.loads(load.answers[-1][2])["data"][0]["embedding"]) == 384
