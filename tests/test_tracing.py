"""Spans of what the engine did: their parents, times and attributes, and that off means off."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import engines
import httpx
import pytest
import tiny
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from starlette.requests import Request

from shapeserve.config import ServeConfig
from shapeserve.engine import Engine
from shapeserve.errors import ConfigError
from shapeserve.protocols.health import ReplicaReport
from shapeserve.serve import tracing
from shapeserve.serve.frontend import Frontend
from shapeserve.serve.tracing import OTLP, Spans, check_tracing, otlp, spans_if_traced, trace_flags

POLICY = {"seq": {"explicit": [8, 24]}, "batch": {"explicit": [1, 4]}}
NAMES = ["shapeserve.queue", "shapeserve.pad", "shapeserve.execute"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tiny.write_model(tmp_path_factory.mktemp("model"))
    config = engines.text_config(directory, name="tiny", policy=POLICY, compile={"tier": "eager"})
    with engines.started(config) as made:
        yield made


class Traced:
    """A frontend whose requests have a span, as Ray gives them one."""

    def __init__(self, engine: Engine, provider: TracerProvider, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._tracer = provider.get_tracer("test")
        self.frontend = Frontend(
            {"tiny": engine},
            aliases={},
            metrics=engine.metrics,
            max_body_bytes=100_000,
            metrics_text=None,  # type: ignore[arg-type]
            report=lambda: ReplicaReport("r", "ready"),
            **{"spans": Spans(provider), **options},
        )
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(self._asgi))

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        with self._tracer.start_as_current_span("request"):
            response = await self.frontend(Request(scope, receive))
        await response(scope, receive, send)

    async def embed(self, *texts: str, **fields: Any) -> int:
        body = {"model": "tiny", "input": texts, **fields}
        response = await self._http.post("http://s/v1/embeddings", json=body)
        self.frontend.close()
        return response.status_code

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """The request's span, and ours in the order in which they began."""
        *ours, request = self.exporter.get_finished_spans()
        assert request.name == "request"
        return request, sorted(ours, key=lambda span: span.start_time or 0)


@pytest.mark.asyncio
async def test_queue_pad_and_execute_are_children_of_the_request_one_after_the_other(
    engine: Engine,
) -> None:
    before_ns = time.time_ns()
    traced = Traced(engine, TracerProvider())
    assert await traced.embed(tiny.text_of(5), tiny.text_of(6)) == 200
    request, ours = traced.spans()
    assert [span.name for span in ours] == NAMES
    for span in ours:
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.context.trace_id == request.context.trace_id
    starts, ends = [s.start_time or 0 for s in ours], [s.end_time or 0 for s in ours]
    assert starts[1:] == ends[:-1]
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert before_ns <= (request.start_time or 0) <= starts[0]
    assert ends[-1] <= (request.end_time or 0)


@pytest.mark.asyncio
async def test_attributes_say_which_batch_and_nothing_of_the_content(engine: Engine) -> None:
    traced = Traced(engine, TracerProvider())
    texts = [tiny.text_of(5), tiny.text_of(6), tiny.text_of(4)]
    assert await traced.embed(*texts) == 200
    seen = [dict(span.attributes or {}) for span in traced.spans()[1]]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].pop("shapeserve.batch.number") == engines.value(engine, "batches_total")
    assert seen[0] == {
        "shapeserve.model": "tiny",
        "shapeserve.bucket": "batch=4,seq=8",
        "shapeserve.mode": "eager",
        "shapeserve.batch.rows": 3,
        "shapeserve.batch.elements": 32,
        "shapeserve.batch.padding": 32 - 15,
        "shapeserve.request.rows": 3,
    }


@pytest.mark.asyncio
async def test_a_request_in_several_batches_has_the_spans_of_each(engine: Engine) -> None:
    traced = Traced(engine, TracerProvider())
    assert await traced.embed(tiny.text_of(5), tiny.text_of(20), tiny.text_of(40)) == 200
    _, ours = traced.spans()
    buckets = [str((s.attributes or {})["shapeserve.bucket"]) for s in ours if s.name == NAMES[2]]
    assert sorted(buckets) == ["batch=1,seq=24", "batch=1,seq=8", "none"]
    assert [span.name for span in ours].count(NAMES[0]) == 3


@pytest.mark.asyncio
async def test_the_pieces_of_a_split_row_are_traced_batch_by_batch(engine: Engine) -> None:
    traced = Traced(engine, TracerProvider())
    assert await traced.embed(tiny.text_of(40), over_max="split") == 200
    executed = [s for s in traced.spans()[1] if s.name == NAMES[2]]
    numbers = [(s.attributes or {})["shapeserve.batch.number"] for s in executed]
    assert len(numbers) == len(set(numbers)) >= 1


@pytest.mark.asyncio
async def test_a_request_that_is_not_sampled_has_no_spans(engine: Engine) -> None:
    traced = Traced(engine, TracerProvider(sampler=ALWAYS_OFF))
    assert await traced.embed(tiny.text_of(5)) == 200
    assert traced.exporter.get_finished_spans() == ()


@pytest.mark.asyncio
async def test_without_tracing_none_is_made_even_where_the_caller_has_a_span(
    engine: Engine,
) -> None:
    traced = Traced(engine, TracerProvider(), spans=None)
    assert await traced.embed(tiny.text_of(5)) == 200
    assert [span.name for span in traced.exporter.get_finished_spans()] == ["request"]


def test_off_is_the_default_and_a_process_without_a_provider_makes_no_spans() -> None:
    assert trace_flags(config().serve) == {}
    assert spans_if_traced() is None


def test_without_opentelemetry_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert spans_if_traced() is None


# --- configuration --------------------------------------------------------------------------------


def config(**serving: Any) -> ServeConfig:
    return ServeConfig.from_dict({"models": [{"path": "fake:x"}], "serve": serving})


@pytest.mark.parametrize(
    ("exporter", "path"), [("otlp", OTLP), ("my_spans:to_disk", "my_spans:to_disk")]
)
def test_the_exporter_and_the_ratio_reach_ray(exporter: str, path: str) -> None:
    traced = config(trace_exporter=exporter, trace_sampling_ratio=0.5)
    assert trace_flags(traced.serve) == {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": path,
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "0.5",
    }


@pytest.mark.parametrize("serving", [{"trace_exporter": "jaeger"}, {"trace_sampling_ratio": 1.5}])
def test_other_exporters_and_ratios_are_refused(serving: dict[str, Any]) -> None:
    (key,) = serving
    with pytest.raises(ConfigError, match=rf"serve\.{key}"):
        config(**serving)


def test_otlp_sends_spans_where_opentelemetrys_variables_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    (processor,) = otlp()
    processor.shutdown()
    assert processor.span_exporter._endpoint == "http://127.0.0.1:9/v1/traces"  # type: ignore[attr-defined]


def test_an_exporter_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_tracing(config(trace_exporter="otlp").serve)
    with pytest.raises(ConfigError, match=r"serve\.trace_exporter: no_such_module:x.*importable"):
        check_tracing(config(trace_exporter="no_such_module:x").serve)
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"shapeserve\[tracing\]"):
        check_tracing(config(trace_exporter="otlp").serve)
