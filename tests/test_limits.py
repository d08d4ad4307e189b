"""Every bound on what a client sends or asks for: met by the last that is let in, with its words.

The bounds themselves stand in docs/http.md, and a test here holds that table against the code.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeSample
from test_frontend import Service
from test_grpc_frontend import Call, Replica

from shapeserve.config import ServeConfig
from shapeserve.errors import ConfigError, InvalidRequest
from shapeserve.models.spec import TensorSpec
from shapeserve.protocols import http, oip, oip_types

HTTP_MD = (Path(__file__).parent.parent / "docs" / "http.md").read_text()
INFER = "/v2/models/mini/infer"
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a b"]}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(max_body_bytes=16_777_216)
    yield made
    made.frontend.close()


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and message, in whichever form."""
    content = response.json()
    error = content["error"]
    fields = error if isinstance(error, dict) else content | {"message": error}
    return response.status_code, fields["code"], fields["message"]


async def post(service: Service, body: bytes, path: str = "/v1/embeddings") -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await service.http.post(path, content=body, headers=headers)


# --- JSON -------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/embeddings", INFER])
@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":[]},', b"[[]],"])
async def test_more_lists_than_the_bound_are_refused_before_they_are_read(
    service: Service, path: str, unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: object) -> None:
        pytest.fail("it was read")

    monkeypatch.setattr("orjson.loads", never)
    count = (http.MAX_LISTS + 1) // (unit.count(b"[") + unit.count(b"{")) + 1
    status, code, message = error_of(await post(service, b"[" + unit * count + b"0]", path))
    assert (status, code) == (400, "invalid_value")
    assert f"at most {http.MAX_LISTS} are read" in message


def test_as_many_lists_as_the_bound_are_read() -> None:
    http.check_lists(b"[" + b"[]," * (http.MAX_LISTS - 1) + b"0]")
    with pytest.raises(InvalidRequest, match=f"has {http.MAX_LISTS + 1} lists"):
        http.check_lists(b"[" + b"[]," * http.MAX_LISTS + b"0]")


@pytest.mark.parametrize("text", ["[{" * http.MAX_LISTS, '\\"[' * http.MAX_LISTS, "\\\\"])
def test_brackets_in_a_text_are_no_lists(text: str) -> None:
    http.check_lists(json.dumps([text, "[" * http.MAX_LISTS]).encode())


def test_a_text_that_does_not_end_hides_no_lists() -> None:
    with pytest.raises(InvalidRequest):
        http.check_lists(b"[" * (http.MAX_LISTS + 1) + b'"' + b"\\" * 99)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/embeddings", INFER])
async def test_json_nested_too_deeply_is_a_400(service: Service, path: str) -> None:
    deep = b'{"input":' + b"[" * 2000 + b"]" * 2000 + b"}"
    status, code, message = error_of(await post(service, deep, path))
    assert (status, code) == (400, "invalid_json")
    assert "depth limit" in message


@pytest.mark.asyncio
@pytest.mark.parametrize("number", ["1" * 5000, "1e400", "-1e999"])
async def test_numbers_beyond_every_type_are_a_400(service: Service, number: str) -> None:
    body = f'{{"model":"mini","input":[{number}]}}'.encode()
    assert (await post(service, body)).status_code == 400


# --- the Open Inference Protocol ---------------------------------------------------------------

TENSORS, PARAMETERS, WORD = oip_types.MAX_TENSORS, oip_types.MAX_PARAMETERS, oip_types.MAX_WORD
LONG = "x" * (WORD + 1)


def with_parameters(**values: Any) -> dict[str, Any]:
    return {"inputs": [TEXT], "parameters": values}


