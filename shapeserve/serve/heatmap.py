"""The grid as a heat map: row shapes down, batch sizes across, coloured by the rows answered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shapeserve.buckets import BATCH
from shapeserve.metrics import REAL

if TYPE_CHECKING:  # at run time it would load torch into the process that builds the application
    from shapeserve.compile.record import VariantState
    from shapeserve.serve.status import Series

LEVELS: Final = 8
"""Shades of a heat map, apart from the one of a bucket that was never used."""


_TIMES: Final = " \N{MULTIPLICATION SIGN} "


@dataclass(frozen=True, slots=True)
class Cell:
    """One bucket.

    Attributes:
        bucket: its label.
        rows: answered in it.
        batches: run in it.
        waste: share of its executed elements that were padding; None before the first batch.
        level: shade, 0 for no rows to ``LEVELS`` for the most.
        tier: what serves it; where replicas serve it at a lower tier than was asked for, that one.
        wanted: what was asked for, if so; else empty.
    """

    bucket: str
    rows: int
    batches: int
    waste: float | None
    level: int
    tier: str
    wanted: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The grid as a table.

    Attributes:
        corner: what the lines are sizes of.
        across: what the columns are sizes of; empty if there is but one, of packed rows.
        columns: heads of the columns.
        lines: head and cells of each line; None where the grid has no such bucket.
        tier: the tier of most buckets.
    """

    corner: str
    across: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    tier: str


def heat_map(
    variants: Iterable[VariantState], rows: Series, batches: Series, tokens: Series
) -> HeatMap | None:
    """Return the map of the buckets that have variants; None if there are none.

    Args:
        variants: of all replicas.
        rows: (mode, bucket) -> rows answered.
        batches: (mode, bucket) -> batches run.
        tokens: (bucket, kind) -> elements executed.
    """
    by_bucket: dict[str, list[VariantState]] = defaultdict(list)
    for variant in variants:
        by_bucket[variant.bucket].append(variant)
    if not by_bucket:
        return None
    answered, ran = _by_bucket(rows), _by_bucket(batches)
    # Of what is shown: the fallback or an earlier grid may have had more.
    most = max(answered.get(bucket, 0) for bucket in by_bucket)
    cells = {
        bucket: _cell(bucket, same, answered.get(bucket, 0), ran.get(bucket, 0), most, tokens)
        for bucket, same in by_bucket.items()
    }
    return _table(cells)


def waste(tokens: Series, bucket: str | None = None) -> dict[str, float]:
    """Return axis -> share of the executed elements that was padding due to it.

    Args:
        tokens: (bucket, kind) -> elements executed.
        bucket: only of this one; of all if None.
    """
    sums: dict[str, float] = defaultdict(float)
    for (at, kind), elements in tokens.items():
        if bucket is None or at == bucket:
            sums[kind] += elements
    total = sum(sums.values())
    return {
        kind.removeprefix("padding_"): elements / total
        for kind, elements in sums.items()
        if total and kind != REAL
    }


def _by_bucket(series: Series) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for (_, bucket), value in series.items():
        sums[bucket] += int(value)
    return sums


def _cell(
    bucket: str,
    variants: Sequence[VariantState],
    rows: int,
    batches: int,
    most: int,
    tokens: Series,
) -> Cell:
    padding = waste(tokens, bucket)
    degraded = [variant for variant in variants if variant.degraded]
    tiers = sorted({str(variant.tier) for variant in degraded or variants})
    wanted = sorted({str(variant.wanted) for variant in degraded})
    # By the root, or one busy bucket would leave all others white.
    level = math.ceil(LEVELS * math.sqrt(rows / most)) if rows else 0
    share = sum(padding.values()) if padding else None
    return Cell(bucket, rows, batches, share, level, ", ".join(tiers), ", ".join(wanted))


def _table(cells: Mapping[str, Cell]) -> HeatMap:
    at: dict[tuple[tuple[int, ...], int], Cell] = {}
    axes: tuple[str, ...] = ()
    for bucket, cell in cells.items():
        sizes = {axis: int(size) for axis, _, size in (p.partition("=") for p in bucket.split(","))}
        batch = sizes.pop(BATCH, 0)
        axes = tuple(sizes)
        at[tuple(sizes.values()), batch] = cell
    shapes = sorted({shape for shape, _ in at})
    batches = sorted({batch for _, batch in at})
    tiers = [cell.tier for cell in cells.values()]
    return HeatMap(
        corner=_TIMES.join(axes),
        across=BATCH if any(batches) else "",
        columns=tuple(str(batch) if batch else "packed rows" for batch in batches),
        lines=tuple(
            (_TIMES.join(map(str, shape)), tuple(at.get((shape, batch)) for batch in batches))
            for shape in shapes
        ),
        tier=max(sorted(set(tiers)), key=tiers.count),
    )
