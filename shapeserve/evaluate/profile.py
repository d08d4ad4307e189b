"""Kernels, gaps and memory of a call, from the trace that torch's profiler exports.

The trace is the documented Chrome format, the same for CPU and CUDA, and has what the profiler's
event objects lack: the bytes of copies, and the memory at every allocation.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shapeserve.evaluate.result import KernelAccount

CALL = "shapeserve::call"
"""Marks a call in the trace."""

_CALLS = 5  # of which the fastest counts; arbitrary
_LONGEST = 5
_GENERATED = re.compile(r"^(graph_\d+_)?(cpp|triton)_")
_GRAPH = "Pregraph bytecode"  # Dynamo's mark before each compiled graph
_LAUNCH = re.compile(r"^cu(da)?(LaunchKernel|GraphLaunch)")
_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_CUDA_MEMORY = 1  # "Device Type" of allocations on a GPU
# They compute nothing: they make a view, or ask for memory.
_NO_COMPUTE = re.compile(
    r"^aten::(empty|empty_strided|empty_like|as_strided|view|_unsafe_view|_reshape_alias|"
    r"transpose|t|permute|expand|expand_as|select|slice|unsqueeze|squeeze|narrow|detach|alias|"
    r"chunk|split|split_with_sizes|unbind|resolve_conj|resolve_neg)$"
)
_US = 1e-6


def profile_calls(
    call: Callable[[], object], device: torch.device, calls: int = _CALLS
) -> KernelAccount:
    """Profile some calls; those before must have made them warm.

    What the profiler itself takes for each operator is in the gaps.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities, profile_memory=True) as profiler:
        for _ in range(calls):
            with record_function(CALL):
                call()
                if cuda:
                    torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="shapeserve-profile-") as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return read_trace(events, cuda=cuda)


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: float
    end: float
    kind: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def within(self, other: _Span) -> bool:
        return self.start >= other.start and self.end <= other.end


def wake_profiler() -> None:
    """Have torch set up its profiler in this thread: the main one, else it complains on stderr."""
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def read_trace(events: Iterable[dict[str, Any]], *, cuda: bool) -> KernelAccount:
    """Sum up the fastest call of a trace (``traceEvents`` of the Chrome format, microseconds).

    Raises:
        ValueError: there is no call in it.
    """
    spans, memory = [], []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation":
            start = float(event["ts"])
            args = event.get("args") or {}
            end = start + float(event["dur"])
            spans.append(_Span(str(event["name"]), start, end, str(event.get("cat", "")), args))
        elif event.get("name") == "[memory]":
            memory.append(event)
    calls = [span for span in spans if span.name == CALL]
    if not calls:
        raise ValueError(f"the trace has no range {CALL}")
    # What else runs on the machine only ever adds.
    call = min(calls, key=lambda span: span.end - span.start)
    inside = [span for span in spans if span.within(call)]
    work = [s for s in inside if s.kind in _GPU_WORK] if cuda else [*_operators(inside)]
    kernels = [s for s in work if _is_kernel(s, cuda=cuda)]
    busy = _union(work)
    return KernelAccount(
        platform="cuda" if cuda else "cpu",
        kernels=len(kernels),
        busy_s=busy * _US,
        gap_s=max(_extent(work, call, cuda=cuda) - busy, 0.0) * _US,
        generated=dict(Counter(s.name for s in kernels if _GENERATED.match(s.name))),
        longest=_longest(kernels),
        peak_bytes=_peak_bytes(memory, calls, cuda=cuda),
        copied_bytes=_copied(work) if cuda else None,
        launches=sum(bool(_LAUNCH.match(s.name)) for s in inside) if cuda else None,
        graphs_run=sum(s.name == _GRAPH for s in inside),
    )


def _is_kernel(span: _Span, *, cuda: bool) -> bool:
    return span.kind == "kernel" if cuda else not _NO_COMPUTE.match(span.name)


def _operators(spans: Sequence[_Span]) -> Iterator[_Span]:
    """Yield the outermost operators: what an operator calls itself is part of it.

    Other ranges (of Dynamo, of the compiled graph) hold operators and are none.
    """
    end = float("-inf")
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if span.start < end or not _is_operator(span):
            continue
        end = span.end
        yield span


def _is_operator(span: _Span) -> bool:
    named = "::" in span.name and " " not in span.name
    return span.name != CALL and (named or bool(_GENERATED.match(span.name)))


def _union(spans: Sequence[_Span]) -> float:
    """Length of time in which at least one of the spans is there."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        total += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    return total


def _extent(spans: Sequence[_Span], call: _Span, *, cuda: bool) -> float:
    if not cuda:
        return call.end - call.start
    return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0


def _longest(kernels: Sequence[_Span]) -> tuple[tuple[str, int, float], ...]:
    """Return name, calls and seconds of the kernels that take longest together."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for span in kernels:
        times[span.name].append((span.end - span.start) * _US)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    return tuple((name, len(seconds), sum(seconds)) for name, seconds in longest)


def _copied(work: Sequence[_Span]) -> int:
    return sum(int(s.args.get("bytes", 0)) for s in work if s.kind == "gpu_memcpy")


def _peak_bytes(
    memory: Sequence[dict[str, Any]], calls: Sequence[_Span], *, cuda: bool
) -> int | None:
    """The most that a call had allocated at a time beyond what there was before it.

    A replay of a CUDA graph allocates nothing; its memory is the pool's.
    """
    kind = _CUDA_MEMORY if cuda else 0
    peak = None
    for call in calls:
        steps = [
            e["args"]
            for e in memory
            if call.start <= float(e["ts"]) <= call.end and e["args"].get("Device Type") == kind
        ]
        if steps:
            before = steps[0]["Total Allocated"] - steps[0]["Bytes"]
            most = max(step["Total Allocated"] for step in steps) - before
            peak = max(peak or 0, most)
    return peak if peak is not None or not cuda else 0
