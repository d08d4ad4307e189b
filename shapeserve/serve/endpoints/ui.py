"""``GET /ui``: the state of the service for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import health, http
from shapeserve.protocols.http import Reply
from shapeserve.serve.admin import Guard
from shapeserve.serve.calls import Call
from shapeserve.serve.page import status_page, warmup_page
from shapeserve.serve.service import Route, Service
from shapeserve.serve.status import ReplicaStatus

# However many look at it, the replicas are asked and a page is made once in so long.
KEEP_S = 1.0

Statuses = Callable[[], Awaitable[tuple[Sequence[ReplicaStatus], int]]]


class Ui:
    """The page, and the one that stands in for it while no replica answers.

    Args:
        service: its worker threads.
        statuses: returns what the replicas say, and how many of them did not answer.
        report: returns this replica's own health report.
        guard: tells the administrator from others.
    """

    def __init__(
        self,
        service: Service,
        statuses: Statuses,
        report: Callable[[], health.ReplicaReport],
        guard: Guard,
    ) -> None:
        self._service = service
        self._statuses = statuses
        self._report = report
        self._guard = guard
        self._made: dict[bool, tuple[float, asyncio.Task[Reply]]] = {}  # for the administrator?
        self.routes = [
            Route("GET", http.UI, Endpoint.OTHER, self.page),
            Route("GET", http.WARMUP_UI, Endpoint.OTHER, self.warmup),
        ]

    async def page(self, _: Request, call: Call) -> Reply:
        """Answer with the page, which may be a second old."""
        admin = self._guard.admits(call.headers)
        now = time.monotonic()
        made_s, task = self._made.get(admin, (-KEEP_S, None))
        if task is None or (task.done() and now - made_s >= KEEP_S):
            task = asyncio.create_task(self._make(admin))
            self._made[admin] = now, task
        return await asyncio.shield(task)  # others may wait for it

    async def _make(self, admin: bool) -> Reply:
        statuses, missing = await self._statuses()
        return await self._service.in_worker(status_page, statuses, missing, admin=admin)

    async def warmup(self, _: Request, __: Call) -> Reply:
        """Answer as the health application does, with this replica alone."""
        report = self._report()
        return warmup_page([(report, 0.0)], report.state)
