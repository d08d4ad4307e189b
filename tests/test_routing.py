"""Which route a path and a method lead to."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
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
