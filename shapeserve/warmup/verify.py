"""Capture and verify every variant of a runner, then seal it.

:func:`warm_up` is a generator: at start-up the engine runs it through on the device thread, for a
new policy one step at a time between batches. The verify pass is the padding-neutrality test of
every bucket as well: a probe row among random neighbours in poisoned buffers must give the answer
that the eager model gives it alone and unpadded (I4), and nothing may compile (I3).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.errors import ModelError
from shapeserve.layout import RowArrays
from shapeserve.metrics import NO_BUCKET, CaptureOutcome, CompilePhase, Metrics, Tier, VariantState
from shapeserve.runner import ModelRunner
from shapeserve.warmup.probe import TOLERANCE, Probe, label, row_area
from shapeserve.warmup.progress import WarmupProgress

log = logging.getLogger("shapeserve.warmup")

_TIMED_RUNS = 10


@dataclass(frozen=True, slots=True)
class WarmupContext:
    """What every step of a warm-up needs.

    Attributes:
        runner: a fresh runner; its programs are compiled already.
        probe: makes the rows.
        monitor: counts the compiles, under ``phase``.
        metrics: where captures are counted.
        phase: ``warmup`` at start-up, ``background`` for a new policy.
        strict: a variant that fails raises instead of being served at a lower tier.
    """

    runner: ModelRunner
    probe: Probe
    monitor: CompileMonitor
    metrics: Metrics
    phase: CompilePhase
    strict: bool


def warm_up(context: WarmupContext) -> Iterator[WarmupProgress]:
    """Bring every variant to its tier, verify it, and seal the set.

    Yields before each step.

    Raises:
        ModelError: padding changes an answer of the eager model, or ``strict`` and a variant
            failed.
    """
    runner = context.runner
    total = len(runner.grid.buckets)
    # Graphs share one pool: a smaller capture fits into what a larger one has freed.
    largest_first = sorted(runner.grid.buckets, key=lambda b: -b.area)
    if runner.programs.tier is Tier.GRAPH:
        for done, bucket in enumerate(largest_first):
            yield WarmupProgress("capture", done, total, bucket.label)
            _capture(context, bucket)
    answers: dict[object, tuple[RowArrays, list[np.ndarray]]] = {}
    compiled = False
    for done, bucket in enumerate(largest_first):
        yield WarmupProgress("verify", done, total, bucket.label)
        key = bucket.without(BATCH)
        if key not in answers:
            row = context.probe.row_for(runner.grid, bucket)
            answers[key] = (row, context.probe.answer(row))
        compiled |= _verify(context, bucket, *answers[key], may_compile=True)
    if compiled:
        # A program needed one more specialisation. The pass that counts is one without any.
        for done, bucket in enumerate(largest_first):
            yield WarmupProgress("verify again", done, total, bucket.label)
            _verify(context, bucket, *answers[bucket.without(BATCH)], may_compile=False)
    yield WarmupProgress("verify", total, total, "fallback")
    _verify_fallback(context)
    runner.variants.seal()
    yield WarmupProgress("sealed", total, total)


def publish_variants(runner: ModelRunner, metrics: Metrics) -> None:
    """Show the variants of the runner that serves."""
    counts = Counter(
        (v.tier, VariantState.DEGRADED if v.degraded else VariantState.WARM)
        for v in runner.variants.all.values()
    )
    model = runner.spec.name
    for tier in Tier:
        for state in VariantState:
            metrics.variants.labels(model=model, tier=tier, state=state).set(counts[tier, state])
    metrics.graph_pool_bytes.labels(model=model).set(runner.variants.graph_bytes)


def _capture(context: WarmupContext, bucket: Bucket) -> None:
    runner, captures = context.runner, context.metrics.captures_total
    sizes = bucket.as_dict()
    inputs = runner.layout.write(context.probe.fill(sizes)[:1], sizes)
    try:
        captured = runner.variants.capture(bucket, inputs)
    except RuntimeError as error:
        captures.labels(model=runner.spec.name, outcome=CaptureOutcome.FAILED).inc()
        if context.strict:
            raise ModelError(f"bucket {bucket.label} cannot be captured: {error}") from error
        tier = runner.variants[bucket].tier
        log.error("bucket %s cannot be captured, stays %s: %s", bucket.label, tier, error)
    else:
        outcome = CaptureOutcome.CAPTURED if captured else CaptureOutcome.REFUSED
        captures.labels(model=runner.spec.name, outcome=outcome).inc()
        if not captured and context.strict:
            raise ModelError(
                f"bucket {bucket.label} is not captured: the budget of memory is used up; raise "
                "compile.graph_memory_fraction, or build fewer buckets"
            )
        if not captured:
            log.warning(
                "bucket %s is not captured: the graphs hold %d bytes already, which is the budget "
                "(compile.graph_memory_fraction); it is served %s",
                bucket.label,
                runner.variants.graph_bytes,
                runner.variants[bucket].tier,
            )


def _verify(
    context: WarmupContext,
    bucket: Bucket,
    row: RowArrays,
    expected: list[np.ndarray],
    *,
    may_compile: bool,
) -> bool:
    """Run ``row`` in ``bucket``; a variant that fails is served eagerly, or raises.

    Returns whether something compiled, which only the first pass may.
    """
    variants = context.runner.variants
    problem = _problem(context, bucket, row, expected)
    compiled = isinstance(problem, _Compiled)
    if compiled and may_compile:
        log.warning("bucket %s: %s", bucket.label, problem)
        problem = _problem(context, bucket, row, expected)
    if problem is None:
        return compiled
    tier = variants[bucket].tier
    if context.strict or tier is Tier.EAGER:
        name = context.runner.spec.name
        raise ModelError(f"bucket {bucket.label} of {name} ({tier}): {problem}")
    log.error("bucket %s: %s; served eagerly from now on", bucket.label, problem)
    variants.demote(bucket)
    _verify(context, bucket, row, expected, may_compile=False)
    return compiled


class _Compiled(str):
    """A problem that may be gone at the next call."""

    __slots__ = ()


def _problem(
    context: WarmupContext, bucket: Bucket, row: RowArrays, expected: list[np.ndarray]
) -> str | None:
    runner = context.runner
    index, rows = context.probe.plant(row, bucket)
    runner.layout.poison()
    eager_before = context.monitor.eager_frames
    try:
        execution = runner.execute(rows, bucket.as_dict(), fallback=False)
    except Exception as raised:  # whatever a model may raise: it is reported, never swallowed
        context.monitor.collect(context.phase, bucket.label)
        return f"{type(raised).__name__}: {raised}"
    if events := context.monitor.collect(context.phase, bucket.label):
        why = events[0].recompile_reason or events[0].name
        return _Compiled(f"it compiled during the verify pass: {why}")
    if context.monitor.eager_frames > eager_before:
        return "it ran eager, because torch reached its recompile limit"
    error = context.probe.error(list(execution.outputs[index].values()), expected)
    tolerance = TOLERANCE[runner.spec.dtype]
    if error <= tolerance:
        return None
    return (
        f"a row of {label(row.sizes)} at index {index} differs by {error:.2g} from the unpadded "
        f"eager answer (tolerance {tolerance:g})"
    )


def _verify_fallback(context: WarmupContext) -> None:
    """Run the longest row that the model takes outside the grid: it must not compile either."""
    runner, tolerance = context.runner, TOLERANCE[context.runner.spec.dtype]
    longest = {axis: runner.spec.hard_limit[axis] for axis in runner.spec.row_axes}
    row = context.probe.row(longest)
    sizes = (
        {BATCH: runner.programs.min_batch, **longest}
        if BATCH in runner.grid.axes
        else {TOKENS: prod(longest.values())}
    )
    for attempt in range(2):
        execution = runner.execute([row], sizes, fallback=True)
        events = context.monitor.collect(context.phase, NO_BUCKET)
        if not events:
            break
        why = f"the fallback compiled at {label(sizes)}: {events[0].recompile_reason}"
        if context.strict or attempt:
            raise ModelError(why)
        log.warning(why)
    error = context.probe.error(list(execution.outputs[0].values()), context.probe.answer(row))
    if not error <= tolerance:
        raise ModelError(
            f"the fallback of {runner.spec.name} differs by {error:.2g} from the eager answer at "
            f"{label(sizes)} (tolerance {tolerance:g})"
        )


def launch_overhead(runner: ModelRunner, probe: Probe) -> float:
    """Measure the fixed cost of a launch, in padded elements.

    Timed on the smallest row shape at its smallest and largest batch: a straight line through the
    two gives the cost of an element and of an empty batch. The batcher weighs it against padding.
    """
    small, large = _timed_buckets(runner.grid)
    if small == large:
        return 0.0
    low, high = (_fastest_s(runner, probe, bucket) for bucket in (small, large))
    per_element = (high - low) / (large.area - small.area)
    if per_element <= 0:
        return float(large.area)  # a launch is all that these sizes cost
    return max(low / per_element - small.area, 0.0)


def _timed_buckets(grid: Grid) -> tuple[Bucket, Bucket]:
    if BATCH not in grid.axes:
        return grid.buckets[0], grid.buckets[-1]
    key = min((b.without(BATCH) for b in grid.buckets), key=row_area)
    sizes = grid.batch_sizes(key)
    return grid.bucket(sizes[0], key), grid.bucket(sizes[-1], key)


def _fastest_s(runner: ModelRunner, probe: Probe, bucket: Bucket) -> float:
    sizes = bucket.as_dict()
    rows = probe.fill(sizes)
    # The fastest run: what else runs on the machine only ever adds.
    return min(runner.execute(rows, sizes, fallback=False).seconds for _ in range(_TIMED_RUNS))
