"""``/v1/embeddings``, ``/v1/rerank``, ``/v1/classify``: texts to vectors, an order, labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request

from shapeserve.metrics import Endpoint
from shapeserve.protocols import classify, http, openai, rerank
from shapeserve.protocols.http import Reply
from shapeserve.protocols.openai import ModelInfo, Task
from shapeserve.serve.calls import Call
from shapeserve.serve.service import Route, Samples, Service


@dataclass(frozen=True, slots=True)
class TextTask:
    """What one of the APIs makes of the steps that they share.

    Attributes:
        path: where it is served.
        endpoint: metric label.
        task: what the model must be able to do.
        read: checks the fields of a request; what it returns has ``model``, ``samples``,
            ``over_max``.
        render: the request and its results to a reply.
        item: what errors call a row.
        first: what errors call the first text of a pair, where all pairs share it.
    """

    path: str
    endpoint: Endpoint
    task: Task
    read: Callable[[Mapping[str, Any], ModelInfo], Any]
    render: Callable[[Any, Sequence[Any]], Reply]
    item: str = "input"
    first: str | None = None


TASKS: Final = (
    TextTask(
        http.EMBEDDINGS,
        Endpoint.EMBEDDINGS,
        "make embeddings",
        openai.read_embeddings,
        openai.render_embeddings,
    ),
    TextTask(
        http.RERANK,
        Endpoint.RERANK,
        "rerank",
        rerank.read_rerank,
        rerank.render_rerank,
        item="documents",
        first="query",
    ),
    TextTask(
        http.CLASSIFY,
        Endpoint.CLASSIFY,
        "classify",
        classify.read_classify,
        classify.render_classify,
    ),
)


class Texts:
    """The APIs for texts.

    The body is read up to the limit, a worker thread parses, tokenises and routes it, the engine
    answers, the reply is rendered.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            Route("POST", task.path, task.endpoint, partial(self._answer, task)) for task in TASKS
        ]

    async def _answer(self, task: TextTask, request: Request, call: Call) -> Reply:
        service = self._service
        body = await service.json_body(request, call)
        parsed, samples = await service.prepare(call, partial(self._read, task, body, call))
        results = await service.answer(parsed.model.name, samples, call, item=task.item)
        return await service.render(len(results), task.render, parsed, results)

    def _read(self, task: TextTask, body: bytes, call: Call) -> tuple[Any, Samples]:
        fields = openai.read_object(body)
        model = openai.read_model(fields, self._service.models)
        call.model = model.name
        openai.check_task(model, task.task, self._service.models)
        parsed = task.read(fields, model)
        return parsed, Samples(
            model.name, parsed.samples, parsed.over_max, item=task.item, first=task.first
        )
