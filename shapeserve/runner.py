"""ModelRunner: the short path from a formed batch to finished rows.

One runner belongs to one grid: it holds the grid, its variants and the static buffers they read.
A new policy is a new runner beside the old one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shapeserve.buckets import BATCH, Bucket
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, VariantSet
from shapeserve.layout import Layout, Reading, RowArrays, RowOutputs
from shapeserve.metrics import NO_BUCKET, CompilePhase, Metrics, Mode
from shapeserve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Execution:
    """What one executed batch gave.

    Attributes:
        outputs: per row, output name -> array of the row's real size, owned by the caller.
        finite: per row, whether every output value is finite.
        mode: how it ran (metric label).
        bucket: bucket label, ``none`` outside the grid.
        sizes: axis -> executed size.
        seconds: how long it kept the device; on a GPU without the copies, which overlap.
        started_s: when its rows began to be written, on ``time.monotonic()``.
        written_s: when they were.
        finished_s: when its outputs were read.
    """

    outputs: list[RowOutputs]
    finite: list[bool]
    mode: Mode
    bucket: str
    sizes: Mapping[str, int]
    seconds: float
    started_s: float
    written_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that has been launched.

    On the CPU it is finished already; on a GPU :meth:`finish` waits for its event and no other.
    """

    reading: Reading
    mode: Mode
    bucket: str
    sizes: Mapping[str, int]
    seconds: Callable[[], float]
    release: Callable[[], None]
    started_s: float
    written_s: float

    def finish(self) -> Execution:
        """Wait for the outputs and return them; to be called once."""
        try:
            outputs, finite = self.reading.rows()
            return Execution(
                outputs,
                finite,
                self.mode,
                self.bucket,
                self.sizes,
                self.seconds(),
                self.started_s,
                self.written_s,
                time.monotonic(),
            )
        finally:
            self.release()


class ModelRunner:
    """Runs batches of rows on the variants of one grid.

    Thread rule: the device thread only. At most ``layout.slots`` flights may be unfinished.
    """

    def __init__(
        self,
        spec: ModelSpec,
        variants: VariantSet,
        programs: Programs,
        layout: Layout,
        monitor: CompileMonitor,
        metrics: Metrics,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.variants = variants
        self.grid = variants.grid
        self.programs = programs
        self.layout = layout
        self.device = device
        self._monitor = monitor
        self._metrics = metrics
        self._free_slots = [*range(layout.slots)]
        self._timers = [_Timer(device) for _ in range(layout.slots)]

    def launch(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], *, fallback: bool
    ) -> Flight:
        """Start ``rows`` padded to ``sizes``.

        Args:
            rows: what fits into ``sizes``, at least one.
            sizes: axis -> executed size, in grid order; a bucket's unless ``fallback``.
            fallback: run the dynamic program outside the grid.
        """
        if fallback:
            sizes = self._fallback_sizes(sizes)
            program = (
                self.programs.without_compiling(sizes)
                if self.variants.sealed
                else self.programs.for_sizes(sizes)[0]
            )
            run, mode, label = self.layout.bind(program, sizes), Mode.FALLBACK, NO_BUCKET
        else:
            variant = self.variants[Bucket(tuple(sizes.items()))]
            run, mode, label = variant.run, variant.mode, variant.bucket.label
        slot = self._free_slots.pop()
        release = partial(self._free_slots.append, slot)
        timer = self._timers[slot]
        started_s = time.monotonic()
        try:
            inputs = self.layout.write(rows, sizes, slot)
            written_s = time.monotonic()
            timer.start()
            outputs = run(*inputs)
            timer.stop()
            reading = self.layout.read(outputs, rows, sizes, slot)
        except BaseException:
            release()
            raise
        return Flight(reading, mode, label, sizes, timer.seconds, release, started_s, written_s)

    def launch_counted(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], *, fallback: bool
    ) -> Flight:
        """Start rows that a client sent: as :meth:`launch`, watched for compiles."""
        shape = NO_BUCKET
        try:
            flight = self.launch(rows, sizes, fallback=fallback)
            shape = flight.bucket
            return flight
        finally:
            self._monitor.collect(CompilePhase.REQUEST, shape)

    def count(self, execution: Execution, rows: Sequence[RowArrays]) -> Mapping[str, int]:
        """Count a finished batch and its area: real elements and what each axis padded (I7).

        Returns:
            Kind (``real``, ``padding_<axis>``) -> elements.
        """
        tokens = self.layout.split(rows, execution.sizes)
        self._metrics.record_batch(
            self.spec.name, execution.mode, execution.bucket, tokens, execution.seconds
        )
        return tokens

    def execute(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], *, fallback: bool
    ) -> Execution:
        """Run ``rows`` and wait; nothing is counted."""
        return self.launch(rows, sizes, fallback=fallback).finish()

    def _fallback_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """A single row that has no program of its own runs in a batch of two."""
        least = self.programs.min_batch
        return {**sizes, BATCH: least} if sizes.get(BATCH, least) < least else sizes


class _Timer:
    """Seconds of the device between start and stop; one for each slot, used again."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            event = torch.cuda.Event
            self._events = [event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        else:
            self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._cuda:
            self._events[which].record()
        else:
            self._times[which] = time.perf_counter()

    def seconds(self) -> float:
        """To be called once the outputs are there."""
        if self._cuda:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._times[1] - self._times[0]
