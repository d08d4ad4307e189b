"""A cost table of a model on this machine: some buckets, timed in an engine of this process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from benchmarks import environment
from shapeserve.buckets import BATCH
from shapeserve.config import ModelConfig
from shapeserve.engine import Engine
from shapeserve.tuning import CostPoint, CostTable

EVERY = 5  # row shapes that are timed; and the last
BEYOND = 1.5  # the fallback is timed at so many times the largest row shape
TIMED_RUNS = 3


def measure_costs(config: ModelConfig) -> CostTable:
    """Time every batch size of some row shapes of a text model, and single rows beyond the grid.

    The seconds are those that ``shapeserve_device_seconds_total`` counts, with as many threads as
    the service gives the model on this machine.
    """
    threads = environment.cores()
    with Engine(config.model_copy(update={"threads": threads})).start() as engine:
        (axis,) = engine.spec.row_axes
        chosen = list(_chosen(engine, axis))
        points = tuple(CostPoint(tuple(s.items()), _seconds(engine, axis, s)) for s in chosen)
        conditions = {
            "model": engine.spec.name,
            "dtype": engine.spec.dtype,
            "device": "cpu",
            "threads": str(threads),
            "torch": environment.describe(None)["versions"]["torch"],
        }
    return CostTable(conditions, (BATCH, axis), points)


def _chosen(engine: Engine, axis: str) -> Iterator[Mapping[str, int]]:
    ladder = sorted({bucket.size(axis) for bucket in engine.grid.buckets})
    kept = {*ladder[::EVERY], ladder[-1]}
    yield from (b.as_dict() for b in engine.grid.buckets if b.size(axis) in kept)
    hard = engine.spec.hard_limit[axis]
    yield from ({BATCH: 1, axis: n} for n in {min(int(BEYOND * ladder[-1]), hard), hard})


def _seconds(engine: Engine, axis: str, sizes: Mapping[str, int]) -> float:
    """Return the median device time of a batch that fills ``sizes``."""
    fallback = sizes[axis] > engine.grid.max_size(axis)
    ((row,),) = (s.rows for s in engine.prepare([[7] * sizes[axis]], over_max="fallback"))

    def run() -> float:
        rows = [row.arrays] * sizes[BATCH]
        return engine.runner.execute(rows, sizes, fallback=fallback).seconds

    engine.on_device(run)
    return statistics.median(engine.on_device(run) for _ in range(TIMED_RUNS))
