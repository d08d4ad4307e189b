"""ModelRunner: the short path from a formed batch to finished rows.

One runner belongs to one grid: it holds the grid, its variants and the static buffers they read.
A new policy is a new runner beside the old one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shapeserve.buckets import BATCH, RowKey
from shapeserve.compile.monitor import CompileMonitor
from shapeserve.compile.variants import Programs, VariantSet
from shapeserve.layout import PaddedLayout, RowArrays
from shapeserve.metrics import NO_BUCKET, REAL, CompilePhase, Metrics, Mode
from shapeserve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Execution:
    """What one executed batch gave.

    Attributes:
        outputs: per row, output name -> array of the row's real size, owned by the caller.
        finite: per row, whether every output value is finite.
        mode: how it ran (metric label).
        bucket: bucket label, ``none`` outside the grid.
        batch: rows executed, filler rows included.
        seconds: from the first write into the buffers to the last row copied out.
    """

    outputs: list[dict[str, np.ndarray]]
    finite: list[bool]
    mode: Mode
    bucket: str
    batch: int
    seconds: float


class ModelRunner:
    """Runs batches of rows on the variants of one grid.

    Thread rule: the device thread only; the buffers take one batch at a time (I5).
    """

    def __init__(
        self,
        spec: ModelSpec,
        variants: VariantSet,
        programs: Programs,
        layout: PaddedLayout,
        monitor: CompileMonitor,
        metrics: Metrics,
    ) -> None:
        self.spec = spec
        self.variants = variants
        self.grid = variants.grid
        self.programs = programs
        self.layout = layout
        self._monitor = monitor
        self._metrics = metrics

    def run(
        self, rows: Sequence[RowArrays], row: RowKey, batch: int, *, fallback: bool
    ) -> Execution:
        """Execute rows that a client sent: as :meth:`execute`, counted and watched."""
        execution = self.execute(rows, row, batch, fallback=fallback)
        self._monitor.collect(CompilePhase.REQUEST)
        self._account(execution, rows, {BATCH: execution.batch, **dict(row)})
        return execution

    def execute(
        self, rows: Sequence[RowArrays], row: RowKey, batch: int, *, fallback: bool
    ) -> Execution:
        """Execute ``rows`` padded to ``batch`` rows of the padded row shape ``row``.

        Args:
            rows: 1..batch rows, none larger than ``row`` along any axis.
            row: (axis, size) of the executed row shape.
            batch: executed rows; for a bucket one of its batch sizes.
            fallback: run the dynamic program outside the grid.
        """
        if fallback:
            batch = max(batch, self.programs.min_batch)
            program, _ = self.programs.for_sizes({BATCH: batch, **dict(row)})
            mode, label = Mode.FALLBACK, NO_BUCKET
        else:
            variant = self.variants[self.grid.bucket(batch, row)]
            program, mode, label = variant.run, variant.mode, variant.bucket.label
        started = time.perf_counter()
        outputs = program(*self.layout.write(rows, {BATCH: batch, **dict(row)}))
        results = self.layout.read(outputs, rows)
        seconds = time.perf_counter() - started
        return Execution(results, [_finite(r) for r in results], mode, label, batch, seconds)

    def _account(
        self, execution: Execution, rows: Sequence[RowArrays], sizes: Mapping[str, int]
    ) -> None:
        """Count the batch and its area: real elements and what each axis padded (I7)."""
        tokens = padding(self.spec.axes, rows, sizes)
        self._metrics.record_batch(
            self.spec.name, execution.mode, execution.bucket, tokens, execution.seconds
        )


def padding(
    axes: Sequence[str], rows: Sequence[RowArrays], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Split an executed area into ``real`` elements and ``padding_<axis>`` for each axis.

    A row's padding belongs to the innermost axis first: along ``width`` only the rows that are
    real in ``height`` count, along ``height`` whole lines of the bucket; filler rows are padding
    along ``batch``. The values add up to the product of ``sizes``.
    """
    row_axes = [axis for axis in axes if axis != BATCH]
    split = {REAL: 0, f"padding_{BATCH}": 0, **{f"padding_{axis}": 0 for axis in row_axes}}
    row_area = prod(sizes[axis] for axis in row_axes)
    for row in rows:
        split[REAL] += prod(row.sizes[axis] for axis in row_axes)
        outer = 1
        inner = row_area
        for axis in row_axes:
            inner //= sizes[axis]
            split[f"padding_{axis}"] += outer * (sizes[axis] - row.sizes[axis]) * inner
            outer *= row.sizes[axis]
    split[f"padding_{BATCH}"] = (sizes[BATCH] - len(rows)) * row_area
    return split


def _finite(outputs: Mapping[str, np.ndarray]) -> bool:
    return all(
        bool(np.isfinite(array).all()) for array in outputs.values() if array.dtype.kind == "f"
    )
