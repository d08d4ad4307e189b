"""What recorded rows will do on a grid: where they run, and what is padded.

Pure: the dispatcher decides, nothing is executed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shapeserve.buckets import BATCH, REAL, TOKENS, Bucket, Grid, padding
from shapeserve.config import ModelConfig, RareShape
from shapeserve.dispatch import Dispatcher
from shapeserve.errors import ConfigError
from shapeserve.models.spec import ModelSpec
from shapeserve.traces import Shapes

# [CLS] and [SEP]: what each piece of a split text spends again. Exact for BERT-like tokenizers.
SPECIAL_TOKENS = 2

Lengths = Mapping[int, int] | Shapes
"""Recorded rows: length -> rows of a model with one row axis, or shapes."""

Sizes = tuple[int, ...]
"""The size of a row along each row axis, in the grid's order."""


@dataclass(frozen=True, slots=True)
class Waste:
    """Elements executed for some rows: what they hold, and what was added along each row axis."""

    real: int
    by_axis: Mapping[str, int]

    @property
    def padding(self) -> int:
        """Elements added along all row axes."""
        return sum(self.by_axis.values())

    @property
    def ratio(self) -> float:
        """Padding / all elements, 0 to 1."""
        return self.padding / (self.real + self.padding) if self.padding else 0.0

    def share(self, axis: str) -> float:
        """Padding along ``axis`` / all elements, 0 to 1."""
        return self.by_axis[axis] / (self.real + self.padding) if self.padding else 0.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What recorded rows will do on a grid.

    Attributes:
        axes: the row axes.
        rows: how many there are.
        outcomes: word -> rows: ``bucket``, ``fallback (REASON)``, ``truncate``, ``split``,
            ``reject``.
        by_size: row shape of a bucket -> rows that run in it.
        waste: of all rows that run, fallback included.
        compared: name of another policy -> its waste for the same rows.
    """

    axes: tuple[str, ...]
    rows: int
    outcomes: Mapping[str, int]
    by_size: Mapping[Sizes, int]
    waste: Waste
    compared: Mapping[str, Waste]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        waste = {"configured": self.waste, **self.compared}
        shares = {
            name: {f"padding_{axis}": w.share(axis) for axis in self.axes}
            for name, w in waste.items()
        }
        # Batch padding depends on which rows arrive together: null, not 0.
        shares["configured"] |= {"padding_batch": None}  # type: ignore[dict-item]
        return {
            "rows": self.rows,
            "outcomes": dict(self.outcomes),
            "rows_by_size": {"x".join(map(str, k)): rows for k, rows in self.by_size.items()},
            "waste": shares,
        }


def expect(config: ModelConfig, spec: ModelSpec, grid: Grid, lengths: Lengths) -> Expectation:
    """Dispatch every row and add up what is executed.

    Padding along the row axes is exact, because a row's padded size does not depend on its
    neighbours. Padding along ``batch``, and the tail of a packed batch, do: not predicted.

    Raises:
        ConfigError: the rows are recorded along other axes than the model's.
    """
    rows = _rows_of(spec, lengths)
    packed = BATCH not in grid.axes
    largest = grid.max_size(TOKENS) if packed else 0
    if packed:  # rows are not padded: each is its own size, up to the end of the grid
        (axis,) = spec.row_axes
        grid = Grid((axis,), [Bucket(((axis, n + 1),)) for n in range(spec.max_length[axis])])
    dispatcher = _dispatcher(config, spec, grid)
    outcomes: Counter[str] = Counter()
    by_size = {_sizes(b.without(BATCH)): 0 for b in grid.buckets}
    for sizes, count in rows.items():
        route = dispatcher.route(_shape(grid, sizes))
        if route.action == "fallback" and sizes[0] <= largest:
            outcomes["bucket"] += count  # nothing is padded to it: a long row packs like others
            continue
        outcomes[f"{route.action} ({route.reason})" if route.reason else route.action] += count
        if route.row and route.reason is None:
            by_size[_sizes(route.row)] += count
    executed = _executed(dispatcher, grid, rows)
    return Expectation(
        axes=grid.row_axes,
        rows=sum(rows.values()),
        outcomes=outcomes,
        by_size={} if packed else by_size,
        waste=Waste(executed.real, dict.fromkeys(grid.row_axes, 0)) if packed else executed,
        compared=_compared(config, spec, grid, rows),
    )


def _rows_of(spec: ModelSpec, lengths: Lengths) -> Mapping[Sizes, int]:
    """Return row sizes -> rows, in the order of the model's row axes."""
    if not isinstance(lengths, Shapes):
        lengths = Shapes((), {(length,): rows for length, rows in lengths.items()})
    axes = lengths.axes
    if (axes and set(axes) != set(spec.row_axes)) or (not axes and len(spec.row_axes) > 1):
        given = ", ".join(axes) if axes else "one axis"
        raise ConfigError(
            f"--lengths has sizes along {given}, {spec.name} has the axes "
            f"{', '.join(spec.row_axes)}; give a trace t_s,{','.join(spec.row_axes)}"
        )
    order = [axes.index(axis) for axis in spec.row_axes] if axes else [0]
    return {tuple(sizes[i] for i in order): rows for sizes, rows in lengths.rows.items()}


