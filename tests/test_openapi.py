"""The OpenAPI document agrees with the router, the parsers, the errors and the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fake_engine import FakeRanker
from openapi_check import Document
from test_frontend import Service

import shapeserve
from shapeserve.errors import RequestError
from shapeserve.protocols.health import Board, ReplicaReport, live
from shapeserve.protocols.http import LIVE, READY, Reply
from shapeserve.protocols.openapi.parts import ERRORS
from shapeserve.serve.admin import Guard
from shapeserve.serve.endpoints.oip import OpenInference

ROOT = Path(shapeserve.__file__).parent
HTTP_MD = (ROOT.parent / "docs" / "http.md").read_text()
ADMIN = {"authorization": "Bearer token"}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a b"]}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service(guard=Guard("token"), more={"ranker": FakeRanker})
    yield made
    made.frontend.close()


@pytest.fixture(scope="module")
def document(service: Service) -> Document:
    return service.document


def operations(document: Document) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, methods in document.data["paths"].items()
        for method, operation in methods.items()
    }


@pytest.mark.asyncio
async def test_it_is_served_and_valid_openapi(service: Service) -> None:
    response = await service.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["openapi"] == "3.1.0"
    assert response.json()["info"]["version"] == shapeserve.__version__
    schemathesis.openapi.from_dict(response.json()).validate()


@pytest.mark.asyncio
async def test_every_route_is_documented_with_its_methods_and_nothing_else(
    service: Service, document: Document
) -> None:
    served, absent = set(), set()
    for route in service.frontend.routes:
        known = getattr(route.handler, "__func__", None) is OpenInference.absent
        (absent if known else served).add((route.method, route.path))
    assert set(operations(document)) == served
    for method, path in absent:  # of other servers' extensions: they are there to be refused
        path = path.format(model="mini", version="1")
        assert (await service.http.request(method, path)).status_code == 404


def test_every_reference_leads_somewhere_and_every_component_is_used(document: Document) -> None:
    used = set(re.findall(r"#/components/(\w+/\w+)", str(document.data)))
    made = {f"{kind}/{name}" for kind, all_ in document.data["components"].items() for name in all_}
    # A path that exists takes other methods with a 405, which belongs to no operation.
    assert made - used == {"securitySchemes/admin", "responses/Error405"}
    assert used <= made


# --- requests ---------------------------------------------------------------------------------


def properties(document: Document, schema: Mapping[str, Any], *steps: str) -> set[str]:
    """Return the names that an object may have, ``steps`` below ``schema``."""
    schema = document.resolve(schema)
    for step in steps:
        schema = document.resolve(schema["properties"][step])
        if "items" in schema:
            schema = document.resolve(schema["items"])
    return set(schema["properties"])


async def allowed(service: Service, path: str, body: dict[str, Any]) -> set[str]:
    """Return the fields that the server names when it refuses one that it does not know."""
    response = await service.http.post(path, json=body)
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400, response.text
    (names,) = re.findall(r"unknown field .*; allowed are (.*)\.$", message)
    return set(names.split(", "))


@pytest.mark.asyncio
async def test_every_field_that_a_parser_knows_is_documented_and_no_other(
    service: Service, document: Document
) -> None:
    posts = [(path, o) for (method, path), o in operations(document).items() if method == "POST"]
    assert len(posts) >= 3
    for path, operation in posts:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        model = "mini" if path == "/v1/embeddings" else "ranker"
        body = {"model": model, "nonsense": 1} if path.startswith("/v1") else {"nonsense": 1}
        url = path.format(model="mini", version="1")
        assert await allowed(service, url, body) == properties(document, schema), path


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("inputs", {"inputs": [{"nonsense": 1}]}),
        ("outputs", {"inputs": [TEXT], "outputs": [{"nonsense": 1}]}),
    ],
)
async def test_every_field_of_a_tensor_is_documented_and_no_other(
    service: Service, document: Document, field: str, body: dict[str, Any]
) -> None:
    operation = operations(document)["POST", "/v2/models/{model}/infer"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    known = await allowed(service, "/v2/models/mini/infer", body)
    assert known == properties(document, schema, field)


EMBED = {"model": "mini", "input": "a"}
INFER = {"inputs": [TEXT]}
RERANK = {"model": "ranker", "query": "a", "documents": ["a", "b"]}
CLASSIFY = {"model": "ranker", "input": "a"}
# Each is one step from a valid request: the document and the server must say the same of it.
EDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", EMBED),
    "alias": ("/v1/embeddings", EMBED | {"model": "ada"}),
    "no-model": ("/v1/embeddings", {"input": "a"}),
    "no-input": ("/v1/embeddings", {"model": "mini"}),
    "null-model": ("/v1/embeddings", EMBED | {"model": None}),
    "null-input": ("/v1/embeddings", EMBED | {"input": None}),
    "empty-text": ("/v1/embeddings", EMBED | {"input": ""}),
    "blank-text": ("/v1/embeddings", EMBED | {"input": [" "]}),
    "empty-list": ("/v1/embeddings", EMBED | {"input": []}),
    "most-rows": ("/v1/embeddings", EMBED | {"input": ["a"] * 32}),
    "too-many-rows": ("/v1/embeddings", EMBED | {"input": ["a"] * 33}),
    "ids": ("/v1/embeddings", EMBED | {"input": [1, 2**31 - 1]}),
    "large-id": ("/v1/embeddings", EMBED | {"input": [2**31]}),
    "negative-id": ("/v1/embeddings", EMBED | {"input": [-1]}),
    "boolean-id": ("/v1/embeddings", EMBED | {"input": [True]}),
    "id-lists": ("/v1/embeddings", EMBED | {"input": [[1], [2, 3]]}),
    "empty-ids": ("/v1/embeddings", EMBED | {"input": [[1], []]}),
    "mixed": ("/v1/embeddings", EMBED | {"input": ["a", [1]]}),
    "object": ("/v1/embeddings", EMBED | {"input": {}}),
    "dimensions": ("/v1/embeddings", EMBED | {"dimensions": 4}),
    "no-dimensions": ("/v1/embeddings", EMBED | {"dimensions": 0}),
    "large-dimensions": ("/v1/embeddings", EMBED | {"dimensions": 5}),
    "boolean-dimensions": ("/v1/embeddings", EMBED | {"dimensions": True}),
    "format": ("/v1/embeddings", EMBED | {"encoding_format": "base64"}),
    "other-format": ("/v1/embeddings", EMBED | {"encoding_format": "hex"}),
    "user": ("/v1/embeddings", EMBED | {"user": "me"}),
    "number-user": ("/v1/embeddings", EMBED | {"user": 1}),
    "nulls": ("/v1/embeddings", EMBED | dict.fromkeys(("user", "dimensions", "truncate"))),
    "more-nulls": ("/v1/embeddings", EMBED | dict.fromkeys(("encoding_format", "over_max"))),
    "truncate": ("/v1/embeddings", EMBED | {"truncate": True}),
    "word-truncate": ("/v1/embeddings", EMBED | {"truncate": "yes"}),
    "over-max": ("/v1/embeddings", EMBED | {"over_max": "split"}),
    "other-over-max": ("/v1/embeddings", EMBED | {"over_max": "shrink"}),
    "same-choice": ("/v1/embeddings", EMBED | {"truncate": True, "over_max": "truncate"}),
    "no-choice": ("/v1/embeddings", EMBED | {"truncate": False, "over_max": "split"}),
    "two-choices": ("/v1/embeddings", EMBED | {"truncate": True, "over_max": "split"}),
    "infer": ("/v2/models/mini/infer", INFER),
    "infer-id": ("/v2/models/mini/infer", INFER | {"id": "x" * 1024}),
    "infer-long-id": ("/v2/models/mini/infer", INFER | {"id": "x" * 1025}),
    "infer-number-id": ("/v2/models/mini/infer", INFER | {"id": 1}),
    "infer-nulls": (
        "/v2/models/mini/infer",
        INFER | dict.fromkeys(("id", "model_name", "parameters", "outputs")),
    ),
    "infer-parameters": ("/v2/models/mini/infer", INFER | {"parameters": {"a": 1, "b": "c"}}),
    "infer-null-parameter": ("/v2/models/mini/infer", INFER | {"parameters": {"a": None}}),
    "infer-priority": ("/v2/models/mini/infer", INFER | {"parameters": {"priority": 1}}),
    "infer-triton": ("/v2/models/mini/infer", INFER | {"parameters": {"triton_x": 1}}),
    "infer-timeout": ("/v2/models/mini/infer", INFER | {"parameters": {"timeout": 86_400 * 10**6}}),
    "infer-day": ("/v2/models/mini/infer", INFER | {"parameters": {"timeout": 86_401 * 10**6}}),
    "infer-flag": ("/v2/models/mini/infer", INFER | {"parameters": {"binary_data_output": True}}),
    "infer-word": ("/v2/models/mini/infer", INFER | {"parameters": {"binary_data_output": "yes"}}),
    "infer-many": (
        "/v2/models/mini/infer",
        INFER | {"parameters": {str(i): 1 for i in range(64)}},
    ),
    "infer-too-many": (
        "/v2/models/mini/infer",
        INFER | {"parameters": {str(i): 1 for i in range(65)}},
    ),
    "infer-no-input": ("/v2/models/mini/infer", {"inputs": []}),
    "infer-outputs": (
        "/v2/models/mini/infer",
        INFER | {"outputs": [{"name": "sentence_embedding"}]},
    ),
    "rerank": ("/v1/rerank", RERANK),
    "rerank-objects": ("/v1/rerank", RERANK | {"documents": [{"text": "a"}, "b"]}),
    "rerank-object-more": ("/v1/rerank", RERANK | {"documents": [{"text": "a", "id": 1}]}),
    "rerank-no-documents": ("/v1/rerank", RERANK | {"documents": []}),
    "rerank-many": ("/v1/rerank", RERANK | {"documents": ["a"] * 33}),
    "rerank-blank-query": ("/v1/rerank", RERANK | {"query": " "}),
    "rerank-top-0": ("/v1/rerank", RERANK | {"top_n": 0}),
    "rerank-top-9": ("/v1/rerank", RERANK | {"top_n": 9, "return_documents": True}),
    "rerank-split": ("/v1/rerank", RERANK | {"over_max": "split"}),
    "rerank-encoder": ("/v1/rerank", RERANK | {"model": "mini"}),
    "classify": ("/v1/classify", CLASSIFY),
    "classify-list": ("/v1/classify", CLASSIFY | {"input": ["a", "b"]}),
    "classify-pair": ("/v1/classify", CLASSIFY | {"input": {"text": "a", "text_pair": "b"}}),
    "classify-half": ("/v1/classify", CLASSIFY | {"input": [{"text": "a"}]}),
    "classify-raw": ("/v1/classify", CLASSIFY | {"raw_scores": True}),
    "classify-encoder": ("/v1/classify", CLASSIFY | {"model": "mini"}),
    "infer-nameless": ("/v2/models/mini/infer", INFER | {"outputs": [{"name": ""}]}),
    "infer-output-word": (
        "/v2/models/mini/infer",
        INFER | {"outputs": [{"name": "a", "parameters": {"binary_data": 1}}]},
    ),
    "infer-datatype": ("/v2/models/mini/infer", {"inputs": [TEXT | {"datatype": "UINT64"}]}),
    "infer-shape": ("/v2/models/mini/infer", {"inputs": [TEXT | {"shape": [0]}]}),
    "infer-no-shape": ("/v2/models/mini/infer", {"inputs": [TEXT | {"shape": []}]}),
    "infer-many-dims": ("/v2/models/mini/infer", {"inputs": [TEXT | {"shape": [1] * 33}]}),
    "infer-word-data": ("/v2/models/mini/infer", {"inputs": [TEXT | {"data": "a"}]}),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", EDGES)
async def test_document_and_server_say_the_same_of_a_request(
    service: Service, document: Document, name: str
) -> None:
    path, body = EDGES[name]
    operation = document.operation("POST", path)
    assert operation is not None
    response = await service.http.post(path, json=body)
    assert response.status_code in (200, 400, 404), response.text
    assert document.accepts(operation, body) == (response.status_code == 200), response.text


@pytest.mark.asyncio
async def test_every_example_is_answered(service: Service, document: Document) -> None:
    answered = 0
    for (method, path), operation in operations(document).items():
        if method != "POST":
            continue
        content = operation["requestBody"]["content"]["application/json"]
        examples = document.resolve(content["schema"]).get("examples", [])
        for example in [*examples, *([content["example"]] if "example" in content else [])]:
            url = path.format(model="mini", version="1")
            assert (await service.http.post(url, json=example)).status_code == 200
            answered += 1
    assert answered == 5


# --- responses --------------------------------------------------------------------------------


def raised_codes() -> Iterator[tuple[int, str]]:
    """Yield status and code of every error that the package raises, read off its source."""
    classes: dict[str, type[RequestError]] = {c.__name__: c for c in RequestError.__subclasses__()}
    yield from ((c.status, c.code) for c in [*classes.values(), RequestError])
    for path in ROOT.rglob("*.py"):
        if path.name == "oip_grpc.py":  # whose errors are no HTTP responses
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            for keyword in node.keywords:
                if node.func.id in classes and keyword.arg == "code":
                    for word in ast.walk(keyword.value):
                        if isinstance(word, ast.Constant) and isinstance(word.value, str):
                            yield classes[node.func.id].status, str(word.value)


def test_every_error_code_that_is_raised_is_documented_under_its_status_and_no_other() -> None:
    raised = set(raised_codes())
    # The one error whose status is that of its reply: `route_error`.
    assert (400, "method_not_allowed") in raised
    raised = raised - {(400, "method_not_allowed")} | {(405, "method_not_allowed")}
    # Chosen with the message, and given as a variable: `Batcher._check_room`.
    assert "code=code" in (ROOT / "batcher.py").read_text()
    raised |= {(429, "queue_tokens")}
    assert raised == {(status, code) for status, codes in ERRORS.items() for code in codes}


def test_the_error_table_of_the_documentation_has_the_same_codes() -> None:
    table = HTTP_MD.split("## Errors")[1].split("\n## ")[0]
    listed = {
        (int(status), code)
        for status, cell in re.findall(r"^\| (\d{3}) \| ([^|]*) \|", table, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", cell)
    }
    assert listed == {(status, code) for status, codes in ERRORS.items() for code in codes}


def test_every_error_type_is_documented(document: Document) -> None:
    schema = document.data["components"]["responses"]["OipError500"]["content"]
    types = schema["application/json"]["schema"]["properties"]["type"]["enum"]
    raised = {cls.type for cls in RequestError.__subclasses__()} | {RequestError.type}
    assert set(types) == raised


@pytest.mark.asyncio
async def test_a_method_that_a_path_does_not_take_is_answered_as_documented(
    service: Service, document: Document
) -> None:
    for path, form in (("/v1/embeddings", "Error405"), ("/v2/models/mini/infer", "OipError405")):
        response = await service.http.get(path)
        documented = {
            "operationId": form,
            "responses": {"405": {"$ref": f"#/components/responses/{form}"}},
        }
        document.check_as(documented, response)


def warming() -> Board:
    board = Board()
    board.report(ReplicaReport("r", "warming", 1, 3, "verify", "batch=1,seq=8", "why"), 0.0)
    return board


@pytest.mark.parametrize(
    ("path", "reply"),
    [(LIVE, live()), (READY, Board().ready(0.0)), (READY, warming().ready(0.0))],
    ids=["live", "starting", "warming"],
)
def test_the_health_application_answers_as_documented(
    document: Document, path: str, reply: Reply
) -> None:
    response = httpx.Response(
        reply.status,
        content=reply.body,
        headers={"content-type": reply.media_type},
        request=httpx.Request("GET", f"http://service{path}"),
    )
    document.check(response)


@pytest.mark.asyncio
async def test_the_check_itself_finds_what_is_not_documented(
    service: Service, document: Document
) -> None:
    """Else nothing would be proved by the responses of all the other tests."""
    response = await service.http.get("/v1/models")

    def changed(status: int = 200, **more: Any) -> httpx.Response:
        known = {"status_code": status, "content": response.content, "headers": response.headers}
        return httpx.Response(**{**known, **more}, request=response.request)

    document.check(changed())
    wrong = {
        "status": changed(418),
        "header": changed(headers={**response.headers, "x-other": "1"}),
        "media": changed(headers={"content-type": "text/html"}),
        "body": changed(content=b'{"object": "list", "data": [], "more": 1}'),
    }
    for bad in wrong.values():
        with pytest.raises(AssertionError):
            document.check(bad)
    elsewhere = httpx.Request("GET", "http://service/v1/secret")
    with pytest.raises(AssertionError, match="not documented"):
        document.check(httpx.Response(200, request=elsewhere))
