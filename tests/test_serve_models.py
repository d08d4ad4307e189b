"""Several models on Ray Serve: in one application, and as applications that scale by themselves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml
from service_process import ServiceProcess, eventually, free_port
from tiny import text_of, write_model

from shapeserve.config import ServeConfig
from shapeserve.engine import DeviceThread, Engine
from shapeserve.metrics import identities
from shapeserve.metrics.identities import parse_samples

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parent.parent / "deploy" / "examples" / "two-applications.yaml"
SIZES = {"first": [8, 24], "second": [12, 24]}
POLICY = {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 4]}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two encoders with other weights and other buckets."""
    return [
        {
            "name": name,
            "aliases": [f"{name}-alias"],
            "path": str(write_model(tmp_path_factory.mktemp(name), seed=seed)),
            "compile": {"tier": "eager"},
            "policy": {"seq": {"explicit": SIZES[name]}, "batch": {"explicit": [1, 4]}},
            "threads": 1,
        }
        for seed, name in enumerate(SIZES)
    ]


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, models: list[dict[str, Any]]
) -> Iterator[ServiceProcess]:
    config = {"models": models, "serve": {"port": free_port(), "proxy": "default"}}
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("ready")
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def reference(models: list[dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    device = DeviceThread(threads=1)
    configs = ServeConfig.from_dict({"models": models}).models
    engines = {str(config.name): Engine(config, device=device) for config in configs}
    for engine in engines.values():
        engine.start()
    yield engines
    for engine in engines.values():
        engine.close()


def grid(service: ServiceProcess, model: str) -> set[str]:
    series = service.samples()["shapeserve_grid_info"]
    return {dict(key)["version"] for key in series if dict(key)["model"] == model}


def test_each_model_of_an_application_answers_under_its_names_and_no_other(
    service: ServiceProcess, reference: dict[str, Engine]
) -> None:
    texts = [text_of(n, seed=n) for n in (3, 8, 9, 12, 24, 40)]
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == ["first", "second"]

        def ask(name: str) -> np.ndarray:
            data = client.embeddings.create(model=name, input=texts).data
            return np.array([item.embedding for item in data])

        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(ask, ["first", "second-alias"] * 8)]
        with pytest.raises(openai.NotFoundError, match=r"first.*second"):
            client.embeddings.create(model="third", input="x")
    for name, vectors in zip(["first", "second"] * 8, answers, strict=True):
        expected = [r.outputs["sentence_embedding"] for r in reference[name].run(texts)]
        np.testing.assert_allclose(vectors, np.stack(expected), atol=1e-5)
    assert np.abs(answers[0] - answers[1]).max() > 0.1


def test_i7_each_model_of_an_application_has_books_of_its_own(service: ServiceProcess) -> None:
    before = [service.total("rows_total", model=name) for name in SIZES]
    for _ in range(3):
        assert service.embed([text_of(5)] * 2, model="first").status_code == 200
    assert service.embed("", model="second").status_code == 400
    after = [service.total("rows_total", model=name) for name in SIZES]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, 0]
    assert service.total("rejected_total", model="second") == 1
    assert service.total("rejected_total", model="first") == 0
    samples = parse_samples(service.http.get("/metrics").text)
    assert {s.labels["model"] for s in samples if "model" in s.labels} == {*SIZES, "none"}
    assert identities(samples) == []


def test_the_policy_of_one_model_is_swapped_and_the_other_keeps_its_own(
    service: ServiceProcess,
) -> None:
    replicas, old, other = service.replicas(), grid(service, "first"), grid(service, "second")
    assert service.do(policy=["first", POLICY])["event"] == "done"
    eventually(lambda: grid(service, "first").isdisjoint(old))
    assert (service.replicas(), grid(service, "second")) == (replicas, other)
    used = [service.embed(text_of(12), model=name).headers for name in SIZES]
    assert [h["x-shapeserve-buckets"] for h in used] == [
        "batch=1,seq=16 x1",
        "batch=1,seq=12 x1",
    ]
    assert service.total("policy_swaps_total", model="second") == 0


# --- applications: keep this test last -----------------------------------------------------------


def example(models: list[dict[str, Any]], documents: int) -> list[dict[str, Any]]:
    """The applications of the example, with tiny models and no claim to whole cores."""
    found: list[dict[str, Any]] = yaml.safe_load(EXAMPLE.read_text())["applications"][1:]
    for application, model in zip(found, models, strict=True):
        kept = {"path": model["path"], "compile": model["compile"], "policy": model["policy"]}
        application["args"]["models"][0] |= {**kept, "limits": {}}
        (deployment,) = application["deployments"]
        deployment["ray_actor_options"] = {"num_cpus": 0.1}
    deployment["num_replicas"] = documents
    return found


def replicas_of(service: ServiceProcess, application: str) -> set[str]:
    """The replicas that an application's own scrape names."""
    response = httpx.get(f"{service.url}/{application}/metrics", timeout=30)
    found = parse_samples(response.text) if response.status_code == 200 else []
    return {s.labels["replica"] for s in found if s.name == "shapeserve_queue_rows"}


@pytest.mark.slow
def test_applications_of_one_model_each_scale_by_themselves(
    service: ServiceProcess, models: list[dict[str, Any]]
) -> None:
    assert service.do(applications=example(models, documents=1))["event"] == "done"
    names = ["queries", "documents"]
    eventually(lambda: all(len(replicas_of(service, name)) == 1 for name in names))
    for name, other in (names, names[::-1]):
        url = f"{service.url}/{name}"
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == [name]
            assert len(client.embeddings.create(model=name, input="cat").data) == 1
            with pytest.raises(openai.NotFoundError):
                client.embeddings.create(model=other, input="cat")
        eventually(lambda url=url: httpx.get(url + "/v2/health/ready").json()["ready"])
    queries, documents = (replicas_of(service, name) for name in names)
    assert service.do(applications=example(models, documents=2))["event"] == "done"
    eventually(lambda: len(replicas_of(service, "documents")) == 2)
    assert documents < replicas_of(service, "documents")  # the first was not restarted
    assert replicas_of(service, "queries") == queries
    assert len(service.ready()[1]["replicas"]) >= 4  # the health application hears of all