def _shape(grid: Grid, sizes: Sizes) -> dict[str, int]:
    return dict(zip(grid.row_axes, sizes, strict=True))


def _sizes(row: Sequence[tuple[str, int]]) -> Sizes:
    return tuple(size for _, size in row)


def _compared(
    config: ModelConfig, spec: ModelSpec, grid: Grid, rows: Mapping[Sizes, int]
) -> dict[str, Waste]:
    """Return the waste of the usual policies for the same rows; beyond the grid they run alike."""
    # A usual policy has no guard: every row within the grid runs in its bucket.
    rules = {
        axis: config.rare_shapes.get(axis, RareShape()).model_copy(
            update={"max_padding_waste": 1.0}
        )
        for axis in grid.row_axes
    }
    unguarded = config.model_copy(update={"rare_shapes": rules})
    ends = [grid.max_size(axis) for axis in grid.row_axes]
    ladders: dict[str, list[tuple[int, ...]]] = {
        "pow2": [powers_of_two(end) for end in ends],
        "pad_to_max": [(e,) for e in ends],
    }
    wastes: dict[str, Waste] = {}
    for name, sizes in ladders.items():
        made = itertools.product(*sizes)
        usual = Grid(
            grid.row_axes, (Bucket(tuple(zip(grid.row_axes, m, strict=True))) for m in made)
        )
        wastes[name] = _executed(_dispatcher(unguarded, spec, usual), usual, rows)
    return wastes


def _executed(dispatcher: Dispatcher, grid: Grid, rows: Mapping[Sizes, int]) -> Waste:
    """Add up what these rows execute; rejected ones execute nothing."""
    total: Counter[str] = Counter()
    for sizes, count in rows.items():
        shape = _shape(grid, sizes)
        route = dispatcher.route(shape)
        cut = {**shape, **route.keep}
        if route.pieces:
            lengths = Counter(route.pieces)
            pieces = {
                _sizes([*{**cut, str(route.axis): length}.items()]): n * count
                for length, n in lengths.items()
            }
            waste = _executed(dispatcher, grid, pieces)
            total.update({REAL: waste.real, **waste.by_axis})
        elif route.row:
            split = padding((BATCH, *grid.row_axes), [cut], {BATCH: 1, **dict(route.row)})
            total.update({REAL: split[REAL] * count})
            total.update({axis: split[f"padding_{axis}"] * count for axis in grid.row_axes})
    return Waste(total[REAL], {axis: total[axis] for axis in grid.row_axes})


def powers_of_two(end: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... below ``end``, and ``end``."""
    return (*(2**i for i in range(math.ceil(math.log2(end)))), end)


def _dispatcher(config: ModelConfig, spec: ModelSpec, grid: Grid) -> Dispatcher:
    overhead = {"seq": SPECIAL_TOKENS} if spec.task == "embed" else None
    return Dispatcher(
        grid,
        config.rare_shapes,
        spec.hard_limit,
        piece_overhead=overhead,
        padding_invariant=spec.padding_invariant is not False,
    )
