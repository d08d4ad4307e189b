"""Runs batches on a warm runner: how long they take, what they need. Thread rule: device thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shapeserve.buckets import BATCH, MIN_ROW_TOKENS, TOKENS, Bucket
from shapeserve.evaluate.module import said, specialize
from shapeserve.evaluate.profile import profile_calls
from shapeserve.evaluate.result import Start
from shapeserve.evaluate.timing import Timing, time_calls
from shapeserve.layout import RowArrays
from shapeserve.metrics import Metrics
from shapeserve.runner import ModelRunner
from shapeserve.tuning.table import CostPoint
from shapeserve.tuning.variants import SpecializedPoint, VariantCosts, VariantPoint
from shapeserve.warmup import Probe

log = logging.getLogger("shapeserve.profile")

_SHORT = 8  # of packed rows: the short ones have this part of the longest one's tokens; arbitrary


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A bucket and rows that fill it.

    Attributes:
        bucket: which.
        rows: what runs in it.
        pairs: of tokens that attend to each other, if the rows are packed.
    """

    bucket: Bucket
    rows: Sequence[RowArrays]
    pairs: float | None = None

    @property
    def label(self) -> str:
        """For people to read."""
        return self.bucket.label + ("" if self.pairs is None else f" in {len(self.rows)} rows")


class BatchBench:
    """Times batches as the engine runs them, through the runner.

    Args:
        runner: a warm, sealed one.
        probe: makes rows of its model.
        timing: how often a batch is run.
    """

    def __init__(self, runner: ModelRunner, probe: Probe, timing: Timing) -> None:
        self._runner = runner
        self._probe = probe
        self._timing = timing
        self._seconds: dict[Load, list[float]] = {}

    def loads(self, buckets: Iterable[Bucket]) -> list[Load]:
        """Return rows that fill each bucket; packed buckets get short ones and long ones."""
        return [load for bucket in buckets for load in self._filled(bucket)]

    def _filled(self, bucket: Bucket) -> Iterator[Load]:
        if BATCH in bucket.axes:
            yield Load(bucket, self._probe.fill(bucket.as_dict()))
            return
        (axis,) = self._runner.spec.row_axes
        longest, tokens = self._runner.spec.max_length[axis], bucket.size(TOKENS)
        least = max(MIN_ROW_TOKENS, self._runner.spec.min_length.get(axis, 1))
        for length in dict.fromkeys(
            min(max(size, least), tokens) for size in (longest, longest // _SHORT)
        ):
            whole, rest = divmod(tokens, length)
            sizes = [length] * whole + [rest] * (rest >= least)
            rows = [self._probe.row({axis: size}) for size in sizes]
            yield Load(bucket, rows, float(sum(size**2 for size in sizes)))

    def round(self, loads: Sequence[Load]) -> bool:
        """Run every load once that has not run often enough; return whether there was one."""
        left = [load for load in loads if not self._enough(load)]
        for load in left:
            done = self._runner.execute(load.rows, load.bucket.as_dict(), fallback=False)
            self._seconds.setdefault(load, []).append(done.seconds)
        return bool(left)

    def _enough(self, load: Load) -> bool:
        later = self._later(load)
        return len(later) >= self._timing.least and sum(later) >= self._timing.budget_s

    def _later(self, load: Load) -> list[float]:
        """All runs but the first, which finds caches cold."""
        return self._seconds.get(load, [])[1:]

    def point(self, load: Load) -> CostPoint:
        """Return what a load costs: the median of its runs, and the memory of one more."""
        return CostPoint(
            load.bucket.sizes, median(self._later(load)), self._peak_bytes(load), load.pairs
        )

    def _peak_bytes(self, load: Load) -> int | None:
        """Memory of a run; a replay allocates nothing, so what was captured is run."""
        runner, sizes = self._runner, load.bucket.as_dict()
        program = runner.layout.bind(runner.programs.for_sizes(sizes)[0], sizes)
        inputs = runner.layout.write(load.rows, sizes)
        try:
            return profile_calls(lambda: program(*inputs), runner.device, calls=1).peak_bytes
        except Exception as error:  # a profiler that cannot run here is no reason to stop
            log.warning("the memory of %s is not known: %s", load.label, said(error))
            return None

    def specialized(self, bucket: Bucket) -> SpecializedPoint:
        """Compile for exactly this bucket and time the result in turn with what serves."""
        runner, sizes = self._runner, bucket.as_dict()
        load = next(self._filled(bucket))
        made = specialize(runner, self._probe, load.rows, sizes, Metrics())
        inputs = runner.layout.write(load.rows, sizes)
        shared = runner.variants[bucket].run
        calls = {True: lambda: made.call(*inputs), False: lambda: shared(*inputs)}
        seconds, failed = time_calls(calls, runner.device, self._timing)
        for error in failed.values():
            raise error
        return SpecializedPoint(
            bucket.sizes, made.seconds, median(seconds[True][1:]), median(seconds[False][1:])
        )


def variant_costs(
    runner: ModelRunner, start: Start, specialized: tuple[SpecializedPoint, ...]
) -> VariantCosts:
    """Return what the start of ``runner`` took for each of its variants, and for all together."""
    grown = runner.variants.captured_bytes
    largest_first = sorted(runner.grid.buckets, key=lambda b: -b.area)
    points = tuple(
        VariantPoint(
            bucket.sizes,
            start.verify_s[bucket.label],
            start.capture_s.get(bucket.label),
            grown.get(bucket),
        )
        for bucket in largest_first
    )
    whole_s = start.once_s + start.seconds
    each_s = sum(start.capture_s.values()) + sum(start.verify_s.values())
    return VariantCosts(
        fixed_s=whole_s - each_s,
        compile_s={name: cost.seconds for name, cost in start.programs.items()},
        min_batch=runner.programs.min_batch if BATCH in runner.grid.axes else 1,
        points=points,
        specialized=specialized,
    )
