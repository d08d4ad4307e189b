"""Counts what torch really compiled, per model and phase.

Every program of a model is compiled through its :meth:`CompileMonitor.counting` backend, which
Dynamo calls in the compiling thread once for each graph. That leaves a mark of the model and the
thread; after the call returns, :meth:`CompileMonitor.collect` reads Dynamo's own record of those
compiles and moves it into the metrics. A call that compiled nothing costs one attribute read.

The marks belong to the monitor, not to the thread alone: several models share a device thread, and
a compile that nobody has collected yet (its call raised, for example) is not the next one's.

Why not ``torch._dynamo.callback``: its start callback fires only for the outermost pending compile
of the *process*, so a recompile beside a background compile of another thread would be missed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch._dynamo.utils as dynamo_utils
from torch._guards import CompileContext

from shapeserve.metrics import (
    CacheResult,
    CompilePhase,
    CompileStage,
    EagerFrameReason,
    GraphBreakReason,
    RecompileReason,
)

if TYPE_CHECKING:
    import torch

    from shapeserve.metrics import Metrics

log = logging.getLogger("shapeserve.compile")

# Dynamo keeps its last 64 records by default; a grid's warm-up may write more before we read them.
_RECORDS_KEPT = 4096


Compiler = Callable[..., Any]


class _ThreadMarks(threading.local):
    """Compile ids seen by the backend in this thread since the last ``collect``."""

    def __init__(self) -> None:
        self.compile_ids: set[str] = set()


class _CountingBackend:
    """A Dynamo backend that notes the compile and delegates to the real one."""

    def __init__(self, compiler: Compiler, name: str, marks: _ThreadMarks) -> None:
        self._compiler = compiler
        self._marks = marks
        self.__name__ = name  # what Dynamo prints as the backend's name

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **kwargs: Any
    ) -> Any:
        """Note the compile of this thread, then compile."""
        self._marks.compile_ids.add(str(CompileContext.current_compile_id()))
        return self._compiler(gm, example_inputs, **kwargs)


@dataclass(frozen=True)
class CompileEvent:
    """One Dynamo compile as torch recorded it.

    ``seconds`` maps a stage to its time; ``recompile_reason`` is the full text of the failed guard,
    or None for the first compile of a code object.
    """

    compile_id: str
    name: str
    seconds: dict[CompileStage, float] = field(default_factory=dict)
    recompile_reason: str | None = None
    cache: Mapping[CacheResult, int] = field(default_factory=dict)


class CompileMonitor:
    """Moves the compiles of one model from torch's records into its metrics.

    Thread rule: call :meth:`collect` in the thread that ran the program.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._marks = _ThreadMarks()
        self.eager_frames = 0
        dynamo_utils.set_compilation_metrics_limit(_RECORDS_KEPT)

    def counting(self, compiler: Compiler, name: str) -> Compiler:
        """Return a Dynamo backend called ``name`` whose compiles are this model's."""
        return _CountingBackend(compiler, name, self._marks)

    def collect(self, phase: CompilePhase) -> tuple[CompileEvent, ...]:
        """Count the model's compiles in this thread since the last call; empty is the rule."""
        if not self._marks.compile_ids:
            return ()
        ids, self._marks.compile_ids = self._marks.compile_ids, set()
        records = {
            str(r.compile_id): r
            for r in dynamo_utils.get_compilation_metrics()
            if r.compile_id is not None and not r.is_runtime and str(r.compile_id) in ids
        }
        events = tuple(_event(cid, records.get(cid)) for cid in sorted(ids))
        for event in events:
            self._count(event, phase)
        return events

    def count_breaks(self, breaks: Mapping[GraphBreakReason, int]) -> None:
        """Count graph breaks met while a program was compiled."""
        for reason, times in breaks.items():
            self._metrics.graph_breaks_total.labels(model=self._model, reason=reason).inc(times)

    def count_eager_frame(self) -> None:
        """Count a call that ran eager because torch refused to compile once more."""
        self.eager_frames += 1
        reason = EagerFrameReason.RECOMPILE_LIMIT
        self._metrics.eager_frames_total.labels(model=self._model, reason=reason).inc()

    def _count(self, event: CompileEvent, phase: CompilePhase) -> None:
        metrics, model = self._metrics, self._model
        for stage, seconds in event.seconds.items():
            metrics.compiles_total.labels(model=model, stage=stage, phase=phase).inc()
            metrics.compile_seconds_total.labels(model=model, stage=stage, phase=phase).inc(seconds)
        for result, n in event.cache.items():
            metrics.compile_cache_total.labels(model=model, result=result).inc(n)
        if phase is CompilePhase.REQUEST:
            reason = classify_recompile(event.recompile_reason)
            metrics.recompiles_total.labels(model=model, reason=reason).inc()
            log.error(
                "recompile on the request path of model %s: %s (%s)",
                model,
                event.name,
                event.recompile_reason or "first compile of this code",
            )


def _event(compile_id: str, record: Any | None) -> CompileEvent:
    """Read one of torch's records; a missing one still counts as a compile."""
    if record is None:
        return CompileEvent(compile_id, "unknown", {CompileStage.DYNAMO: 0.0})
    # Torch's figures are cumulative (each stage holds the next one), the metric's are not.
    dynamo = (record.dynamo_cumulative_compile_time_us or 0) / 1e6
    aot = (record.aot_autograd_cumulative_compile_time_us or 0) / 1e6
    inductor = (record.inductor_cumulative_compile_time_us or 0) / 1e6
    return CompileEvent(
        compile_id=compile_id,
        name=record.co_name or "unknown",
        seconds={
            CompileStage.DYNAMO: max(dynamo - aot, 0.0),
            CompileStage.AOT: max(aot - inductor, 0.0),
            CompileStage.INDUCTOR: inductor,
        },
        recompile_reason=record.recompile_reason,
        cache=_cache_results(record),
    )


def _cache_results(record: Any) -> dict[CacheResult, int]:
    hits = record.inductor_fx_local_cache_hit_count or 0
    misses = record.inductor_fx_local_cache_miss_count or 0
    # Neither: the compile did not ask the cache, as every program with packed weights.
    return {CacheResult.HIT: hits, CacheResult.MISS: misses} | (
        {} if hits or misses else {CacheResult.BYPASS: 1}
    )


# Guard texts as torch 2.11-2.14 writes them; the first word found wins.
_REASONS: tuple[tuple[str, RecompileReason], ...] = (
    ("size mismatch", RecompileReason.SHAPE),
    ("stride mismatch", RecompileReason.STRIDE),
    ("dtype mismatch", RecompileReason.DTYPE),
    ("dispatch key set mismatch", RecompileReason.TENSOR_KIND),
    ("GLOBAL_STATE", RecompileReason.GLOBAL_STATE),
    ("grad_mode", RecompileReason.GLOBAL_STATE),
    (".size()[", RecompileReason.SHAPE),
    ("duck", RecompileReason.SHAPE),
)


def classify_recompile(text: str | None) -> RecompileReason:
    """Map the guard text to the closed set of reasons that a metric label may carry."""
    if text is None:
        return RecompileReason.FIRST_COMPILE
    for needle, reason in _REASONS:
        if needle in text:
            return reason
    return RecompileReason.OTHER
