"""What every HTTP endpoint shares: replies, error replies, and the headers read from a request."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import orjson

from shapeserve.errors import (
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RequestError,
    UnsupportedMediaType,
)

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
EMBEDDINGS, MODELS, METRICS = "/v1/embeddings", "/v1/models", "/metrics"
RERANK, CLASSIFY = "/v1/rerank", "/v1/classify"
LIVE, READY = "/v2/health/live", "/v2/health/ready"
PATHS = (EMBEDDINGS, RERANK, CLASSIFY, MODELS, METRICS, LIVE, READY)
# Day-long requests are a client's mistake, and a bound keeps the arithmetic exact.
MAX_TIMEOUT_S = 86_400.0
# What any log format and any header carries without quoting. 128 = two UUIDs and a prefix.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP response; the server adds ``content-length`` and the request id."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = JSON


def json_reply(content: object, status: int = 200) -> Reply:
    """Return ``content`` as a JSON reply."""
    return Reply(status, orjson.dumps(content))


def error_reply(error: RequestError) -> Reply:
    """Return the error as ``{"error": {"message", "type", "param", "code"}}``.

    ``Retry-After`` is in whole seconds, rounded up: a client that obeys it is not refused
    again for coming a fraction early.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Reply(error.status, orjson.dumps(error.body()), headers)


def route_error(path: str, method: str, allowed: tuple[str, ...]) -> Reply:
    """Return 404 for a path that nothing serves, 405 for one that serves other methods."""
    if not allowed:
        return error_reply(
            NotFound(
                f"nothing is served at {path[:200]!r}; this server has {', '.join(PATHS)}.",
                code="unknown_path",
            )
        )
    error = InvalidRequest(
        f"{path} does not take {method[:20]!r}; use {' or '.join(allowed)}.",
        code="method_not_allowed",
    )
    return Reply(405, orjson.dumps(error.body()), {"allow": ", ".join(allowed)})


def check_request_id(value: str) -> str:
    """Return the request id if it can stand in a log line as it is, else raise a 400."""
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest(
            f"x-request-id has {len(value)} characters or some that are not allowed; send 1 to "
            "128 of A-Z a-z 0-9 . _ : / + = @ - or leave the header out.",
            param="x-request-id",
        )
    return value


def parse_timeout_s(value: str | None) -> float | None:
    """Return ``x-request-timeout-seconds`` as seconds, None if the header is absent."""
    if value is None:
        return None
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"x-request-timeout-seconds is {value[:40]!r}; it must be a number above 0 and at "
            f"most {MAX_TIMEOUT_S:.0f}; leave it out to wait without a limit.",
            param="x-request-timeout-seconds",
        )
    return timeout_s


def check_json_media_type(value: str | None) -> None:
    """Refuse a body that says it is not JSON in UTF-8. No header at all is taken for JSON."""
    if value is None:
        return
    media, _, parameters = value.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media.strip().lower() != JSON or charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMediaType(
            f"content-type is {value[:80]!r}; this endpoint reads application/json in UTF-8: "
            "send `content-type: application/json`."
        )


def too_large(size_bytes: int | None, max_body_bytes: int) -> PayloadTooLarge:
    """Return the 413 for a body of ``size_bytes`` (None: the end of it was never read)."""
    given = "more than that" if size_bytes is None else f"{size_bytes} bytes"
    return PayloadTooLarge(
        f"the body is {given}, the limit is {max_body_bytes} bytes; send fewer inputs a request "
        "or raise `serve.max_body_bytes`."
    )


def parse_content_length(value: str | None, max_body_bytes: int) -> int | None:
    """Return the announced body size in bytes, None if it is not announced (chunked)."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        raise InvalidRequest(
            f"content-length is {value[:40]!r}; it must be a number of bytes.",
            param="content-length",
        )
    size_bytes = int(value[:20])  # 20 digits hold every 64-bit length
    if size_bytes > max_body_bytes:
        raise too_large(size_bytes, max_body_bytes)
    return size_bytes
