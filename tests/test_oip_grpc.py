"""Open Inference Protocol messages to requests, answers to messages, errors to status codes."""

from __future__ import annotations

from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import service_pb2 as theirs

from shapeserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    RowFailed,
    Unavailable,
    UnsupportedMediaType,
)
from shapeserve.models.spec import ModelSpec, TensorSpec
from shapeserve.protocols import oip_grpc
from shapeserve.protocols.oip_types import DATATYPES, InferRequest, InferResponse, Tensor, to_bytes
from shapeserve.protocols.proto import oip_pb2

TYPED = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
}
NUMBERS = [name for name in DATATYPES if name != "BYTES"]


# --- the messages ---------------------------------------------------------------------------------


def fields_of(message: Any, at: str = "") -> dict[str, tuple[int, int, bool]]:
    """Path of every field, nested messages included -> number, type, repeated."""
    found = {
        f"{at}{field.name}": (field.number, field.type, field.is_repeated)
        for field in message.fields
    }
    for nested in message.nested_types:
        found |= fields_of(nested, f"{at}{nested.name}.")
    return found


def test_our_messages_are_those_of_tritons_own_client() -> None:
    for name, message in oip_pb2.DESCRIPTOR.message_types_by_name.items():
        triton_has = fields_of(theirs.DESCRIPTOR.message_types_by_name[name])
        ours = fields_of(message)
        # Triton adds a field to the metadata of nothing that we have.
        assert {path: triton_has.get(path) for path in ours} == ours


def test_our_methods_are_those_of_tritons_own_client() -> None:
    (ours,) = oip_pb2.DESCRIPTOR.services_by_name.values()
    (service,) = theirs.DESCRIPTOR.services_by_name.values()
    assert ours.full_name == service.full_name
    for method in ours.methods:
        same = service.methods_by_name[method.name]
        assert (same.input_type.full_name, same.output_type.full_name) == (
            method.input_type.full_name,
            method.output_type.full_name,
        )


# --- requests -------------------------------------------------------------------------------------


def read(message: Any) -> InferRequest:
    """Read it as it comes over the wire."""
    return oip_grpc.read_infer(
        oip_grpc.parse(message.SerializeToString(), oip_pb2.ModelInferRequest)
    )


def message_of(*inputs: Any, raw: Any = (), **fields: Any) -> Any:
    return oip_pb2.ModelInferRequest(inputs=inputs, raw_input_contents=raw, **fields)


def input_of(name: str, datatype: str, shape: Any, **fields: Any) -> Any:
    return oip_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, **fields
    )


def typed(datatype: str, shape: Any, **contents: Any) -> Any:
    return input_of("x", datatype, shape, contents=oip_pb2.InferTensorContents(**contents))


SHAPES = hnp.array_shapes(max_dims=4, max_side=4)


@st.composite
def tensors(draw: st.DrawFn, names: list[str] = NUMBERS) -> Tensor:
    datatype = draw(st.sampled_from(names))
    held: Any = DATATYPES[datatype].held
    elements = None
    if datatype == "BF16":  # what 16 bits can hold
        elements = st.integers(-256, 256).map(float)
    elif held.kind == "f":
        elements = st.floats(-1000, 1000, width=16)
    array = draw(hnp.arrays(held, draw(SHAPES), elements=elements))
    return Tensor("x", datatype, array.shape, array)


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_raw_contents_become_the_tensors_that_were_sent(sent: list[Tensor]) -> None:
    inputs = [input_of(t.name, t.datatype, t.shape) for t in sent]
    got = read(message_of(*inputs, raw=[to_bytes(t) for t in sent])).inputs
    for ours, tensor in zip(got, sent, strict=True):
        assert (ours.datatype, ours.shape) == (tensor.datatype, tensor.shape)
        np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(tensor.data))


@given(tensors(sorted(TYPED)))
def test_typed_contents_become_what_raw_ones_do(tensor: Tensor) -> None:
    values = np.asarray(tensor.data).reshape(-1).tolist()
    as_typed = typed(tensor.datatype, tensor.shape, **{TYPED[tensor.datatype]: values})
    as_raw = message_of(input_of("x", tensor.datatype, tensor.shape), raw=[to_bytes(tensor)])
    (got,), (expected,) = read(message_of(as_typed)).inputs, read(as_raw).inputs
    assert (got.datatype, got.shape) == (expected.datatype, expected.shape)
    np.testing.assert_array_equal(np.asarray(got.data), np.asarray(expected.data))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5))
