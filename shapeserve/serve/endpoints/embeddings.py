"""``POST /v1/embeddings``: texts or token ids to vectors."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Samples, Service


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
        parsed, samples = await service.prepare(call, partial(self._read, body, call))
        results = await service.answer(parsed.model.name, samples, call)
        return await service.render(len(results), openai.render_embeddings, parsed, results)

    def _read(self, body: bytes, call: Call) -> tuple[openai.EmbeddingRequest, Samples]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, "make embeddings", self._service.models)
        parsed = openai.read_embeddings(fields, model)
        return parsed, Samples(model.name, parsed.samples, parsed.over_max)
