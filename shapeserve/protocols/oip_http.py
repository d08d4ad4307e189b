"""Open Inference Protocol v2 over HTTP: JSON, and tensors as binary data after it.

``Inference-Header-Content-Length`` says where the JSON ends; the tensors that have
``binary_data_size`` follow in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import orjson

from shapeserve import __version__
from shapeserve.errors import InvalidRequest
from shapeserve.models.spec import ModelSpec
from shapeserve.protocols import oip, oip_rows
from shapeserve.protocols.fields import MISSING
from shapeserve.protocols.http import OCTETS, Reply, check_lists, json_reply
from shapeserve.protocols.oip_types import (
    InferRequest,
    InferResponse,
    RequestedOutput,
    Tensor,
    check_datatype,
    check_shape,
    from_bytes,
    from_values,
    shown,
    to_bytes,
    to_values,
)

HEADER_LENGTH: Final = "inference-header-content-length"
EXTENSIONS: Final = ("binary_tensor_data",)
# `model_name` is not of the protocol, but KServe's own client sends it.
_REQUEST: Final = ("id", "parameters", "inputs", "outputs", "model_name")
_INPUT: Final = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT: Final = ("name", "parameters")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An inference request, and what of it only HTTP has.

    Attributes:
        infer: the request, without the parameters of the binary data extension.
        binary: output name -> whether to answer with binary data, where the request says so.
        binary_default: the same for outputs that it says nothing about.
    """

    infer: InferRequest
    binary: Mapping[str, bool]
    binary_default: bool


class _Binary:
    """The binary data after the JSON, handed out in order."""

    def __init__(self, data: memoryview, *, announced: bool) -> None:
        self._data = data
        self._announced = announced

    def take(self, where: str, size_bytes: object) -> memoryview:
        """Return the next ``size_bytes`` bytes, the value of ``binary_data_size``."""
        param = f"{where}.parameters[binary_data_size]"
        if not self._announced:
            raise InvalidRequest(
                f"{param} is {shown(size_bytes)}, but the header Inference-Header-Content-Length "
                "is missing; send it with the length of the JSON in bytes.",
                param="Inference-Header-Content-Length",
            )
        if type(size_bytes) is not int or not 0 <= size_bytes <= len(self._data):
            raise InvalidRequest(
                f"{param} is {shown(size_bytes)}; it must be a whole number of bytes, and at most "
                f"the {len(self._data)} that are left after the JSON and the inputs before.",
                param=param,
            )
        taken, self._data = self._data[:size_bytes], self._data[size_bytes:]
        return taken

    def finish(self) -> None:
        """Refuse bytes that belong to no input."""
        if self._data:
            raise InvalidRequest(
                f"{len(self._data)} bytes follow the JSON and the inputs' binary data; make "
                "Inference-Header-Content-Length the length of the JSON, and each "
                "binary_data_size the length of its input's data.",
                param="Inference-Header-Content-Length",
            )


def parse(body: bytes, header_length: str | None, model: str, version: str = "") -> HttpRequest:
    """Return the inference request in ``body``.

    Args:
        body: JSON in UTF-8, and binary data after it.
        header_length: ``Inference-Header-Content-Length``; None if there is no such header.
        model: name or alias, from the path.
        version: from the path, or empty.

    Raises:
        InvalidRequest: 400, naming the field, its value, the bound and the remedy.
    """
    end = _json_bytes(header_length, len(body))
    view = memoryview(body)
    fields = _read_object(body if end == len(body) else body[:end], header_length)
    binary = _Binary(view[end:], announced=header_length is not None)
    _check_names(fields, model)
    parameters = _parameters("parameters", fields.get("parameters"))
    inputs = tuple(
        _input(f"inputs[{i}]", item, binary)
        for i, item in enumerate(_list("inputs", fields.get("inputs", MISSING), required=True))
    )
    binary.finish()
    asked = [
        _output(f"outputs[{i}]", item)
        for i, item in enumerate(_list("outputs", fields.get("outputs")))
    ]
    default = _pop_flag("parameters", parameters, "binary_data_output")
    request_id = _text("id", fields.get("id")) or ""
    outputs = tuple(output for output, _ in asked)
    return HttpRequest(
        InferRequest(model, version, request_id, parameters, inputs, outputs),
        {output.name: flag for output, flag in asked if flag is not None},
        bool(default),
    )


