"""The routes of the administrator: there for the token, for everybody else as if they were not."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openapi_check import Document
from test_frontend import Service

from shapeserve.serve import admin
from shapeserve.serve.admin import TOKEN_VARIABLE, Guard

TOKEN = "s3cret-tökén"
URL = "/v2/models/mini/compile"


def bearer(token: str = TOKEN, scheme: str = "Bearer") -> dict[str, Any]:
    return {"authorization": f"{scheme} {token}".encode()}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(guard=Guard(TOKEN))
    yield made
    made.frontend.close()


@pytest.fixture
def closed() -> Iterator[Service]:
    """A service that was started without a token."""
    made = Service(guard=Guard(""))
    yield made
    made.frontend.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("url", [URL, "/v2/models/ada/compile"])
async def test_the_token_opens_the_compile_record(service: Service, scheme: str, url: str) -> None:
    response = await service.http.get(url, headers=bearer(scheme=scheme))
    assert response.status_code == 200
    record = response.json()
    assert (record["model"], record["replica"]) == ("mini", "r")
    assert record["variants"] == [
        {"bucket": "batch=1,seq=8", "tier": "eager", "wanted": "compiled", "degraded": True}
    ]
    assert record["compiles"] == [
        {"phase": "warmup", "stage": "dynamo", "count": 2, "seconds": 1.5}
    ]
    (recompile,) = record["recent_recompiles"]
    assert (recompile["reason"], recompile["program"]) == ("shape", "many_0")
    assert recompile["guard"].endswith("expected 8, actual 9")
    assert (record["graph_breaks"], record["captures"]) == ({"explicit": 1}, {"failed": 1})


NOT_THE_TOKEN = {
    "nothing": {},
    "wrong": bearer("wrong"),
    "shorter": bearer(TOKEN[:-1]),
    "longer": bearer(TOKEN + "x"),
    "empty": bearer(""),
    "no-scheme": {"authorization": TOKEN.encode()},
    "basic": bearer(scheme="Basic"),
    "cookie": {"cookie": f"token={TOKEN}".encode()},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", NOT_THE_TOKEN)
async def test_without_the_token_the_answer_is_that_of_a_server_without_the_route(
    service: Service, closed: Service, name: str, method: str
) -> None:
    def told(response: httpx.Response) -> tuple[int, dict[str, str], bytes]:
        return response.status_code, dict(response.headers), response.content

    given = await service.http.request(method, URL, headers=NOT_THE_TOKEN[name])
    unset = await closed.http.request(method, URL, headers=NOT_THE_TOKEN[name])
    assert given.status_code in (404, 405)
    assert told(given) == told(unset)
    assert service.requests() == closed.requests()
    other = await closed.http.request(method, URL.replace("compile", "nothing"))
    assert other.status_code == given.status_code
    assert other.text == given.text.replace("compile", "nothing")


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("None"), bearer()])
async def test_without_a_token_in_the_environment_nobody_is_let_in(
    closed: Service, headers: dict[str, Any]
) -> None:
    assert (await closed.http.get(URL, headers=headers)).status_code == 404


@pytest.mark.asyncio
async def test_the_administrator_is_told_what_is_wrong_with_the_request(service: Service) -> None:
    missing = await service.http.get("/v2/models/gpt/compile", headers=bearer())
    assert (missing.status_code, missing.json()["code"]) == (404, "model_not_found")
    assert "'gpt' is not served" in missing.json()["error"]
    wrong = await service.http.post(URL, headers=bearer())
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")


@pytest.mark.asyncio
async def test_the_token_changes_nothing_else(service: Service) -> None:
    assert (await service.http.get("/v1/models", headers=bearer())).status_code == 200
    wrong = bearer("wrong")  # of a gateway in front, for example
    assert (await service.http.get("/v1/models", headers=wrong)).status_code == 200


def test_the_comparison_takes_the_same_time_wherever_the_two_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return compare_digest(given, kept)

    monkeypatch.setattr(admin.hmac, "compare_digest", compare)
    guard = Guard("token")
    assert not guard.admits({"authorization": "Bearer tokem"})
    assert guard.admits({"authorization": "Bearer token"})
    assert not guard.admits({"authorization": "Basic token"})
    assert compared == [(b"tokem", b"token"), (b"token", b"token"), (b"token", b"token")]


@pytest.mark.parametrize(("value", "opens"), [("token", True), (" token\n", True), ("", False)])
def test_the_token_is_read_once_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, opens: bool
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, value)
    guard = Guard.from_environment()
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert guard.admits({"authorization": "Bearer token"}) is opens
    assert not Guard.from_environment().admits({"authorization": "Bearer token"})


@pytest.mark.asyncio
async def test_the_token_is_in_no_log_and_no_answer(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answers = [
            (await service.http.get(url, headers=headers)).text
            for url in (URL, "/v2/models/gpt/compile", "/v2/models", "/openapi.json")
            for headers in (bearer(), bearer(TOKEN + "x"))
        ]
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("shapeserve"))
    assert "404" in ours
    for text in (ours, repr(Guard(TOKEN)), *answers):
        assert TOKEN not in text


def test_the_document_says_that_the_route_needs_the_token() -> None:
    made = Service()
    made.frontend.close()
    document: Document = made.document
    operation = document.data["paths"]["/v2/models/{model}/compile"]["get"]
    (scheme,) = operation["security"][0]
    assert document.data["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
    assert TOKEN_VARIABLE in operation["description"]
    open_ = [o for m in document.data["paths"].values() for o in m.values() if o is not operation]
    assert all({} in other.get("security", [{}]) for other in open_)  # none needs it
