"""Counts what torch really compiled, per model and phase.

Dynamo runs a hook in the compiling thread at the start of every compile, also of one that fails,
and every program of a model is compiled through its :meth:`CompileMonitor.counting` backend, which
Dynamo calls once for each graph. Both leave a mark of the model and the thread; after the call
returns, :meth:`CompileMonitor.collect` reads Dynamo's own record of those compiles and moves it
into the metrics. A call that compiles nothing pays two reads of thread-locals, below 1 us (timeit,
one busy Xeon core, Python 3.11); a batch takes 200 us and more.

The marks belong to the monitor, not to the thread alone: several models share a device thread, and
a compile that nobody has collected yet (its call raised, for example) is not the next one's.

Why not ``torch._dynamo.callback``: its start callback fires only for the outermost pending compile
of the *process*, so a recompile beside a background compile of another thread would be missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch._dynamo.utils as dynamo_utils
from torch._guards import CompileContext

from shapeserve.compile.breaks import claim, classify_break
from shapeserve.metrics import (
    NO_BUCKET,
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
# Of compiles on the request path; each has a text of a guard. Arbitrary: there should be none.
_RECOMPILES_KEPT = 50


# What torch answers with an eager frame; anything else is raised to the caller.
_SOFT_FAILURES = {"Unsupported", "UserError"}
_LIMIT_FAILURE = "FailOnRecompileLimitHit"

Compiler = Callable[..., Any]


class _ThreadMarks(threading.local):
    """Ids of the compiles that began in this thread since the last ``collect``."""

    def __init__(self) -> None:
        self.compile_ids: set[str] = set()

    def add(self) -> None:
        self.compile_ids.add(str(CompileContext.current_compile_id()))


class _Running(threading.local):
    """Whose program was called last in this thread: a compile that begins there is its."""

    marks: _ThreadMarks | None = None


_RUNNING = _Running()


def _mark() -> str:
    if _RUNNING.marks is not None:
        _RUNNING.marks.add()
    return ""  # torch files it with the record


def _hook_torch() -> None:
    """Have torch call :func:`_mark` at every compile; once a process."""
    register = getattr(dynamo_utils, "register_hook_for_recompile_user_context", None)
    hooks = getattr(dynamo_utils, "get_hook_for_recompile_user_context", lambda: None)() or ()
    if register is not None and _mark not in hooks:
        register(_mark)


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
        self._marks.add()
        return self._compiler(gm, example_inputs, **kwargs)


@dataclass(frozen=True)
class CompileEvent:
    """One Dynamo compile as torch recorded it.

    ``seconds`` maps a stage to its time; ``recompile_reason`` is the full text of the failed guard,
    or None for the first compile of a code object. ``failure`` is the full text of why the frame
    runs eager since then, with its ``eager`` class. ``shape`` is the bucket's label, or `fallback`.
    """

    compile_id: str
    name: str
    seconds: dict[CompileStage, float] = field(default_factory=dict)
    recompile_reason: str | None = None
    cache: Mapping[CacheResult, int] = field(default_factory=dict)
    eager: EagerFrameReason | None = None
    failure: str | None = None
    shape: str | None = None


@dataclass(frozen=True, slots=True)
class Recompile:
    """One compile on the request path.

    Attributes:
        compile_id: torch's, as in its own logs.
        program: what was compiled.
        reason: as it is counted.
        guard: the full text of the guard that failed; None for the first compile of some code.
        seconds: how long it took.
        unix_s: when it was found.
    """

    compile_id: str
    program: str
    reason: RecompileReason
    guard: str | None
    seconds: float
    unix_s: float


class CompileMonitor:
    """Moves the compiles of one model from torch's records into its metrics.

    Thread rule: call :meth:`collect` in the thread that ran the program. Any thread may read the
    attributes.

    Attributes:
        eager_frames: calls that ran eager because torch refused to compile once more.
        recent_recompiles: the last compiles on the request path, oldest first.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._marks = _ThreadMarks()
        self._said: set[tuple[str, ...]] = set()
        self.eager_frames = 0
        self.recent_recompiles: tuple[Recompile, ...] = ()
        dynamo_utils.set_compilation_metrics_limit(_RECORDS_KEPT)
        _hook_torch()
        self.discard()

    def counting(self, compiler: Compiler, name: str) -> Compiler:
        """Return a Dynamo backend called ``name`` whose compiles are this model's."""
        return _CountingBackend(compiler, name, self._marks)

    def running(self) -> None:
        """Say that this thread is about to run a program of this model."""
        _RUNNING.marks = self._marks

    def discard(self) -> None:
        """Forget what this thread compiled and where it broke: it is tried again another way."""
        self._marks.compile_ids = set()
        claim()

    def collect(self, phase: CompilePhase, shape: str | None = None) -> tuple[CompileEvent, ...]:
        """Count the model's compiles in this thread since the last call; empty is the rule.

        Args:
            phase: what they are counted under.
            shape: the bucket that ran, or ``NO_BUCKET`` for the fallback; for the log.
        """
        if not self._marks.compile_ids:
            return ()
        ids, self._marks.compile_ids = self._marks.compile_ids, set()
        shape = "fallback" if shape == NO_BUCKET else shape
        records = {
            str(r.compile_id): r
            for r in dynamo_utils.get_compilation_metrics()
            if r.compile_id is not None and not r.is_runtime
        }
        # Id "3/1" is the second compile of frame 3; one that was refused has no name of its own.
        names = {cid.split("/")[0]: r.co_name for cid, r in records.items() if r.co_name}
        found = [
            _event(cid, records.get(cid), names.get(cid.split("/")[0], "unknown"), shape)
            for cid in sorted(ids)
        ]
        for event in found:
            self._log(event, phase)
        # At the limit nothing was compiled, and whoever ran the program counted the eager call.
        events = [event for event in found if event.eager is not EagerFrameReason.RECOMPILE_LIMIT]
        for event in events:
            self._count(event, phase)
        for reason, times in claim().items():
            self._metrics.graph_breaks_total.labels(model=self._model, reason=reason).inc(times)
        return tuple(events)

    def count_eager_frame(self, reason: EagerFrameReason) -> None:
        """Count a call, or a frame, that should be compiled and ran eager."""
        self.eager_frames += 1
        self._metrics.eager_frames_total.labels(model=self._model, reason=reason).inc()

    def _count(self, event: CompileEvent, phase: CompilePhase) -> None:
        metrics, model = self._metrics, self._model
        for stage, seconds in event.seconds.items():
            metrics.compiles_total.labels(model=model, stage=stage, phase=phase).inc()
            metrics.compile_seconds_total.labels(model=model, stage=stage, phase=phase).inc(seconds)
        for result, n in event.cache.items():
            metrics.compile_cache_total.labels(model=model, result=result).inc(n)
        if event.eager is not None:
            self.count_eager_frame(event.eager)
            broken = classify_break(event.failure or "")
            metrics.graph_breaks_total.labels(model=model, reason=broken).inc()
        if phase is CompilePhase.REQUEST:
            reason = classify_recompile(event.recompile_reason)
            metrics.recompiles_total.labels(model=model, reason=reason).inc()
            self._remember(event, reason)

    def _log(self, event: CompileEvent, phase: CompilePhase) -> None:
        """Log one compile; on the request path as an error, once for each cause."""
        where = event.shape or "unknown sizes"
        if phase is not CompilePhase.REQUEST:
            spent = ", ".join(f"{stage} {s:.1f} s" for stage, s in event.seconds.items())
            why = event.failure or event.recompile_reason or "first compile of this code"
            log.info(
                "model %s compiled %s at %s: %s (%s)", self._model, event.name, where, spent, why
            )
            return
        reason = event.eager or classify_recompile(event.recompile_reason)
        if (cause := (event.name, reason, where)) in self._said:
            return
        self._said.add(cause)
        what = "recompile" if event.eager is None else f"eager frame ({event.eager})"
        log.error(
            "%s on the request path of model %s at %s: %s (%s)",
            what,
            self._model,
            where,
            event.name,
            event.recompile_reason or event.failure or "first compile of this code",
        )

    def _remember(self, event: CompileEvent, reason: RecompileReason) -> None:
        recompile = Recompile(
            event.compile_id,
            event.name,
            reason,
            event.recompile_reason,
            sum(event.seconds.values()),
            time.time(),
        )
        # A new tuple, so that a reader in another thread never sees one that changes.
        self.recent_recompiles = (*self.recent_recompiles, recompile)[-_RECOMPILES_KEPT:]


