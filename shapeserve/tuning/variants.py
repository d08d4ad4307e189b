"""What having variants costs: seconds of a start, bytes of graphs, and what specialising gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapeserve.tuning.cost import Sizes
from shapeserve.tuning.regress import fit_factors

SizeItems = tuple[tuple[str, int], ...]
"""(axis, size) of a bucket, in the table's order of axes."""


@dataclass(frozen=True, slots=True)
class VariantPoint:
    """What one variant added to a start.

    Attributes:
        sizes: of its bucket.
        verify_s: seconds of its verification.
        capture_s: seconds of its capture; None if it was not captured.
        graph_bytes: what its capture added to the memory of all graphs; None without one.
    """

    sizes: SizeItems
    verify_s: float
    capture_s: float | None = None
    graph_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SpecializedPoint:
    """A program for exactly one bucket, beside the one that it shares with others.

    Attributes:
        sizes: of the bucket.
        compile_s: seconds to make it, the capture included.
        specialized_s: seconds of a call of it.
        shared_s: seconds of a call of the variant that serves, timed in turn with it.
    """

    sizes: SizeItems
    compile_s: float
    specialized_s: float
    shared_s: float


@dataclass(frozen=True)
class VariantCosts:
    """What variants cost, measured in one start of the whole grid.

    Attributes:
        fixed_s: seconds of the start that other buckets would take too: loading, self-test,
            compiles.
        compile_s: program -> seconds of its compile, which are in ``fixed_s``.
        min_batch: rows that a batch has at least: 2 if one row has no program of its own.
        points: of every variant, at least one, in the order of capture: the largest first.
        specialized: of the buckets that were specialised.
    """

    fixed_s: float
    compile_s: Mapping[str, float]
    min_batch: int
    points: tuple[VariantPoint, ...]
    specialized: tuple[SpecializedPoint, ...] = ()

    @property
    def captured(self) -> tuple[VariantPoint, ...]:
        """Those that were captured, in that order."""
        return tuple(point for point in self.points if point.graph_bytes is not None)

    def warmup_s(self, buckets: Iterable[Sizes]) -> float:
        """Return the seconds of a start with these buckets."""
        areas = [math.prod(sizes.values()) for sizes in buckets]
        parts = [self._line([(p.sizes, p.verify_s) for p in self.points])]
        captures = [(p.sizes, p.capture_s) for p in self.points if p.capture_s is not None]
        if captures:
            parts.append(self._line(captures))
        return self.fixed_s + sum(each * len(areas) + area * sum(areas) for each, area in parts)

    def graph_bytes(self, buckets: Iterable[Sizes]) -> float | None:
        """Return the memory of the graphs of these buckets; None if none was captured.

        All share one pool. The largest, captured first, takes what its activations need; each
        further one adds what an average one added.
        """
        if not self.captured:
            return None
        areas = [math.prod(sizes.values()) for sizes in buckets]
        first, *others = self.captured
        largest = (first.graph_bytes or 0) / math.prod(size for _, size in first.sizes)
        # With nothing to judge by, as if nothing were shared.
        rest = others or [first]
        each = sum(point.graph_bytes or 0 for point in rest) / len(rest)
        return largest * max(areas) + each * (len(areas) - 1)

    def _line(self, measured: Sequence[tuple[SizeItems, float]]) -> tuple[float, float]:
        """Fit seconds of a variant, and of each of its padded elements."""
        areas = [float(math.prod(size for _, size in sizes)) for sizes, _ in measured]
        terms = np.array([[1.0, area] for area in areas])
        each, element = fit_factors(terms, np.array([seconds for _, seconds in measured]))
        return each, element
