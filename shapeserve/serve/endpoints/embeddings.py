"""``POST /v1/embeddings``: texts or token ids to vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Service

if TYPE_CHECKING:
    from shapeserve.engine import PreparedSample


class Embeddings:
    """The OpenAI embeddings API.

    The body is read up to the limit, a worker thread parses, tokenises and routes it, the engine
    answers, the reply is rendered.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [Route("POST", http.EMBEDDINGS, Endpoint.EMBEDDINGS, self.embed)]

    async def embed(self, request: Request, call: Call) -> Reply:
        """Answer one request."""
        service = self._service
        body = await service.json_body(request, call)
        parsed, samples = await service.in_worker(self._prepare, body, call)
        results = await service.answer(parsed.model.name, samples, call)
        return await service.render(len(results), openai.render_embeddings, parsed, results)

    def _prepare(
        self, body: bytes, call: Call
    ) -> tuple[openai.EmbeddingRequest, list[PreparedSample]]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, "make embeddings", self._service.models)
        parsed = openai.read_embeddings(fields, model)
        engine = self._service.engines[model.name]
        return parsed, engine.prepare(parsed.samples, over_max=parsed.over_max)
