"""From the sizes of rows to buckets: one axis exactly, two axes by search with a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shapeserve.config import axes_of
from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning.joint import JointSearch, assign
from shapeserve.tuning.ladder import Demand, best_ladders
from shapeserve.tuning.tail import with_tail

Entries = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Sizes of one axis, ascending; or shapes of several axes."""

Buckets = Mapping[str, Entries]
"""Key of a policy -> its sizes or shapes: ``seq`` or ``height,width``. All combinations exist."""

RowCost = Callable[[np.ndarray], np.ndarray]
"""Padded elements of a row -> what it costs; never falls."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the sizes must obey.

    Attributes:
        ends: axis -> largest size, always a bucket; no row is longer.
        align: every other size is a multiple of it, except those in ``forced``.
        forced: further sizes that must be buckets, if there is one axis.
        row_cost: cost of a row by its padded elements; None: their number.
        variant_cost: what one more row shape costs, in the unit of ``row_cost``.
    """

    ends: Mapping[str, int]
    align: int = 1
    forced: tuple[int, ...] = ()
    row_cost: RowCost | None = None
    variant_cost: float = 0.0

    def cost(self, areas: np.ndarray) -> np.ndarray:
        """Return what rows of these padded elements cost."""
        return areas if self.row_cost is None else self.row_cost(areas)


