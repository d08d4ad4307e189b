"""The HTTP side of one replica: from a Starlette request to a reply. Knows nothing of Ray.

A request is matched to a route, whose handler (``endpoints/``) answers it or raises; every request
is counted exactly once, in :meth:`Frontend.__call__`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from shapeserve.errors import RequestError
from shapeserve.metrics import Metrics, Outcome
from shapeserve.protocols import health, http
from shapeserve.protocols.http import Reply
from shapeserve.serve.admin import Guard
from shapeserve.serve.calls import Call, Ledger
from shapeserve.serve.endpoints.admin import Admin
from shapeserve.serve.endpoints.models import Models
from shapeserve.serve.endpoints.oip import OpenInference
from shapeserve.serve.endpoints.openapi import OpenApi
from shapeserve.serve.endpoints.operations import Operations
from shapeserve.serve.endpoints.texts import Texts
from shapeserve.serve.endpoints.ui import Statuses, Ui
from shapeserve.serve.grpc import GrpcFrontend
from shapeserve.serve.policies import AskAll, Policies
from shapeserve.serve.routing import Router
from shapeserve.serve.service import Route, Service
from shapeserve.serve.status import ReplicaStatus, replica_status
from shapeserve.serve.tracing import Spans

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.engine import Engine


class Frontend:
    """Answers requests for a set of engines.

    Args:
        engines: model name -> started engine.
        aliases: model name -> further names of it.
        metrics: where requests are counted; the engines' own.
        max_body_bytes: longer bodies are refused with 413.
        metrics_text: returns the exposition of all replicas.
        report: returns this replica's own health report.
        ask_all: swaps a policy on every replica, or asks which serves; this one if not given.
        guard: lets the administrator in; nobody, if there is none.
        statuses: returns what all replicas say of their models, and how many did not answer; this
            replica alone, if it is not given.
        spans: traces what the engines did; without it nothing is traced.
        max_inflight_bytes: of all bodies held at a time; more are refused with 429.
        max_answer_bytes: requests for larger tensors are refused with 400.

    Attributes:
        grpc: answers gRPC with the same engines.
        policies: of these engines.

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
        ask_all: AskAll | None = None,
        guard: Guard | None = None,
        statuses: Statuses | None = None,
        spans: Spans | None = None,
        max_inflight_bytes: float = math.inf,
        max_answer_bytes: float = math.inf,
    ) -> None:
        self._metrics = metrics
        self._report = report
        self._ledger = Ledger(metrics)
        self._service = Service(
            engines,
            aliases=aliases,
            max_body_bytes=max_body_bytes,
            max_inflight_bytes=max_inflight_bytes,
            max_answer_bytes=max_answer_bytes,
            spans=spans,
        )
        self.grpc = GrpcFrontend(self._service, self._ledger, report)
        self.policies = Policies(engines, metrics, report().replica)
        self._guard = guard or Guard()
        self._public = Router(
            [
                *Texts(self._service).routes,
                *Models(self._service).routes,
                *OpenInference(self._service).routes,
                *OpenApi(self._service).routes,
                *Operations(metrics_text, report).routes,
                *Ui(self._service, statuses or self._own_status, report, self._guard).routes,
            ]
        )
        # What only the administrator may see has a router of its own, so that to everybody else
        # it is as if it were not there.
        admin = Admin(self._service, report, self.policies, ask_all or self.policies.only_here)
        self._all = Router([*self._public.routes, *admin.routes])

    async def __call__(self, request: Request) -> Response:
        """Answer one request; only the cancellation by Ray is raised (the client went away)."""
        with self._service.under_way():
            return await self._counted(request)

    async def _counted(self, request: Request) -> Response:
        call = _call_of(request)
        try:
            reply = await self._answer(request, call)
        except asyncio.CancelledError:  # the client went away, or Ray has answered 408 for us
            self._ledger.record(call, Outcome.DEADLINE if call.late else Outcome.CANCELLED)
            raise
        except ClientDisconnect:  # in the middle of its body; nobody reads this
            reply = Reply(499, b"")
        except RequestError as error:
            self._ledger.refuse(error, call)
            reply = http.error_reply(error, call.path)
        except Exception:
            reply = http.error_reply(self._ledger.fail(call), call.path)
        finally:
            self._service.bodies.release(call)
        self._ledger.record(call, Outcome.of_status(reply.status))
        return Response(reply.body, reply.status, reply.headers, reply.media_type)

    @property
    def routes(self) -> Sequence[Route]:
        """Everything that is served, to whomever."""
        return self._all.routes

    def status(self) -> ReplicaStatus:
        """Return what this replica says of its models; any thread may call."""
        return replica_status(self._report(), [*self._service.engines.values()], self._metrics)

    async def _own_status(self) -> tuple[Sequence[ReplicaStatus], int]:
        return [self.status()], 0

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, over any protocol."""
        return self._service.in_flight

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._service.draining

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Refuse new work with 503; call ``on_idle`` once nothing is under way."""
        self._service.drain(on_idle)

    def resume(self) -> None:
        """Take new work again."""
        self._service.resume()

    def close(self) -> None:
        """Stop the worker threads."""
        self._service.close()

    async def _answer(self, request: Request, call: Call) -> Reply:
        if (request_id := call.headers.get("x-request-id")) is not None:
            call.request_id = http.check_request_id(request_id)
        router = self._all if self._guard.admits(call.headers) else self._public
        found = router.match(call.method, call.path)
        call.variables = found.variables
        if found.endpoint is not None:
            call.endpoint = found.endpoint
        if found.handler is None:
            return http.route_error(call.path, call.method, found.allowed)
        return await found.handler(request, call)


def _call_of(request: Request) -> Call:
    scope = request.scope
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return Call(headers, method, scope["path"].removeprefix(scope.get("root_path", "")))
