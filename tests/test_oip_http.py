"""Open Inference Protocol over HTTP: bodies to requests, answers to bodies."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.errors import (
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from shapeserve.protocols import http, oip_http
from shapeserve.protocols.oip_http import HttpRequest
from shapeserve.protocols.oip_types import InferResponse, Tensor

MODEL = "org/m"
INPUT = {"name": "x", "shape": [2, 2], "datatype": "INT64"}
JSON_INPUT = {**INPUT, "data": [1, 2, 3, 4]}
BINARY_INPUT = {**INPUT, "parameters": {"binary_data_size": 32}}
RAW = np.arange(1, 5, dtype=np.int64).tobytes()


def parsed(content: Any, raw: bytes | None = None, length: str | None = None) -> HttpRequest:
    """Parse ``content`` as JSON; with ``raw`` after it, announced by the header."""
    head = content if isinstance(content, bytes) else json.dumps(content).encode()
    if raw is not None and length is None:
        length = str(len(head))
    return oip_http.parse(head + (raw or b""), length, MODEL, "1")


def inputs(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"inputs": list(items), **fields}


def test_a_request_is_read_completely() -> None:
    content = inputs(
        JSON_INPUT,
        id="42",
        model_name=MODEL,
        parameters={"binary_data_output": True, "trace": "t"},
        outputs=[
            {"name": "a", "parameters": {"binary_data": False, "k": 1}},
            {"name": "b"},
        ],
    )
    request = parsed(content)
    assert (request.infer.model_name, request.infer.model_version) == (MODEL, "1")
    assert (request.infer.id, request.infer.parameters) == ("42", {"trace": "t"})
    assert [(o.name, o.parameters) for o in request.infer.outputs] == [("a", {"k": 1}), ("b", {})]
    assert (request.binary, request.binary_default) == ({"a": False}, True)


@pytest.mark.parametrize("absent", [{}, {"id": None, "parameters": None, "outputs": None}])
def test_everything_but_the_inputs_is_optional(absent: dict[str, Any]) -> None:
    infer = parsed(inputs(JSON_INPUT, **absent)).infer
    assert (infer.id, infer.parameters, infer.outputs) == ("", {}, ())


@pytest.mark.parametrize(
    ("content", "raw"),
    [
        (inputs(JSON_INPUT), None),
        (inputs({**INPUT, "data": [[1, 2], [3, 4]]}), None),
        (inputs(BINARY_INPUT), RAW),
        (inputs(JSON_INPUT), b""),
    ],
    ids=["flat", "nested", "binary", "header-without-binary"],
)
def test_every_form_of_data_gives_the_same_tensor(content: Any, raw: bytes | None) -> None:
    (tensor,) = parsed(content, raw).infer.inputs
    assert isinstance(tensor.data, np.ndarray)
    assert tensor.data.tolist() == [[1, 2], [3, 4]]


def test_binary_inputs_follow_the_json_in_its_order_and_mix_with_others() -> None:
    flags = {"name": "f", "shape": [3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}}
    last = {**BINARY_INPUT, "name": "y"}
    raw = RAW + b"\1\0\1" + RAW[::-1]
    first, middle, plain, end = parsed(
        inputs(BINARY_INPUT, flags, JSON_INPUT, last), raw
    ).infer.inputs
    assert isinstance(middle.data, np.ndarray)
    assert middle.data.tolist() == [True, False, True]
    assert np.array_equal(first.data, plain.data)
    assert isinstance(end.data, np.ndarray)
    assert end.data.tobytes() == RAW[::-1]


def with_(**changes: Any) -> dict[str, Any]:
    """A request whose one input is changed; None takes a field away."""
    item = {**JSON_INPUT, **changes}
    return inputs({name: value for name, value in item.items() if value is not None})


def sized(size: Any) -> dict[str, Any]:
    return with_(data=None, parameters={"binary_data_size": size})


LENGTH = "Inference-Header-Content-Length"
SIZE = "inputs[0].parameters[binary_data_size]"
# content, binary data, header (None: the true one): what the message says, and the param
BAD: dict[str, tuple[Any, bytes | None, str | None, str, str | None]] = {
    "not-json": (b"{", None, None, f"if binary data follows the JSON, the header {LENGTH}", None),
    "cut-json": (b'{"inputs":', b"[]}", None, f"{LENGTH} says that it has 10 bytes", None),
    "nan": (
        b'{"inputs":[NaN]}',
        None,
        None,
        "NaN, Infinity, comments and trailing commas are not",
        None,
    ),
    "list": ([], None, None, "the request is []; it must be a JSON object", None),
    "no-inputs": ({}, None, None, "inputs is missing", "inputs"),
    "null-inputs": ({"inputs": None}, None, None, "inputs is null", "inputs"),
    "empty-inputs": (inputs(), None, None, "inputs is []", "inputs"),
    "input-text": (inputs("x"), None, None, "inputs[0] is 'x'; it must be a JSON", "inputs[0]"),
    "field": (inputs(JSON_INPUT, stream=True), None, None, "unknown field 'stream'", "stream"),
    "input-field": (with_(dtype="INT64"), None, None, "unknown field 'dtype'", "inputs[0].dtype"),
    "other-model": (
        inputs(JSON_INPUT, model_name="other"),
        *(None, None, "model_name is 'other', but the path names 'org/m'", "model_name"),
    ),
    "id": (inputs(JSON_INPUT, id=5), None, None, "id is 5; it must be a string", "id"),
    "no-name": (with_(name=None), None, None, "inputs[0].name is missing", "inputs[0].name"),
    "empty-name": (with_(name=""), None, None, "inputs[0].name is ''", "inputs[0].name"),
    "datatype": (with_(datatype="int64"), None, None, "is 'int64'", "inputs[0].datatype"),
    "no-shape": (with_(shape=None), None, None, "shape is missing", "inputs[0].shape"),
    "null-shape": (
        inputs(JSON_INPUT | {"shape": None}),
        None,
        None,
        "shape is null",
        "inputs[0].shape",
    ),
    "no-datatype": (inputs({"name": "x"}), None, None, "datatype is missing", "inputs[0].datatype"),
    "negative": (with_(shape=[2, -2]), None, None, "shape[1] is -2", "inputs[0].shape"),
    "product": (with_(shape=[2, 3]), None, None, "4 elements, but shape [2, 3]", "inputs[0].data"),
    "no-data": (with_(data=None), None, None, "has neither of `data` and", "inputs[0]"),
    "both": (with_(parameters={"binary_data_size": 0}), b"", None, "has both of", "inputs[0]"),
    "scalar": (with_(data=5), None, None, "data is 5; it must be a list", "inputs[0].data"),
    "ragged": (
        with_(data=[[1, 2], [3]]),
        *(None, None, "has a list of 1 in dim 1, where shape [2, 2] has 2", "inputs[0].data"),
    ),
    "half-nested": (with_(data=[[1, 2], 3]), None, None, "has 3 in dim 1", "inputs[0].data"),
    "too-deep": (
        with_(data=[[[1], [2]], [[3], [4]]]),
        *(None, None, "data[0] is [1]; an element of INT64", "inputs[0].data"),
    ),
    "parameters": (inputs(JSON_INPUT, parameters=[]), None, None, "parameters is []", "parameters"),
    "parameter": (
        inputs(JSON_INPUT, parameters={"a": {}}),
        *(None, None, "parameters[a] is {}; it must be a string, a number or", "parameters[a]"),
    ),
    "binary-output": (
        inputs(JSON_INPUT, parameters={"binary_data_output": 1}),
        *(None, None, "is 1; it must be true or false", "parameters[binary_data_output]"),
    ),
    "shared-memory": (
        with_(data=None, parameters={"shared_memory_region": "r"}),
        *(None, None, "shared_memory_region", "inputs[0].parameters[shared_memory_region]"),
    ),
    "outputs": (inputs(JSON_INPUT, outputs="y"), None, None, "outputs is 'y'", "outputs"),
    "output": (inputs(JSON_INPUT, outputs=["y"]), None, None, "outputs[0] is 'y'", "outputs[0]"),
    "output-name": (inputs(JSON_INPUT, outputs=[{}]), None, None, "missing", "outputs[0].name"),
    "output-field": (
        inputs(JSON_INPUT, outputs=[{"name": "y", "datatype": "FP32"}]),
        *(None, None, "unknown field 'datatype'", "outputs[0].datatype"),
    ),
    "output-binary": (
        inputs(JSON_INPUT, outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}]),
        *(None, None, "is 'yes'; it must be true or false", "outputs[0].parameters[binary_data]"),
    ),
    "no-header": (sized(32), None, None, f"the header {LENGTH} is missing", LENGTH),
    "short": (sized(32), RAW[:-1], None, "at most the 31 that are left", SIZE),
    "long": (sized(32), RAW + b"\0", None, "1 bytes follow the JSON and the inputs'", LENGTH),
    "negative-size": (sized(-1), RAW, None, "binary_data_size] is -1", SIZE),
    "text-size": (sized("32"), RAW, None, "is '32'; it must be a whole number", SIZE),
    "true-size": (sized(True), RAW, None, "is true; it must be a whole number", SIZE),
    "huge-size": (sized(2**64), RAW, None, "at most the 32 that are left", SIZE),
    "wrong-size": (sized(24), RAW, None, "has 24 bytes of data, but shape [2, 2]", "inputs[0]"),
    "data-after": (inputs(JSON_INPUT), b"\0", None, "1 bytes follow the JSON", LENGTH),
    "header-long": (sized(32), RAW, "1000", "is '1000'; it must be the length of the JSON", LENGTH),
    "header-zero": (sized(32), RAW, "0", "Tensors without JSON are not read", LENGTH),
    "header-sign": (sized(32), RAW, "-1", "is '-1'; it must be the length", LENGTH),
    "header-text": (sized(32), RAW, "all", "is 'all'; it must be the length", LENGTH),
    "header-digits": (sized(32), RAW, "9" * 5000, "must be the length of the JSON", LENGTH),
}


@pytest.mark.parametrize("case", BAD)
def test_every_violation_is_a_400_that_names_it(case: str) -> None:
    content, raw, length, message, param = BAD[case]
    with pytest.raises(InvalidRequest) as refused:
        parsed(content, raw, length)
    assert message in refused.value.message
    assert refused.value.param == param
    assert len(refused.value.message) < 400


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    [*oip_http._REQUEST, *oip_http._INPUT, "binary_data_size", "INT64", "BYTES"]
)
TREES = st.recursive(
    SCALARS | WORDS,
    lambda tree: st.lists(tree, max_size=4) | st.dictionaries(WORDS, tree, max_size=5),
    max_leaves=20,
)


@given(
    st.binary(max_size=40) | TREES.map(lambda tree: json.dumps(tree).encode()),
    st.binary(max_size=16),
    st.none() | st.integers(-1, 80).map(str) | st.text(max_size=5),
)
def test_i8_any_body_at_all_is_read_or_refused(head: bytes, raw: bytes, length: str | None) -> None:
    with contextlib.suppress(InvalidRequest):  # and no other exception
        oip_http.parse(head + raw, length, MODEL)


@given(
    st.lists(st.sampled_from(["INT64", "BOOL", "FP32", "FP16", "BYTES"]), min_size=1, max_size=4),
    st.data(),
)
def test_what_tritonclient_sends_is_read_whether_binary_or_json(
    datatypes: list[str], data: st.DataObject
) -> None:
    arrays = {
        "INT64": np.array([[-1, 2**40]]),
        "BOOL": np.array([[True, False]]),
        "FP32": np.array([[0.1, -3e38]], np.float32),
        "FP16": np.array([[0.1, 6e4]], np.float16),
        "BYTES": np.array([["naïve".encode(), b""]], object),
    }
    sent = []
    for i, datatype in enumerate(datatypes):
        sent.append(triton.InferInput(f"x{i}", [1, 2], datatype))
        sent[-1].set_data_from_numpy(arrays[datatype], binary_data=data.draw(st.booleans()))
    body, length = triton.InferenceServerClient.generate_request_body(sent, request_id="7")
    request = oip_http.parse(body, None if length is None else str(length), MODEL)
    assert (request.infer.id, request.binary_default) == ("7", True)
    for datatype, tensor in zip(datatypes, request.infer.inputs, strict=True):
        assert (tensor.datatype, tensor.shape) == (datatype, (1, 2))
        expected = arrays[datatype]
        got = np.array(tensor.data, object).reshape(1, 2) if datatype == "BYTES" else tensor.data
        np.testing.assert_array_equal(got, expected)


# --- answers ----------------------------------------------------------------------------------

OUTPUTS = (
    Tensor("v", "FP32", (2, 2), np.array([[0.1, 1], [2, 3]], np.float32)),
    Tensor("h", "FP16", (2, 1), np.array([[0.1], [6e4]], np.float16)),
    Tensor("b", "BF16", (2, 1), np.array([[1.5], [3e38]], np.float32)),
    Tensor("k", "BOOL", (2,), np.array([True, False])),
)


@pytest.mark.parametrize("binary", [{}, {"v": True}, {"v": False, "k": False}])
@pytest.mark.parametrize("default", [True, False])
def test_tritonclient_reads_every_mix_of_binary_and_json(
    binary: dict[str, bool], default: bool
) -> None:
    asked = HttpRequest(parsed(inputs(JSON_INPUT)).infer, binary, default)
    response = InferResponse("m", "1", "42", {"trace": "t"}, OUTPUTS)
    reply = oip_http.render(asked, response, {"x-more": "1"})
    flags = [binary.get(tensor.name, default) for tensor in OUTPUTS]
    length = reply.headers.get(oip_http.HEADER_LENGTH)
    assert reply.headers["x-more"] == "1"
    assert (length is not None, reply.media_type) == (
        (True, http.OCTETS) if any(flags) else (False, http.JSON)
    )
    parse = triton.InferenceServerClient.parse_response_body
    result = parse(reply.body, header_length=None if length is None else int(length))
    content = result.get_response()
    assert [content[key] for key in ("model_name", "model_version", "id")] == ["m", "1", "42"]
    assert content["parameters"] == {"trace": "t"}
    assert ["data" not in output for output in content["outputs"]] == flags
    for tensor in OUTPUTS:
        got = result.as_numpy(tensor.name)
        assert got.shape == tensor.shape
        np.testing.assert_allclose(
            got.astype(np.float64), np.asarray(tensor.data, np.float64), 4e-3
        )


def test_an_answer_has_no_id_and_no_parameters_if_the_request_had_none() -> None:
    asked = HttpRequest(parsed(inputs(JSON_INPUT)).infer, {}, False)
    reply = oip_http.render(asked, InferResponse("m", "1", "", {}, OUTPUTS[:1]), {})
    assert set(json.loads(reply.body)) == {"model_name", "model_version", "outputs"}


def test_an_error_is_a_string_below_v2_and_an_object_elsewhere() -> None:
    error = Overloaded("full", retry_after_s=1.2)
    reply = http.error_reply(error, "/v2/models/m/infer")
    assert json.loads(reply.body) == {
        "error": "full",
        "type": "overloaded_error",
        "param": None,
        "code": "queue_full",
    }
    assert (reply.status, reply.headers) == (429, {"retry-after": "2"})
    for path in ("/v1/embeddings", "/v20"):
        assert json.loads(http.error_reply(error, path).body)["error"]["message"] == "full"


# --- compressed bodies ------------------------------------------------------------------------

COMPRESS: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", COMPRESS)
@given(st.binary(max_size=2000))
def test_a_compressed_body_comes_back_as_it_was(encoding: Any, body: bytes) -> None:
    assert http.decompress(COMPRESS[encoding](body), encoding, len(body)) == body


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_decompression_bomb_is_a_413_that_names_the_limit(encoding: Any) -> None:
    bomb = COMPRESS[encoding](bytes(100_000_000))
    assert len(bomb) < 200_000
    with pytest.raises(PayloadTooLarge, match="more than 1000 bytes when it is decompressed"):
        http.decompress(bomb, encoding, 1000)
    with pytest.raises(PayloadTooLarge):
        http.decompress(COMPRESS[encoding](bytes(1001)), encoding, 1000)
    assert http.decompress(COMPRESS[encoding](bytes(1000)), encoding, 1000) == bytes(1000)


BROKEN = {
    "plain": lambda body: body,
    "empty": lambda _: b"",
    "cut": lambda body: gzip.compress(body)[:-1],
    "twice": lambda body: gzip.compress(body) + gzip.compress(body),
    "flipped": lambda body: gzip.compress(body)[:-5] + b"\0" + gzip.compress(body)[-4:],
    "zlib": zlib.compress,
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_body_that_is_not_what_its_encoding_says_is_a_400(case: str) -> None:
    with pytest.raises(
        InvalidRequest, match="content-encoding is gzip, but the body is"
    ) as refused:
        http.decompress(BROKEN[case](b'{"inputs": []}'), "gzip", 1000)
    assert refused.value.param == "content-encoding"


@pytest.mark.parametrize(
    ("value", "encoding"),
    [(None, None), ("identity", None), ("", None), (" GZIP ", "gzip"), ("deflate", "deflate")],
)
def test_encodings_that_are_read(value: str | None, encoding: str | None) -> None:
    assert http.parse_content_encoding(value) == encoding


@pytest.mark.parametrize("value", ["br", "zstd", "gzip, gzip", "x" * 1000])
def test_other_encodings_are_a_415(value: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="reads gzip, deflate and identity") as refused:
        http.parse_content_encoding(value)
    assert refused.value.code == "unsupported_content_encoding"


@pytest.mark.parametrize("value", [None, "application/json", "application/octet-stream"])
def test_inference_takes_json_and_octets(value: str | None) -> None:
    http.check_media_type(value, octets=True)


def test_inference_takes_nothing_else_and_other_endpoints_no_octets() -> None:
    with pytest.raises(UnsupportedMediaType, match="application/json or application/octet-stream"):
        http.check_media_type("application/x-www-form-urlencoded", octets=True)
    with pytest.raises(UnsupportedMediaType):
        http.check_media_type("application/octet-stream")