def _check_names(fields: dict[str, Any], model: str) -> None:
    _check_fields("the request", "", fields, _REQUEST)
    if fields.get("model_name") not in (None, model):
        raise InvalidRequest(
            f"model_name is {shown(fields['model_name'])}, but the path names {shown(model)}; "
            "leave it out.",
            param="model_name",
        )


def _json_bytes(value: str | None, body_bytes: int) -> int:
    """Return the length of the JSON."""
    if value is None:
        return body_bytes
    length = int(value[:20]) if value.isascii() and value.isdigit() else -1
    if not 1 <= length <= body_bytes:
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {shown(value)}; it must be the length of the JSON "
            f"in bytes, 1 to the {body_bytes} of the body. Tensors without JSON are not read.",
            param="Inference-Header-Content-Length",
        )
    return length


def _read_object(data: bytes, header_length: str | None) -> dict[str, Any]:
    check_lists(data)
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        hint = (
            "if binary data follows the JSON, the header Inference-Header-Content-Length must say "
            "where it begins"
            if header_length is None
            else f"Inference-Header-Content-Length says that it has {len(data)} bytes"
        )
        raise InvalidRequest(
            f"the JSON cannot be read: {error}; NaN, Infinity, comments and trailing commas are "
            f"not JSON; {hint}.",
            code="invalid_json",
        ) from None
    return _object(None, fields)


def _object(where: str | None, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{where or 'the request'} is {shown(value)}; it must be a JSON object.", param=where
        )
    return value


def _list(name: str, value: Any, *, required: bool = False) -> list[Any]:
    if value is None and not required:
        return []
    if not isinstance(value, list) or (required and not value):
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must be a list of "
            f"tensors{', and not empty' if required else ''}.",
            param=name,
        )
    oip.check_tensors(name, len(value))
    return value


def _text(where: str, value: Any, *, required: bool = False) -> str | None:
    if value is None and not required:
        return None
    if not isinstance(value, str) or (required and not value):
        raise InvalidRequest(
            f"{where} is {shown(value)}; it must be a string"
            f"{', and not empty' if required else ''}.",
            param=where,
        )
    return value


def _check_fields(what: str, where: str, fields: dict[str, Any], allowed: Sequence[str]) -> None:
    unknown = next((name for name in fields if name not in allowed), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{what} has the unknown field {shown(unknown)}; allowed are {', '.join(allowed)}.",
            param=f"{where}{unknown[:40]}",
            code="unknown_field",
        )


