"""``trace_exporter: trace_exporter:to_files``: spans as JSON lines, a file for each process."""

import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class ToFile(SpanExporter):
    """Writes spans below the directory that the service of the test has."""

    def __init__(self) -> None:
        self._path = Path(os.environ["SERVICE_OF"], f"spans-{os.getpid()}.jsonl")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return SpanExportResult.SUCCESS


def to_files() -> list[SpanProcessor]:
    return [SimpleSpanProcessor(ToFile())]