@dataclass(frozen=True, slots=True)
class Fit:
    """Buckets, and how good they are for the rows they were fitted to.

    Attributes:
        buckets: what a policy lists.
        cost: of all rows, in the unit of ``Rules.row_cost``.
        bound: no other buckets of so many row shapes cost less; equals ``cost`` on one axis.
    """

    buckets: Buckets
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How much better, as a share of the bound, an unknown optimum could be at most."""
        return self.cost / self.bound - 1 if self.bound else 0.0


def fit(
    traffic: Traffic,
    rules: Rules,
    numbers: Sequence[int],
    on_step: Callable[[], None] = lambda: None,
    *,
    expect_longer: bool = True,
) -> dict[int, Fit]:
    """Return for each of ``numbers`` the best buckets of at most so many row shapes.

    Args:
        traffic: rows, none longer than ``rules.ends``.
        rules: what the sizes must obey.
        numbers: of row shapes, ascending; those too small for the forced sizes are left out.
        on_step: called after each number.
        expect_longer: on one axis, allow for about one row beyond the longest, which unseen traffic
            brings; False gives the optimum for these very rows.

    Raises:
        ConfigError: there are three axes or more, sizes are forced on two, or all numbers are too
            small.
    """
    if len(traffic.axes) > 2:
        raise ConfigError(
            f"the trace has the axes {', '.join(traffic.axes)}; at most two can be tuned together"
        )
    if len(traffic.axes) == 2 and rules.forced:
        raise ConfigError(
            f"sizes that must be buckets are along one axis, the trace has "
            f"{', '.join(traffic.axes)}; leave them out"
        )
    if expect_longer and len(traffic.axes) == 1:
        traffic = with_tail(traffic, rules.ends)
    solver = (_OneAxis if len(traffic.axes) == 1 else _TwoAxes)(traffic, rules, max(numbers))
    fits = {}
    for number in numbers:
        if number >= solver.least:
            fits[number] = solver.solve(number)
        on_step()
    return fits


def assigned(traffic: Traffic, buckets: Buckets) -> np.ndarray:
    """Return the padded sizes [rows, axes] of every row: of the bucket of least area."""
    sizes = np.empty_like(traffic.sizes)
    for key, entries in buckets.items():
        columns = [traffic.axes.index(axis) for axis in axes_of(key)]
        if len(columns) == 1:
            ladder = np.array(entries)
            lengths = traffic.sizes[:, columns[0]]
            sizes[:, columns[0]] = ladder[np.searchsorted(ladder, lengths)]
        else:
            shapes = [entry for entry in entries if isinstance(entry, tuple)]
            sizes[:, columns] = assign(traffic.sizes[:, columns], shapes)
    return sizes


def executed(traffic: Traffic, buckets: Buckets) -> np.ndarray:
    """Return the padded elements of every row."""
    return np.asarray(assigned(traffic, buckets).prod(axis=1, dtype=np.float64))


def waste(traffic: Traffic, buckets: Buckets) -> float:
    """Return padding / all elements that the rows execute, along the axes of a row."""
    real = float((traffic.counts * traffic.sizes.prod(axis=1, dtype=np.float64)).sum())
    return 1 - real / float((traffic.counts * executed(traffic, buckets)).sum())


def waste_by_axis(traffic: Traffic, buckets: Buckets) -> dict[str, float]:
    """Return axis -> padding along it / all elements: what the rows' padding adds up to.

    From the innermost axis outwards, as the engine counts it: a row of 3 x 4 in 8 x 8 has 3 * 4
    along the width and 5 * 8 along the height.
    """
    sizes, made = traffic.sizes.astype(np.float64), assigned(traffic, buckets).astype(np.float64)
    whole = (traffic.counts * made.prod(axis=1)).sum()
    shares = {}
    for i, axis in enumerate(traffic.axes):
        padding = made[:, i] - sizes[:, i]
        area = sizes[:, :i].prod(axis=1) * padding * made[:, i + 1 :].prod(axis=1)
        shares[axis] = float((traffic.counts * area).sum() / whole)
    return shares


def row_shapes(buckets: Buckets) -> int:
    """Return how many row shapes there are."""
    return prod(len(entries) for entries in buckets.values())


class _OneAxis:
    """Exact, all numbers at once."""

    def __init__(self, traffic: Traffic, rules: Rules, most: int) -> None:
        (self._axis,) = traffic.axes
        edges = np.array(sorted({*rules.forced, rules.ends[self._axis]}))
        self.least = len(edges)
        if self.least > most:
            raise ConfigError(
                f"{most} buckets are too few: {self.least} sizes are forced (the largest is one "
                f"of them); allow {self.least} or force fewer"
            )
        self._ladders = best_ladders(_demand(traffic, rules, edges), most)

    def solve(self, most: int) -> Fit:
        ladder = self._ladders[most - self.least]
        return Fit({self._axis: ladder.sizes}, ladder.cost, ladder.cost)


class _TwoAxes:
    """Shapes along both axes together."""

    least = 1

    def __init__(self, traffic: Traffic, rules: Rules, most: int) -> None:
        self._key, self._rules = ",".join(traffic.axes), rules
        end = [rules.ends[axis] for axis in traffic.axes]
        aligned = np.minimum(-(-traffic.sizes // rules.align) * rules.align, end)
        distinct, places = np.unique(aligned, axis=0, return_inverse=True)
        counts = np.bincount(places.ravel(), traffic.counts)
        height, width = end
        self._search = JointSearch(
            distinct, counts, (height, width), rules.cost, rules.variant_cost
        )

    def solve(self, most: int) -> Fit:
        shapes, cost = self._search.solve(most)
        return Fit(
            {self._key: shapes},
            cost,
            self._search.bound(most, elements=self._rules.row_cost is None),
        )


def _demand(traffic: Traffic, rules: Rules, edges: np.ndarray) -> Demand:
    """Count rows by the smallest size that the rules allow for them."""
    lengths = traffic.sizes[:, 0]
    aligned = -(-lengths // rules.align) * rules.align
    needed = np.minimum(aligned, edges[np.searchsorted(edges, lengths)])
    sizes = np.union1d(needed, edges)
    counts = np.bincount(np.searchsorted(sizes, needed), traffic.counts, len(sizes))
    return Demand(
        sizes=sizes,
        counts=counts,
        costs=rules.cost(sizes.astype(np.float64)),
        variant_costs=np.full(len(sizes), rules.variant_cost),
        forced=tuple(np.searchsorted(sizes, edges[:-1]).tolist()),
    )
