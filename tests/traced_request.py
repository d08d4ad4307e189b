"""One request of a caller that traces, and what a service wrote of it (``trace_exporter``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service_process import ServiceProcess, eventually

CALLER = "00f067aa0ba902b7"
TRACED, UNTRACED = "4bf92f3577b34da6a3ce929d0e0e4736", "0" * 31 + "1"


def check_traced_request(service: ServiceProcess, model: str, least: int) -> None:
    """Send a request of a caller that traces, and one of a caller that does not.

    Args:
        service: with the ratio 0, so that only the caller's word makes spans.
        model: that is asked.
        least: spans of a request, Ray's own among them.
    """
    service.embed("a", {"traceparent": f"00-{UNTRACED}-{CALLER}-00"})
    headers = {"traceparent": f"00-{TRACED}-{CALLER}-01"}
    assert service.embed("cat cat", headers, model=model).status_code == 200

    def complete() -> bool:  # the outermost span ends last; ours are made after the answer
        now = spans(service.directory, TRACED)
        ended = {span["parent_id"] for span in now} | {span["name"] for span in now}
        return len(now) >= least and {f"0x{CALLER}", "shapeserve.execute"} <= ended

    eventually(complete)
    found = spans(service.directory, TRACED)
    names = [span["name"] for span in found]
    assert names[-3:] == ["shapeserve.queue", "shapeserve.pad", "shapeserve.execute"]
    by_id = {span["context"]["span_id"]: span for span in found}
    parents = {by_id[span["parent_id"]]["name"] for span in found[-3:]}
    assert parents == {"replica_handle_request ShapeServe __call__"}
    assert found[0]["parent_id"] == f"0x{CALLER}"
    assert found[-1]["attributes"]["shapeserve.model"] == model
    assert "cat" not in str([span["attributes"] for span in found])
    assert spans(service.directory, UNTRACED) == []


def spans(directory: Path, trace_id: str) -> list[dict[str, Any]]:
    """The spans of one trace that were written there, in the order in which they began."""
    files = [path.read_text().splitlines() for path in directory.glob("spans-*.jsonl")]
    every = [json.loads(line) for file in files for line in file if line.endswith("}")]
    mine = [span for span in every if span["context"]["trace_id"] == f"0x{trace_id}"]
    return sorted(mine, key=lambda span: span["start_time"])
