"""Buckets, and the grid that finds the cheapest one for a shape.

A *bucket* is a padded shape that has a variant; a *grid* is the immutable set of them.
Nothing here knows what the axes mean, except that ``batch`` counts rows; a packed batch has the
single axis ``tokens`` instead, on which its rows lie end to end.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

BATCH = "batch"
TOKENS = "tokens"
REAL = "real"
"""Elements of an executed area that are no padding."""

MIN_ROW_TOKENS = 4
"""A packed row takes at least this much of a bucket, so one of n tokens has n/4 rows at most.

The number of rows decides the size of offsets and outputs; a text of two words has 4 tokens.
"""

Shape = Mapping[str, int]
"""Axis name -> size."""

RowKey = tuple[tuple[str, int], ...]
"""The padded shape of one row: (axis, size) of every axis but ``batch``, in grid order."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One padded shape: (axis, size) pairs in the order of the grid's axes."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> Bucket:
        """Build a bucket from keywords: ``Bucket.of(batch=8, seq=128)``."""
        return cls(tuple(sizes.items()))

    def size(self, axis: str) -> int:
        """Return the size along ``axis``; KeyError if the bucket has no such axis."""
        return dict(self.sizes)[axis]

    def as_dict(self) -> dict[str, int]:
        """Return axis -> size."""
        return dict(self.sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names in order."""
        return tuple(axis for axis, _ in self.sizes)

    @property
    def area(self) -> int:
        """Elements executed: the product of all sizes."""
        return math.prod(size for _, size in self.sizes)

    @property
    def label(self) -> str:
        """The bucket as metric label: ``batch=8,seq=128``."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes)

    def covers(self, shape: Shape) -> bool:
        """Say whether every axis of ``shape`` is here with at least its size."""
        sizes = dict(self.sizes)
        return all(sizes.get(axis, 0) >= size for axis, size in shape.items())

    def without(self, axis: str) -> RowKey:
        """Return the sizes of all other axes."""
        return tuple(pair for pair in self.sizes if pair[0] != axis)


class Grid:
    """The immutable set of buckets of one (model, layout).

    Args:
        axes: axis names, in the order in which bucket labels name them.
        buckets: any order, duplicates are dropped; each names exactly these axes.
        cost: what executing a bucket costs, in any unit; its area if not given. A bucket
            that covers another should not cost less, else a row that fills a bucket
            exactly may be sent to the cheaper, larger one (which is the optimum then).

    Raises:
        ValueError: a bucket names other axes, or has a size below 1.
    """

    __slots__ = ("_best", "_by_row", "_ladders", "axes", "buckets", "row_axes", "version")

    axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    version: str

    def __init__(
        self,
        axes: Iterable[str],
        buckets: Iterable[Bucket],
        cost: Callable[[Bucket], float] | None = None,
    ) -> None:
        """Sort the buckets and tabulate the answer of ``fit`` for every combination of sizes."""
        self.axes = tuple(axes)
        self.row_axes = tuple(axis for axis in self.axes if axis != BATCH)
        self.buckets = tuple(
            sorted({_in_order(b, self.axes) for b in buckets}, key=lambda b: b.sizes)
        )
        named = ";".join((",".join(self.axes), *(b.label for b in self.buckets)))
        self.version = hashlib.sha256(named.encode()).hexdigest()[:12]
        self._ladders = tuple(
            (axis, tuple(sorted({b.size(axis) for b in self.buckets}))) for axis in self.axes
        )
        self._best = _cheapest_per_cell(self.buckets, self._ladders, cost or _area)
        self._by_row = _group_by_row(self.buckets)

    def fit(self, shape: Shape) -> Bucket | None:
        """Return the bucket of least cost that covers ``shape``, or None if none does.

        Args:
            shape: axis name -> size. An axis of the grid that is left out is not
                constrained; an axis that the grid does not have is covered by no bucket.

        Ties go to fewer rows, because fewer rows also means fewer outputs to copy, then to
        the smaller area. Never raises (invariant I1). Cost: one bisection for each axis.
        """
        cell = []
        known = 0
        for axis, ladder in self._ladders:
            size = shape.get(axis)
            if size is None:
                cell.append(0)
                continue
            known += 1
            cell.append(bisect_left(ladder, size))
        if known != len(shape):
            return None
        return self._best.get(tuple(cell))

    def fit_row(self, row_shape: Shape) -> Bucket | None:
        """Return the cheapest bucket for a single row of this shape (no ``batch`` axis)."""
        if BATCH in self.axes:
            return self.fit({**row_shape, BATCH: 1})
        return self.fit(row_shape)

    def batch_sizes(self, row_key: RowKey) -> tuple[int, ...]:
        """Return the batch sizes that exist for a padded row shape, ascending; () if none."""
        return tuple(self._by_row.get(row_key, ()))

    def bucket(self, batch: int, row_key: RowKey) -> Bucket:
        """Return the bucket of exactly these sizes; KeyError if the grid has none."""
        return self._by_row[row_key][batch]

    def max_size(self, axis: str) -> int:
        """Return the largest size along ``axis`` over all buckets; 0 for an empty grid."""
        ladder = dict(self._ladders)[axis]
        return ladder[-1] if ladder else 0

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self.buckets)

    def __repr__(self) -> str:
        """Return axes, number of buckets and version."""
        return f"Grid(axes={self.axes}, buckets={len(self.buckets)}, version={self.version!r})"


