"""``POST /v1/rerank``: a query and documents to documents by relevance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, openai, rerank
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Service

if TYPE_CHECKING:
    from shapeserve.engine import PreparedSample


class Rerank:
    """The rerank API; see ``Embeddings`` for the way of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [Route("POST", http.RERANK, Endpoint.RERANK, self.rank)]

    async def rank(self, request: Request, call: Call) -> Reply:
        """Answer one request."""
        service = self._service
        body = await service.json_body(request, call)
        parsed, samples = await service.in_worker(self._prepare, body, call)
        results = await service.answer(parsed.model.name, samples, call, item="documents")
        return await service.render(len(results), rerank.render_rerank, parsed, results)

    def _prepare(
        self, body: bytes, call: Call
    ) -> tuple[rerank.RerankRequest, list[PreparedSample]]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, "rerank", self._service.models)
        parsed = rerank.read_rerank(fields, model)
        samples = self._service.engines[model.name].prepare(
            parsed.samples, over_max=parsed.over_max, item="documents", first="query"
        )
        return parsed, samples
