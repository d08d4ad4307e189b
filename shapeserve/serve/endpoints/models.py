"""``GET /v1/models``: which models are served."""

from __future__ import annotations

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Service


class Models:
    """The OpenAI models API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            Route("GET", http.MODELS, Endpoint.MODELS, self.list),
            Route("GET", f"{http.MODELS}/{{model}}", Endpoint.MODELS, self.one),
        ]

    async def list(self, _: Request, __: Call) -> Reply:
        """Answer with all models."""
        return openai.render_models(self._service.infos)

    async def one(self, _: Request, call: Call) -> Reply:
        """Answer with the model that the path names."""
        return openai.render_model(call.variables["model"], self._service.models)
