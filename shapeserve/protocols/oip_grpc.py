"""Open Inference Protocol v2 over gRPC: messages to requests, answers to messages, errors to codes.

Messages come as bytes and are read here, on a worker thread, and not by the gRPC server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from shapeserve import __version__
from shapeserve.errors import InvalidRequest, RequestError
from shapeserve.models.spec import ModelSpec
from shapeserve.protocols import http, oip, oip_rows
from shapeserve.protocols.oip_types import (
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    RequestedOutput,
    Tensor,
    check_datatype,
    check_shape,
    from_bytes,
    from_values,
    shown,
    to_bytes,
)
from shapeserve.protocols.proto import oip_pb2

_CODES: Final = {
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

# Clients take 8 KiB of metadata, details included, in which a character may become twelve.
MAX_DETAILS: Final = 500

# Where typed contents have the elements of a datatype; 16-bit floats have no field.
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends that is not answered.

    Attributes:
        code: gRPC's.
        details: for whoever reads it.
        metadata: for programs, sent after the answer.
    """

    code: grpc.StatusCode
    details: str
    metadata: dict[str, str]


def status_of(error: RequestError) -> Status:
    """Return the status of a call that ends with ``error``."""
    later = http.retry_after(error)  # the message says it too
    other = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    code = _CODES.get(error.status, other)
    details = error.message[:MAX_DETAILS]
    return Status(code, details, {"x-shapeserve-code": error.code, **later})


def parse(body: bytes, message: type[Message]) -> Any:
    """Return the message in ``body``."""
    try:
        return message.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(
            f"the message is no {message.DESCRIPTOR.full_name}: {str(error)[:100]}; make the "
            "client from the protocol's own .proto file.",
            code="invalid_message",
        ) from None


# --- requests ---------------------------------------------------------------------------------


def read_infer(message: Any) -> InferRequest:
    """Return the request in a ``ModelInferRequest``.

    Raises:
        InvalidRequest: naming the field, what it holds, what is allowed.
    """
    oip.check_tensors("inputs", len(message.inputs))
    oip.check_tensors("outputs", len(message.outputs))
    return InferRequest(
        model_name=message.model_name,
        model_version=message.model_version,
        id=message.id,
        parameters=_parameters("parameters", message.parameters),
        inputs=_inputs(message),
        outputs=tuple(
            RequestedOutput(output.name, _parameters(f"outputs[{i}].parameters", output.parameters))
            for i, output in enumerate(message.outputs)
        ),
    )


def _parameters(where: str, messages: Mapping[str, Any]) -> Parameters:
    values: dict[str, Parameter] = {}
    for name, message in messages.items():
        field = message.WhichOneof("parameter_choice")
        if field is None:
            raise InvalidRequest(
                f"{where} has {shown(name)} without a value; set one of its fields.",
                param=f"{where}[{name[:40]}]",
            )
        values[name] = getattr(message, field)
    return values


def _inputs(message: Any) -> tuple[Tensor, ...]:
    for i, tensor in enumerate(message.inputs):
        where = f"inputs[{i}].parameters"
        oip.check_parameters(where, _parameters(where, tensor.parameters))
    raw = message.raw_input_contents
    if not raw:
        return tuple(_typed(f"inputs[{i}]", tensor) for i, tensor in enumerate(message.inputs))
    for i, tensor in enumerate(message.inputs):
        if tensor.HasField("contents"):
            raise InvalidRequest(
                f"inputs[{i}].contents is there beside raw_input_contents; send the data of all "
                "inputs in one of the two.",
                param=f"inputs[{i}].contents",
            )
    if len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} items, but there are {len(message.inputs)} inputs; "
            "send one item an input, in the same order.",
            param="raw_input_contents",
        )
    return tuple(
        _raw(f"inputs[{i}]", tensor, data)
        for i, (tensor, data) in enumerate(zip(message.inputs, raw, strict=True))
    )


def _raw(where: str, tensor: Any, data: bytes) -> Tensor:
    datatype = check_datatype(where, tensor.datatype)
    shape = check_shape(where, tuple(tensor.shape))
    return from_bytes(where, tensor.name, datatype, shape, data)


def _typed(where: str, tensor: Any) -> Tensor:
    datatype = check_datatype(where, tensor.datatype)
    shape = check_shape(where, tuple(tensor.shape))
    field = _contents_field(where, datatype, tensor.contents)
    values = list(getattr(tensor.contents, field))
    if not values:
        raise InvalidRequest(
            f"{where} has no data; send its elements in contents.{field}, or the bytes of all "
            "inputs in raw_input_contents.",
            param=f"{where}.contents",
        )
    return from_values(f"{where}.contents.{field}", tensor.name, datatype, shape, values)


def _contents_field(where: str, datatype: Datatype, contents: Any) -> str:
    """Return the field that holds the elements; refuse elements in any other."""
    field = _CONTENTS.get(datatype.name)
    if field is None:
        raise InvalidRequest(
            f"{where}.datatype is {datatype.name}, which typed contents cannot hold; send its "
            "bytes in raw_input_contents.",
            param=f"{where}.datatype",
        )
    others = [other.name for other, _ in contents.ListFields() if other.name != field]
    if others:
        raise InvalidRequest(
            f"{where}.contents has {', '.join(others)}; the elements of {datatype.name} are sent "
            f"in {field}, and in nothing else.",
            param=f"{where}.contents",
        )
    return field


# --- answers ----------------------------------------------------------------------------------


def render_infer(response: InferResponse) -> bytes:
    """Return the answer as a message, its data raw."""
    message = oip_pb2.ModelInferResponse(
        model_name=response.model_name,
        model_version=response.model_version,
        id=response.id,
        outputs=[
            oip_pb2.ModelInferResponse.InferOutputTensor(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
            )
            for tensor in response.outputs
        ],
        raw_output_contents=[to_bytes(tensor) for tensor in response.outputs],
    )
    for name, value in response.parameters.items():
        setattr(message.parameters[name], _parameter_field(value), value)
    return _bytes(message)


def render_server() -> bytes:
    """Return what this server is."""
    return _bytes(oip_pb2.ServerMetadataResponse(name="shapeserve", version=__version__))


def render_model(spec: ModelSpec) -> bytes:
    """Return what the model takes and gives."""
    return _bytes(
        oip_pb2.ModelMetadataResponse(
            name=spec.name,
            versions=[oip.VERSION],
            platform=oip.PLATFORM,
            inputs=[_metadata(info) for info in oip_rows.inputs_of(spec)],
            outputs=[_metadata(info) for info in oip.outputs_of(spec)],
        )
    )


def _metadata(info: oip_rows.TensorInfo) -> oip_pb2.ModelMetadataResponse.TensorMetadata:
    return oip_pb2.ModelMetadataResponse.TensorMetadata(
        name=info.name, datatype=info.datatype, shape=info.shape
    )


def render_ready(message: type[Message], ready: bool) -> bytes:
    """Return a response whose one field is ``live`` or ``ready``."""
    (field,) = message.DESCRIPTOR.fields
    return _bytes(message(**{field.name: ready}))


def _bytes(message: Message) -> bytes:
    return bytes(message.SerializeToString())


def _parameter_field(value: Parameter) -> str:
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param" if value < 2**63 else "uint64_param"
    return "string_param" if isinstance(value, str) else "double_param"