TOO_MUCH: dict[str, tuple[dict[str, Any], str, str]] = {
    "inputs": ({"inputs": [TEXT] * (TENSORS + 1)}, "inputs", f"at most {TENSORS} are read"),
    "outputs": (
        {"inputs": [TEXT], "outputs": [{"name": "a"}] * (TENSORS + 1)},
        *("outputs", f"at most {TENSORS} are read"),
    ),
    "parameters": (
        with_parameters(**{f"p{i}": i for i in range(PARAMETERS + 1)}),
        *("parameters", f"at most {PARAMETERS} are read"),
    ),
    "input-parameters": (
        {"inputs": [TEXT | {"parameters": {f"p{i}": i for i in range(PARAMETERS + 1)}}]},
        *("inputs[0].parameters", f"at most {PARAMETERS} are read"),
    ),
    "parameter-name": (
        with_parameters(**{LONG: 1}),
        *(f"parameters[{LONG[:40]}]", f"a name of {WORD + 1} characters"),
    ),
    "parameter-value": (
        with_parameters(trace=LONG),
        *("parameters[trace]", f"a value of {WORD + 1} characters"),
    ),
    "id": ({"inputs": [TEXT], "id": LONG}, "id", f"at most {WORD} are sent back"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", TOO_MUCH)
async def test_more_than_a_bound_of_the_protocol_is_a_400_with_the_bound(
    service: Service, name: str
) -> None:
    body, param, words = TOO_MUCH[name]
    response = await service.http.post(INFER, json=body)
    status, code, message = error_of(response)
    assert (status, code, response.json()["param"]) == (400, "invalid_value", param)
    assert words in message


@pytest.mark.asyncio
async def test_as_much_as_the_bounds_of_the_protocol_is_answered(service: Service) -> None:
    most = {f"{i}".rjust(WORD, "x"): "y" * WORD for i in range(PARAMETERS)}
    body = with_parameters(**most) | {"id": "i" * WORD}
    response = await service.http.post(INFER, json=body)
    assert response.status_code == 200
    assert (response.json()["id"], response.json()["parameters"]) == ("i" * WORD, most)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/v1/models/{LONG}"),
        ("GET", f"/v2/models/{LONG}"),
        ("GET", f"/v2/models/mini/versions/{LONG}"),
        ("GET", f"/{LONG}"),
        ("PUT", f"/v2/models/{LONG}/infer"),
        ("GET", f"/v2/models/{LONG}/infer"),
    ],
)
async def test_a_name_of_any_length_is_cut_in_the_answer(
    service: Service, method: str, path: str
) -> None:
    response = await service.http.request(method, path)
    assert response.status_code in (404, 405)
    assert "x" * 10 in response.text
    assert "x" * 201 not in response.text


@pytest.mark.asyncio
async def test_a_word_of_any_length_is_cut_in_the_answer(service: Service) -> None:
    embed = {"model": "mini", "input": "a"}
    for body in ({LONG: 1}, {"model": LONG}, {"encoding_format": LONG}, {"over_max": LONG}):
        response = await service.http.post("/v1/embeddings", json=embed | body)
        assert response.status_code in (400, 404)
        assert "x" * 201 not in response.text
    tensor = TEXT | {"datatype": LONG}
    for body in ({"inputs": [tensor]}, {"inputs": [TEXT | {"name": LONG}]}, {LONG: 1}):
        response = await service.http.post(INFER, json=body)
        assert response.status_code == 400
        assert "x" * 201 not in response.text


# --- answers ----------------------------------------------------------------------------------


def job(rows: int, *dims: str | int) -> oip.Job:
    """A job for one output of float32."""
    tensor = TensorSpec("out", "float32", ("batch", *dims))
    return oip.Job([""] * rows, (tensor,), None, None, {})


def test_one_long_row_makes_the_answer_too_large_for_all() -> None:
    short = [{"seq": 2}] * 999
    oip.check_answer(job(1000, "seq", 8), [*short, {"seq": 2}], 64_000)
    with pytest.raises(InvalidRequest) as caught:
        oip.check_answer(job(1000, "seq", 8), [*short, {"seq": 512}], 64_000)
    assert caught.value.code == "too_much_output"
    assert "[1000, 512, 8] and 16384000 bytes, at most 64000" in caught.value.message
    assert "serve.max_answer_bytes" in caught.value.message


def test_all_outputs_that_are_asked_for_count_and_no_others() -> None:
    two = job(1, "seq")
    two = oip.Job(two.rows, two.outputs * 2, None, None, {})
    oip.check_answer(two, [{"seq": 5}], 40)
    with pytest.raises(InvalidRequest, match="40 bytes, at most 39"):
        oip.check_answer(two, [{"seq": 5}], 39)


