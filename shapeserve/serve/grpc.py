"""The gRPC side of one replica: from the bytes of a message to those of its answer.

Knows nothing of Ray but what a call's context has. As in the HTTP frontend, every call is counted
exactly once, in :meth:`GrpcFrontend.__call__`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from shapeserve.errors import RequestError, Unavailable
from shapeserve.metrics import Endpoint, Outcome
from shapeserve.protocols import health, http, oip, oip_grpc, openai
from shapeserve.protocols.oip_types import InferRequest
from shapeserve.protocols.proto import oip_pb2
from shapeserve.serve.calls import Call, Ledger
from shapeserve.serve.endpoints.oip import reply_rows
from shapeserve.serve.service import Samples, Service

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine, PreparedSample, Result

REQUEST_ID = "x-request-id"


class Context(Protocol):
    """What is used of Ray's ``RayServegRPCContext``."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return what the client sent, and what ``grpc_ingress`` added."""

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        """Return Ray's own id of the request."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set how the call ends."""

    def set_details(self, details: str) -> None:
        """Set what the client is told of it."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """Set what the client gets after the answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a message, and metadata to send after it."""

    body: bytes = b""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def SerializeToString(self) -> bytes:  # noqa: N802 - Ray calls it, as of a message
        """Return the bytes."""
        return self.body


Handler = Callable[[bytes, Call], Awaitable[Answer]]


class GrpcFrontend:
    """Answers the methods of the Open Inference Protocol.

    Args:
        service: engines and worker threads, shared with the HTTP frontend.
        ledger: counts calls.
        report: returns this replica's own health report.

    Thread rule: one event loop. Nothing here blocks it.
    """

    def __init__(
        self, service: Service, ledger: Ledger, report: Callable[[], health.ReplicaReport]
    ) -> None:
        self._service = service
        self._ledger = ledger
        self._report = report
        self._methods: dict[str, tuple[Endpoint, Handler]] = {
            "ServerLive": (Endpoint.OTHER, self._live),
            "ServerReady": (Endpoint.OTHER, self._ready),
            "ModelReady": (Endpoint.MODELS, self._model_ready),
            "ServerMetadata": (Endpoint.MODELS, self._server),
            "ModelMetadata": (Endpoint.MODELS, self._model),
            "ModelInfer": (Endpoint.OIP_GRPC, self._infer),
        }

    async def __call__(self, method: str, request: bytes, context: Context) -> Answer:
        """Answer one call; only the cancellation by Ray is raised (the client went away).

        An error is set on the context and not raised: Ray would log a traceback for each, and
        drop the metadata.
        """
        with self._service.under_way():
            return await self._counted(method, request, context)

    async def _counted(self, method: str, request: bytes, context: Context) -> Answer:
        endpoint, handler = self._methods[method]
        call = _call_of(method, endpoint, context)
        try:
            answer, outcome = await self._answer(request, call, handler), Outcome.OK
        except asyncio.CancelledError:
            self._ledger.record(call, Outcome.DEADLINE if call.late else Outcome.CANCELLED)
            raise
        except RequestError as error:
            self._ledger.refuse(error, call)
            answer, outcome = _fail(error, context)
        except Exception:
            answer, outcome = _fail(self._ledger.fail(call), context)
        finally:
            self._service.bodies.release(call)
        self._ledger.record(call, outcome)
        trailing = {**answer.metadata, REQUEST_ID: call.request_id}
        context.set_trailing_metadata(list(trailing.items()))
        return answer

    async def _answer(self, request: bytes, call: Call, handler: Handler) -> Answer:
        if (request_id := call.headers.get(REQUEST_ID)) is not None:
            call.request_id = http.check_request_id(request_id)
        if len(request) > self._service.max_body_bytes:
            raise http.too_large(len(request), self._service.max_body_bytes)
        return await handler(request, call)

    # --- methods ------------------------------------------------------------------------------

    async def _live(self, _: bytes, __: Call) -> Answer:
        return Answer(oip_grpc.render_ready(oip_pb2.ServerLiveResponse, True))

    async def _ready(self, _: bytes, __: Call) -> Answer:
        ready = self._report().state == "ready"
        return Answer(oip_grpc.render_ready(oip_pb2.ServerReadyResponse, ready))

    async def _model_ready(self, request: bytes, __: Call) -> Answer:
        engine = self._named(oip_grpc.parse(request, oip_pb2.ModelReadyRequest))
        ready = engine.ready
        try:
            engine.healthy()
        except Unavailable:
            ready = False
        return Answer(oip_grpc.render_ready(oip_pb2.ModelReadyResponse, ready))

    async def _server(self, _: bytes, __: Call) -> Answer:
        return Answer(oip_grpc.render_server())

    async def _model(self, request: bytes, __: Call) -> Answer:
        engine = self._named(oip_grpc.parse(request, oip_pb2.ModelMetadataRequest))
        return Answer(oip_grpc.render_model(engine.spec))

    def _named(self, message: Any) -> Engine:
        return self._find(message.name, message.version)

    def _find(self, name: str, version: str) -> Engine:
        info = openai.find_model(name, self._service.models)
        oip.check_version(name, version)
        return self._service.engines[info.name]

    async def _infer(self, request: bytes, call: Call) -> Answer:
        service = self._service
        service.check_open()
        call.set_deadline()
        service.bodies.hold(call, len(request))
        (parsed, job, engine), samples = await service.prepare(
            call, partial(self._read, request, call)
        )
        results = await service.answer(engine.spec.name, samples, call)
        return await service.render(reply_rows(results), _render, parsed, job, engine, results)

    def _read(
        self, request: bytes, call: Call
    ) -> tuple[tuple[InferRequest, oip.Job, Engine], Samples]:
        """Read a request; CPU work, on a worker thread."""
        message = oip_grpc.parse(request, oip_pb2.ModelInferRequest)
        if REQUEST_ID not in call.headers and http.is_request_id(message.id):
            call.request_id = message.id
        engine = self._find(message.model_name, message.model_version)
        call.model = engine.spec.name
        parsed = oip_grpc.read_infer(message)
        job = oip.read(parsed, engine.spec, max_rows=engine.config.limits.max_rows)
        call.limit(job.timeout_s)
        return (parsed, job, engine), Samples(
            engine.spec.name, job.rows, job.over_max, check=partial(self._check_answer, job)
        )

    def _check_answer(self, job: oip.Job, samples: Sequence[PreparedSample]) -> None:
        oip.check_answer(job, [s.executed for s in samples], self._service.max_answer_bytes)


def _render(
    parsed: InferRequest, job: oip.Job, engine: Engine, results: Sequence[Result]
) -> Answer:
    response = oip.answer(parsed, engine.spec, job, [result.outputs for result in results])
    return Answer(oip_grpc.render_infer(response), openai.report_headers(results))


def _call_of(method: str, endpoint: Endpoint, context: Context) -> Call:
    headers = {k: v for k, v in context.invocation_metadata() if isinstance(v, str)}
    rays = dict(context.trailing_metadata()).get("request_id", "-")
    return Call(headers, "POST", method, endpoint=endpoint, request_id=rays)


def _fail(error: RequestError, context: Context) -> tuple[Answer, Outcome]:
    status = oip_grpc.status_of(error)
    context.set_code(status.code)
    context.set_details(status.details)
    return Answer(metadata=status.metadata), Outcome.of_status(error.status)


def _method(name: str) -> Any:
    async def answer(self: GrpcMethods, request: bytes, grpc_context: Context) -> Answer:
        return await self._grpc(name, request, grpc_context)

    answer.__name__ = name
    answer.__doc__ = f"Answer one call of ``{name}``."
    return answer


class GrpcMethods:
    """The methods as Ray looks for them on a deployment's class."""

    _grpc: GrpcFrontend

    ServerLive = _method("ServerLive")
    ServerReady = _method("ServerReady")
    ModelReady = _method("ModelReady")
    ServerMetadata = _method("ServerMetadata")
    ModelMetadata = _method("ModelMetadata")
    ModelInfer = _method("ModelInfer")
