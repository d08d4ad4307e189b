"""How an executed area is counted: real elements, and the padding of each axis (I7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from shapeserve.buckets import BATCH, TOKENS
from shapeserve.metrics.catalogue import REAL


class HasSizes(Protocol):
    """A row that knows its real sizes."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Row axis -> real size."""


def padding(
    axes: Sequence[str], rows: Sequence[HasSizes], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Split an executed area into ``real`` elements and ``padding_<axis>`` for each axis.

    A row's padding belongs to the innermost axis first: along ``width`` only the rows that are
    real in ``height`` count, along ``height`` whole lines of the bucket; filler rows are padding
    along ``batch``. Packed rows (axis ``tokens``) have only the tail as padding. The values add up
    to the product of ``sizes``.
    """
    if BATCH not in axes:
        real = sum(prod(row.sizes.values()) for row in rows)
        return {REAL: real, f"padding_{TOKENS}": sizes[TOKENS] - real}
    row_axes = [axis for axis in axes if axis != BATCH]
    row_area = prod(sizes[axis] for axis in row_axes)
    filler = (sizes[BATCH] - len(rows)) * row_area
    if len(row_axes) == 1:
        (axis,) = row_axes
        real = sum(row.sizes[axis] for row in rows)
        return {
            REAL: real,
            f"padding_{BATCH}": filler,
            f"padding_{axis}": len(rows) * row_area - real,
        }
    split = {REAL: 0, f"padding_{BATCH}": filler, **{f"padding_{axis}": 0 for axis in row_axes}}
    for row in rows:
        split[REAL] += prod(row.sizes[axis] for axis in row_axes)
        outer = 1
        inner = row_area
        for axis in row_axes:
            inner //= sizes[axis]
            split[f"padding_{axis}"] += outer * (sizes[axis] - row.sizes[axis]) * inner
            outer *= row.sizes[axis]
    return split
