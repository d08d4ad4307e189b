"""The health application: answers ``/v2/health`` while the replicas are still warming up.

A separate Serve application, because Ray holds back the requests of a replica whose constructor
runs, and because it must be up before the models are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from shapeserve.protocols import health, http
from shapeserve.protocols.http import Reply
from shapeserve.protocols.proto.oip_pb2 import ServerLiveResponse, ServerReadyResponse
from shapeserve.serve.names import HEALTH_APP, HEALTH_DEPLOYMENT, HEALTH_PREFIX
from shapeserve.serve.page import warmup_page

log = logging.getLogger("shapeserve.serve")

NO_REPLICA = "no replica is up; ServerReady says when one is"


class Health:
    """The board, behind HTTP and gRPC for probes and behind a handle for replicas."""

    def __init__(self) -> None:
        self._board = health.Board()

    async def __call__(self, request: Request) -> Response:
        """Answer ``/v2/health/live``, ``/v2/health/ready`` and ``/v2/health/ui``."""
        reply = self._reply(request.method, request.scope["path"])
        return Response(reply.body, reply.status, reply.headers, reply.media_type)

    def _reply(self, method: str, path: str) -> Reply:
        if path not in (http.LIVE, http.READY, http.WARMUP_UI):
            return http.route_error(path, method, ())
        if method not in ("GET", "HEAD"):
            return http.route_error(path, method, ("GET",))
        now = time.monotonic()
        if path == http.WARMUP_UI:
            return warmup_page(self._board.reports(now), self._board.state(now))
        return health.live() if path == http.LIVE else self._board.ready(now)

    async def ServerLive(self, _: bytes) -> ServerLiveResponse:  # noqa: N802 - Ray calls it so
        """Answer the gRPC method: this process answers."""
        return ServerLiveResponse(live=True)

    async def ServerReady(self, _: bytes) -> ServerReadyResponse:  # noqa: N802
        """Answer the gRPC method: whether a sealed replica is alive."""
        return ServerReadyResponse(ready=self._board.state(time.monotonic()) == "ready")

    async def _no_replica(self, _: bytes, grpc_context: Any) -> ServerReadyResponse:
        """Refuse what only a replica can answer; Ray leads it here while it knows of none."""
        grpc_context.set_code(grpc.StatusCode.UNAVAILABLE)
        grpc_context.set_details(NO_REPLICA)
        return ServerReadyResponse()

    ModelReady = ServerMetadata = ModelMetadata = ModelInfer = _no_replica

    async def report(self, report: health.ReplicaReport) -> None:
        """Take one heartbeat."""
        self._board.report(report, time.monotonic())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Say that the service is stopping while ``{draining: true}`` is deployed."""
        self._board.drain(user_config.get("draining") is True)


def health_app(args: dict[str, str]) -> serve.Application:
    """Build the health application; deploy it with ``route_prefix: /v2/health``."""
    if args:
        raise ValueError(f"the health application takes no args, got {sorted(args)}; remove them")
    deployment = serve.deployment(
        name=HEALTH_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        # A file without it takes the draining back: Serve tells of no change to nothing.
        user_config={"draining": False},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1.0,
    )
    return deployment(Health).bind()


def handle() -> DeploymentHandle[Any]:
    """Return a handle to the board.

    Raises:
        RayServeException: the health application is not deployed.
    """
    return serve.get_deployment_handle(HEALTH_DEPLOYMENT, HEALTH_APP)


class Heartbeat:
    """Sends a replica's report once per heartbeat, for as long as the replica lives.

    Args:
        report: returns the report of the moment.
        on_beat: called with every heartbeat, on a worker thread.

    Thread rule: the replica's event loop.
    """

    def __init__(
        self,
        report: Callable[[], health.ReplicaReport],
        on_beat: Callable[[], None],
    ) -> None:
        self._report = report
        self._on_beat = on_beat
        self._handle: DeploymentHandle[Any] | None = None
        self._was_heard = True

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            try:
                await self.beat()
                await asyncio.to_thread(self._on_beat)
            except Exception:  # without heartbeats a good replica counts as dead
                log.exception("a heartbeat failed; the next one follows")
            await asyncio.sleep(health.HEARTBEAT_S)

    async def beat(self) -> None:
        """Send one report; a board that cannot be reached is logged once and tried again."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(handle)
            async with asyncio.timeout(2 * health.HEARTBEAT_S):
                await self._handle.report.remote(self._report())
        except (RayError, RayServeException, KeyError, TimeoutError) as error:
            if self._was_heard:
                log.warning(
                    "no health application at %s: %r; deploy shapeserve.serve:health_app "
                    "there for readiness during warm-up",
                    HEALTH_PREFIX,
                    error,
                )
            self._was_heard = False
        else:
            self._was_heard = True
