"""``POST /v1/rerank``: a query and documents to documents by relevance."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai, rerank
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Samples, Service


class Rerank:
    """The rerank API; see ``Embeddings`` for the way of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [Route("POST", http.RERANK, Endpoint.RERANK, self.rank)]

    async def rank(self, request: Request, call: Call) -> Reply:
        """Answer one request."""
        service = self._service
        body = await service.json_body(request, call)
        parsed, samples = await service.prepare(call, partial(self._read, body, call))
        results = await service.answer(parsed.model.name, samples, call, item="documents")
        return await service.render(len(results), rerank.render_rerank, parsed, results)

    def _read(self, body: bytes, call: Call) -> tuple[rerank.RerankRequest, Samples]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, "rerank", self._service.models)
        parsed = rerank.read_rerank(fields, model)
        return parsed, Samples(
            model.name, parsed.samples, parsed.over_max, item="documents", first="query"
        )