def _event(compile_id: str, record: Any | None, name: str, shape: str | None) -> CompileEvent:
    """Read one of torch's records; a missing one still counts as a compile."""
    if record is None:
        return CompileEvent(compile_id, name, {CompileStage.DYNAMO: 0.0}, shape=shape)
    return CompileEvent(
        compile_id=compile_id,
        name=name,
        seconds=_seconds(record),
        recompile_reason=record.recompile_reason,
        cache=_cache_results(record),
        eager=_eager_reason(record),
        failure=record.fail_reason,
        shape=shape,
    )


def _seconds(record: Any) -> dict[CompileStage, float]:
    """Return stage -> seconds of the stages that ran.

    Torch's figures are cumulative (each stage holds the next one), the metric's are not.
    """
    microseconds = (
        (CompileStage.DYNAMO, record.dynamo_cumulative_compile_time_us or 0),
        (CompileStage.AOT, record.aot_autograd_cumulative_compile_time_us),
        (CompileStage.INDUCTOR, record.inductor_cumulative_compile_time_us),
        (CompileStage.AUTOTUNE, record.compile_time_autotune_time_us),
    )
    ran = [(stage, us / 1e6) for stage, us in microseconds if us is not None]
    inner = [seconds for _, seconds in ran[1:]] + [0.0]
    return {stage: max(s - i, 0.0) for (stage, s), i in zip(ran, inner, strict=True)}


def _eager_reason(record: Any) -> EagerFrameReason | None:
    if record.fail_type == _LIMIT_FAILURE:
        return EagerFrameReason.RECOMPILE_LIMIT
    if record.fail_type not in _SOFT_FAILURES or record.has_guarded_code:
        return None
    wanted = classify_break(record.fail_reason or "") is GraphBreakReason.EAGER_ISLAND
    return EagerFrameReason.EAGER_ISLAND if wanted else EagerFrameReason.UNSUPPORTED


def _cache_results(record: Any) -> dict[CacheResult, int]:
    hits = record.inductor_fx_local_cache_hit_count or 0
    misses = record.inductor_fx_local_cache_miss_count or 0
    if hits or misses:
        return {CacheResult.HIT: hits, CacheResult.MISS: misses}
    # Code was generated without asking the cache, as for every program with packed weights.
    ran = record.inductor_cumulative_compile_time_us is not None
    return {CacheResult.BYPASS: 1} if ran else {}


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
