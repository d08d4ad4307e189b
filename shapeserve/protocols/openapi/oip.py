"""``/v2``: the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shapeserve.models.spec import ModelSpec
from shapeserve.protocols import http, oip
from shapeserve.protocols.fields import OVER_MAX
from shapeserve.protocols.oip_http import EXTENSIONS, HEADER_LENGTH
from shapeserve.protocols.oip_rows import TEXT, takes_text
from shapeserve.protocols.oip_types import (
    DATATYPES,
    MAX_DIMS,
    MAX_PARAMETERS,
    MAX_TENSORS,
    MAX_WORD,
)
from shapeserve.protocols.openapi.parts import (
    READS,
    REPORT,
    Data,
    answer,
    content,
    errors,
    fields,
    get,
    list_of,
    path_parameter,
    post,
    ref,
    text,
    whole,
    words,
)

_SCALAR: Data = {"type": ["string", "number", "boolean"], "maxLength": MAX_WORD}
_NAME = text(minLength=1)


def paths(specs: Iterable[ModelSpec]) -> Data:
    """Return path -> method -> operation."""
    found: Data = {
        http.OIP: {
            "get": get(
                "serverMetadata",
                "What this server is.",
                {
                    "200": answer("The server.", content(ref("Server"))),
                    **errors("OipError", (400, 500)),
                },
            )
        }
    }
    texts = [spec.name for spec in specs if takes_text(spec)]
    for path, suffix in ((http.OIP_MODEL, ""), (http.OIP_VERSION, "Version")):
        parameters = [ref("Model", "parameters")]
        if suffix:
            parameters.append(ref("Version", "parameters"))
        found[path] = {"get": _metadata(parameters, suffix)}
        found[f"{path}/ready"] = {"get": _ready(parameters, suffix)}
        found[f"{path}/infer"] = {"post": _infer(parameters, suffix, texts)}
    return found


def version_parameter() -> Data:
    """Return the part of the path that :func:`paths` refers to."""
    return path_parameter("version", "1 is the only version.", words(oip.VERSION))


def _metadata(parameters: Sequence[Data], suffix: str) -> Data:
    responses = {
        "200": answer("The model.", content(ref("ModelMetadata"))),
        **errors("OipError", (400, 404, 500)),
    }
    return get(f"modelMetadata{suffix}", "What a model takes and gives.", responses, parameters)


def _ready(parameters: Sequence[Data], suffix: str) -> Data:
    state = content(ref("ModelReady"))
    responses = {
        "200": answer("It answers.", state),
        "503": answer("It does not; how far its warm-up is.", state),
        **errors("OipError", (400, 404, 500)),
    }
    return get(f"modelReady{suffix}", "Whether a model answers.", responses, parameters)


def _infer(parameters: Sequence[Data], suffix: str, texts: Sequence[str]) -> Data:
    binary = text("The JSON, and after it the binary data.", format="binary")
    length: Data = {HEADER_LENGTH: {"schema": whole(1), "description": "Bytes of the JSON."}}
    bodies = content(ref("InferRequest")) | content(binary, http.OCTETS)
    if texts:
        bodies[http.JSON]["example"] = _example()
    responses = {
        "200": answer(
            "The outputs, as binary data where that was asked for.",
            content(ref("InferResponse")) | content(binary, http.OCTETS),
            REPORT | length,
        ),
        **errors("OipError", (404, *READS)),
    }
    header = {"name": HEADER_LENGTH, "in": "header", **length[HEADER_LENGTH]}
    summary = "Tensors or texts to tensors."
    return post(f"infer{suffix}", summary, bodies, responses, [*parameters, header])


def _example() -> Data:
    rows = ["A cat.", "A dog."]
    tensor = {"name": TEXT, "shape": [len(rows)], "datatype": "BYTES", "data": rows}
    return {"inputs": [tensor]}


def schemas() -> Data:
    """Return the components that :func:`paths` refers to."""
    return {
        "Server": fields(
            {
                "name": words("shapeserve"),
                "version": text(),
                "extensions": list_of(words(*EXTENSIONS)),
            }
        ),
        "ModelMetadata": fields(
            {
                "name": _NAME,
                "versions": list_of(words(oip.VERSION), 1, 1),
                "platform": words(oip.PLATFORM),
                "inputs": list_of(ref("TensorMetadata")),
                "outputs": list_of(ref("TensorMetadata")),
            }
        ),
        "TensorMetadata": fields(
            {
                "name": _NAME,
                "datatype": words(*DATATYPES),
                "shape": list_of(whole(-1), 1),
                "optional": {"const": True},
            },
            optional=("optional",),
        ),
        "ModelReady": fields(
            {
                "name": _NAME,
                "ready": {"type": "boolean"},
                "done": whole(),
                "total": whole(),
                "message": text(),
            }
        ),
        **_request_schemas(),
        **_response_schemas(),
    }


def _request_schemas() -> Data:
    named = {"name": _NAME, "datatype": words(*DATATYPES)}
    shape = list_of(whole(1), 1, MAX_DIMS)
    timeout = whole(maximum=int(http.MAX_TIMEOUT_S * 1e6), description="Microseconds; 0: none.")
    flag = {"type": ["boolean", "null"]}
    return {
        "InferRequest": fields(
            {
                "id": {"type": ["string", "null"], "maxLength": MAX_WORD},
                "model_name": {"type": ["string", "null"], "description": "As in the path."},
                "parameters": _parameters(
                    over_max=words(*OVER_MAX), timeout=timeout, binary_data_output=flag
                ),
                "inputs": list_of(ref("InferInput"), 1, MAX_TENSORS),
                "outputs": list_of(ref("InferRequestedOutput"), 0, MAX_TENSORS)
                | {"type": ["array", "null"]},
            },
            optional=("id", "model_name", "parameters", "outputs"),
        ),
        "InferInput": fields(
            {
                **named,
                "shape": shape,
                "parameters": _parameters(binary_data_size=whole()),
                "data": {
                    "type": ["array", "null"],
                    "items": {"type": ["number", "string", "boolean", "array"]},
                    "description": "The elements, flat or nested; or `binary_data_size`.",
                },
            },
            optional=("parameters", "data"),
        ),
        "InferRequestedOutput": fields(
            {"name": _NAME, "parameters": _parameters(binary_data=flag)}, optional=("parameters",)
        ),
    }


def _response_schemas() -> Data:
    tensor = fields(
        {
            "name": _NAME,
            "datatype": words(*DATATYPES),
            "shape": list_of(whole(1), 1),
            "data": list_of({"type": ["number", "string", "boolean"]}),
            "parameters": fields({"binary_data_size": whole()}),
        },
        optional=("data", "parameters"),
    )
    return {
        "InferResponse": fields(
            {
                "model_name": _NAME,
                "model_version": words(oip.VERSION),
                "id": text("As in the request.", maxLength=MAX_WORD),
                "parameters": {
                    "type": "object",
                    "additionalProperties": _SCALAR,
                    "description": "Those of the request that mean nothing here.",
                },
                "outputs": list_of(tensor, 1),
            },
            optional=("id", "parameters"),
        )
    }


def _parameters(**known: Data) -> Data:
    """Return the schema of parameters: those of ours, none that are refused, and any others."""
    refused = {"anyOf": [{"enum": sorted(oip.REFUSED)}, {"pattern": f"^{oip.REFUSED_PREFIX}"}]}
    return {
        "type": ["object", "null"],
        "properties": known,
        "additionalProperties": _SCALAR,
        "propertyNames": {"not": refused, "maxLength": MAX_WORD},
        "maxProperties": MAX_PARAMETERS,
    }
