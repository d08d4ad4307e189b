"""``POST /v1/classify``: texts or pairs of texts to labels."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import classify, http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Samples, Service


class Classify:
    """The classification API; see ``Embeddings`` for the way of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [Route("POST", http.CLASSIFY, Endpoint.CLASSIFY, self.label)]

    async def label(self, request: Request, call: Call) -> Reply:
        """Answer one request."""
        service = self._service
        body = await service.json_body(request, call)
        parsed, samples = await service.prepare(call, partial(self._read, body, call))
        results = await service.answer(parsed.model.name, samples, call)
        return await service.render(len(results), classify.render_classify, parsed, results)

    def _read(self, body: bytes, call: Call) -> tuple[classify.ClassifyRequest, Samples]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, "classify", self._service.models)
        parsed = classify.read_classify(fields, model)
        return parsed, Samples(model.name, parsed.samples, parsed.over_max)
