"""``GET /openapi.json``: what is served, for programs."""

from __future__ import annotations

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http
from shapeserve.protocols.http import Reply
from shapeserve.protocols.openapi import document
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Service


class OpenApi:
    """The document; made once, because models neither come nor go."""

    def __init__(self, service: Service) -> None:
        specs = [engine.spec for engine in service.engines.values()]
        self._reply = http.json_reply(document(service.models, specs))
        self.routes = [Route("GET", http.OPENAPI, Endpoint.OTHER, self.get)]

    async def get(self, _: Request, __: Call) -> Reply:
        """Answer with the document."""
        return self._reply
