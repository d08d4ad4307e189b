"""OpenTelemetry spans of what the engine did for a request: queue, pad, execute.

Ray Serve makes the span of a request and carries the caller's trace context (``traceparent``) to
it; ours are its children. The device thread only notes times; the spans are made here, on the event
loop, after the answer. Without tracing nothing of this module is called.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shapeserve import __version__
from shapeserve.config import HttpConfig
from shapeserve.errors import ConfigError

if TYPE_CHECKING:  # of the extra `tracing`, which not everybody installs
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import TracerProvider

    from shapeserve.engine import Result, Run

OTLP = "shapeserve.serve.tracing:otlp"
_OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


def trace_flags(serving: HttpConfig) -> dict[str, str]:
    """Return the environment that switches Ray Serve's tracing on; empty if it stays off.

    Not ``tracing_config``, which Ray 2.60 does not pass on to its proxies: without a span of theirs
    the caller's trace ends there.
    """
    if serving.trace_exporter is None:
        return {}
    return {
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": (
            OTLP if serving.trace_exporter == "otlp" else serving.trace_exporter
        ),
        "RAY_SERVE_TRACING_SAMPLING_RATIO": str(serving.trace_sampling_ratio),
    }


def check_tracing(serving: HttpConfig) -> None:
    """Refuse an exporter that no process of the service could load.

    Raises:
        ConfigError: it is not there.
    """
    exporter = serving.trace_exporter
    if exporter is None:
        return
    module = _OTLP_PACKAGE if exporter == "otlp" else exporter.partition(":")[0]
    try:
        found = find_spec(module) is not None and find_spec("opentelemetry.sdk") is not None
    except ImportError:
        found = False
    if not found:
        raise ConfigError(
            f"serve.trace_exporter: {exporter} is not importable here, or OpenTelemetry is not; "
            "pip install 'shapeserve[tracing]', and give otlp or module:function of a module that "
            "is on PYTHONPATH"
        )


def otlp() -> list[SpanProcessor]:
    """Return what sends spans over OTLP/HTTP; configured by OpenTelemetry's own variables.

    Ray calls it in every proxy and replica.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def spans_if_traced() -> Spans | None:
    """Return what makes spans in this process; None if Ray has not set tracing up here."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    return Spans(provider) if isinstance(provider, TracerProvider) else None


class Spans:
    """Makes the spans of answered requests.

    Args:
        provider: where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace

        self._current = trace.get_current_span
        self._provider = provider
        self._tracer = provider.get_tracer("shapeserve", __version__)

    def record(self, model: str, results: Sequence[Result], queued_s: float) -> None:
        """Make the spans of one request, as children of the span that is current here.

        Args:
            model: its name.
            results: of its samples; a batch that several of them were in has its spans once.
            queued_s: when they were queued, on ``time.monotonic()``.
        """
        if not self._current().is_recording():  # the trace is not sampled
            return
        since_epoch_ns = time.time_ns() - time.monotonic_ns()
        rows: dict[Run, int] = {}
        for result in results:
            for run in result.runs:
                rows[run] = rows.get(run, 0) + 1
        for run, mine in sorted(rows.items()):
            attributes: dict[str, str | int] = {
                "shapeserve.model": model,
                "shapeserve.bucket": run.bucket,
                "shapeserve.mode": str(run.mode),
                "shapeserve.batch.number": run.number,
                "shapeserve.batch.rows": run.rows,
                "shapeserve.batch.elements": run.elements,
                "shapeserve.batch.padding": run.padding,
                "shapeserve.request.rows": mine,
            }
            times_s = (queued_s, run.started_s, run.written_s, run.finished_s)
            queued, started, written, finished = (since_epoch_ns + int(s * 1e9) for s in times_s)
            self._span("queue", queued, started, attributes)
            self._span("pad", started, written, attributes)
            self._span("execute", written, finished, attributes)

    def _span(
        self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, str | int]
    ) -> None:
        span = self._tracer.start_span(
            f"shapeserve.{name}", attributes=attributes, start_time=start_ns
        )
        span.end(end_ns)

    def flush(self) -> None:
        """Send what is still held; blocks."""
        self._provider.force_flush()  # type: ignore[attr-defined]  # of the SDK's
