"""The HTTP side of a replica with a fake engine: no Ray, no model, no sockets."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from fake_engine import BUCKET, FakeEngine, FakeRanker
from openapi_check import Document
from starlette.requests import Request

from shapeserve.config import ModelConfig
from shapeserve.metrics import NO_MODEL, Metrics
from shapeserve.protocols.health import ReplicaReport
from shapeserve.protocols.openapi import document
from shapeserve.serve import body as body_module
from shapeserve.serve import service as service_module
from shapeserve.serve.frontend import Frontend

MAX_BODY = 2000


class Service:
    """A frontend with two fake models, or more, spoken to over ASGI."""

    def __init__(
        self,
        state: Any = "ready",
        more: Mapping[str, type[FakeEngine]] | None = None,
        **options: Any,
    ) -> None:
        self.metrics = Metrics()
        kinds = {"mini": FakeEngine, "other": FakeEngine, **(more or {})}
        self.engines = {
            name: kind(
                ModelConfig(name=name, path="x", limits={"max_rows": 32}), self.metrics
            ).start()
            for name, kind in kinds.items()
        }
        self.frontend = Frontend(
            self.engines,  # type: ignore[arg-type]
            aliases={"mini": ("ada",)},
            metrics=self.metrics,
            metrics_text=self._metrics_text,
            report=lambda: ReplicaReport("r", state, 1, 3),
            **{"max_body_bytes": MAX_BODY, **options},
        )
        transport = httpx.ASGITransport(self._asgi)
        self.http = httpx.AsyncClient(
            transport=transport,
            base_url="http://service",
            event_hooks={"response": [self._is_documented]},  # whatever a test asks for
        )
        specs = [engine.spec for engine in self.engines.values()]
        self.document = Document(document(self.frontend._service.models, specs))

    async def _is_documented(self, response: httpx.Response) -> None:
        await response.aread()
        self.document.check(response)

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self.frontend(Request(scope, receive))
        await response(scope, receive, send)

    async def _metrics_text(self) -> str:
        return self.metrics.text()

    async def embed(self, value: Any, headers: Any = None, **fields: Any) -> httpx.Response:
        content = {"model": "mini", "input": value, **fields}
        return await self.http.post("/v1/embeddings", json=content, headers=headers)

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"shapeserve_{name}", labels) or 0.0

    def requests(self) -> dict[tuple[str, str, str], float]:
        """Every request counted so far: (model, endpoint, outcome) -> how often."""
        return {
            (s.labels["model"], s.labels["endpoint"], s.labels["outcome"]): s.value
            for s in self.metrics.samples()
            if s.name == "shapeserve_requests_total" and s.value
        }


@pytest.fixture
def service() -> Any:
    made = Service()
    yield made
    made.frontend.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.asyncio
async def test_an_answer_has_vectors_usage_and_what_was_done(service: Service) -> None:
    response = await service.embed(["two words", "fallback", "cut", "split"])
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-shapeserve-modes"] == "compiled=3,fallback=1"
    assert response.headers["x-shapeserve-buckets"] == f"{BUCKET.label} x3; none x1"
    assert response.headers["x-shapeserve-fallbacks"] == "over_max=1"
    assert response.headers["x-shapeserve-truncated"] == "1"
    assert response.headers["x-shapeserve-split"] == "1"
    content = response.json()
    assert [item["index"] for item in content["data"]] == [0, 1, 2, 3]
    assert content["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


@pytest.mark.asyncio
async def test_many_rows_are_rendered_like_few(service: Service) -> None:
    many = (await service.embed(["a b"] * (service_module.INLINE_ROWS + 1))).json()["data"]
    one = (await service.embed("a b")).json()["data"]
    assert len(many) == service_module.INLINE_ROWS + 1
    assert many[-1]["embedding"] == one[0]["embedding"]


@pytest.mark.asyncio
async def test_models_are_listed_and_found_by_name_and_alias(service: Service) -> None:
    listing = (await service.http.get("/v1/models")).json()
    assert [model["id"] for model in listing["data"]] == ["mini", "other"]
    assert (await service.http.get("/v1/models/ada")).json()["id"] == "mini"
    missing = await service.http.get("/v1/models/gpt")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


@pytest.mark.asyncio
async def test_head_is_answered_like_get(service: Service) -> None:
    assert (await service.http.head("/v1/models")).status_code == 200


@pytest.mark.asyncio
async def test_unknown_paths_and_methods_are_json_errors(service: Service) -> None:
    missing = await service.http.get("/v1/nothing")
    wrong = await service.http.get("/v1/embeddings")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_path")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("state", "status"), [("warming", 503), ("ready", 200), ("unhealthy", 503)]
)
async def test_health_is_answered_here_too(state: Any, status: int) -> None:
    service = Service(state)
    assert (await service.http.get("/v2/health/live")).status_code == 200
    ready = await service.http.get("/v2/health/ready")
    assert (ready.status_code, ready.json()["state"]) == (status, state)


def body(value: Any, model: str = "mini", **fields: Any) -> dict[str, Any]:
    return {"json": {"model": model, "input": value, **fields}}


# request, then: status, code and param of the error; model and reason of the rejection
INVALID = (400, "invalid_value")
EMPTY = (400, "empty_input")
TIMEOUT, ID = "x-request-timeout-seconds", "x-request-id"
TEXT = {"content": b"input=x", "headers": {"content-type": "text/plain"}}
BAD = {
    "json": ({"content": b"{"}, 400, "invalid_json", None, NO_MODEL, "invalid"),
    "media": (TEXT, 415, "unsupported_media_type", None, NO_MODEL, "media_type"),
    "model": (body("x", "gpt"), 404, "model_not_found", "model", NO_MODEL, "unknown_model"),
    "empty": (body(["a", ""]), *EMPTY, "input[1]", "mini", "invalid"),
    "blank": (body(["a", " "], "ada"), *EMPTY, "input[1]", "mini", "invalid"),
    "rows": (body(["a"] * 33), 400, "too_many_rows", "input", "mini", "too_many_rows"),
    "dims": (body("a", dimensions=5), *INVALID, "dimensions", "mini", "invalid"),
    "timeout": (body("a") | {"headers": {TIMEOUT: "soon"}}, *INVALID, TIMEOUT, NO_MODEL, "invalid"),
    "id": (body("a") | {"headers": {ID: "a b"}}, *INVALID, ID, NO_MODEL, "invalid"),
    "large": (
        {"content": b" " * (MAX_BODY + 1)},
        *(413, "body_too_large", None, NO_MODEL, "body_too_large"),
    ),
    "full": (body(["a", "full"]), 429, "queue_full", None, "mini", "queue_full"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_every_refusal_is_exact_counted_once_and_harms_nobody(
    service: Service, name: str
) -> None:
    request, status, code, param, model, reason = BAD[name]
    response = await service.http.post("/v1/embeddings", **request)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    outcome = "overloaded" if status == 429 else "client_error"
    endpoint = "other" if name == "id" else "embeddings"
    assert service.requests() == {(model, endpoint, outcome): 1}
    assert service.counted("rejected_total", model=model, reason=reason) == 1
    assert service.counted("request_seconds_count", model=model, endpoint=endpoint) == 1
    assert (await service.embed("fine")).status_code == 200


@pytest.mark.asyncio
async def test_an_overload_says_when_to_come_back(service: Service) -> None:
    assert (await service.embed("full")).headers["retry-after"] == "2"


@pytest.mark.asyncio
async def test_a_failed_row_is_a_500_that_names_it(service: Service) -> None:
    response = await service.embed(["a", "nan", "b", "nan"])
    error = error_of(response)
    assert (response.status_code, error["code"]) == (500, "row_failed")
    assert error["param"] == "input[1]"
    assert "input[1]" in error["message"]
    assert "input[3]" in error["message"]
    assert service.requests() == {("mini", "embeddings", "server_error"): 1}
    assert service.counted("rejected_total", model="mini", reason="invalid") == 0


@pytest.mark.asyncio
async def test_an_unforeseen_error_is_a_500_that_keeps_its_detail_in_the_log(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "shapeserve"):
        response = await service.embed("crash", headers={"x-request-id": "id-1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "id-1" in error_of(response)["message"]
    assert "secret detail" in caplog.text
    assert "request=id-1" in caplog.text


@pytest.mark.asyncio
async def test_a_refusal_is_logged_with_the_request_id_and_without_the_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shapeserve"):
        await service.embed(["private words", ""], headers={"x-request-id": "id-2"})
        await service.http.get("/nothing%0Aforged%20line")
    assert "embeddings 400 empty_input model=mini request=id-2: input[1]" in caplog.text
    assert "private" not in caplog.text
    assert "forged" not in caplog.text


@pytest.mark.asyncio
async def test_the_list_of_models_says_what_each_answers() -> None:
    service = Service(more={"ranker": FakeRanker})
    cards = (await service.http.get("/v1/models")).json()["data"]
    assert {card["id"]: card["tasks"] for card in cards} == {
        "mini": ["embeddings"],
        "other": ["embeddings"],
        "ranker": ["rerank", "classify"],
    }
    service.frontend.close()


@pytest.mark.asyncio
async def test_a_dead_engine_is_a_503(service: Service) -> None:
    assert (await service.embed("die")).status_code == 503
    response = await service.embed("fine")
    assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
    assert (await service.embed("fine", model="other")).status_code == 200


@pytest.mark.asyncio
async def test_a_deadline_too_short_to_answer_in_is_a_504_at_once(service: Service) -> None:
    response = await service.embed("a", headers={TIMEOUT: "0.001"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert "gRPC also the client's own) leaves less than the 20 ms" in error_of(response)["message"]
    assert service.requests() == {(NO_MODEL, "embeddings", "deadline"): 1}


@pytest.mark.asyncio
async def test_the_deadline_of_the_header_becomes_a_504(service: Service) -> None:
    response = await service.embed("slow 60", headers={"x-request-timeout-seconds": "0.05"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert service.requests() == {("mini", "embeddings", "deadline"): 1}


@pytest.mark.asyncio
async def test_a_request_that_ray_ends_after_its_deadline_counts_as_late(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def runs_on(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(service.engines["mini"], "submit_prepared", runs_on)
    late = asyncio.create_task(service.embed("a", headers={TIMEOUT: "0.05"}))
    await asyncio.sleep(0.2)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert service.requests() == {("mini", "embeddings", "deadline"): 1}


@pytest.mark.asyncio
async def test_a_client_that_leaves_cancels_its_rows_only_and_is_counted(service: Service) -> None:
    engine = service.engines["mini"]
    leaving = asyncio.create_task(service.embed("slow 60"))
    while not engine.waiting:
        await asyncio.sleep(0.001)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (engine.cancelled, engine.waiting) == (1, 0)
    assert (await service.embed("fine")).status_code == 200
    assert service.requests() == {
        ("mini", "embeddings", "cancelled"): 1,
        ("mini", "embeddings", "ok"): 1,
    }


@pytest.mark.asyncio
async def test_a_chunked_body_is_read_no_further_than_the_limit_in_memory(
    service: Service,
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100 * MAX_BODY:
            sent += 1000
            yield b" " * 1000

    response = await service.http.post("/v1/embeddings", content=endless())
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert sent <= (2 + body_module.DISCARD_FACTOR) * MAX_BODY


@pytest.mark.asyncio
async def test_while_it_drains_work_is_refused_with_503_and_what_runs_is_answered(
    service: Service,
) -> None:
    idle: list[bool] = []
    running = asyncio.create_task(service.embed("slow 0.2"))
    await asyncio.sleep(0.05)
    service.frontend.drain(lambda: idle.append(True))
    refused = await service.embed("a")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await service.http.get("/v1/models")).status_code == 200
    assert not idle
    assert (await running).status_code == 200
    assert idle
    assert service.frontend.in_flight == 0


@pytest.mark.asyncio
async def test_a_chunked_body_within_the_limit_is_answered(service: Service) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"model":"mini",', b'"input":"a"}'):
            yield part

    headers = {"content-type": "application/json"}
    response = await service.http.post("/v1/embeddings", content=chunks(), headers=headers)
    assert response.status_code == 200


@pytest.mark.asyncio
async def test_metrics_are_the_text_format_and_count_themselves(service: Service) -> None:
    await service.http.get("/metrics")
    response = await service.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE shapeserve_requests_total counter" in response.text
    assert service.requests() == {(NO_MODEL, "metrics", "ok"): 2}


@pytest.mark.asyncio
async def test_a_path_is_read_below_the_prefix_of_the_application(service: Service) -> None:
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/mini/v1/models",
        "root_path": "/mini",
        "headers": [],
    }
    response = await service.frontend(Request(scope))
    assert json.loads(bytes(response.body))["object"] == "list"
