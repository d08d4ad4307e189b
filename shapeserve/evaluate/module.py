"""Time the module alone in one bucket, in every way that it can run there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shapeserve.buckets import BATCH
from shapeserve.compile.graph import GraphPool
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.evaluate.latency import FirstCall, Latency
from shapeserve.evaluate.profile import profile_calls
from shapeserve.evaluate.reference import Case
from shapeserve.evaluate.result import Arm, CompileCost, Row, Scope, Start
from shapeserve.evaluate.start import Counts
from shapeserve.evaluate.timing import Timing, time_calls, timed
from shapeserve.layout import Forward, RowArrays
from shapeserve.metrics import CompilePhase, Metrics, Tier
from shapeserve.runner import ModelRunner
from shapeserve.warmup import Probe, compile_program

SINGLE = "program for one row"
"""What the start calls the program of batches of one row; every other one runs all the rest."""


def arms_of(runner: ModelRunner) -> list[Arm]:
    """Return the ways in which this model can run a bucket."""
    programs = runner.programs
    compiled = [Arm.COMPILED] * programs.compiles
    captured = [Arm.CAPTURED] * (programs.tier is Tier.GRAPH)
    return [Arm.EAGER, *compiled, *captured, *[Arm.SPECIALIZED] * programs.compiles]


class NotRun(Exception):  # noqa: N818 - it is no error
    """This bucket is not run that way; the message says why."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A way to run the bucket that has made its first call."""

    call: Forward
    first: FirstCall
    compile: CompileCost | None
    recompiles: Callable[[], int] | None


