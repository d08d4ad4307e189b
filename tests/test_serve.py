"""The service on Ray Serve with its Python proxy: two replicas, a fake and a tiny real model."""

import asyncio
import base64
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from fake_engine import BUCKET
from service_process import ADMIN_TOKEN, ServiceProcess, eventually, free_port
from tiny import text_of, write_classifier, write_model
from traced_request import check_traced_request
from tritonclient.utils import InferenceServerException

from shapeserve.config import ModelConfig
from shapeserve.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

MAX_BODY = 100_000
DRAIN_S = 5
NARROW = {"max_queue_rows": 4}
POLICY = {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 4]}}


def tiny_model(directory: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "aliases": ["ada"],
        "path": str(directory),
        "compile": {"tier": "eager"},
        "policy": {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 4]}},
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServiceProcess]:
    ranker = write_classifier(tmp_path_factory.mktemp("ranker"))
    config = {
        "models": [
            {"name": "fake", "path": "fake:slow"},
            tiny_model(model_dir),
            # The bound of a real queue.
            {**tiny_model(model_dir), "name": "narrow", "aliases": [], "limits": NARROW},
            {**tiny_model(ranker), "name": "ranker", "aliases": []},
        ],
        "serve": {
            "port": free_port(),
            "proxy": "default",
            "replicas": 2,
            "max_body_bytes": MAX_BODY,
            "drain_s": DRAIN_S,
            "trace_exporter": "trace_exporter:to_files",
            "trace_sampling_ratio": 0.0,
        },
    }
    made = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    try:
        made.until("started")
        eventually(lambda: shows_progress(page_while_warming(made)))
        seen_while_warming.extend(made.watch_warming())
        made.until("ready")
        eventually(lambda: len(made.replicas()) == 2)
        yield made
    finally:
        made.stop()


seen_while_warming: list[tuple[int, int, dict[str, Any]]] = []
pages_while_warming: list[str] = []
WARMING = 'class="state warming"'


def page_while_warming(service: ServiceProcess) -> str:
    pages_while_warming.append(service.http.get("/v2/health/ui").text)
    return pages_while_warming[-1]


def shows_progress(page: str) -> bool:
    return WARMING in page and "<progress" in page


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


# --- start-up -------------------------------------------------------------------------------------


def test_while_warming_live_is_200_and_ready_503_with_progress(service: ServiceProcess) -> None:
    assert {live for live, _, _ in seen_while_warming} == {200}
    warming = [content for _, status, content in seen_while_warming if status == 503]
    assert [c for c in warming if c["state"] == "warming" and 0 < c["done"] < c["total"]]
    assert seen_while_warming[-1][2]["ready"] is True


def test_whoever_waits_for_the_service_sees_the_progress(service: ServiceProcess) -> None:
    steps = [tuple(e["at"]) for e in service.events if e["event"] == "progress"]
    assert [s for s in steps if 0 < s[0] < s[1] and s[2] == f"verify {BUCKET.label}"]


def test_the_page_of_the_health_application_shows_it_before_any_replica_answers(
    service: ServiceProcess,
) -> None:
    assert any(map(shows_progress, pages_while_warming))

    def ready() -> int:
        return service.http.get("/v2/health/ui").text.count('class="state ready"')

    eventually(lambda: ready() == 3)  # the service and its two replicas


# --- answers --------------------------------------------------------------------------------------


def test_the_document_is_kept_and_the_token_of_the_environment_opens(
    service: ServiceProcess,
) -> None:
    service.is_as_documented()


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[Engine]:
    with Engine(ModelConfig(**tiny_model(model_dir))).start() as engine:
        yield engine


def vectors(engine: Engine, samples: list[Any]) -> np.ndarray:
    return np.stack([r.outputs["sentence_embedding"] for r in engine.run(samples)])  # type: ignore[union-attr]


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_the_official_client_gets_the_engines_vectors_for_texts(
    client: openai.OpenAI, reference: Engine, encoding_format: Any
) -> None:
    texts = [text_of(n, seed=n) for n in (3, 8, 9, 24, 40)]
    options = {"encoding_format": encoding_format} if encoding_format else {}
    answer = client.embeddings.create(model="ada", input=texts, **options)
    assert [item.index for item in answer.data] == list(range(len(texts)))
    assert answer.model == "tiny"
    assert answer.usage.total_tokens == 3 + 8 + 9 + 24 + 40
    got = [item.embedding for item in answer.data]
    if encoding_format == "base64":  # asked for by name, the client leaves it as it is
        got = [np.frombuffer(base64.b64decode(v), "<f4") for v in got]  # type: ignore[arg-type]
    np.testing.assert_allclose(np.array(got), vectors(reference, list(texts)), atol=1e-5)


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        (text_of(5), [text_of(5)]),
        ([2, 7, 9, 3], [[2, 7, 9, 3]]),
        ([[2, 7, 9, 3], [2, 8, 3]], [[2, 7, 9, 3], [2, 8, 3]]),
    ],
    ids=["string", "token-ids", "lists-of-token-ids"],
)
def test_the_official_client_gets_them_for_every_form_of_input(
    client: openai.OpenAI, reference: Engine, value: Any, samples: list[Any]
) -> None:
    answer = client.embeddings.create(model="tiny", input=value)
    got = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(got, vectors(reference, samples), atol=1e-5)


