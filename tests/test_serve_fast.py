"""The service on Ray Serve behind HAProxy, which is what ``shapeserve serve`` starts by default."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from grpc_calls import fake_vectors, status, texts_input, trailing, vectors
from service_process import ServiceProcess, eventually, free_port, listening
from traced_request import check_traced_request

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

MAX_BODY = 100_000
DRAIN_S = 5
GRPC_PORT = free_port()
GRPC = f"127.0.0.1:{GRPC_PORT}"


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[ServiceProcess]:
    config = {
        "models": [{"name": "fake", "path": "fake:slow"}],
        "serve": {
            "port": free_port(),
            "grpc_port": GRPC_PORT,
            "proxy": "fast",
            "max_body_bytes": MAX_BODY,
            "drain_s": DRAIN_S,
            "trace_exporter": "trace_exporter:to_files",
            "trace_sampling_ratio": 0.0,
            "log_format": "json",
            "log_dir": str(log_dir),
            "access_log": True,
        },
    }
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("started")
        with triton.InferenceServerClient(GRPC) as client:
            grpc_while_warming.append((client.is_server_live(), client.is_server_ready()))
        seen_while_warming.extend(made.watch_warming())
        made.until("ready")
        haproxy_at_ready.extend(made.pids("haproxy.cfg"))
        yield made
    finally:
        made.stop()


grpc_while_warming: list[tuple[bool, bool]] = []
haproxy_at_ready: list[int] = []
seen_while_warming: list[tuple[int, int, dict[str, Any]]] = []


def test_while_warming_live_is_200_and_ready_503_with_progress(service: ServiceProcess) -> None:
    assert {live for live, _, _ in seen_while_warming} == {200}
    warming = [content for _, status, content in seen_while_warming if status == 503]
    assert [c for c in warming if c["state"] == "warming" and 0 < c["done"] < c["total"]]


def test_i3_ready_means_that_haproxy_already_routes_here(service: ServiceProcess) -> None:
    # A reload after ready closes the connections of the first clients.
    time.sleep(2)
    assert haproxy_at_ready
    assert set(service.pids("haproxy.cfg")) == set(haproxy_at_ready)


def test_it_answers_behind_haproxy(service: ServiceProcess) -> None:
    assert len(service.pids("haproxy.cfg")) >= 1
    response = service.embed(["two words", "fallback"], headers={"x-request-id": "my-id"})
    assert response.status_code == 200
    assert response.headers["x-shapeserve-modes"] == "compiled=1,fallback=1"
    assert response.headers.get_list("x-request-id") == ["my-id"]


def test_the_document_is_kept_and_the_token_of_the_environment_opens_behind_haproxy(
    service: ServiceProcess,
) -> None:
    service.is_as_documented()


def test_binary_data_passes_haproxy_both_ways(service: ServiceProcess) -> None:
    text = triton_http.InferInput("text", [2], "BYTES")
    text.set_data_from_numpy(np.array([b"one", b"two words"], object))
    with triton_http.InferenceServerClient(httpx.URL(service.url).netloc.decode()) as client:
        answer = client.infer("fake", [text], request_compression_algorithm="gzip")
    expected = fake_vectors(["one", "two words"])
    np.testing.assert_allclose(vectors(answer), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "status"),
    [("", 400), ("full", 429), ("crash", 500), ("nan", 500)],
)
def test_its_errors_pass_haproxy_unchanged(service: ServiceProcess, text: str, status: int) -> None:
    response = service.embed(text)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.headers.get_list("x-request-id")) == 1


def test_every_line_is_json_and_those_of_a_request_have_its_id(
    service: ServiceProcess, log_dir: Path
) -> None:
    for text in ("full", "crash", "fine"):
        service.embed(text, headers={"x-request-id": f"id-of-{text}"})
    made = service.embed("full").headers["x-request-id"]

    def lines(request_id: str) -> list[dict[str, Any]]:
        files = [path.read_bytes().splitlines() for path in log_dir.glob("*.log")]
        every = [orjson.loads(line) for file in files for line in file]
        return [line for line in every if line.get("request_id") == request_id]

    full = eventually(lambda: [x for x in lines("id-of-full") if x["levelname"] == "WARNING"])[0]
    assert (full["code"], full["model"], full["deployment"]) == (
        "queue_full",
        "fake",
        "shapeserve_ShapeServe",
    )
    crash = eventually(lambda: [x for x in lines("id-of-crash") if x["levelname"] == "ERROR"])[0]
    assert "secret detail" in crash["exc_text"]
    access = eventually(lambda: lines("id-of-fine"))  # asked for here; off by default
    assert ["200" in line["message"] for line in access] == [True]
    assert eventually(lambda: [x for x in lines(made) if x["levelname"] == "WARNING"])


def test_a_traced_request_has_the_spans_of_the_engine_below_rays_behind_haproxy(
    service: ServiceProcess,
) -> None:
    """The ratio is 0: only a caller that traces, by its ``traceparent``, has spans."""
    check_traced_request(service, "fake", 4)


def test_a_deadline_passes_haproxy_as_504(service: ServiceProcess) -> None:
    response = service.embed("slow 60", headers={"x-request-timeout-seconds": "1"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("size", [MAX_BODY + 1, 20 * MAX_BODY])
def test_a_body_over_the_limit_is_a_413(service: ServiceProcess, size: int) -> None:
    response = service.http.post("/v1/embeddings", content=b" " * size)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_client_that_leaves_is_noticed(service: ServiceProcess) -> None:
    body = b'{"model":"fake","input":"slow 600"}'
    with socket.create_connection(("127.0.0.1", httpx.URL(service.url).port or 0)) as connection:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: service.total("queue_rows") == 1)
    eventually(lambda: service.total("requests_total", outcome="cancelled") == 1)


def test_haproxy_listens_on_the_loopback_interface_only(service: ServiceProcess) -> None:
    addresses = listening(service.pids("haproxy.cfg"))
    assert len(addresses) >= 4  # HTTP, gRPC, the statistics page, the Prometheus exporter
    assert set(addresses) == {"127.0.0.1"}


# --- gRPC -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(GRPC) as made:
        yield made


def test_grpc_is_live_and_not_ready_while_warming(service: ServiceProcess, client: Any) -> None:
    assert grpc_while_warming == [(True, False)]
    assert client.is_server_live()
    assert client.is_server_ready()


def test_triton_client_is_answered_behind_haproxy(client: Any) -> None:
    texts = ["a", "b c", "d e f"]
    result = client.infer("fake", [texts_input(texts)], request_id="7")
    np.testing.assert_allclose(vectors(result), fake_vectors(texts), rtol=1e-6)
    assert result.get_response().id == "7"


@pytest.mark.parametrize(
    ("model", "text", "code", "word"),
    [
        ("gpt", "a", "NOT_FOUND", "model_not_found"),
        ("fake", "", "INVALID_ARGUMENT", "empty_input"),
        ("fake", "a" * MAX_BODY, "RESOURCE_EXHAUSTED", "body_too_large"),
        ("fake", "full", "RESOURCE_EXHAUSTED", "queue_full"),
        ("fake", "nan", "INTERNAL", "row_failed"),
    ],
    ids=["model", "blank", "large", "full", "row-failed"],
)
def test_grpc_errors_pass_haproxy_with_their_metadata(
    service: ServiceProcess, client: Any, model: str, text: str, code: str, word: str
) -> None:
    before = service.total("requests_total", endpoint="oip_grpc")
    with pytest.raises(triton.InferenceServerException) as refused:
        client.infer(model, [texts_input([text])], headers={"x-request-id": "my-id"})
    told = trailing(refused.value)
    assert (status(refused.value), told["x-shapeserve-code"]) == (code, word)
    assert told["x-request-id"] == "my-id"
    assert service.total("requests_total", endpoint="oip_grpc") == before + 1


def test_a_grpc_deadline_and_a_client_that_leaves_free_their_rows(
    service: ServiceProcess, client: Any
) -> None:
    with pytest.raises(triton.InferenceServerException) as late:
        client.infer("fake", [texts_input(["slow 60"])], client_timeout=1.0)
    assert status(late.value) == "DEADLINE_EXCEEDED"
    asked = {"endpoint": "oip_grpc"}
    eventually(lambda: service.total("requests_total", outcome="deadline", **asked) == 1)
    leaving = client.async_infer("fake", [texts_input(["slow 600"])], lambda result, error: None)
    eventually(lambda: service.total("queue_rows") == 1)
    leaving.cancel()
    eventually(lambda: service.total("requests_total", outcome="cancelled", **asked) == 1)
    assert service.total("queue_rows") == 0


# --- failures -------------------------------------------------------------------------------------


def test_a_killed_replica_turns_readiness_off_until_its_successor_is_warm(
    service: ServiceProcess,
) -> None:
    (victim,) = service.pids("ServeReplica:shapeserve:ShapeServe")
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: service.ready()[0] == 503)
    eventually(lambda: service.ready()[0] == 200)

    def answers() -> bool:
        try:
            return service.embed("fine").status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers)


# --- the end: keep this test last -----------------------------------------------------------------


def test_ctrl_c_in_a_terminal_answers_what_is_in_flight_and_leaves_nothing(
    service: ServiceProcess,
) -> None:
    statuses: list[int] = []

    def ask() -> None:
        body = {"model": "fake", "input": "slow 3"}
        response = httpx.post(service.url + "/v1/embeddings", json=body, timeout=60)
        statuses.append(response.status_code)

    by_grpc: list[np.ndarray] = []

    def ask_grpc() -> None:
        with triton.InferenceServerClient(GRPC) as client:
            by_grpc.append(vectors(client.infer("fake", [texts_input(["slow 3"])])))

    asking = [threading.Thread(target=ask) for _ in range(4)]
    asking.append(threading.Thread(target=ask_grpc))
    for thread in asking:
        thread.start()
    eventually(lambda: service.total("queue_rows") == 5)
    service.interrupt_group()
    late: list[httpx.Response] = []

    def ask_late() -> None:
        with contextlib.suppress(httpx.TransportError):  # it has stopped
            while True:
                late.append(service.embed("a"))

    asking.append(threading.Thread(target=ask_late))
    asking[-1].start()
    said = service.until("stopped")
    for thread in asking:
        thread.join()
    assert statuses == [200] * 4
    refused = [response for response in late if response.status_code != 200]
    assert {r.status_code for r in refused[:-3]} == {503}  # HAProxy's own words are the last
    assert refused[0].json()["error"]["code"] == "unavailable"
    assert len(by_grpc) == 1
    assert said["seconds"] <= DRAIN_S + 5
    assert service.process.wait(60) == 0
    eventually(lambda: service.pids("") == [])
    assert not Path(service.events[0]["private"]).exists()
