"""``/v2`` of a replica with a fake engine: routes, statuses, headers, what is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import BUCKET
from test_frontend import MAX_BODY, Service

from shapeserve.metrics import NO_MODEL
from shapeserve.serve import service as service_module

URL = "/v2/models/mini/infer"


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.frontend.close()


def texts(*values: str, **fields: Any) -> dict[str, Any]:
    """A request with one text a row."""
    item = {"name": "text", "shape": [len(values)], "datatype": "BYTES", "data": list(values)}
    return {"inputs": [item], **fields}


async def infer(service: Service, *values: str, url: str = URL, **fields: Any) -> httpx.Response:
    return await service.http.post(url, json=texts(*values, **fields))


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = dict(response.json())
    assert set(error) == {"error", "type", "param", "code"}
    assert isinstance(error["error"], str)
    return error


def output_of(response: httpx.Response) -> dict[str, Any]:
    (output,) = response.json()["outputs"]
    return dict(output)


@pytest.mark.asyncio
@pytest.mark.parametrize("url", [URL, "/v2/models/ada/infer", "/v2/models/mini/versions/1/infer"])
async def test_an_answer_has_the_outputs_and_what_was_done(service: Service, url: str) -> None:
    response = await infer(service, "two words", "fallback", "cut", "split", url=url, id="7")
    assert response.status_code == 200
    content = response.json()
    assert [content[key] for key in ("model_name", "model_version", "id")] == ["mini", "1", "7"]
    output = output_of(response)
    assert (output["name"], output["datatype"]) == ("sentence_embedding", "FP32")
    assert (output["shape"], len(output["data"])) == ([4, 4], 16)
    assert response.headers["x-shapeserve-modes"] == "compiled=3,fallback=1"
    assert response.headers["x-shapeserve-buckets"] == f"{BUCKET.label} x3; none x1"
    assert response.headers["x-shapeserve-fallbacks"] == "over_max=1"
    assert response.headers["x-shapeserve-truncated"] == "1"
    assert response.headers["x-shapeserve-split"] == "1"
    assert service.requests() == {("mini", "oip_http", "ok"): 1}


@pytest.mark.asyncio
async def test_many_rows_are_rendered_like_few(service: Service) -> None:
    many = output_of(await infer(service, *["a b"] * (service_module.INLINE_ROWS + 1)))
    one = output_of(await infer(service, "a b"))
    assert many["data"] == one["data"] * (service_module.INLINE_ROWS + 1)


@pytest.mark.asyncio
async def test_binary_data_goes_both_ways(service: Service) -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    size = {"binary_data_size": ids.nbytes}
    item = {"name": "input_ids", "shape": [2, 2], "datatype": "INT32", "parameters": size}
    head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "content-type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    response = await service.http.post(URL, content=head + ids.tobytes(), headers=headers)
    assert response.headers["content-type"] == "application/octet-stream"
    end = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.content[:end])["outputs"]
    assert output["parameters"] == {"binary_data_size": 2 * 4 * 4}
    assert np.frombuffer(response.content[end:], "<f4").shape == (8,)


@pytest.mark.asyncio
async def test_the_server_and_its_models_describe_themselves(service: Service) -> None:
    server = (await service.http.get("/v2")).json()
    assert (server["name"], server["extensions"]) == ("shapeserve", ["binary_tensor_data"])
    model = (await service.http.get("/v2/models/ada")).json()
    assert (model["name"], model["versions"]) == ("mini", ["1"])
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1], "optional": True}
    assert model["inputs"][0] == ids
    assert model["outputs"] == [
        {"name": "sentence_embedding", "datatype": "FP32", "shape": [-1, 4]}
    ]
    assert (await service.http.get("/v2/models/mini/versions/1")).json() == model
    assert (await service.http.head("/v2/models/mini")).status_code == 200


@pytest.mark.asyncio
async def test_a_model_is_ready_until_it_is_not_and_says_how_far_it_is(service: Service) -> None:
    async def ready(model: str) -> tuple[int, dict[str, Any]]:
        response = await service.http.get(f"/v2/models/{model}/versions/1/ready")
        return response.status_code, response.json()

    assert await ready("ada") == (
        200,
        {"name": "mini", "ready": True, "done": 3, "total": 3, "message": ""},
    )
    service.engines["mini"].ready = False
    status, content = await ready("mini")
    assert (status, content["ready"], content["message"]) == (503, False, "verify")
    await infer(service, "die", url="/v2/models/other/infer")
    status, content = await ready("other")
    assert (status, content["message"]) == (503, "the device thread died")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/v2/models/gpt", "model_not_found", "served are: ada, mini, other"),
        ("/v2/models/gpt/ready", "model_not_found", "'gpt' is not served"),
        ("/v2/models/mini/versions/2", "version_not_found", "its one version is '1'"),
        ("/v2/models/mini/versions/2/ready", "version_not_found", "version '2'"),
        ("/v2/models/mini/config", "unknown_path", "neither the model configuration"),
        ("/v2/models/mini/versions/1/stats", "unknown_path", "nor the statistics"),
        ("/v2/models/stats", "unknown_path", "nor the statistics"),
        ("/v2/repository/index", "unknown_path", "/v2/models/{model}/infer"),
    ],
)
async def test_what_is_not_there_is_a_404_in_the_form_of_the_protocol(
    service: Service, path: str, code: str, message: str
) -> None:
    response = await service.http.get(path)
    assert (response.status_code, error_of(response)["code"]) == (404, code)
    assert message in error_of(response)["error"]


@pytest.mark.asyncio
async def test_a_wrong_method_is_a_405_in_the_form_of_the_protocol(service: Service) -> None:
    response = await service.http.get(URL)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(response)["code"] == "method_not_allowed"


OUTPUT = {"name": "sentence_embedding"}
LONG = {"content": b" " * (MAX_BODY + 1)}
FORM = {"content": b"a=1", "headers": {"content-type": "application/x-www-form-urlencoded"}}
ENCODED = {"content": b"{}", "headers": {"content-encoding": "br"}}
INVALID = (400, "invalid_value")
TIMEOUT = "x-request-timeout-seconds"
BAD: dict[str, tuple[dict[str, Any], int, str, str | None, str]] = {
    "json": ({"content": b"{"}, 400, "invalid_json", None, "invalid"),
    "nothing": ({"json": {}}, *INVALID, "inputs", "invalid"),
    "input": ({"json": texts("a") | {"inputs": [{}]}}, *INVALID, "inputs[0].name", "invalid"),
    "blank": ({"json": texts("a", " ")}, 400, "empty_input", "input[1]", "invalid"),
    "no-rows": ({"json": texts()}, *INVALID, "inputs[0].shape", "invalid"),
    "rows": (
        {"json": texts(*["a"] * 33)},
        *(400, "too_many_rows", "inputs[text].shape", "too_many_rows"),
    ),
    "output": (
        {"json": texts("a", outputs=[OUTPUT, {"name": "logits"}])},
        *(*INVALID, "outputs[1].name", "invalid"),
    ),
    "priority": (
        {"json": texts("a", parameters={"priority": 1})},
        *(400, "unsupported_parameter", "parameters[priority]", "invalid"),
    ),
    "over-max": (
        {"json": texts("a", parameters={"over_max": "shrink"})},
        *(*INVALID, "parameters[over_max]", "invalid"),
    ),
    "header": (
        {"json": texts("a"), "headers": {"inference-header-content-length": "9999"}},
        *(*INVALID, "Inference-Header-Content-Length", "invalid"),
    ),
    "deadline": ({"json": texts("a"), "headers": {TIMEOUT: "soon"}}, *INVALID, TIMEOUT, "invalid"),
    "media": (FORM, 415, "unsupported_media_type", None, "media_type"),
    "encoding": (ENCODED, 415, "unsupported_content_encoding", None, "media_type"),
    "large": (LONG, 413, "body_too_large", None, "body_too_large"),
    "bomb": (
        {"content": gzip.compress(b" " * 10**7), "headers": {"content-encoding": "gzip"}},
        *(413, "body_too_large", None, "body_too_large"),
    ),
    "full": ({"json": texts("a", "full")}, 429, "queue_full", None, "queue_full"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_every_refusal_is_exact_counted_once_and_harms_nobody(
    service: Service, name: str
) -> None:
    request, status, code, param, reason = BAD[name]
    response = await service.http.post(URL, **request)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    outcome = "overloaded" if status == 429 else "client_error"
    assert service.requests() == {("mini", "oip_http", outcome): 1}
    assert service.counted("rejected_total", model="mini", reason=reason) == 1
    assert service.counted("rows_accepted_total", model="mini") == 0
    assert (await infer(service, "fine")).status_code == 200


@pytest.mark.asyncio
async def test_a_request_for_no_model_is_counted_without_one(service: Service) -> None:
    response = await infer(service, "a", url="/v2/models/gpt/infer")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert service.requests() == {(NO_MODEL, "oip_http", "client_error"): 1}
    assert service.counted("rejected_total", model=NO_MODEL, reason="unknown_model") == 1


@pytest.mark.asyncio
async def test_a_full_queue_says_when_to_come_back(service: Service) -> None:
    assert (await infer(service, "full")).headers["retry-after"] == "2"


@pytest.mark.asyncio
async def test_a_failed_row_is_a_500_that_names_it(service: Service) -> None:
    response = await infer(service, "a", "nan", "b", "nan")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (500, "row_failed", "input[1]")
    assert "input[3]" in error["error"]
    assert service.requests() == {("mini", "oip_http", "server_error"): 1}


@pytest.mark.asyncio
async def test_a_dead_engine_is_a_503_and_an_unforeseen_error_a_500(service: Service) -> None:
    response = await infer(service, "crash")
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    await infer(service, "die")
    response = await infer(service, "fine")
    assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("parameters", "headers"),
    [
        ({"timeout": 50_000}, {}),
        ({}, {TIMEOUT: "0.05"}),
        ({"timeout": 60_000_000}, {TIMEOUT: "0.05"}),
        ({"timeout": 50_000}, {TIMEOUT: "60"}),
    ],
    ids=["parameter", "header", "header-first", "parameter-first"],
)
async def test_the_sooner_of_deadline_header_and_timeout_parameter_is_a_504(
    service: Service, parameters: dict[str, Any], headers: dict[str, str]
) -> None:
    content = texts("slow 600", parameters=parameters)
    response = await service.http.post(URL, json=content, headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert service.requests() == {("mini", "oip_http", "deadline"): 1}


@pytest.mark.asyncio
async def test_a_client_that_leaves_cancels_its_rows_only_and_is_counted(service: Service) -> None:
    engine = service.engines["mini"]
    leaving = asyncio.create_task(infer(service, "slow 60"))
    while not engine.waiting:
        await asyncio.sleep(0.001)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (engine.cancelled, engine.waiting) == (1, 0)
    assert (await infer(service, "fine")).status_code == 200
    assert service.requests() == {
        ("mini", "oip_http", "cancelled"): 1,
        ("mini", "oip_http", "ok"): 1,
    }


@pytest.mark.asyncio
async def test_parameters_without_a_meaning_here_come_back(service: Service) -> None:
    response = await infer(service, "a", parameters={"trace": "t", "over_max": "split"})
    assert response.json()["parameters"] == {"trace": "t"}


@pytest.mark.asyncio
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_every_endpoint_with_a_body_reads_a_compressed_one(
    service: Service, encoding: str
) -> None:
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    for path, content in (
        (URL, texts("a b")),
        ("/v1/embeddings", {"model": "mini", "input": ["a b"]}),
    ):
        body = compress(json.dumps(content).encode())
        response = await service.http.post(path, content=body, headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.asyncio
async def test_a_decompressed_body_has_the_limit_of_any_body(service: Service) -> None:
    plain = json.dumps(texts("a")).encode()
    headers = {"content-encoding": "gzip"}
    for padding, status in ((MAX_BODY - len(plain), 200), (MAX_BODY - len(plain) + 1, 413)):
        body = gzip.compress(plain + b" " * padding)
        response = await service.http.post(URL, content=body, headers=headers)
        assert response.status_code == status
