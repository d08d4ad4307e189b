"""What operators ask for: metrics, liveness, readiness."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import health, http
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route


class Operations:
    """Metrics and health.

    Args:
        metrics_text: returns the exposition of all replicas.
        report: returns this replica's own health report.
    """

    def __init__(
        self,
        metrics_text: Callable[[], Awaitable[str]],
        report: Callable[[], health.ReplicaReport],
    ) -> None:
        self._metrics_text = metrics_text
        self._report = report
        self.routes = [
            Route("GET", http.METRICS, Endpoint.METRICS, self.scrape),
            Route("GET", http.LIVE, Endpoint.OTHER, self.live),
            Route("GET", http.READY, Endpoint.OTHER, self.ready),
        ]

    async def scrape(self, _: Request, __: Call) -> Reply:
        """Answer with the exposition of all replicas."""
        return Reply(200, (await self._metrics_text()).encode(), media_type=http.PROMETHEUS)

    async def live(self, _: Request, __: Call) -> Reply:
        """Say that the process answers."""
        return health.live()

    async def ready(self, _: Request, __: Call) -> Reply:
        """Say whether this replica is ready."""
        board, now = health.Board(), time.monotonic()
        board.report(self._report(), now)
        return board.ready(now)