def test_the_official_client_lists_models_and_asks_for_dimensions(client: openai.OpenAI) -> None:
    served = [model.id for model in client.models.list().data]
    assert served == ["fake", "tiny", "narrow", "ranker"]
    assert client.models.retrieve("ada").id == "tiny"
    short = client.embeddings.create(model="tiny", input="cat", dimensions=3).data[0].embedding
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-6)


def test_documents_are_ranked_and_labelled_over_http(service: ServiceProcess) -> None:
    documents = [text_of(n, seed=n) for n in (3, 9, 12)]
    request = {"model": "ranker", "query": "the cat", "documents": documents}
    ranked = service.http.post("/v1/rerank", json=request)
    assert ranked.status_code == 200
    scores = {item["index"]: item["relevance_score"] for item in ranked.json()["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    pairs = [{"text": "the cat", "text_pair": document} for document in documents]
    labelled = service.http.post("/v1/classify", json={"model": "ranker", "input": pairs})
    found = [item["probs"][0] for item in labelled.json()["data"]]
    np.testing.assert_allclose(found, [scores[i] for i in range(3)], atol=1e-5)
    wrong = service.http.post("/v1/rerank", json={**request, "model": "ada"})
    assert (wrong.status_code, "that do: ranker" in error_of(wrong)["message"]) == (400, True)


def test_what_does_not_fit_a_bucket_is_reported(client: openai.OpenAI) -> None:
    ask = client.embeddings.with_raw_response.create
    long = ask(model="tiny", input=[text_of(5), text_of(40)]).headers
    assert long["x-shapeserve-modes"] == "eager=1,fallback=1"
    assert long["x-shapeserve-fallbacks"] == "over_max=1"
    with pytest.raises(openai.BadRequestError, match="at most 48") as refused:
        client.embeddings.create(model="tiny", input=[text_of(5), text_of(49)])
    assert (refused.value.code, refused.value.param) == ("too_long", "input[1]")
    cut = ask(model="tiny", input=[text_of(5), text_of(49)], extra_body={"truncate": True})
    assert cut.headers["x-shapeserve-truncated"] == "1"
    assert cut.parse().data[1].truncated_from == 49  # type: ignore[attr-defined]


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="gpt", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError) as full:
        client.embeddings.create(model="fake", input="full")
    assert full.value.response.headers["retry-after"] == "2"


# --- the Open Inference Protocol, asked by NVIDIA's client ----------------------------------------


def text_input(inputs: Any, *texts: str) -> list[Any]:
    made = inputs("text", [len(texts)], "BYTES")
    return [made.set_data_from_numpy(np.array([text.encode() for text in texts], object))]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritonclient_gets_the_engines_vectors_as_binary_data(
    service: ServiceProcess, reference: Engine, compression: str | None
) -> None:
    texts = [text_of(n, seed=n) for n in (3, 8, 9, 24, 40)]
    with triton.InferenceServerClient(httpx.URL(service.url).netloc.decode()) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ada")
        assert client.get_model_metadata("tiny")["outputs"][0]["shape"] == [-1, 32]
        answer = client.infer(
            "ada",
            text_input(triton.InferInput, *texts),
            request_id="7",
            request_compression_algorithm=compression,
        )
    assert answer.get_response()["id"] == "7"
    got = answer.as_numpy("sentence_embedding")
    np.testing.assert_allclose(got, vectors(reference, list(texts)), atol=1e-5)


@pytest.mark.asyncio
async def test_the_asynchronous_tritonclient_gets_its_own_rows_from_many_requests_at_once(
    service: ServiceProcess, reference: Engine
) -> None:
    asked = [[text_of(3 + i, seed=j) for j in range(1 + i % 3)] for i in range(9)]
    async with triton_aio.InferenceServerClient(httpx.URL(service.url).netloc.decode()) as client:
        waiting = [client.infer("tiny", text_input(triton_aio.InferInput, *t)) for t in asked]
        answers = await asyncio.gather(*waiting)
    for texts, answer in zip(asked, answers, strict=True):
        got = answer.as_numpy("sentence_embedding")
        np.testing.assert_allclose(got, vectors(reference, list(texts)), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "texts", "status", "message"),
    [
        ("gpt", ["a"], "404", "served are: ada, fake, narrow, ranker, tiny"),
        ("tiny", ["a", " "], "400", r"input\[1\] is empty"),
        ("narrow", ["a"] * 5, "400", "queue"),
        ("fake", ["a", "nan"], "500", r"input\[1\]"),
        ("fake", ["a" * MAX_BODY], "413", f"the limit is {MAX_BODY}"),
    ],
)
def test_tritonclient_shows_the_status_and_the_message_of_an_error(
    service: ServiceProcess, model: str, texts: list[str], status: str, message: str
) -> None:
    with triton.InferenceServerClient(httpx.URL(service.url).netloc.decode()) as client:
        with pytest.raises(InferenceServerException, match=message) as refused:
            client.infer(model, text_input(triton.InferInput, *texts))
        assert refused.value.status() == status


