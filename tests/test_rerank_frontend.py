"""Rerank and classify over ASGI: a fake engine for what goes wrong, a tiny real one for answers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import httpx
import numpy as np
import pytest
import tiny
from fake_engine import FakeEngine, FakeRanker
from starlette.requests import Request

from shapeserve.config import ModelConfig
from shapeserve.engine import Engine, TextPair
from shapeserve.metrics import NO_MODEL, Metrics
from shapeserve.protocols.health import ReplicaReport
from shapeserve.serve.frontend import Frontend

DOCS = Path(__file__).parent.parent / "docs" / "http.md"


class Client:
    """A frontend spoken to over ASGI."""

    def __init__(self, served: dict[str, Any], metrics: Metrics) -> None:
        self.metrics = metrics
        self.frontend = Frontend(
            served,
            aliases={},
            metrics=metrics,
            max_body_bytes=10_000,
            metrics_text=self._metrics_text,
            report=lambda: ReplicaReport("r", "ready", 1, 1),
        )
        transport = httpx.ASGITransport(self._asgi)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://service")

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self.frontend(Request(scope, receive))
        await response(scope, receive, send)

    async def _metrics_text(self) -> str:
        return self.metrics.text()

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=fields)

    def requests(self) -> dict[tuple[str, str, str], float]:
        """Every request counted so far: (model, endpoint, outcome) -> how often."""
        return {
            (s.labels["model"], s.labels["endpoint"], s.labels["outcome"]): s.value
            for s in self.metrics.samples()
            if s.name == "shapeserve_requests_total" and s.value
        }


@pytest.fixture
def fake() -> Iterator[Client]:
    metrics = Metrics()
    kinds: dict[str, type[FakeEngine]] = {"ranker": FakeRanker, "mini": FakeEngine}
    client = Client(
        {
            name: kind(ModelConfig(name=name, path="x", limits={"max_rows": 32}), metrics).start()
            for name, kind in kinds.items()
        },
        metrics,
    )
    yield client
    client.frontend.close()


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, metrics: Metrics
) -> Iterator[dict[str, Engine]]:
    """A tiny cross-encoder and a tiny classifier under the names that the documentation uses."""
    eager: dict[str, Any] = {"compile": {"tier": "eager"}, "limits": {"max_length": 32}}
    ranker = tiny.write_classifier(tmp_path_factory.mktemp("r") / "m")
    names = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    mood = tiny.write_classifier(tmp_path_factory.mktemp("c") / "m", labels=2, **names)
    directories = {"my-reranker": ranker, "my-classifier": mood}
    configs = {n: engines.text_config(d, name=n, **eager) for n, d in directories.items()}
    made = {name: Engine(config, metrics=metrics) for name, config in configs.items()}
    with made["my-reranker"].start(), made["my-classifier"].start():
        yield made


@pytest.fixture
def real(served: dict[str, Engine], metrics: Metrics) -> Iterator[Client]:
    client = Client(served, metrics)
    yield client
    client.frontend.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# --- with a fake engine ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_documents_come_back_in_order_of_relevance_and_the_request_is_counted(
    fake: Client,
) -> None:
    documents = ["a", "a b c", "a b"]
    answer = await fake.post("/v1/rerank", model="ranker", query="q", documents=documents, top_n=2)
    assert answer.status_code == 200
    assert [item["index"] for item in answer.json()["results"]] == [1, 2]
    assert answer.headers["x-shapeserve-modes"] == "compiled=3"
    assert fake.requests() == {("ranker", "rerank", "ok"): 1}


@pytest.mark.asyncio
async def test_many_documents_are_rendered_like_few(fake: Client) -> None:
    documents = ["a " * (1 + i % 7) for i in range(32)]
    answer = await fake.post("/v1/rerank", model="ranker", query="q", documents=documents)
    assert [item["index"] % 7 for item in answer.json()["results"]][:4] == [6, 6, 6, 6]


@pytest.mark.asyncio
async def test_a_document_whose_score_is_not_finite_is_a_500_that_names_it(fake: Client) -> None:
    documents = ["a", "nan", "b", "nan"]
    answer = await fake.post("/v1/rerank", model="ranker", query="q", documents=documents)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        500,
        "row_failed",
        "documents[1]",
    )
    assert "documents[3]" in error["message"]
    answer = await fake.post("/v1/classify", model="ranker", input=["a", "nan"])
    assert (answer.status_code, error_of(answer)["param"]) == (500, "input[1]")
    assert fake.requests() == {
        ("ranker", "rerank", "server_error"): 1,
        ("ranker", "classify", "server_error"): 1,
    }


Q = {"query": "q", "documents": ["a"]}
BAD: dict[str, tuple[str, dict[str, Any], tuple[int, str, str], str]] = {
    "embed-rerank": ("rerank", {"model": "mini", **Q}, (400, "invalid_value", "model"), "mini"),
    "embed-label": (
        "classify",
        {"model": "mini", "input": "a"},
        (400, "invalid_value", "model"),
        "mini",
    ),
    "label-embed": (
        "embeddings",
        {"model": "ranker", "input": "a"},
        (400, "invalid_value", "model"),
        "ranker",
    ),
    "model": ("rerank", {"model": "gpt", **Q}, (404, "model_not_found", "model"), NO_MODEL),
    "query": (
        "rerank",
        {"model": "ranker", "query": "", "documents": ["a"]},
        (400, "empty_input", "query"),
        "ranker",
    ),
    "rows": (
        "rerank",
        {"model": "ranker", "query": "q", "documents": ["a"] * 33},
        (400, "too_many_rows", "documents"),
        "ranker",
    ),
    "full": (
        "classify",
        {"model": "ranker", "input": "full"},
        (429, "queue_full", ""),
        "ranker",
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_every_refusal_is_exact_and_counted_under_its_endpoint(
    fake: Client, name: str
) -> None:
    endpoint, fields, expected, model = BAD[name]
    answer = await fake.post(f"/v1/{endpoint}", **fields)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"] or "") == expected
    outcome = "overloaded" if expected[0] == 429 else "client_error"
    assert fake.requests() == {(model, endpoint, outcome): 1}


@pytest.mark.asyncio
async def test_a_refusal_says_which_models_would_do(fake: Client) -> None:
    answer = await fake.post("/v1/rerank", model="mini", **Q)
    assert error_of(answer)["message"].endswith("served models that do: ranker.")
    answer = await fake.post("/v1/embeddings", model="ranker", input="a")
    assert error_of(answer)["message"].endswith("served models that do: mini.")


# --- with tiny models -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_ranking_is_that_of_the_engines_logits(
    real: Client, served: dict[str, Engine]
) -> None:
    query, documents = tiny.text_of(5), [tiny.text_of(3 + i, seed=i) for i in range(12)]
    answer = await real.post(
        "/v1/rerank", model="my-reranker", query=query, documents=documents, raw_scores=True
    )
    results = served["my-reranker"].run([TextPair(query, document) for document in documents])
    logits = [float(result.outputs["logits"][0]) for result in results]
    got = {item["index"]: item["relevance_score"] for item in answer.json()["results"]}
    assert [*got] == sorted(got, key=lambda i: -logits[i])
    np.testing.assert_allclose([got[i] for i in range(12)], logits, atol=1e-5)
    assert answer.json()["usage"]["total_tokens"] == sum(result.length for result in results)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"query": tiny.text_of(200)}, "query", ["query has 198 tokens, at most 44"]),
        ({"documents": ["a", " "]}, "documents[1]", ["is empty or holds no token"]),
        ({"query": ""}, "query", ["query is empty or holds no token"]),
        ({"documents": ["a", tiny.text_of(90)]}, "documents[1]", ["is too long, at most 48"]),
    ],
)
async def test_what_only_the_tokenizer_sees_is_named_as_the_client_calls_it(
    real: Client, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    request = {"model": "my-reranker", "query": "the cat", "documents": ["a"], **fields}
    error = error_of(await real.post("/v1/rerank", **request))
    assert error["param"] == param
    assert [word for word in words if word not in error["message"]] == []


@pytest.mark.asyncio
async def test_a_cut_document_is_reported(real: Client) -> None:
    documents = [tiny.text_of(5), tiny.text_of(90)]
    answer = await real.post(
        "/v1/rerank", model="my-reranker", query="the", documents=documents, truncate=True
    )
    cut = {item["index"]: item.get("truncated_from") for item in answer.json()["results"]}
    assert cut == {0: None, 1: 92}
    assert answer.headers["x-shapeserve-truncated"] == "1"


def examples() -> list[Any]:
    """Every curl of the documentation's rerank and classify sections, and the answer beside it."""
    text = DOCS.read_text()
    found = []
    for path in ("rerank", "classify"):
        section = text.split(f"## `POST /v1/{path}`", 1)[1].split("\n## ", 1)[0]
        for command, answer in re.findall(r"```sh\n(.*?)```\s*```json\n(.*?)```", section, re.S):
            found.append(pytest.param(path, command, json.loads(answer), id=path))
    assert len(found) >= 2
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "command", "shown"), examples())
async def test_the_curl_examples_of_the_documentation_are_answered_in_the_shown_shape(
    real: Client, path: str, command: str, shown: dict[str, Any]
) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[1].endswith(f"/v1/{path}")
    answer = await real.post(f"/v1/{path}", **json.loads(words[words.index("-d") + 1]))
    assert answer.status_code == 200, answer.text
    assert shape(answer.json()) == shape(shown)


def shape(value: Any) -> Any:
    """Keys and kinds of values, numbers and texts apart."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return float if isinstance(value, int | float) else type(value)


@pytest.mark.asyncio
async def test_the_open_inference_protocol_gives_the_logits_of_a_pair_in_token_ids(
    real: Client, served: dict[str, Engine]
) -> None:
    pair = TextPair(tiny.text_of(5), tiny.text_of(9))
    (prepared,) = served["my-reranker"].prepare([pair])
    arrays = prepared.rows[0].arrays.arrays
    names = ("input_ids", "token_type_ids")
    tensors = [
        {"name": n, "datatype": "INT64", "shape": [1, len(arrays[n])], "data": arrays[n].tolist()}
        for n in names
    ]
    answer = await real.post("/v2/models/my-reranker/infer", inputs=tensors)
    assert answer.status_code == 200, answer.text
    (logits,) = answer.json()["outputs"]
    (expected,) = served["my-reranker"].run([pair])
    assert (logits["name"], logits["datatype"], logits["shape"]) == ("logits", "FP32", [1, 1])
    np.testing.assert_allclose(logits["data"], expected.outputs["logits"], atol=1e-5)
