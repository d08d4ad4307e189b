"""The routes of the administrator: there for the token, for everybody else as if they were not."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openapi_check import Document
from test_frontend import Service

from shapeserve.config import policy_to_dict
from shapeserve.serve import admin
from shapeserve.serve.admin import TOKEN_VARIABLE, Guard
from shapeserve.serve.policies import PolicyState

TOKEN = "s3cret-tökén"
URL = "/v2/models/mini/compile"
POLICY = "/v2/models/mini/policy"


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
    guarded = [operation, *document.data["paths"][POLICY.replace("mini", "{model}")].values()]
    (scheme,) = operation["security"][0]
    assert document.data["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
    assert TOKEN_VARIABLE in operation["description"]
    assert all(one["security"] == operation["security"] for one in guarded)
    everything = [o for m in document.data["paths"].values() for o in m.values()]
    rest = [o for o in everything if o not in guarded]
    assert all({} in other.get("security", [{}]) for other in rest)  # none needs it


# --- policies ---------------------------------------------------------------------------------

NEW = {"seq": {"explicit": [8, 16], "predicted_waste": 0.25}}


async def put(service: Service, policy: Any) -> httpx.Response:
    return await service.http.put(POLICY, json=policy, headers=bearer())


def swaps(service: Service, result: str) -> float:
    return service.counted("policy_swaps_total", model="mini", result=result)


@pytest.mark.asyncio
async def test_a_policy_is_put_and_told_with_the_version_of_its_grid(service: Service) -> None:
    before = (await service.http.get(POLICY, headers=bearer())).json()
    assert before["replicas"][0] == {
        "replica": "r",
        "result": "serves",
        "grid": before["grid"],
        "policy": {},
        "message": "",
    }
    response = await put(service, NEW)
    assert response.status_code == 200
    after = response.json()
    grid = service.engines["mini"].grid.version
    assert after["grid"] == grid != before["grid"]
    assert after["replicas"] == [
        {"replica": "r", "result": "applied", "grid": grid, "policy": NEW, "message": ""}
    ]
    assert "user_config" in after["lasts"]
    assert service.counted("policy_predicted_waste", model="mini", axis="seq") == 0.25
    again = (await put(service, NEW)).json()
    assert (again["replicas"][0]["result"], again["grid"]) == ("unchanged", grid)
    by_alias = await service.http.get(POLICY.replace("mini", "ada"), headers=bearer())
    assert by_alias.json()["replicas"][0]["policy"] == NEW


BAD_POLICIES = {
    "unsorted": ({"seq": {"explicit": [8, 4]}}, "seq.explicit[1]: size 4 comes after 8; sort them"),
    "word": ({"seq": {"explicit": ["a"]}}, "must be a whole number"),
    "waste": ({"seq": {"explicit": [8], "predicted_waste": 2}}, "predicted_waste: got 2"),
    "key": ({"seq": {"explicitly": [8]}}, "did you mean 'explicit'?"),
    "too long for the model": ({"seq": {"explicit": [1024]}}, "1024 is above the model's 512"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD_POLICIES)
async def test_a_bad_policy_is_refused_and_counted_and_the_old_one_serves(
    service: Service, name: str
) -> None:
    policy, message = BAD_POLICIES[name]
    grid = service.engines["mini"].grid.version
    response = await put(service, policy)
    assert response.status_code == 400
    error = response.json()
    assert message in error["error"]
    assert "the old one serves" in error["error"]
    assert (error["param"], error["code"]) == ("policy", "invalid_value")
    assert swaps(service, "rejected") == 1
    assert service.engines["mini"].grid.version == grid


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"[1]", {}, 400),
        (b"seq: {explicit: [8]}", {}, 400),
        (b"{}", {b"content-type": b"application/yaml"}, 415),
        (b"{" + b" " * 3000 + b"}", {}, 413),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(
    service: Service, content: bytes, headers: dict[Any, Any], status: int
) -> None:
    response = await service.http.put(POLICY, content=content, headers=bearer() | headers)
    assert response.status_code == status
    assert swaps(service, "rejected") == 0


@pytest.mark.asyncio
async def test_every_replica_is_given_it_and_one_that_fails_is_named() -> None:
    asked: list[tuple[str, Any]] = []
    states = [PolicyState("b", "applied", "g"), PolicyState("a", "failed", "o", {}, "no memory")]

    async def ask_all(model: str, policy: Any) -> list[PolicyState]:
        asked.append((model, policy))
        return states

    service = Service(guard=Guard(TOKEN), ask_all=ask_all)
    response = await put(service, NEW)
    assert (response.status_code, response.json()["code"]) == (500, "swap_failed")
    assert "1 of 2 replicas serve the new policy; a failed: no memory" in response.json()["error"]
    assert asked == [("mini", NEW)]
    states[1] = PolicyState("r", "applied", "g")
    answer = (await put(service, NEW)).json()
    assert [state["replica"] for state in answer["replicas"]] == ["r", "b"]  # its own first
    states[:] = [PolicyState("r", "rejected", message="too long"), PolicyState("b", "applied")]
    assert (await put(service, NEW)).status_code == 500  # they do not agree: somebody must look
    service.frontend.close()


@pytest.mark.asyncio
async def test_nothing_is_swapped_while_the_service_stops(service: Service) -> None:
    service.frontend.drain(lambda: None)
    assert (await put(service, NEW)).status_code == 503
    assert service.engines["mini"].policy == {}


@pytest.mark.asyncio
async def test_work_is_taken_again_once_the_service_stops_no_more(service: Service) -> None:
    service.frontend.drain(lambda: None)
    service.frontend.resume()
    assert (await put(service, NEW)).status_code == 200


@pytest.mark.asyncio
async def test_the_deployed_policies_win_whenever_serve_says_them(service: Service) -> None:
    await put(service, NEW)
    deployed = {"mini": {"seq": {"explicit": [8, 32]}}}
    await service.frontend.policies.reconfigure(deployed)
    assert policy_to_dict(service.engines["mini"].policy) == deployed["mini"]


@pytest.mark.asyncio
async def test_a_deployed_policy_that_serves_already_is_counted_as_that(service: Service) -> None:
    await put(service, NEW)
    await service.frontend.policies.reconfigure({"mini": NEW})
    assert swaps(service, "unchanged") == 1


@pytest.mark.asyncio
async def test_the_last_deployment_wins_over_one_that_still_warms_up(service: Service) -> None:
    engine = service.engines["mini"]
    swap, begun, go, swapped = engine.swap_policy, threading.Event(), threading.Event(), []

    def slow_swap(policy: Any) -> Any:
        begun.set()
        assert go.wait(30)
        swapped.append(policy_to_dict(policy))
        return swap(policy)

    engine.swap_policy = slow_swap  # type: ignore[method-assign]
    reconfigure = service.frontend.policies.reconfigure
    first = asyncio.create_task(reconfigure({"mini": NEW}))
    await asyncio.to_thread(begun.wait, 30)
    skipped = asyncio.create_task(reconfigure({"mini": {"seq": {"explicit": [8, 32]}}}))
    back = asyncio.create_task(reconfigure({}))  # what serves at this moment
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, skipped, back)
    assert swapped == [NEW, {}]
    assert engine.policy == {}


@pytest.mark.asyncio
async def test_a_swap_that_breaks_down_is_told_and_not_raised(service: Service) -> None:
    def explode(policy: Any) -> Any:
        raise MemoryError("no room for the graphs")

    service.engines["mini"].swap_policy = explode  # type: ignore[method-assign]
    response = await put(service, NEW)
    assert response.status_code == 500
    assert "r failed: MemoryError: no room for the graphs" in response.json()["error"]
    await service.frontend.policies.reconfigure({"mini": NEW, "unknown": NEW})
