"""The HTTP side of one replica: from a Starlette request to a reply. Knows nothing of Ray.

The order of an embeddings request: headers are checked, the body is read up to the limit, a
worker thread parses, tokenises and routes it, the engine answers, the reply is rendered. Every
request is counted exactly once, in :meth:`Frontend.__call__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shapeserve.errors import DeadlineExceeded, PayloadTooLarge, RequestError, RowFailed
from shapeserve.metrics import NO_MODEL, Endpoint, Metrics, Outcome, RejectReason
from shapeserve.protocols import health, http, openai
from shapeserve.protocols.http import Reply

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine, PreparedSample, Result

log = logging.getLogger("shapeserve.serve")

# Tokenisers release the GIL; more threads than this would only fight the model for the cores.
PREPARE_THREADS = 2
# Below this a reply renders in well under a millisecond, less than a hop to a thread costs.
INLINE_ROWS = 16
# Of a body over the limit, this many times the limit is read and thrown away, so that the client
# is still there to read the 413; a proxy that meets an unread body resets the connection instead.
DISCARD_FACTOR = 4
DISCARD_S = 5.0
# Ray answers the same header with a plain 408 when the time is up; answering earlier by this
# share of it, within these bounds, lets the client get the JSON error.
ANSWER_SHARE = 0.1
MIN_ANSWER_S = 0.02
MAX_ANSWER_S = 0.25

_REJECTS = {
    "queue_full": RejectReason.QUEUE_FULL,
    "queue_tokens": RejectReason.QUEUE_TOKENS,
    "too_long": RejectReason.TOO_LONG,
    "too_many_rows": RejectReason.TOO_MANY_ROWS,
    "model_not_found": RejectReason.UNKNOWN_MODEL,
    "body_too_large": RejectReason.BODY_TOO_LARGE,
    "unsupported_media_type": RejectReason.MEDIA_TYPE,
    "unavailable": RejectReason.UNAVAILABLE,
}


@dataclass(slots=True)
class Call:
    """One request under way: what the log line and the metrics need to know of it.

    Attributes:
        headers: lower-case names; of a repeated header the last one.
        method: HTTP method, ``HEAD`` as ``GET``.
        path: path below the application's prefix.
        endpoint: metric label.
        model: metric label, set as soon as the request has named a served model.
        request_id: the client's or Ray's.
        started_s: arrival on ``time.perf_counter()``.
        deadline_s: when to give up, on ``time.monotonic()``; None: never.
    """

    headers: Mapping[str, str]
    method: str
    path: str
    endpoint: Endpoint = Endpoint.OTHER
    model: str = NO_MODEL
    request_id: str = "-"
    started_s: float = field(default_factory=time.perf_counter)
    deadline_s: float | None = None


Handler = Callable[[Request, Call], Awaitable[Reply]]


class Frontend:
    """Answers requests for a set of engines.

    Args:
        engines: model name -> started engine.
        aliases: model name -> further names of it.
        metrics: where requests are counted; the engines' own.
        max_body_bytes: longer bodies are refused with 413.
        metrics_text: returns the exposition of all replicas.
        report: returns this replica's own health report.

    Thread rule: one event loop. Nothing here blocks it.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        aliases: Mapping[str, tuple[str, ...]],
        metrics: Metrics,
        max_body_bytes: int,
        metrics_text: Callable[[], Awaitable[str]],
        report: Callable[[], health.ReplicaReport],
    ) -> None:
        self._engines = engines
        created_s = int(time.time())
        self._infos = [
            _info(engine, aliases.get(name, ()), created_s) for name, engine in engines.items()
        ]
        self._models = openai.by_name(self._infos)
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._metrics_text = metrics_text
        self._report = report
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, "shapeserve-prepare")
        self._routes: dict[str, tuple[str, Endpoint, Handler]] = {
            http.EMBEDDINGS: ("POST", Endpoint.EMBEDDINGS, self._embeddings),
            http.MODELS: ("GET", Endpoint.MODELS, self._list_models),
            http.METRICS: ("GET", Endpoint.METRICS, self._scrape),
            http.LIVE: ("GET", Endpoint.OTHER, self._live),
            http.READY: ("GET", Endpoint.OTHER, self._ready),
        }

    async def __call__(self, request: Request) -> Response:
        """Answer one request; only the cancellation by Ray is raised (the client went away)."""
        call = _call_of(request)
        try:
            reply = await self._route(request, call)
        except asyncio.CancelledError:  # the client went away, or Ray has answered 408 for us
            late = call.deadline_s is not None and time.monotonic() >= call.deadline_s
            self._record(call, Outcome.DEADLINE if late else Outcome.CANCELLED)
            raise
        except ClientDisconnect:  # in the middle of its body; nobody reads this
            reply = Reply(499, b"")
        except RequestError as error:
            reply = self._refuse(error, call)
        except Exception:
            log.exception("%s failed, request=%s", call.endpoint, call.request_id)
            why = f"internal error; the server's log has it under request id {call.request_id}."
            reply = http.error_reply(RequestError(why))
        self._record(call, Outcome.of_status(reply.status))
        return Response(reply.body, reply.status, reply.headers, reply.media_type)

    def close(self) -> None:
        """Stop the worker threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- routes -------------------------------------------------------------------------------

    async def _route(self, request: Request, call: Call) -> Reply:
        if (request_id := call.headers.get("x-request-id")) is not None:
            call.request_id = http.check_request_id(request_id)
        route = self._routes.get(call.path)
        if route is None and call.path.startswith(http.MODELS + "/"):
            route = ("GET", Endpoint.MODELS, self._one_model)
        if route is None:
            return http.route_error(call.path, call.method, ())
        method, call.endpoint, handler = route
        if call.method != method:
            return http.route_error(call.path, call.method, (method,))
        return await handler(request, call)

    async def _embeddings(self, request: Request, call: Call) -> Reply:
        call.deadline_s = _deadline_s(call.headers.get("x-request-timeout-seconds"))
        if call.deadline_s is not None and time.monotonic() >= call.deadline_s:
            raise DeadlineExceeded(
                f"x-request-timeout-seconds leaves less than the {MIN_ANSWER_S * 1e3:.0f} ms that "
                "an answer takes; allow more time"
            )
        http.check_json_media_type(call.headers.get("content-type"))
        body = await _read_body(request, call.headers.get("content-length"), self._max_body_bytes)
        loop = asyncio.get_running_loop()
        parsed, samples = await loop.run_in_executor(self._pool, self._prepare, body, call)
        engine = self._engines[parsed.model.name]
        results = _all_answered(await engine.submit_prepared(samples, deadline_s=call.deadline_s))
        if len(results) <= INLINE_ROWS:
            return openai.render_embeddings(parsed, results)
        render = partial(openai.render_embeddings, parsed, results)
        return await loop.run_in_executor(self._pool, render)

    def _prepare(
        self, body: bytes, call: Call
    ) -> tuple[openai.EmbeddingRequest, list[PreparedSample]]:
        """Parse, tokenise and route; CPU work, on a worker thread."""
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._models)
        call.model = model.name
        parsed = openai.read_embeddings(fields, model)
        return parsed, self._engines[model.name].prepare(parsed.samples, over_max=parsed.over_max)

    async def _list_models(self, _: Request, __: Call) -> Reply:
        return openai.render_models(self._infos)

    async def _one_model(self, _: Request, call: Call) -> Reply:
        return openai.render_model(call.path.removeprefix(http.MODELS + "/"), self._models)

    async def _scrape(self, _: Request, __: Call) -> Reply:
        return Reply(200, (await self._metrics_text()).encode(), media_type=http.PROMETHEUS)

    async def _live(self, _: Request, __: Call) -> Reply:
        return health.live()

    async def _ready(self, _: Request, __: Call) -> Reply:
        board, now = health.Board(), time.monotonic()
        board.report(self._report(), now)
        return board.ready(now)

    # --- what is told and counted -------------------------------------------------------------

    def _refuse(self, error: RequestError, call: Call) -> Reply:
        if error.status < 500 or error.status == 503:
            reason = _REJECTS.get(error.code, RejectReason.INVALID)
            self._metrics.rejected_total.child(call.model, reason).inc()
        # The path is the client's text and stays out of the log; the endpoint is ours.
        log.log(
            logging.INFO if error.status < 429 else logging.WARNING,
            "%s %d %s model=%s request=%s: %s",
            *(call.endpoint, error.status, error.code),
            *(call.model, call.request_id, error.message),
        )
        return http.error_reply(error)

    def _record(self, call: Call, outcome: Outcome) -> None:
        seconds = time.perf_counter() - call.started_s
        self._metrics.record_request(call.model, call.endpoint, outcome, seconds)


def _info(engine: Engine, aliases: tuple[str, ...], created_s: int) -> openai.ModelInfo:
    spec = engine.spec
    return openai.ModelInfo(
        name=spec.name,
        aliases=aliases,
        dim=spec.embedding_dim,
        max_rows=engine.config.limits.max_rows,
        normalize=spec.normalize,
        created_s=created_s,
    )


def _call_of(request: Request) -> Call:
    scope = request.scope
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return Call(headers, method, scope["path"].removeprefix(scope.get("root_path", "")))


def _deadline_s(header: str | None) -> float | None:
    """Return when to give up, on ``time.monotonic()``."""
    timeout_s = http.parse_timeout_s(header)
    if timeout_s is None:
        return None
    margin_s = min(max(ANSWER_SHARE * timeout_s, MIN_ANSWER_S), MAX_ANSWER_S)
    return time.monotonic() + timeout_s - margin_s


async def _read_body(request: Request, content_length: str | None, max_bytes: int) -> bytes:
    """Return the body; keep at most ``max_bytes`` of it in memory, announced or not."""
    stream = request.stream()
    chunks: list[bytes] = []
    size_bytes = 0
    try:
        http.parse_content_length(content_length, max_bytes)
        async for chunk in stream:
            size_bytes += len(chunk)
            if size_bytes > max_bytes:
                raise http.too_large(None, max_bytes)
            chunks.append(chunk)
    except PayloadTooLarge:
        chunks.clear()
        await _discard(stream, DISCARD_FACTOR * max_bytes)
        raise
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read on without keeping anything, up to ``max_bytes`` and ``DISCARD_S`` seconds."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in stream:
                max_bytes -= len(chunk)
                if max_bytes < 0:
                    return


def _all_answered(outcomes: Sequence[Result | RowFailed]) -> list[Result]:
    """Return the results, or raise one 500 that names the rows that failed (the first ten)."""
    failed = [(i, outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, RowFailed)]
    if failed:
        named = "; ".join(f"input[{i}]: {error.message}" for i, error in failed[:10])
        more = f"; and {len(failed) - 10} more" if len(failed) > 10 else ""
        raise RowFailed(
            f"{named}{more}; the other rows of this request ran and may be sent again.",
            param=f"input[{failed[0][0]}]",
        )
    return [outcome for outcome in outcomes if not isinstance(outcome, RowFailed)]