# --- bad requests through the proxy ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"content": b"{"}, 400, "invalid_json"),
        ({"content": b'{"model":"fake","input":[NaN]}'}, 400, "invalid_json"),
        ({"json": {"model": "fake", "input": ["a", ""]}}, 400, "empty_input"),
        ({"json": {"model": "tiny", "input": ["a", " "]}}, 400, "empty_input"),
        ({"json": {"model": "tiny", "input": [[2, 10**6, 3]]}}, 400, "invalid_value"),
        ({"data": {"input": "a"}}, 415, "unsupported_media_type"),
        ({"content": b" " * (MAX_BODY + 1)}, 413, "body_too_large"),
        ({"content": b" " * (20 * MAX_BODY)}, 413, "body_too_large"),
        ({"content": (b" " * 10_000 for _ in range(30))}, 413, "body_too_large"),
        ({"json": {"model": "fake", "input": "full"}}, 429, "queue_full"),
        ({"json": {"model": "narrow", "input": ["a"] * 5}}, 400, "too_many_rows"),
        ({"json": {"model": "fake", "input": ["a", "nan"]}}, 500, "row_failed"),
        ({"json": {"model": "fake", "input": "crash"}}, 500, "internal_error"),
    ],
    ids=[
        *("json", "nan", "empty", "blank", "vocabulary", "form", "large", "huge", "chunked"),
        *("full", "rows", "row-failed", "crash"),
    ],
)
def test_a_bad_request_gets_its_json_error_and_harms_nobody(
    service: ServiceProcess, request_: Any, status: int, code: str
) -> None:
    response = service.http.post("/v1/embeddings", **request_)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert service.embed("fine").status_code == 200


def test_unknown_paths_and_methods_get_json_errors(service: ServiceProcess) -> None:
    assert error_of(service.http.get("/v1/nothing"))["code"] == "unknown_path"
    assert service.http.get("/v2/health/nothing").json()["code"] == "unknown_path"
    assert service.http.delete("/v1/models").headers["allow"] == "GET"


@pytest.mark.parametrize("text", ["fine", "", "full", "crash", "nan"])
def test_every_response_carries_the_request_id_once(service: ServiceProcess, text: str) -> None:
    sent = service.embed(text, headers={"x-request-id": "my-id"})
    assert sent.headers.get_list("x-request-id") == ["my-id"]
    made = service.embed(text)
    assert len(made.headers.get_list("x-request-id")) == 1


def test_a_refusal_is_in_the_replicas_log_with_the_request_id(service: ServiceProcess) -> None:
    service.embed(["a", ""], headers={"x-request-id": "find-me"})
    logs = Path(service.events[0]["private"], "session_latest/logs/serve")
    line = "embeddings 400 empty_input model=fake request=find-me"
    eventually(lambda: any(line in log.read_text() for log in logs.glob("replica_shapeserve_*")))


