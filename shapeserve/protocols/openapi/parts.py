"""What the parts of the document are made of: schemas, parameters, headers, error responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from shapeserve.protocols.http import JSON, MAX_TIMEOUT_S, REQUEST_ID

Data = dict[str, Any]
Form = Literal["Error", "OipError"]
"""The two forms of an error: OpenAI's, and that of the Open Inference Protocol below ``/v2``."""

ERRORS: Final[Mapping[int, tuple[str, ...]]] = {
    400: (
        "empty_input",
        "invalid_json",
        "invalid_value",
        "too_long",
        "too_many_rows",
        "too_many_tokens",
        "too_much_output",
        "too_short",
        "unknown_field",
        "unsupported_parameter",
    ),
    404: ("model_not_found", "unknown_path", "version_not_found"),
    405: ("method_not_allowed",),
    413: ("body_too_large",),
    415: ("unsupported_content_encoding", "unsupported_media_type"),
    429: ("queue_bytes", "queue_full", "queue_tokens"),
    500: ("internal_error", "row_failed", "swap_failed"),
    503: ("unavailable",),
    504: ("deadline_exceeded",),
}
"""Status -> the words that ``code`` may be."""

_WHEN: Final[Mapping[int, str]] = {
    400: "The request is wrong; the message says what is allowed.",
    404: "Nothing is served under that name or path.",
    405: "The path takes other methods.",
    413: "The body is over `serve.max_body_bytes`, as it is or decompressed.",
    415: "The body's type or compression is not read here.",
    429: "The queue is full; nothing of the request was queued.",
    500: "A row failed in the model, a replica did not take a policy, or a defect of the server.",
    503: "Not ready, draining, or the device thread died.",
    504: "The deadline passed before the rows ran.",
}
_TYPES: Final = ("invalid_request_error", "overloaded_error", "server_error", "timeout_error")
CUT_FROM: Final = (
    "Tokens of the row, or pair, before it was truncated; of a very long text at least that many."
)
READS: Final = (400, 413, 415, 429, 500, 503, 504)
"""What an inference request may be answered with, beside 200, 404 and Ray's 408."""


def ref(name: str, kind: str = "schemas") -> Data:
    """Return a reference to a component."""
    return {"$ref": f"#/components/{kind}/{name}"}


def fields(properties: Data, optional: Iterable[str] = (), **more: Any) -> Data:
    """Return the schema of an object with these properties and no others."""
    required = [name for name in properties if name not in set(optional)]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required, **more} if required else {**schema, **more}


def long_rows(
    properties: Data, over_max: Sequence[str], *, optional: Sequence[str], examples: list[Data]
) -> Data:
    """Return the schema of a request of texts, with the fields that all of them have.

    Args:
        properties: the request's own fields.
        over_max: what may become of a row beyond the largest bucket.
        optional: those of ``properties`` that may be left out.
        examples: valid requests.
    """
    shared: Data = {
        "user": {"type": ["string", "null"], "description": "Accepted and ignored."},
        "truncate": {
            "type": ["boolean", "null"],
            "description": "true is short for `over_max: truncate`.",
        },
        "over_max": {
            "enum": [*over_max, None],
            "description": "What to do with a row beyond the largest bucket.",
        },
    }
    two_choices: Data = {
        "truncate": {"const": True},
        "over_max": {"enum": [choice for choice in over_max if choice != "truncate"]},
    }
    return fields(
        properties | shared,
        optional=(*optional, *shared),
        **{"not": {"properties": two_choices, "required": list(two_choices)}},
        examples=examples,
    )


def list_of(items: Data, least: int = 0, most: int | None = None) -> Data:
    """Return the schema of a list."""
    bounds = {"minItems": least or None, "maxItems": most}
    return {
        "type": "array",
        "items": items,
        **{key: value for key, value in bounds.items() if value is not None},
    }


def text(description: str = "", **more: Any) -> Data:
    """Return the schema of a string."""
    return {"type": "string", **({"description": description} if description else {}), **more}


def whole(least: int = 0, **more: Any) -> Data:
    """Return the schema of a whole number."""
    return {"type": "integer", "minimum": least, **more}


def words(*allowed: str | None) -> Data:
    """Return the schema of one of these words; None stands for null."""
    return {"enum": list(allowed)}


def content(schema: Data, media_type: str = JSON) -> Data:
    """Return what a body holds."""
    return {media_type: {"schema": schema}}


def answer(description: str, bodies: Data, headers: Data | None = None) -> Data:
    """Return a response; every one has the request id."""
    return {"description": description, "headers": _REQUEST_ID | (headers or {}), "content": bodies}


def page(description: str) -> Data:
    """Return a response that is a page for people."""
    headers = {
        "content-security-policy": _header("It loads and runs nothing.", text(), required=True),
        "cache-control": _header("It is kept nowhere.", words("no-store"), required=True),
        "referrer-policy": _header("", words("no-referrer"), required=True),
        "x-content-type-options": _header("", words("nosniff"), required=True),
    }
    return answer(description, content(text(), "text/html"), headers)


