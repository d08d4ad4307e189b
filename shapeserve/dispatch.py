"""The decision what becomes of one row: which padded shape, in a bucket or not, and why.

Pure: nothing is executed, queued or counted here. ``engine`` obeys a ``Route``, the batcher
groups rows whose routes have the same ``row``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from shapeserve.buckets import BATCH, Grid, RowKey, Shape
from shapeserve.config import OverMax, RareShape
from shapeserve.errors import ConfigError, InvalidRequest
from shapeserve.metrics import FallbackReason

Action = Literal["bucket", "fallback", "truncate", "split", "reject"]

_DEFAULT_RULES = RareShape()
ASK_TO_CUT = (
    "send `over_max: truncate` (one of the `parameters` of the request in the Open Inference "
    "Protocol)"
)
"""What to do about a long row, in every protocol."""
# Without rounding, each length would be a shape of its own and no two fallback rows would ever
# share a batch.
DEFAULT_FALLBACK_ALIGN: Mapping[str, int] = {"seq": 8}


@dataclass(frozen=True, slots=True)
class Route:
    """What becomes of one row.

    Attributes:
        action: ``bucket`` or ``fallback``: run the row as it is; ``truncate``: cut it to
            ``keep``, then run it; ``split``: cut it into ``pieces`` (after ``keep``, if there is
            one) and route each of them;
            ``reject``: refuse it with ``message``.
        row: padded sizes of every axis but ``batch``; () for ``split`` and ``reject``.
        reason: why the row runs in the fallback, or None if it runs in a bucket.
        keep: axis -> new length, for every axis that is truncated.
        axis: the axis along which the row is split.
        pieces: lengths of the pieces along ``axis``, special tokens included, in order.
        message: what was given, what is allowed, what to do.
    """

    action: Action
    row: RowKey = ()
    reason: FallbackReason | None = None
    keep: Mapping[str, int] = field(default_factory=dict, hash=False)
    axis: str | None = None
    pieces: tuple[int, ...] = ()
    message: str | None = None


class Dispatcher:
    """Routes rows for one grid.

    Args:
        grid: the buckets.
        rare_shapes: axis -> rules; axes left out have the default rules.
        hard_limits: axis -> longest size that the model executes.
        fallback_align: axis -> multiple to which fallback rows are padded (default: 8 for
            ``seq``, else 1), though never beyond the hard limit.
        piece_overhead: axis -> positions that every piece of a split row spends on special
            tokens (2 for ``[CLS] ... [SEP]``).
        padding_invariant: False runs every row at its exact size, because the model's answers
            depend on padding: in a bucket of just that size, else in the fallback.

    Raises:
        ConfigError: rules for an axis that rows of this grid do not have.
    """

    def __init__(
        self,
        grid: Grid,
        rare_shapes: Mapping[str, RareShape],
        hard_limits: Mapping[str, int],
        fallback_align: Mapping[str, int] = DEFAULT_FALLBACK_ALIGN,
        *,
        piece_overhead: Mapping[str, int] | None = None,
        padding_invariant: bool = True,
    ) -> None:
        for axis in rare_shapes:
            if axis not in grid.row_axes:
                raise ConfigError(
                    f"rare_shapes.{axis}: rows have no axis {axis!r}, their axes are "
                    f"{', '.join(grid.row_axes)}; remove or rename it"
                )
        self._grid = grid
        self._rules = {axis: rare_shapes.get(axis, _DEFAULT_RULES) for axis in grid.row_axes}
        self._hard = {axis: hard_limits.get(axis, math.inf) for axis in grid.row_axes}
        self._end = {
            axis: int(min(grid.max_size(axis), self._hard[axis])) for axis in grid.row_axes
        }
        self._align = fallback_align
        self._overhead = piece_overhead or {}
        self._padding_invariant = padding_invariant

    def route(self, row_shape: Shape, *, over_max: str | None = None, exact: bool = False) -> Route:
        """Decide what becomes of a row.

        Args:
            row_shape: size >= 1 of every axis but ``batch``.
            over_max: the caller's choice for a row that is longer than the grid; None
                leaves it to ``rare_shapes``.
            exact: the caller wants the row executed without any padding.

        Raises:
            InvalidRequest: ``over_max`` is none of the four words.
        """
        chosen = _checked(over_max)
        choices = {
            axis: chosen or self._rules[axis].over_max
            for axis in self._grid.row_axes
            if row_shape[axis] > self._end[axis]
        }
        if choices:
            return self._route_over_max(row_shape, choices, exact)
        return self._place(row_shape, {}, exact)

    def _route_over_max(self, shape: Shape, choices: dict[str, OverMax], exact: bool) -> Route:
        """Route a row that is longer than the grid along the axes in ``choices``."""
        splits = [axis for axis, choice in choices.items() if choice == "split"]
        stays = [axis for axis, choice in choices.items() if choice in ("fallback", "reject")]
        # Pieces are cut along one axis; a row that also has another to split, or one that stays
        # too long for the grid, needs the fallback anyhow and is best run there whole.
        if len(splits) > 1 or stays or (splits and self._capacity(splits[0]) < 1):
            stays, splits = stays + splits, []
        for axis in stays:
            limit = self._end[axis] if choices[axis] == "reject" else self._hard[axis]
            if shape[axis] > limit:
                return Route("reject", message=_too_long(axis, shape[axis], int(limit)))
        keep = {axis: self._end[axis] for axis in choices if choices[axis] == "truncate"}
        if splits:
            axis = splits[0]
            pieces = self._pieces(axis, shape[axis])
            return Route("split", keep=keep, axis=axis, pieces=pieces)
        return self._place({**shape, **keep}, keep, exact)

    def _place(self, shape: Shape, keep: Mapping[str, int], exact: bool) -> Route:
        """Route a row as it is now: into its bucket, unless something rules that out."""
        bucket = self._grid.fit_row(shape)
        # Also a corner that a grid which is no full product leaves open: no axis is too long.
        if bucket is None:
            return self._fall_back(shape, FallbackReason.OVER_MAX, keep, exact)
        if not self._padding_invariant:
            row = tuple((axis, shape[axis]) for axis in self._grid.row_axes)
            if self._grid.batch_sizes(row):
                return Route("truncate" if keep else "bucket", row, keep=keep)
            return self._fall_back(shape, FallbackReason.CAPABILITY, keep, exact)
        if exact:
            return self._fall_back(shape, FallbackReason.REQUESTED, keep, exact)
        row = bucket.without(BATCH)
        if self._wastes(shape, row):
            return self._fall_back(shape, FallbackReason.PADDING_WASTE, keep, exact)
        return Route("truncate" if keep else "bucket", row, keep=keep)

    def _wastes(self, shape: Shape, row: RowKey) -> bool:
        """Say whether a row would be more padding than the rules of a padded axis allow."""
        waste = 1 - math.prod(shape.values()) / math.prod(size for _, size in row)
        return any(
            size > shape[axis]
            and size > self._rules[axis].guard_min
            and waste > self._rules[axis].max_padding_waste
            for axis, size in row
        )

    def _fall_back(
        self, shape: Shape, reason: FallbackReason, keep: Mapping[str, int], exact: bool
    ) -> Route:
        unpadded = exact or not self._padding_invariant
        row = tuple(
            (axis, shape[axis] if unpadded else self._aligned(axis, shape[axis]))
            for axis in self._grid.row_axes
        )
        return Route("truncate" if keep else "fallback", row, reason, keep)

    def _aligned(self, axis: str, size: int) -> int:
        """Round up for the fallback, though never beyond what the model executes."""
        multiple = self._align.get(axis, 1)
        return int(min(-(-size // multiple) * multiple, self._hard[axis]))

    def _capacity(self, axis: str) -> int:
        return self._end[axis] - self._overhead.get(axis, 0)

    def _pieces(self, axis: str, size: int) -> tuple[int, ...]:
        """Return full pieces and the rest; each has its own special tokens."""
        overhead, capacity = self._overhead.get(axis, 0), self._capacity(axis)
        full, rest = divmod(size - overhead, capacity)
        return (self._end[axis],) * full + ((rest + overhead,) if rest else ())


def _checked(over_max: str | None) -> OverMax | None:
    if over_max is not None and over_max not in get_args(OverMax):
        raise InvalidRequest(
            f"over_max={over_max!r} is not known; use one of {', '.join(get_args(OverMax))}",
            param="over_max",
        )
    return cast("OverMax | None", over_max)


def _too_long(axis: str, size: int, limit: int) -> str:
    return (
        f"{axis}={size} is too long, at most {limit} is accepted; shorten the input or {ASK_TO_CUT}"
    )