def test_a_deadline_is_a_504_before_ray_gives_up(service: ServiceProcess) -> None:
    response = service.embed("slow 60", headers={"x-request-timeout-seconds": "1"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


# --- under load -----------------------------------------------------------------------------------


def send_raw(service: ServiceProcess, text: str) -> socket.socket:
    """Send a request and return its socket without reading the answer."""
    body = json.dumps({"model": "fake", "input": text}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", httpx.URL(service.url).port or 0))
    connection.sendall(head.encode() + body)
    return connection


def waiting_rows(service: ServiceProcess) -> float:
    return service.total("queue_rows", model="fake")


def test_a_client_that_leaves_frees_its_rows_and_harms_nobody(service: ServiceProcess) -> None:
    before = service.total("requests_total", outcome="cancelled")
    leaving = [send_raw(service, "slow 600") for _ in range(3)]
    staying = send_raw(service, "slow 5")
    eventually(lambda: waiting_rows(service) == 4)
    for connection in leaving:
        connection.close()
    eventually(lambda: service.total("requests_total", outcome="cancelled") == before + 3)
    assert staying.recv(15) == b"HTTP/1.1 200 OK"
    staying.close()


def test_metrics_answer_while_requests_wait(service: ServiceProcess) -> None:
    waiting = [send_raw(service, "slow 600") for _ in range(40)]
    try:
        eventually(lambda: waiting_rows(service) == 40)
        assert len(service.replicas()) == 2
    finally:
        for connection in waiting:
            connection.close()


def settled(read: Callable[[], float]) -> float:
    """A value that has stopped to change: requests of earlier tests may still be cancelled."""
    last = read()
    for _ in range(20):
        time.sleep(0.5)
        last, before = read(), last
        if last == before:
            break
    return last


def test_metrics_of_all_replicas_add_up_and_every_request_counts_once(
    service: ServiceProcess,
) -> None:
    asked = {"model": "fake", "endpoint": "embeddings"}
    before = settled(lambda: service.total("requests_total", **asked))
    timed = service.total("request_seconds_count", **asked)
    for text in ["a", "b", "", "full", "nan", "crash"] * 4:
        service.embed(text)
    assert service.total("requests_total", **asked) == before + 24
    assert service.total("request_seconds_count", **asked) == timed + 24
    counted = {
        dict(key)["replica"]
        for key, value in service.samples()["shapeserve_requests_total"].items()
        if value and dict(key)["endpoint"] == "embeddings"
    }
    assert counted == service.replicas()  # both replicas have worked


def test_the_page_adds_up_the_rows_of_all_replicas_as_the_metrics_do(
    service: ServiceProcess,
) -> None:
    service.embed(["a b"] * 5)
    rows = service.total("rows_total", model="fake", bucket=BUCKET.label)
    html = eventually(
        lambda: shown if "2 replicas" in (shown := service.http.get("/ui").text) else ""
    )
    cell = re.findall(rf'data-bucket="{BUCKET.label}" data-rows="(\d+)"', html)[0]  # of `fake`
    assert rows >= 5
    assert int(cell) == rows
    assert all(replica in html for replica in service.replicas())


def test_a_traced_request_has_the_spans_of_the_engine_below_rays_proxy_and_replica(
    service: ServiceProcess,
) -> None:
    """The ratio is 0: only a caller that traces, by its ``traceparent``, has spans."""
    check_traced_request(service, "tiny", 5)


def test_our_metrics_are_in_rays_own_scrape_too(service: ServiceProcess) -> None:
    port = service.do(metrics_port=None)["answer"]
    wanted = [
        "ray_shapeserve_requests_total{",
        "ray_shapeserve_request_seconds_bucket{",
        "ray_shapeserve_grid_info{",
    ]

    def found() -> bool:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        return all(name in text for name in wanted)

    eventually(found)


# --- changes --------------------------------------------------------------------------------------


def grids(service: ServiceProcess, model: str) -> set[str]:
    series = service.samples()["shapeserve_grid_info"]
    return {dict(key)["version"] for key in series if dict(key)["model"] == model}


def both(service: ServiceProcess) -> set[str]:
    """Its two replicas. Serve takes each out of the routes for the moment in which it is told."""
    service.do(settle=True)
    eventually(lambda: len(service.replicas()) == 2)
    return service.replicas()


def test_a_new_policy_is_swapped_in_without_restarting_a_replica(service: ServiceProcess) -> None:
    replicas, (old,) = both(service), grids(service, "tiny")
    assert service.do(policy=["tiny", POLICY])["event"] == "done"
    eventually(lambda: grids(service, "tiny").isdisjoint({old}))
    assert len(grids(service, "tiny")) == 1
    assert both(service) == replicas
    answer = service.embed(text_of(12), model="tiny")
    assert answer.headers["x-shapeserve-buckets"] == "batch=1,seq=16 x1"


def test_requests_are_led_to_every_replica_while_a_new_policy_warms_up(
    service: ServiceProcess,
) -> None:
    replicas, (old,) = both(service), grids(service, "fake")
    applied = {"model": "fake", "result": "applied"}
    service.do(policy=["fake", {"seq": {"explicit": [2, 8]}}])  # takes it seconds
    routed = set()
    while True:
        assert service.embed("fine").status_code == 200
        look = service.replicas()  # those that a request is led to
        if service.total("policy_swaps_total", **applied):
            break
        routed = look
    # Serve takes each out for the moment in which it is told; that was at the beginning.
    assert routed == replicas
    eventually(lambda: grids(service, "fake").isdisjoint({old}))
    assert both(service) == replicas


def test_a_policy_that_does_not_fit_is_counted_and_the_old_one_serves(
    service: ServiceProcess,
) -> None:
    replicas, before = both(service), grids(service, "fake")
    assert service.do(policy=["fake", {"seq": {"explicit": [1024]}}])["event"] == "done"
    eventually(lambda: service.total("policy_swaps_total", model="fake", result="rejected") == 2)
    assert (both(service), grids(service, "fake")) == (replicas, before)
    assert service.embed("fine").status_code == 200


def test_no_user_config_at_all_brings_a_replica_down(service: ServiceProcess) -> None:
    replicas, before = both(service), grids(service, "narrow")
    rejected = {"model": "narrow", "result": "rejected"}
    bad = {"narrow": {"seq": {"explicit": "all"}}, "gpt": {}, "tiny": 5}
    for policies in (["narrow"], bad):
        assert service.do(raw_policies=policies)["event"] == "done"
    eventually(lambda: service.total("policy_swaps_total", **rejected) == 2)
    service.do(raw_policies={"tiny": POLICY})
    assert (both(service), grids(service, "narrow")) == (replicas, before)
    assert service.ready()[0] == 200


def test_the_administrators_policy_reaches_every_replica_in_place(service: ServiceProcess) -> None:
    replicas, path = both(service), "/v2/models/narrow/policy"
    token = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    put = service.http.put(path, json=POLICY, headers=token).json()
    assert {(s["replica"], s["result"]) for s in put["replicas"]} == {
        (replica, "applied") for replica in replicas
    }
    assert grids(service, "narrow") == {put["grid"]}
    told = service.http.get(path, headers=token).json()
    assert [state["policy"] for state in told["replicas"]] == [POLICY, POLICY]
    bad = service.http.put(path, json={"seq": {"explicit": [8, 9999]}}, headers=token)
    assert (bad.status_code, bad.json()["param"]) == (400, "policy")
    assert "9999 is above" in bad.json()["error"]
    assert grids(service, "narrow") == {put["grid"]}
    assert both(service) == replicas


def test_a_policy_that_is_none_is_refused_before_it_is_deployed(service: ServiceProcess) -> None:
    said = service.do(policy=["fake", {"seq": {"explicit": [8, 4]}}])
    assert said["event"] == "error"
    assert "comes after 8" in said["message"]


# --- failures -------------------------------------------------------------------------------------


def answers(service: ServiceProcess) -> bool:
    try:
        return service.embed("fine").status_code == 200
    except httpx.TransportError:
        return False


def test_a_killed_replica_is_replaced_and_its_series_end(service: ServiceProcess) -> None:
    before, swapped = service.replicas(), grids(service, "tiny")
    victims = service.pids("ServeReplica:shapeserve:ShapeServe")
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    eventually(lambda: answers(service) and len(service.replicas() - before) == 1)
    eventually(lambda: len(service.replicas()) == 2)  # a new replica hears of its peers in a moment
    assert service.ready()[0] == 200
    assert grids(service, "tiny") == swapped  # the successor has the policy of the update


@pytest.mark.slow
def test_a_replica_whose_engine_died_is_replaced(service: ServiceProcess) -> None:
    before = service.replicas()
    assert service.embed("die").status_code == 503
    eventually(lambda: answers(service) and len(service.replicas() - before) == 1)
    eventually(lambda: len(service.replicas()) == 2)


# --- the end: keep this test last -----------------------------------------------------------------


def test_sigterm_turns_readiness_off_and_answers_what_is_in_flight(
    service: ServiceProcess,
) -> None:
    eventually(lambda: service.ready()[0] == 200 and answers(service))
    waiting = [send_raw(service, "slow 3") for _ in range(4)]
    eventually(lambda: waiting_rows(service) == 4)
    states: set[str] = set()
    watch = threading.Event()

    def look() -> None:
        while not watch.is_set():
            states.add(service.ready()[1].get("state", ""))

    looking = threading.Thread(target=look)
    looking.start()
    service.process.send_signal(signal.SIGTERM)
    said = service.until("stopped")
    watch.set()
    looking.join()
    assert said["seconds"] <= DRAIN_S + 5
    assert "draining" in states
    for connection in waiting:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()
    assert service.process.wait(60) == 0
    eventually(lambda: service.pids("") == [])
