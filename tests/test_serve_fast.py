"""The service on Ray Serve behind HAProxy, which is what ``shapeserve serve`` starts by default."""

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
import pytest
import tritonclient.http as triton
from service_process import ServiceProcess, eventually, free_port, listening

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

MAX_BODY = 100_000
DRAIN_S = 5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    config = {
        "models": [{"name": "fake", "path": "fake:slow"}],
        "serve": {
            "port": free_port(),
            "proxy": "fast",
            "max_body_bytes": MAX_BODY,
            "drain_s": DRAIN_S,
        },
    }
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("started")
        seen_while_warming.extend(made.watch_warming())
        made.until("ready")
        haproxy_at_ready.extend(made.pids("haproxy.cfg"))
        yield made
    finally:
        made.stop()


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
    text = triton.InferInput("text", [2], "BYTES")
    text.set_data_from_numpy(np.array([b"one", b"two words"], object))
    with triton.InferenceServerClient(httpx.URL(service.url).netloc.decode()) as client:
        answer = client.infer("fake", [text], request_compression_algorithm="gzip")
    vectors = answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(vectors[:, 0] * np.array([1, 2]), vectors[:, 3] * 3, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "status"),
    [("", 400), ("full", 429), ("crash", 500), ("nan", 500)],
)
def test_its_errors_pass_haproxy_unchanged(service: ServiceProcess, text: str, status: int) -> None:
    response = service.embed(text)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.headers.get_list("x-request-id")) == 1


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
    assert len(addresses) >= 3  # the service, the statistics page, the Prometheus exporter
    assert set(addresses) == {"127.0.0.1"}


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

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    eventually(lambda: service.total("queue_rows") == 4)
    service.interrupt_group()
    said = service.until("stopped")
    for thread in asking:
        thread.join()
    assert statuses == [200] * 4
    assert said["seconds"] <= DRAIN_S + 5
    assert service.process.wait(60) == 0
    eventually(lambda: service.pids("") == [])
    assert not Path(service.events[0]["private"]).exists()
