"""The Serve config file for a GPU, on a GPU: deployed, updated under load, rolled back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ray_cluster import RayCluster, SteadyLoad
from service_process import free_port
from test_deploy_serve import HEALTH, content_of, replace_and_roll_back, start_cluster, swap

__all__ = ["start_cluster"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


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
    body = {"model": "any", "input": ["a text", "a somewhat longer text " * 20]}
    with SteadyLoad(f"http://127.0.0.1:{port}", body) as load:
        swap(cluster, file, load, {"tokens": {"explicit": [96, 1000, 8192]}})
        assert load.counted("variants", "tier") == {"graph": 3.0}
        assert set(load.counted("rows_total", "mode")) == {"graph"}
        replace_and_roll_back(cluster, file, load)
        assert set(load.counted("rows_total", "mode")) == {"graph"}
        assert load.counted("recompiles_total", "reason") == {}
    print(len(load.answers), "requests, longest", f"{load.longest_s:.2f} s")
    assert load.failures() == []
    assert len(json.loads(load.answers[-1][2])["data"][0]["embedding"]) == 384
