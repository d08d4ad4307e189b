"""Two replicas behind HAProxy: both work, and both are changed in place."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from service_process import ServiceProcess, eventually, free_port
from tiny import text_of, write_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

POLICY = {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 4]}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    model: dict[str, Any] = {
        "name": "tiny",
        "path": str(write_model(tmp_path_factory.mktemp("model"))),
        "compile": {"tier": "eager"},
        "policy": {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 4]}},
    }
    config = {"models": [model], "serve": {"port": free_port(), "proxy": "fast", "replicas": 2}}
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("ready")
        eventually(lambda: len(made.replicas()) == 2)
        yield made
    finally:
        made.stop()


def answered(service: ServiceProcess) -> dict[str, float]:
    """Replica -> rows that it has answered."""
    rows: dict[str, float] = {}
    for key, value in service.samples()["shapeserve_rows_total"].items():
        replica = dict(key)["replica"]
        rows[replica] = rows.get(replica, 0) + value
    return rows


def test_the_openai_client_gets_the_same_vectors_from_both(service: ServiceProcess) -> None:
    texts = [text_of(3 + i % 20, seed=i) for i in range(12)]
    vectors = []
    for _ in range(10):  # a connection each: HAProxy chooses the replica for every request
        with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
            data = client.embeddings.create(model="tiny", input=texts).data
        vectors.append(np.array([item.embedding for item in data]))
    for again in vectors[1:]:
        np.testing.assert_allclose(again, vectors[0], atol=1e-6)
    rows = answered(service)
    assert sum(rows.values()) == 120
    assert len(rows) == 2
    assert min(rows.values()) > 0


def test_a_new_policy_reaches_both_in_place(service: ServiceProcess) -> None:
    replicas = service.replicas()
    assert service.do(policy=["tiny", POLICY])["event"] == "done"

    def swapped() -> bool:
        series = service.samples()["shapeserve_policy_swaps_total"].items()
        return sum(v for key, v in series if dict(key)["result"] == "applied") == 2

    eventually(swapped)
    assert service.replicas() == replicas
    for _ in range(6):
        answer = service.embed(text_of(12), model="tiny")
        assert answer.headers["x-shapeserve-buckets"] == "batch=1,seq=16 x1"
