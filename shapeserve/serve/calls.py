"""One request under way, whatever its protocol: what is known of it, told and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from shapeserve.errors import DeadlineExceeded, RequestError
from shapeserve.metrics import NO_MODEL, Endpoint, Metrics, Outcome, RejectReason
from shapeserve.protocols import http

log = logging.getLogger("shapeserve.serve")

# Ray answers the same header with a plain 408 when the time is up; answering earlier by this
# share of it, within these bounds, lets the client get the JSON error.
ANSWER_SHARE = 0.1
MIN_ANSWER_S = 0.02
MAX_ANSWER_S = 0.25

_REJECTS = {
    "queue_full": RejectReason.QUEUE_FULL,
    "queue_tokens": RejectReason.QUEUE_TOKENS,
    "too_long": RejectReason.TOO_LONG,
    "queue_bytes": RejectReason.QUEUE_BYTES,
    "too_many_rows": RejectReason.TOO_MANY_ROWS,
    "too_many_tokens": RejectReason.TOO_MANY_TOKENS,
    "model_not_found": RejectReason.UNKNOWN_MODEL,
    "version_not_found": RejectReason.UNKNOWN_MODEL,
    "body_too_large": RejectReason.BODY_TOO_LARGE,
    "unsupported_media_type": RejectReason.MEDIA_TYPE,
    "unsupported_content_encoding": RejectReason.MEDIA_TYPE,
    "unavailable": RejectReason.UNAVAILABLE,
}


@dataclass(slots=True)
class Call:
    """What the log line and the metrics need to know of a request.

    Attributes:
        headers: lower-case names; of a repeated header the last one.
        method: HTTP method, ``HEAD`` as ``GET``.
        path: path below the application's prefix.
        variables: what stands for the names in the route's path.
        endpoint: metric label.
        model: metric label, set as soon as the request has named a served model.
        request_id: the client's or Ray's.
        started_s: arrival on ``time.perf_counter()``.
        deadline_s: when to give up, on ``time.monotonic()``; None: never.
        held_bytes: of its body, as it came and decompressed.
    """

    headers: Mapping[str, str]
    method: str
    path: str
    variables: Mapping[str, str] = field(default_factory=dict)
    endpoint: Endpoint = Endpoint.OTHER
    model: str = NO_MODEL
    request_id: str = "-"
    started_s: float = field(default_factory=time.perf_counter)
    deadline_s: float | None = None
    held_bytes: int = 0

    def set_deadline(self) -> None:
        """Read ``x-request-timeout-seconds``.

        Raises:
            InvalidRequest: it is no number of seconds.
            DeadlineExceeded: it leaves no time to answer.
        """
        timeout_s = http.parse_timeout_s(self.headers.get("x-request-timeout-seconds"))
        if timeout_s is None:
            return
        margin_s = min(max(ANSWER_SHARE * timeout_s, MIN_ANSWER_S), MAX_ANSWER_S)
        self.deadline_s = time.monotonic() + timeout_s - margin_s
        if margin_s >= timeout_s:
            raise DeadlineExceeded(
                "the deadline of the call (x-request-timeout-seconds, in gRPC also the client's "
                f"own) leaves less than the {MIN_ANSWER_S * 1e3:.0f} ms that an answer takes; "
                "allow more time"
            )

    @property
    def fields(self) -> dict[str, str]:
        """What every line about this request has in a structured log."""
        known = {"endpoint": str(self.endpoint), "model": self.model}
        return known if self.request_id == "-" else {**known, "request_id": self.request_id}

    def limit(self, timeout_s: float | None) -> None:
        """Give up ``timeout_s`` from now, if that is sooner."""
        if timeout_s is not None:
            end_s = time.monotonic() + timeout_s
            self.deadline_s = end_s if self.deadline_s is None else min(end_s, self.deadline_s)

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s


class Ledger:
    """Logs refusals and counts every request once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def refuse(self, error: RequestError, call: Call) -> None:
        """Count and log a request that is answered with ``error``."""
        if error.status < 500 or error.status == 503:
            reason = _REJECTS.get(error.code, RejectReason.INVALID)
            self._metrics.rejected_total.child(call.model, reason).inc()
        # The path is the client's text and stays out of the log; the endpoint is ours.
        log.log(
            logging.INFO if error.status < 429 else logging.WARNING,
            "%s %d %s model=%s request=%s: %s",
            *(call.endpoint, error.status, error.code),
            *(call.model, call.request_id, error.message),
            extra={**call.fields, "status": error.status, "code": error.code},
        )

    def fail(self, call: Call) -> RequestError:
        """Log the exception being handled; return what the client is told of it."""
        log.exception("%s failed, request=%s", call.endpoint, call.request_id, extra=call.fields)
        return RequestError(
            f"internal error; the server's log has it under request id {call.request_id}."
        )

    def record(self, call: Call, outcome: Outcome) -> None:
        """Count a request that is over, and its duration."""
        seconds = time.perf_counter() - call.started_s
        self._metrics.record_request(call.model, call.endpoint, outcome, seconds)