def test_bytes_are_the_same_raw_and_typed(values: list[bytes]) -> None:
    shape = (len(values),)
    raw = to_bytes(Tensor("x", "BYTES", shape, values))
    (from_raw,) = read(message_of(input_of("x", "BYTES", shape), raw=[raw])).inputs
    (from_typed,) = read(message_of(typed("BYTES", shape, bytes_contents=values))).inputs
    assert from_raw.data == from_typed.data == values


@given(tensors())
def test_what_tritons_client_makes_of_an_array_is_read(tensor: Tensor) -> None:
    array = np.asarray(tensor.data)
    if tensor.datatype == "BF16":
        array = array.astype(ml_dtypes.bfloat16)
    made = triton.InferInput("x", list(array.shape), tensor.datatype)
    made.set_data_from_numpy(array)
    sent = theirs.ModelInferRequest(
        inputs=[made._get_tensor()], raw_input_contents=[made._get_content()]
    )
    (got,) = read(sent).inputs
    np.testing.assert_array_equal(np.asarray(got.data), array.astype(got.data.dtype))


@pytest.mark.parametrize("value", ["a", 7, -7, True, False, 0.5, 2**63, 2**64 - 1, -(2**63)])
def test_parameters_keep_value_and_type_both_ways(value: Any) -> None:
    answer = InferResponse("m", "1", "id", {"key": value}, ())
    sent = oip_grpc.parse(oip_grpc.render_infer(answer), oip_pb2.ModelInferResponse)
    message = oip_pb2.ModelInferRequest(parameters=dict(sent.parameters))
    (got,) = read(message).parameters.values()
    assert (got, type(got)) == (value, type(value))


def test_names_version_id_and_outputs_are_read() -> None:
    output = oip_pb2.ModelInferRequest.InferRequestedOutputTensor(name="vector")
    got = read(message_of(model_name="m", model_version="1", id="é 7", outputs=[output]))
    assert (got.model_name, got.model_version, got.id) == ("m", "1", "é 7")
    assert [output.name for output in got.outputs] == ["vector"]


ONE = input_of("x", "INT64", [1])
EIGHT = b"\0" * 8
REGION = {"shared_memory_region": oip_pb2.InferParameter(string_param="r")}
WITH_REGION = input_of("x", "INT64", [1], parameters=REGION)
BAD: dict[str, tuple[Any, str, str]] = {
    "both": (
        message_of(typed("INT64", [1], int64_contents=[1]), raw=[EIGHT]),
        "beside raw_input_contents",
        "inputs[0].contents",
    ),
    "both-empty-contents": (
        message_of(ONE, typed("INT64", [1]), raw=[EIGHT, EIGHT]),
        "inputs\\[1\\].contents is there beside",
        "inputs[1].contents",
    ),
    "raw-missing": (message_of(ONE, ONE, raw=[EIGHT]), "1 items, but there are 2 inputs", "raw"),
    "raw-too-many": (message_of(ONE, raw=[EIGHT] * 3), "3 items, but there are 1 inputs", "raw"),
    "raw-short": (message_of(ONE, raw=[b"123"]), "has 3 bytes .* takes 8", "inputs[0]"),
    "no-data": (
        message_of(ONE),
        "has no data; send its elements in contents.int64_contents, .* raw_input_contents",
        "inputs[0].contents",
    ),
    "typed-short": (
        message_of(typed("INT64", [2], int64_contents=[1])),
        "1 elements, but shape .* has 2",
        "inputs[0].contents.int64_contents",
    ),
    "typed-fp16": (message_of(typed("FP16", [1])), "raw_input_contents", "inputs[0].datatype"),
    "typed-bf16": (message_of(typed("BF16", [1])), "raw_input_contents", "inputs[0].datatype"),
    "wrong-field": (
        message_of(typed("INT64", [1], int_contents=[1])),
        "has int_contents; .* sent in int64_contents",
        "inputs[0].contents",
    ),
    "two-fields": (
        message_of(typed("INT64", [1], int64_contents=[1], fp32_contents=[1])),
        "has fp32_contents",
        "inputs[0].contents",
    ),
    "out-of-range": (
        message_of(typed("UINT8", [1], uint_contents=[256])),
        "UINT8 holds 0 to 255",
        "inputs[0].contents.uint_contents",
    ),
    "datatype": (message_of(input_of("x", "INT128", [1])), "INT128", "inputs[0].datatype"),
    "negative-shape": (message_of(input_of("x", "INT64", [-1])), "is -1", "inputs[0].shape"),
    "huge-shape": (
        message_of(input_of("x", "INT64", [2**62, 2**62]), raw=[EIGHT]),
        "has 8 bytes",
        "inputs[0]",
    ),
    "shared-memory": (message_of(WITH_REGION), "send and read the data itself", "inputs[0].param"),
    "empty-parameter": (
        message_of(ONE, raw=[EIGHT], parameters={"key": oip_pb2.InferParameter()}),
        "'key' without a value",
        "parameters[key]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_names_the_field_and_the_remedy(name: str) -> None:
    message, match, param = BAD[name]
    with pytest.raises(InvalidRequest, match=match) as refused:
        read(message)
    assert (refused.value.param or "").startswith(param)


@given(st.binary(max_size=60))
def test_no_bytes_at_all_raise_anything_but_an_invalid_request(body: bytes) -> None:
    try:
        oip_grpc.read_infer(oip_grpc.parse(body, oip_pb2.ModelInferRequest))
    except InvalidRequest as error:
        assert error.message  # noqa: PT017 - most bytes are a message, which is as good


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"is no inference\.ModelInferRequest") as refused:
        oip_grpc.parse(b"\xff\xff", oip_pb2.ModelInferRequest)
    assert refused.value.code == "invalid_message"


# --- answers --------------------------------------------------------------------------------------


@given(st.lists(tensors(), min_size=1, max_size=3))
def test_tritons_client_reads_the_arrays_of_an_answer(outputs: list[Tensor]) -> None:
    named = [Tensor(f"y{i}", t.datatype, t.shape, t.data) for i, t in enumerate(outputs)]
    body = oip_grpc.render_infer(InferResponse("m", "1", "id", {}, tuple(named)))
    result = triton.InferResult(theirs.ModelInferResponse.FromString(body))
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "id")
    for tensor in named:
        np.testing.assert_array_equal(result.as_numpy(tensor.name), np.asarray(tensor.data))