def _area(bucket: Bucket) -> float:
    return float(bucket.area)


def _rows(bucket: Bucket) -> int:
    return bucket.as_dict().get(BATCH, 1)


def _in_order(bucket: Bucket, axes: tuple[str, ...]) -> Bucket:
    """Return the bucket with its sizes in the order of ``axes``."""
    sizes = bucket.as_dict()
    if len(bucket.sizes) != len(axes) or set(sizes) != set(axes):
        raise ValueError(f"bucket {bucket.label!r} must name exactly the axes {', '.join(axes)}")
    if any(size < 1 for size in sizes.values()):
        raise ValueError(f"bucket {bucket.label!r} has a size below 1")
    return Bucket(tuple((axis, sizes[axis]) for axis in axes))


def _cheapest_per_cell(
    buckets: tuple[Bucket, ...],
    ladders: tuple[tuple[str, tuple[int, ...]], ...],
    cost: Callable[[Bucket], float],
) -> dict[tuple[int, ...], Bucket]:
    """Map every combination of ladder positions to the cheapest bucket that covers it.

    A shape's answer depends only on the first size of each ladder that covers it, so these
    cells are all there is. Walked from the largest cell down: the best of a cell is its own
    bucket or the best of a neighbour one step up. Cost: O(cells x axes).
    """
    order = sorted(buckets, key=lambda b: (cost(b), _rows(b), b.area, b.sizes))
    rank = {bucket.sizes: i for i, bucket in enumerate(order)}
    best: dict[tuple[int, ...], int] = {}
    for cell in itertools.product(*(range(len(s) - 1, -1, -1) for _, s in ladders)):
        own = tuple((axis, s[i]) for (axis, s), i in zip(ladders, cell, strict=True))
        above = ((*cell[:k], cell[k] + 1, *cell[k + 1 :]) for k in range(len(cell)))
        found = [best[up] for up in above if up in best]
        if own in rank:
            found.append(rank[own])
        if found:
            best[cell] = min(found)
    return {cell: order[i] for cell, i in best.items()}


def _group_by_row(buckets: tuple[Bucket, ...]) -> dict[RowKey, dict[int, Bucket]]:
    groups: dict[RowKey, dict[int, Bucket]] = {}
    for bucket in sorted(buckets, key=_rows):
        groups.setdefault(bucket.without(BATCH), {})[_rows(bucket)] = bucket
    return groups


def padding(axes: Iterable[str], rows: Sequence[Shape], sizes: Shape) -> dict[str, int]:
    """Split an executed area into ``real`` elements and ``padding_<axis>`` for each axis.

    Args:
        axes: of the area, ``batch`` first; ``tokens`` alone if the rows are packed.
        rows: the real rows, as axis -> size.
        sizes: axis -> executed size.

    A row's padding belongs to the innermost axis first: along ``width`` only the rows that are
    real in ``height`` count, along ``height`` whole lines of the bucket; filler rows are padding
    along ``batch``. Of packed rows only the tail of the batch is padding. The values add up to the
    product of ``sizes``.
    """
    if BATCH not in sizes:
        real = sum(math.prod(row.values()) for row in rows)
        return {REAL: real, f"padding_{TOKENS}": sizes[TOKENS] - real}
    row_axes = [axis for axis in axes if axis != BATCH]
    row_area = math.prod(sizes[axis] for axis in row_axes)
    filler = (sizes[BATCH] - len(rows)) * row_area
    if len(row_axes) == 1:
        (axis,) = row_axes
        real = sum(row[axis] for row in rows)
        return {
            REAL: real,
            f"padding_{BATCH}": filler,
            f"padding_{axis}": len(rows) * row_area - real,
        }
    split = {REAL: 0, f"padding_{BATCH}": filler, **{f"padding_{axis}": 0 for axis in row_axes}}
    for row in rows:
        split[REAL] += math.prod(row[axis] for axis in row_axes)
        outer = 1
        inner = row_area
        for axis in row_axes:
            inner //= sizes[axis]
            split[f"padding_{axis}"] += outer * (sizes[axis] - row[axis]) * inner
            outer *= row[axis]
    return split