@pytest.mark.asyncio
async def test_an_answer_over_the_bound_is_refused_before_anything_is_queued() -> None:
    service = Service(max_answer_bytes=2 * 4 * 4)  # two vectors of four
    two = TEXT | {"shape": [2], "data": ["a", "b"]}
    three = TEXT | {"shape": [3], "data": ["a", "b", "c"]}
    assert (await service.http.post(INFER, json={"inputs": [two]})).status_code == 200
    status, code, _ = error_of(await service.http.post(INFER, json={"inputs": [three]}))
    assert (status, code) == (400, "too_much_output")
    assert service.counted("rows_accepted_total", model="mini") == 2
    service.frontend.close()


def test_the_pieces_of_a_split_row_count_together() -> None:
    assert FakeSample("a b c").executed == {"seq": 3}  # as PreparedSample has it, see below
    from shapeserve.batcher import Lane
    from shapeserve.engine.rows import PreparedRow, PreparedSample
    from shapeserve.layout import RowArrays

    def piece(size: int) -> PreparedRow:
        arrays = RowArrays({"input_ids": np.zeros(size)}, {"seq": size})
        return PreparedRow(arrays, Lane((), False, (1,)), size, 1, None, None)  # type: ignore[arg-type]

    assert PreparedSample((piece(8), piece(3)), {"seq": 30}).executed == {"seq": 11}


# --- bodies -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_bodies_beyond_what_the_process_may_hold_are_a_429_until_there_is_room() -> None:
    content = json.dumps({"model": "mini", "input": "slow 60"}).encode()
    service = Service(max_inflight_bytes=2 * len(content))
    waiting = [asyncio.create_task(post(service, content)) for _ in range(2)]
    while service.engines["mini"].waiting < 2:
        await asyncio.sleep(0.001)
    full = await post(service, content)
    status, code, message = error_of(full)
    assert (status, code, full.headers["retry-after"]) == (429, "queue_bytes", "1")
    assert f"hold {2 * len(content)} bytes" in message
    assert "serve.max_inflight_bytes" in message
    assert service.counted("rejected_total", model="none", reason="queue_bytes") == 1
    assert (await service.http.get("/v1/models")).status_code == 200  # it has no body
    waiting[0].cancel()  # the client left
    await asyncio.wait([waiting[0]])
    assert (await post(service, content.replace(b"slow 60", b"a"))).status_code == 200
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    assert service.frontend._service.bodies.held_bytes == 0
    service.frontend.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("content", [b"{", b'{"model":"mini","input":["a","crash"]}', b"x" * 3000])
async def test_a_body_is_let_go_however_its_request_ends(content: bytes) -> None:
    service = Service(max_inflight_bytes=10_000)
    for body in (content, gzip.compress(content)):
        headers = {"content-encoding": "gzip"} if body is not content else {}
        response = await service.http.post("/v1/embeddings", content=body, headers=headers)
        assert response.status_code in (400, 413, 500)
    assert service.frontend._service.bodies.held_bytes == 0
    service.frontend.close()


@pytest.mark.asyncio
async def test_a_compressed_body_counts_with_what_it_becomes() -> None:
    content = json.dumps({"model": "mini", "input": "a", "user": "u" * 1500}).encode()
    packed = gzip.compress(content)
    service = Service(max_inflight_bytes=len(packed) + len(content) - 1)
    assert (await post(service, content)).status_code == 200
    headers = {"content-encoding": "gzip"}
    response = await service.http.post("/v1/embeddings", content=packed, headers=headers)
    assert error_of(response)[:2] == (429, "queue_bytes")
    service.frontend.close()


def test_a_larger_body_makes_room_for_as_many() -> None:
    serve = {"max_body_bytes": 2**30}
    config = ServeConfig.from_dict({"models": [{"path": "x"}], "serve": serve})
    assert config.serve.inflight_bytes == 64 * 2**30


def test_room_for_less_than_one_body_is_a_mistake_in_the_configuration() -> None:
    serve = {"max_body_bytes": 1000, "max_inflight_bytes": 1999}
    with pytest.raises(ConfigError, match="use 2000 or more"):
        ServeConfig.from_dict({"models": [{"path": "x"}], "serve": serve})