def test_metadata_has_names_datatypes_and_dynamic_sizes() -> None:
    spec = ModelSpec(
        name="m",
        task="module",
        dtype="float32",
        inputs={"image": TensorSpec("image", "bfloat16", ("batch", 3, "height"))},
        outputs={"vector": TensorSpec("vector", "float32", ("batch", 4))},
        axes=("batch", "height"),
        max_length={"height": 8},
        hard_limit={"height": 8},
    )
    got = theirs.ModelMetadataResponse.FromString(oip_grpc.render_model(spec))
    (image,), (vector,) = got.inputs, got.outputs
    assert (got.name, list(got.versions)) == ("m", ["1"])
    assert (image.name, image.datatype, list(image.shape)) == ("image", "BF16", [-1, 3, -1])
    assert (vector.name, vector.datatype, list(vector.shape)) == ("vector", "FP32", [-1, 4])


@pytest.mark.parametrize("ready", [True, False])
def test_health_has_its_one_field(ready: bool) -> None:
    live = oip_grpc.render_ready(oip_pb2.ServerLiveResponse, ready)
    assert theirs.ServerLiveResponse.FromString(live).live is ready
    model = oip_grpc.render_ready(oip_pb2.ModelReadyResponse, ready)
    assert theirs.ModelReadyResponse.FromString(model).ready is ready


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (UnsupportedMediaType, grpc.StatusCode.INVALID_ARGUMENT),
        (NotFound, grpc.StatusCode.NOT_FOUND),
        (PayloadTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RowFailed, grpc.StatusCode.INTERNAL),
        (RequestError, grpc.StatusCode.INTERNAL),
        (Unavailable, grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_every_error_has_its_status_code(error: type[RequestError], code: grpc.StatusCode) -> None:
    status = oip_grpc.status_of(error("why", code="word"))
    assert (status.code, status.details) == (code, "why")
    assert status.metadata == {"x-shapeserve-code": "word"}


def test_a_full_queue_says_when_to_come_again_in_words_and_metadata() -> None:
    status = oip_grpc.status_of(Overloaded("the queue is full; retry in 2 s", retry_after_s=1.2))
    assert status.details == "the queue is full; retry in 2 s"
    assert status.metadata["retry-after"] == "2"


def test_details_stay_below_what_clients_take_as_metadata() -> None:
    details = oip_grpc.status_of(InvalidRequest("\U0001f600" * 5000)).details
    percent_encoded_bytes = 3 * len(details.encode())
    assert 4000 < percent_encoded_bytes < 8192
