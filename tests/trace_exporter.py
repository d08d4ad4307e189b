"""``trace_exporter: trace_exporter:to_files``: spans as JSON lines, a file for each process."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def spans(directory: Path, trace_id: str) -> list[dict[str, Any]]:
    """The spans of one trace that were written there, in the order in which they began."""
    files = [path.read_text().splitlines() for path in directory.glob("spans-*.jsonl")]
    every = [json.loads(line) for file in files for line in file if line.endswith("}")]
    mine = [span for span in every if span["context"]["trace_id"] == f"0x{trace_id}"]
    return sorted(mine, key=lambda span: span["start_time"])
