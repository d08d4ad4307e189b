"""The routes of the administrator. Without the token the router does not know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.health import ReplicaReport
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Service


class Admin:
    """What tells too much of the inside to be told to everybody.

    Args:
        service: the engines.
        report: returns this replica's own health report, for its name.
    """

    def __init__(self, service: Service, report: Callable[[], ReplicaReport]) -> None:
        self._service = service
        self._report = report
        self.routes = [Route("GET", http.COMPILE, Endpoint.OTHER, self.compile_record)]

    async def compile_record(self, _: Request, call: Call) -> Reply:
        """Answer with what this replica has compiled for a model."""
        model = openai.find_model(call.variables["model"], self._service.models)
        record = asdict(self._service.engines[model.name].compile_record())
        return http.json_reply({**record, "replica": self._report().replica})