def _parameters(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    parameters = _object(where, value)
    for name, given in parameters.items():
        if not isinstance(given, (str, int, float)):  # a bool is an int
            raise InvalidRequest(
                f"{where}[{name[:40]}] is {shown(given)}; it must be a string, a number or a "
                "boolean.",
                param=f"{where}[{name[:40]}]",
            )
    return parameters


def _pop_flag(where: str, parameters: dict[str, Any], name: str) -> bool | None:
    value = parameters.pop(name, None)
    if value is not None and type(value) is not bool:
        raise InvalidRequest(
            f"{where}[{name}] is {shown(value)}; it must be true or false.",
            param=f"{where}[{name}]",
        )
    return value


def _input(where: str, item: Any, binary: _Binary) -> Tensor:
    fields = _object(where, item)
    _check_fields(where, f"{where}.", fields, _INPUT)
    name = _text(f"{where}.name", fields.get("name", MISSING), required=True)
    datatype = check_datatype(where, fields.get("datatype", MISSING))
    shape = check_shape(where, fields.get("shape", MISSING))
    parameters = _parameters(f"{where}.parameters", fields.get("parameters"))
    oip.check_parameters(f"{where}.parameters", parameters)
    size_bytes, data = parameters.get("binary_data_size"), fields.get("data")
    if (size_bytes is None) == (data is None):
        given = "neither" if data is None else "both"
        raise InvalidRequest(
            f"{where} has {given} of `data` and the parameter `binary_data_size`; send its "
            "elements one way.",
            param=where,
        )
    if data is None:
        return from_bytes(where, str(name), datatype, shape, binary.take(where, size_bytes))
    return from_values(f"{where}.data", str(name), datatype, shape, _flat(where, data, shape))


def _flat(where: str, data: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the elements in row-major order; lists in lists must have the shape."""
    if not isinstance(data, list):
        raise InvalidRequest(
            f"{where}.data is {shown(data)}; it must be a list of the elements, or lists of lists "
            "in the tensor's shape.",
            param=f"{where}.data",
        )
    if not data or not isinstance(data[0], list):
        return data
    level: list[Any] = [data]
    for dim, size in enumerate(shape):
        bad = next((part for part in level if type(part) is not list or len(part) != size), None)
        if bad is not None:
            given = f"a list of {len(bad)}" if isinstance(bad, list) else shown(bad)
            raise InvalidRequest(
                f"{where}.data has {given} in dim {dim}, where shape {shown(list(shape))} has "
                f"{size} elements; send shape and data that agree.",
                param=f"{where}.data",
            )
        level = list(chain.from_iterable(level))
    return level


def _output(where: str, item: Any) -> tuple[RequestedOutput, bool | None]:
    fields = _object(where, item)
    _check_fields(where, f"{where}.", fields, _OUTPUT)
    name = _text(f"{where}.name", fields.get("name", MISSING), required=True)
    parameters = _parameters(f"{where}.parameters", fields.get("parameters"))
    flag = _pop_flag(f"{where}.parameters", parameters, "binary_data")
    return RequestedOutput(str(name), parameters), flag


# --- answers ----------------------------------------------------------------------------------


def render(request: HttpRequest, response: InferResponse, headers: dict[str, str]) -> Reply:
    """Return the answer: JSON, and after it the outputs that are to be binary data."""
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor in response.outputs:
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if request.binary.get(tensor.name, request.binary_default):
            parts.append(to_bytes(tensor))
            outputs.append({**described, "parameters": {"binary_data_size": len(parts[-1])}})
        else:
            outputs.append({**described, "data": to_values(tensor)})
    content = _content(response) | {"outputs": outputs}
    head = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    if not parts:
        return Reply(200, head, headers)
    headers = {**headers, HEADER_LENGTH: str(len(head))}
    return Reply(200, b"".join((head, *parts)), headers, OCTETS)


def _content(response: InferResponse) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        content["id"] = response.id
    if response.parameters:
        content["parameters"] = dict(response.parameters)
    return content


def render_server() -> Reply:
    """Return what this server is."""
    return json_reply({"name": "shapeserve", "version": __version__, "extensions": EXTENSIONS})


def render_model(spec: ModelSpec) -> Reply:
    """Return what the model takes and gives."""
    return json_reply(
        {
            "name": spec.name,
            "versions": [oip.VERSION],
            "platform": oip.PLATFORM,
            "inputs": [_metadata(info) for info in oip_rows.inputs_of(spec)],
            "outputs": [_metadata(info) for info in oip.outputs_of(spec)],
        }
    )


def _metadata(info: oip_rows.TensorInfo) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": info.name, "datatype": info.datatype, "shape": info.shape}
    return {**tensor, "optional": True} if info.optional else tensor


def render_ready(model: str, *, ready: bool, message: str, done: int, total: int) -> Reply:
    """Return 200 while the model answers, else 503 with the progress of its warm-up."""
    content = {"name": model, "ready": ready, "done": done, "total": total, "message": message}
    return json_reply(content, 200 if ready else 503)