# --- gRPC -------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("texts", "fields", "code", "details"),
    [
        (["a", "b", "c"], {}, "INVALID_ARGUMENT", "48 bytes, at most 32 are sent"),
        (["a"], {"id": LONG}, "INVALID_ARGUMENT", f"at most {WORD} are sent back"),
        (["a"], {"outputs": [{"name": "x"}] * 257}, "INVALID_ARGUMENT", f"at most {TENSORS}"),
        (["a" * 3000], {}, "RESOURCE_EXHAUSTED", "serve.max_inflight_bytes"),
    ],
    ids=["answer", "id", "outputs", "bodies"],
)
async def test_the_same_bounds_hold_over_grpc(
    texts: list[str], fields: dict[str, Any], code: str, details: str
) -> None:
    made = Service(max_body_bytes=10_000, max_inflight_bytes=3000, max_answer_bytes=2 * 4 * 4)
    replica = Replica(made.frontend)
    call = Call()
    assert await replica.infer(*texts, call=call, **fields) is None
    assert (call.code.name, details in call.details) == (code, True), call.details
    assert await replica.infer("a", "b") is not None
    assert made.frontend._service.bodies.held_bytes == 0
    made.frontend.close()


# --- nothing is fetched -----------------------------------------------------------------------

PLACES = [
    "http://169.254.169.254/latest/meta-data/",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "/etc/passwd",
    "../../etc/passwd",
    "data:text/plain;base64,QQ==",
    "package:os",
]


@pytest.mark.asyncio
@pytest.mark.parametrize("place", PLACES)
async def test_i8_an_input_that_names_a_place_is_text_and_nothing_else(
    service: Service, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **_: object) -> None:
        pytest.fail(f"something was opened: {args}")

    plain = await service.http.post("/v1/embeddings", json={"model": "mini", "input": "word"})
    for name in (
        "socket.socket.connect",
        "socket.getaddrinfo",
        "builtins.open",
        "io.open",
        "os.open",
    ):
        monkeypatch.setattr(name, never)
    bodies = [
        ("/v1/embeddings", {"model": "mini", "input": place, "user": place}),
        (INFER, {"inputs": [TEXT | {"data": [place]}], "parameters": {"url": place}, "id": place}),
    ]
    answers = [await service.http.post(path, json=body) for path, body in bodies]
    answers += [await service.http.get(path + place) for path in ("/v1/models/", "/v2/models/")]
    with pytest.raises(pytest.fail.Exception, match="something was opened"):
        Path(place).read_bytes()
    monkeypatch.undo()
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404]
    assert answers[0].json()["data"] == plain.json()["data"]  # one word, like any other


# --- the documentation ------------------------------------------------------------------------


def table() -> dict[str, list[str]]:
    """Return the rows of the table of bounds: first cell -> the others."""
    part = HTTP_MD.split("## Limits")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def test_the_table_of_bounds_has_the_values_of_the_code() -> None:
    rows = table()
    serve = ServeConfig.from_dict({"models": [{"path": "x"}]}).serve
    limits = ServeConfig.from_dict({"models": [{"path": "x"}]}).models[0].limits
    known = {
        "serve.max_body_bytes": serve.max_body_bytes,
        "serve.max_inflight_bytes": serve.inflight_bytes,
        "serve.max_answer_bytes": serve.max_answer_bytes,
        "limits.max_rows": limits.max_rows,
        "limits.max_queue_rows": limits.max_queue_rows,
        "limits.max_queue_tokens": limits.max_queue_tokens,
        "http.MAX_LISTS": http.MAX_LISTS,
        "oip_types.MAX_TENSORS": TENSORS,
        "oip_types.MAX_PARAMETERS": PARAMETERS,
        "oip_types.MAX_WORD": WORD,
        "oip_types.MAX_DIMS": oip_types.MAX_DIMS,
    }
    stated: dict[str, set[int]] = {}
    for cells in rows.values():
        for key in re.findall(r"`([\w.]+)`", cells[-1]):
            if key in known:
                stated.setdefault(key, set()).add(int(cells[0].replace(",", "")))
    assert stated == {key: {value} for key, value in known.items()}


def test_the_table_of_bounds_has_only_statuses_and_codes_that_exist() -> None:
    from shapeserve.protocols.openapi.parts import ERRORS

    known = {f"{status} `{code}`" for status, codes in ERRORS.items() for code in codes}
    assert {cells[1] for cells in table().values()} - known <= {"by the proxy", "cut"}
