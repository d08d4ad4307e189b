"""Which route a path and a method lead to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from shapeserve.metrics import Endpoint
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.header_guard import HeaderGuard
from shapeserve.serve.routing import Router
from shapeserve.serve.service import Route


async def handler(_: Request, __: Call) -> Reply:
    return Reply(200, b"")


ROUTER = Router(
    [
        Route("GET", "/v2", Endpoint.OTHER, handler),
        Route("GET", "/v2/models/{model}", Endpoint.MODELS, handler),
        Route("POST", "/v2/models/{model}/infer", Endpoint.EMBEDDINGS, handler),
        Route("GET", "/v2/models/stats", Endpoint.METRICS, handler),
    ]
)


@pytest.mark.parametrize("name", ["m", "org/model", "a b", "naïve", "..", "infer"])
def test_a_variable_takes_whatever_stands_there(name: str) -> None:
    assert ROUTER.match("POST", f"/v2/models/{name}/infer").variables == {"model": name}


def test_the_path_without_a_variable_is_found_first() -> None:
    assert ROUTER.match("GET", "/v2/models/stats").endpoint is Endpoint.METRICS
    assert ROUTER.match("GET", "/v2/models/statistics").endpoint is Endpoint.MODELS


def test_the_longer_of_two_patterns_is_found_first() -> None:
    assert ROUTER.match("POST", "/v2/models/m/infer").endpoint is Endpoint.EMBEDDINGS
    assert ROUTER.match("GET", "/v2/models/m/other").variables == {"model": "m/other"}


def test_another_method_is_told_which_ones_there_are() -> None:
    found = ROUTER.match("DELETE", "/v2/models/m/infer")
    assert (found.handler, found.allowed) == (None, ("POST",))


@pytest.mark.parametrize("path", ["", "/", "/v2/models/", "/v2/", "/V2", "/v2/models//infer/x/"])
def test_an_unknown_path_leads_nowhere_or_to_a_model_of_that_name(path: str) -> None:
    found = ROUTER.match("GET", path)
    assert found.handler is None or found.variables["model"] in path


@pytest.mark.parametrize(
    ("name", "value"), [(b"x-request-id", b"caf\xe9"), (b"x-\xff", b"a"), (b"traceparent", b"\x80")]
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/health/live"])
def test_a_header_that_ray_cannot_decode_is_a_400_that_names_it(
    name: bytes, value: bytes, path: str
) -> None:
    response = guarded(path, [(b"accept", b"*/*"), (name, value)])
    assert response.status_code == 400
    assert name.decode("ascii", "replace") in bytes(response.body).decode()


def test_a_header_in_utf_8_is_passed_on() -> None:
    assert guarded("/", [(b"x-name", "café".encode())]).body == b"passed on"


def guarded(path: str, headers: list[tuple[bytes, bytes]]) -> Response:
    """What is answered; spoken to directly, because clients refuse to send such headers."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body is not read")

    app = HeaderGuard(PlainTextResponse("passed on"))
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(app(scope, receive, send))
    return Response(sent[1]["body"], sent[0]["status"])