def errors(form: Form, statuses: Sequence[int]) -> Data:
    """Return status -> error response in that form."""
    return {str(status): ref(f"{form}{status}", "responses") for status in statuses}


def error_responses() -> Data:
    """Return the components that :func:`errors` refers to."""
    return {
        f"{form}{status}": _error_response(form, status)
        for form in ("Error", "OipError")
        for status in ERRORS
    }


def _error_response(form: str, status: int) -> Data:
    about: Data = {
        "type": words(*_TYPES),
        "param": {"type": ["string", "null"], "description": "The field, header or row at fault."},
        "code": words(*ERRORS[status]),
    }
    message = text("What was given, what is allowed, what to do.")
    schema = (
        fields({"error": fields({"message": message, **about})})
        if form == "Error"
        else fields({"error": message, **about})
    )
    more = {405: _ALLOW, 429: _RETRY_AFTER, 503: _MAY_RETRY}.get(status)
    return answer(_WHEN[status], content(schema), more)


def _header(description: str, schema: Data, *, required: bool = False) -> Data:
    return {"description": description, "required": required, "schema": schema}


_REQUEST_ID: Final[Data] = {"x-request-id": ref("RequestId", "headers")}
_ALLOW: Final[Data] = {"allow": _header("Methods that the path takes.", text(), required=True)}
_RETRY_AFTER: Final[Data] = {
    "retry-after": _header("Seconds to wait before another try.", whole(1), required=True)
}
_MAY_RETRY: Final[Data] = {"retry-after": _header("There while the service stops.", whole(1))}
REPORT: Final[Data] = {
    f"x-shapeserve-{name}": ref(f"Shapeserve{name.capitalize()}", "headers")
    for name in ("modes", "buckets", "fallbacks", "truncated", "split")
}
"""Headers that say how the rows of an answer ran."""


_PLAIN: Final = content(text(), "text/plain")


def header_components() -> Data:
    """Return the components that responses refer to for their headers."""
    counts = {"type": "string", "pattern": "^[^=]+=[0-9]+(,[^=]+=[0-9]+)*$"}
    return {
        "RequestId": _header("The caller's, or one that was made.", text()),
        "ShapeserveModes": _header("Mode = rows that ran so.", counts, required=True),
        "ShapeserveBuckets": _header("Buckets, with the rows of each.", text(), required=True),
        "ShapeserveFallbacks": _header("Reason = rows that ran without a bucket.", counts),
        "ShapeserveTruncated": _header("Rows that were truncated.", whole(1)),
        "ShapeserveSplit": _header("Rows that were split.", whole(1)),
    }


def header_parameters() -> Data:
    """Return the components that operations refer to for the headers of a request."""
    return {
        "RequestId": _parameter(
            "x-request-id",
            "Taken over into the response and the log.",
            text(pattern=f"^{REQUEST_ID.pattern}$"),
        ),
        "Timeout": _parameter(
            "x-request-timeout-seconds",
            "The deadline. One that leaves less than 20 ms is a 504 at once.",
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
        ),
        "ContentEncoding": _parameter(
            "content-encoding",
            "How the body is compressed; empty is identity.",
            words("gzip", "deflate", "identity", ""),
        ),
    }


def _parameter(name: str, description: str, schema: Data) -> Data:
    return {"name": name, "in": "header", "description": description, "schema": schema}


REQUEST_HEADERS: Final = [
    ref(name, "parameters") for name in ("RequestId", "Timeout", "ContentEncoding")
]
"""Of every operation that reads a body."""


def path_parameter(name: str, description: str, schema: Data) -> Data:
    """Return a part of the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


def get(
    operation: str, summary: str, responses: Data, parameters: Iterable[Data] = (), **more: Any
) -> Data:
    """Return an operation without a body."""
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [*parameters, ref("RequestId", "parameters")],
        "responses": responses,
        **more,
    }


def text_task(operation: str, summary: str, request: str, about: str, reply: str) -> Data:
    """Return the operations of a path where texts are sent and rows answered.

    Args:
        operation: its id.
        summary: what it is for.
        request: component of the request.
        about: what the answer is.
        reply: component of the answer.
    """
    responses = {
        "200": answer(about, content(ref(reply)), REPORT),
        **errors("Error", (404, *READS)),
    }
    return {"post": post(operation, summary, content(ref(request)), responses)}


def post(
    operation: str, summary: str, bodies: Data, responses: Data, parameters: Iterable[Data] = ()
) -> Data:
    """Return an operation with a body."""
    late = answer("The deadline passed while the rows ran; from Ray.", _PLAIN)
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [*parameters, *REQUEST_HEADERS],
        "requestBody": {"required": True, "content": bodies},
        "responses": responses | {"408": late},
    }
