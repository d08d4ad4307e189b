"""What every HTTP endpoint shares: replies, error replies, and the headers read from a request."""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, field
from typing import Literal, cast

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
OCTETS = "application/octet-stream"
EMBEDDINGS, MODELS, METRICS = "/v1/embeddings", "/v1/models", "/metrics"
RERANK, CLASSIFY = "/v1/rerank", "/v1/classify"
OPENAPI = "/openapi.json"
LIVE, READY = "/v2/health/live", "/v2/health/ready"
UI, WARMUP_UI = "/ui", "/v2/health/ui"
OIP = "/v2"
OIP_MODEL = "/v2/models/{model}"
OIP_VERSION = "/v2/models/{model}/versions/{version}"
COMPILE = f"{OIP_MODEL}/compile"
POLICY = f"{OIP_MODEL}/policy"
PATHS = (
    *(EMBEDDINGS, RERANK, CLASSIFY, MODELS),
    *(OIP, f"{OIP_MODEL}/infer", METRICS, OPENAPI, LIVE, READY, UI),
)
Encoding = Literal["gzip", "deflate"]
# Day-long requests are a client's mistake, and a bound keeps the arithmetic exact.
MAX_TIMEOUT_S = 86_400.0
# A body of nothing but "[]," would stop the whole process for 8 s while it is read: each list is an
# object for Python's collector. So many take 0.16 s.
MAX_LISTS = 250_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# What any log format and any header carries without quoting. 128 = two UUIDs and a prefix.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


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


def error_reply(error: RequestError, path: str = "") -> Reply:
    """Return the error in the form that clients of ``path`` read."""
    return Reply(error.status, _error_body(error, path), retry_after(error))


def retry_after(error: RequestError) -> dict[str, str]:
    """Return the header that says when to come again, if the error knows.

    In whole seconds, rounded up: a client that obeys it is not refused again for coming a
    fraction early.
    """
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def _error_body(error: RequestError, path: str) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}``.

    In the Open Inference Protocol ``error`` is a string, and the rest stands beside it.
    """
    body = error.body()
    if path == OIP or path.startswith(OIP + "/"):
        fields = dict(body["error"])
        return orjson.dumps({"error": fields.pop("message"), **fields})
    return orjson.dumps(body)


def route_error(path: str, method: str, allowed: tuple[str, ...]) -> Reply:
    """Return 404 for a path that nothing serves, 405 for one that serves other methods."""
    if not allowed:
        return error_reply(
            NotFound(
                f"nothing is served at {path[:200]!r}; this server has {', '.join(PATHS)}.",
                code="unknown_path",
            ),
            path,
        )
    error = InvalidRequest(
        f"{path[:200]} does not take {method[:20]!r}; use {' or '.join(allowed)}.",
        code="method_not_allowed",
    )
    return Reply(405, _error_body(error, path), {"allow": ", ".join(allowed)})


def is_request_id(value: str) -> bool:
    """Return whether a request id can stand in a log line as it is."""
    return REQUEST_ID.fullmatch(value) is not None


def check_request_id(value: str) -> str:
    """Return the request id if it can stand in a log line as it is, else raise a 400."""
    if not is_request_id(value):
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


def check_media_type(value: str | None, *, octets: bool = False) -> None:
    """Refuse a body that says it is not JSON in UTF-8. No header at all is taken for JSON.

    Args:
        value: of ``content-type``.
        octets: whether JSON followed by binary data is read too.
    """
    if value is None:
        return
    media, _, parameters = value.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    allowed = (JSON, OCTETS) if octets else (JSON,)
    if media.strip().lower() not in allowed or charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMediaType(
            f"content-type is {value[:80]!r}; this endpoint reads {' or '.join(allowed)} in UTF-8: "
            "send `content-type: application/json`."
        )


def parse_content_encoding(value: str | None) -> Encoding | None:
    """Return how the body is compressed, None if it is not."""
    coding = "identity" if value is None else value.strip().lower()
    if coding in ("identity", ""):
        return None
    if coding in ("gzip", "deflate"):
        return cast(Encoding, coding)
    raise UnsupportedMediaType(
        f"content-encoding is {value[:40] if value else value!r}; this server reads gzip, deflate "
        "and identity, one of them at a time.",
        code="unsupported_content_encoding",
    )


def check_lists(data: bytes) -> None:
    """Refuse JSON of more than ``MAX_LISTS`` lists and objects before it is read."""
    if data.count(b"[") + data.count(b"{") <= MAX_LISTS:
        return
    outside = _STRING.sub(b"", data)  # texts may have as many brackets as they like
    count = outside.count(b"[") + outside.count(b"{")
    if count > MAX_LISTS:
        raise InvalidRequest(
            f"the JSON has {count} lists and objects, at most {MAX_LISTS} are read; send the "
            "elements of a tensor as one flat list, or fewer rows a request."
        )


def decompress(body: bytes, encoding: Encoding, max_body_bytes: int) -> bytes:
    """Return the body as it was before compression; at most ``max_body_bytes`` are ever made."""
    # In HTTP, deflate is what zlib makes (RFC 9110, section 8.4.1.2); 16 asks for a gzip header.
    inflate = zlib.decompressobj(zlib.MAX_WBITS + (16 if encoding == "gzip" else 0))
    try:
        plain = inflate.decompress(body, max_body_bytes + 1)
    except zlib.error as error:
        raise _not_compressed(encoding, str(error)) from None
    if len(plain) > max_body_bytes:
        raise PayloadTooLarge(
            f"the {encoding} body has more than {max_body_bytes} bytes when it is decompressed, "
            "and that is the limit; send fewer inputs a request or raise `serve.max_body_bytes`."
        )
    if not inflate.eof:
        raise _not_compressed(encoding, "it ends too early")
    if inflate.unused_data:
        raise _not_compressed(encoding, f"{len(inflate.unused_data)} bytes follow its end")
    return plain


def _not_compressed(encoding: Encoding, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"content-encoding is {encoding}, but the body is not one stream of that: {why}; compress "
        "it again or leave the header out.",
        param="content-encoding",
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
