"""``/v2``: the Open Inference Protocol over HTTP, for any kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request

from shapeserve.errors import NotFound, Unavailable
from shapeserve.metrics import Endpoint
from shapeserve.protocols import http, oip, oip_http, openai
from shapeserve.protocols.http import Reply
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Samples, Service

if TYPE_CHECKING:
    from shapeserve.engine import Engine, PreparedSample, Result
    from shapeserve.protocols.oip_http import HttpRequest

# Of one embedding, about: that many output elements count as a row when it is decided where a
# reply is rendered.
ROW_ELEMENTS = 1024


class OpenInference:
    """Metadata, readiness and inference, with and without a version in the path."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            Route("GET", http.OIP, Endpoint.MODELS, self.server),
            Route("GET", f"{http.OIP}/models/stats", Endpoint.MODELS, self.absent),
        ]
        for path in (http.OIP_MODEL, http.OIP_VERSION):
            self.routes += [
                Route("GET", path, Endpoint.MODELS, self.model),
                Route("GET", f"{path}/ready", Endpoint.MODELS, self.ready),
                Route("GET", f"{path}/config", Endpoint.MODELS, self.absent),
                Route("GET", f"{path}/stats", Endpoint.MODELS, self.absent),
                Route("POST", f"{path}/infer", Endpoint.OIP_HTTP, self.infer),
            ]

    async def server(self, _: Request, __: Call) -> Reply:
        """Answer with what this server is."""
        return oip_http.render_server()

    async def model(self, _: Request, call: Call) -> Reply:
        """Answer with what the model takes and gives."""
        return oip_http.render_model(self._find(call).spec)

    async def ready(self, _: Request, call: Call) -> Reply:
        """Say whether the model answers, and how far its warm-up is."""
        engine = self._find(call)
        progress, ready = engine.progress, engine.ready
        message = " ".join(part for part in (progress.stage, progress.detail) if part)
        try:
            engine.healthy()
        except Unavailable as error:
            ready, message = False, error.message
        return oip_http.render_ready(
            engine.spec.name,
            ready=ready,
            message="" if ready else message,
            done=progress.done,
            total=progress.total,
        )

    async def absent(self, _: Request, __: Call) -> Reply:
        """Refuse the extensions of other servers."""
        raise NotFound(
            "this server has neither the model configuration nor the statistics extension; GET "
            f"{http.OIP_MODEL} for inputs and outputs, and {http.METRICS} for statistics.",
            code="unknown_path",
        )

    async def infer(self, request: Request, call: Call) -> Reply:
        """Answer one inference request."""
        service, engine = self._service, self._find(call)
        call.model = engine.spec.name
        body = await service.json_body(request, call, octets=True)
        (parsed, job), samples = await service.prepare(
            call, partial(self._read, body, call, engine)
        )
        results = await service.answer(engine.spec.name, samples, call)
        return await service.render(reply_rows(results), _render, parsed, job, engine, results)

    def _find(self, call: Call) -> Engine:
        name = call.variables["model"]
        info = openai.find_model(name, self._service.models)
        oip.check_version(name, call.variables.get("version", ""))
        return self._service.engines[info.name]

    def _read(
        self, body: bytes, call: Call, engine: Engine
    ) -> tuple[tuple[HttpRequest, oip.Job], Samples]:
        parsed = oip_http.parse(
            body,
            call.headers.get(oip_http.HEADER_LENGTH),
            call.variables["model"],
            call.variables.get("version", ""),
        )
        job = oip.read(parsed.infer, engine.spec, max_rows=engine.config.limits.max_rows)
        call.limit(job.timeout_s)
        check = partial(self._check_answer, job)
        return (parsed, job), Samples(engine.spec.name, job.rows, job.over_max, check=check)

    def _check_answer(self, job: oip.Job, samples: Sequence[PreparedSample]) -> None:
        sizes = [sample.executed for sample in samples]
        oip.check_answer(job, sizes, self._service.max_answer_bytes)


def reply_rows(results: Sequence[Result]) -> int:
    """Return how many rows of embeddings a reply weighs."""
    elements = sum(array.size for result in results for array in result.outputs.values())
    return max(len(results), elements // ROW_ELEMENTS)


def _render(parsed: HttpRequest, job: oip.Job, engine: Engine, results: list[Result]) -> Reply:
    rows = [result.outputs for result in results]
    response = oip.answer(parsed.infer, engine.spec, job, rows)
    return oip_http.render(parsed, response, openai.report_headers(results))
