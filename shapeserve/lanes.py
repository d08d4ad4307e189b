"""From a route to the lane in which a row waits: what the engine and the simulator share.

Pure, so that the simulator forms the very batches that the engine forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from shapeserve.batcher import Lane
from shapeserve.buckets import BATCH, MIN_ROW_TOKENS, TOKENS, Bucket, Grid, RowKey, Shape
from shapeserve.config import RareShape
from shapeserve.dispatch import Dispatcher, Route
from shapeserve.metrics import FallbackReason
from shapeserve.models.spec import ModelSpec

_FALLBACK_ALIGN = 8  # of packed rows beyond the grid: tensor cores take multiples of 8


class Place(NamedTuple):
    """Where a row waits; a tuple, because one is made for every row.

    Attributes:
        lane: rows of one lane may share a batch.
        cost: its padded elements.
        units: what it takes of a batch of its lane.
        reason: why it goes to the fallback, or None.
    """

    lane: Lane
    cost: int
    units: int
    reason: FallbackReason | None


class Lanes:
    """The lanes of one grid.

    Args:
        grid: the buckets.
        max_fallback_elements: area of one fallback batch.
    """

    def __init__(self, grid: Grid, max_fallback_elements: int) -> None:
        self._grid = grid
        self._max_fallback_elements = max_fallback_elements
        self._lanes: dict[RowKey, Lane] = {}
        self._packed: Lane | None = None
        if grid.axes == (TOKENS,):
            sizes = tuple(bucket.size(TOKENS) for bucket in grid.buckets)
            self._packed = Lane((), False, sizes, TOKENS)

    def place(self, sizes: Shape, route: Route) -> Place:
        """Return where a row of these (already cut) sizes waits, if its route is not a split."""
        if self._packed is not None:
            return self._place_packed(prod(sizes.values()), self._packed)
        lane = self._lane(route.row, fallback=route.reason is not None)
        return Place(lane, prod(size for _, size in route.row), 1, route.reason)

    def _place_packed(self, length: int, lane: Lane) -> Place:
        """Place a row on the tokens axis: whatever its length, it is not padded to others."""
        if length <= lane.batch_sizes[-1]:
            return Place(lane, length, max(length, MIN_ROW_TOKENS), None)
        size = -(-length // _FALLBACK_ALIGN) * _FALLBACK_ALIGN
        return Place(Lane((), True, (size,), TOKENS), size, size, FallbackReason.OVER_MAX)

    def _lane(self, row: RowKey, *, fallback: bool) -> Lane:
        if fallback:  # not kept: there are as many as clients care to send
            return Lane(row, fallback, self._fallback_batches(row))
        lane = self._lanes.get(row)
        if lane is None:
            lane = self._lanes[row] = Lane(row, fallback, self._grid.batch_sizes(row))
        return lane

    def _fallback_batches(self, row: RowKey) -> tuple[int, ...]:
        """Powers of two within the area of one fallback batch; one row is always allowed."""
        area = prod(size for _, size in row)
        largest = self._grid.max_size(BATCH)
        sizes = [1]
        while sizes[-1] * 2 <= largest and sizes[-1] * 2 * area <= self._max_fallback_elements:
            sizes.append(sizes[-1] * 2)
        return tuple(sizes)


def largest_area(spec: ModelSpec, max_batch_tokens: int, grid: Grid) -> int:
    """Return the elements of the largest area that rows may need.

    That of a bucket, or of the longest row in the fallback.
    """
    longest = prod(max(size, 1) for size in spec.hard_limit.values())
    ends = prod(max(spec.hard_limit.get(a, 0), spec.max_length.get(a, 0)) for a in spec.row_axes)
    return max(
        max_batch_tokens,
        max(bucket.area for bucket in grid.buckets),
        # One row without a program of its own is padded to two.
        2 * max(longest, ends),
    )


def dispatcher_for(
    spec: ModelSpec,
    rare_shapes: Mapping[str, RareShape],
    grid: Grid,
    special_tokens: int | None,
) -> Dispatcher:
    """Return the dispatcher of a grid, with the model's hard limits and special tokens.

    Packed rows are not padded, so that their lengths have one step: the end of the grid.

    Args:
        spec: the model.
        rare_shapes: axis -> rules.
        grid: the buckets.
        special_tokens: what each piece of a split text spends again; None for other models.
    """
    if BATCH not in grid.axes:
        (axis,) = spec.row_axes
        grid = Grid((axis,), [Bucket(((axis, spec.max_length[axis]),))])
    return Dispatcher(
        grid,
        rare_shapes,
        spec.hard_limit,
        piece_overhead=None if special_tokens is None else {"seq": special_tokens},
        padding_invariant=spec.padding_invariant is not False,
    )


def without_single(grid: Grid) -> Grid:
    """Drop the buckets of one row whose row shape has a larger batch; widen the others to two.

    For a model in which one row has no program of its own, so that what is counted is what runs.
    """
    kept: list[Bucket] = []
    for bucket in grid.buckets:
        if bucket.size(BATCH) > 1:
            kept.append(bucket)
        elif len(grid.batch_sizes(bucket.without(BATCH))) == 1:
            kept.append(Bucket(tuple((a, 2 if a == BATCH else s) for a, s in bucket.sizes)))
    return Grid(grid.axes, kept)