class ModuleBench:
    """Times the module alone. Thread rule: the device thread.

    Args:
        runner: a warm one.
        metrics: where its compiles are counted.
        start: how it became warm.
        probe: of the reference.
        timing: how often calls are timed.
    """

    def __init__(
        self, runner: ModelRunner, metrics: Metrics, start: Start, probe: Probe, timing: Timing
    ) -> None:
        self._runner = runner
        self._metrics = metrics
        self._start = start
        self._probe = probe
        self._timing = timing

    def measure(self, case: Case) -> list[Row]:
        """Return a row for every way to run the bucket, in the order of ``arms_of``."""
        inputs = self._runner.layout.write(case.rows, case.sizes)
        rows = {arm: Row(case.bucket.label, arm, Scope.MODULE) for arm in arms_of(self._runner)}
        ready: dict[Arm, _Ready] = {}
        for arm in rows:
            try:
                ready[arm] = self._prepare(arm, case, inputs)
                rows[arm] = self._compare(rows[arm], ready[arm].call, case, inputs)
            except NotRun as why:
                rows[arm] = replace(rows[arm], note=str(why))
            except Exception as error:  # the user's model: whatever it raises is a result
                ready.pop(arm, None)
                rows[arm] = replace(rows[arm], error=said(error))
        self._time(rows, ready, inputs)
        return [*rows.values()]

    def _time(
        self, rows: dict[Arm, Row], ready: dict[Arm, _Ready], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Fill in latency, recompiles and kernels of what is ready."""
        calls = {arm: _bound(it.call, inputs) for arm, it in ready.items()}
        device = self._runner.device
        seconds, failed = time_calls(calls, device, self._timing)
        for arm, it in ready.items():
            if arm in failed:
                rows[arm] = replace(rows[arm], error=said(failed[arm]))
                continue
            rows[arm] = replace(
                rows[arm],
                latency=Latency(it.first, tuple(seconds[arm])),
                compile=it.compile,
                recompiles=it.recompiles() if it.recompiles else None,
            )
            try:
                rows[arm] = replace(rows[arm], kernels=profile_calls(calls[arm], device))
            except Exception as error:  # a profiler that cannot run here is no reason to stop
                rows[arm] = replace(rows[arm], error=f"not profiled: {said(error)}")

    def _compare(self, row: Row, call: Forward, case: Case, inputs: Sequence[torch.Tensor]) -> Row:
        layout = self._runner.layout
        outputs = layout.read(call(*inputs), case.rows, case.sizes).rows()[0]
        return replace(row, numerics=case.numerics(outputs, self._probe, self._runner.spec.dtype))

    def _prepare(self, arm: Arm, case: Case, inputs: Sequence[torch.Tensor]) -> _Ready:
        if arm is Arm.EAGER:
            return self._eager(case, inputs)
        if arm is Arm.COMPILED:
            return self._compiled(case)
        if arm is Arm.CAPTURED:
            return self._captured(case)
        return self._specialized(case)

    def _eager(self, case: Case, inputs: Sequence[torch.Tensor]) -> _Ready:
        runner = self._runner
        call = runner.layout.bind(runner.programs.eager, case.sizes)
        seconds = timed(_bound(call, inputs), runner.device)
        return _Ready(call, FirstCall(seconds, "the call alone, in a warm process"), None, None)

    def _compiled(self, case: Case) -> _Ready:
        runner = self._runner
        program, tier = runner.programs.for_sizes(case.sizes)
        if tier is not Tier.COMPILED:
            raise NotRun("runs eagerly: torch would compile a size of 1 for itself alone")
        name, cost = self._program(case)
        first = FirstCall(cost.seconds, f"compiling the {name}, shared with other buckets")
        call = runner.layout.bind(program, case.sizes)
        return _Ready(call, first, cost, self._recompiles(case))

    def _captured(self, case: Case) -> _Ready:
        runner = self._runner
        variant = runner.variants[case.bucket]
        if variant.tier is not Tier.GRAPH:
            raise RuntimeError(f"it is not captured but served {variant.tier}; the log says why")
        seconds, cost = self._start.capture_s[case.bucket.label], None
        includes = "capturing this bucket"
        if runner.programs.compiles:
            name, cost = self._program(case)
            seconds += cost.seconds
            includes = f"compiling the {name}, shared with other buckets, and {includes}"
        return _Ready(variant.run, FirstCall(seconds, includes), cost, None)

    def _program(self, case: Case) -> tuple[str, CompileCost]:
        """The program that runs this bucket, and what it cost at the start."""
        single = case.sizes.get(BATCH) == 1
        return next((n, c) for n, c in self._start.programs.items() if (n == SINGLE) == single)

    def _recompiles(self, case: Case) -> Callable[[], int]:
        """Return what counts the compiles of the engine's programs from now on."""
        before = recompiles_total(self._metrics)

        def count() -> int:
            # What a program compiled in this thread is counted after the next batch.
            flight = self._runner.launch_counted(case.rows, case.sizes, fallback=False)
            flight.finish()
            return recompiles_total(self._metrics) - before

        return count

    def _specialized(self, case: Case) -> _Ready:
        metrics = Metrics()
        before = Counts.now(metrics)
        made = specialize(self._runner, self._probe, case.rows, case.sizes, metrics)
        cost = Counts.now(metrics).cost_since(before, made.seconds, exact=True)
        includes = "compiling for exactly this bucket"
        if self._runner.programs.tier is Tier.GRAPH:
            includes += ", and capturing it"

        def recompiles() -> int:
            return len(made.monitor.collect(CompilePhase.BACKGROUND))

        return _Ready(made.call, FirstCall(cost.seconds, includes), cost, recompiles)


@dataclass(frozen=True, slots=True)
class Specialized:
    """A program for exactly one bucket.

    Attributes:
        call: runs it.
        seconds: what it took to make, the capture included.
        monitor: counts its compiles.
    """

    call: Forward
    seconds: float
    monitor: CompileMonitor


def specialize(
    runner: ModelRunner,
    probe: Probe,
    rows: Sequence[RowArrays],
    sizes: Mapping[str, int],
    metrics: Metrics,
) -> Specialized:
    """Compile for exactly these sizes, and capture that where graphs are captured.

    Afterwards ``rows`` are in the layout's buffers. Thread rule: the device thread.

    Args:
        runner: a warm one; its own programs stay as they are.
        probe: makes the rows of the compile.
        rows: what fills ``sizes``.
        sizes: of a bucket.
        metrics: where the compile is counted; an own registry.

    Raises:
        NotRun: there is no program for these sizes.
    """
    name = runner.spec.name
    metrics.preset(name, [], runner.grid.axes)
    monitor = CompileMonitor(metrics, name)
    programs = runner.programs.specialized(monitor)
    began = time.perf_counter()
    compile_program(programs, runner.layout, probe, sizes, monitor)
    program, tier = programs.for_sizes(sizes)
    if tier is not Tier.COMPILED:
        raise NotRun("runs eagerly: a size of 1 has no program")
    call = runner.layout.bind(program, sizes)
    if runner.programs.tier is Tier.GRAPH:
        inputs = runner.layout.write(rows, sizes)  # the compile wrote other rows
        call = GraphPool(runner.device).capture(call, inputs)
    seconds = time.perf_counter() - began
    runner.layout.write(rows, sizes)
    return Specialized(call, seconds, monitor)


def said(error: BaseException) -> str:
    """An error as one line; torch appends pages of advice."""
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"


def _bound(call: Forward, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: call(*inputs)


def recompiles_total(metrics: Metrics) -> int:
    """Return the compiles on the request path so far."""
    name = "shapeserve_recompiles_total"
    return int(sum(sample.value for sample in metrics.samples() if sample.name == name))
