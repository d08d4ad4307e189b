"""From the sizes of rows to bucket sizes: one axis exactly, two axes by search with a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic
from shapeserve.tuning.ladder import Demand, Ladder, best_ladders
from shapeserve.tuning.tail import with_tail

Ladders = Mapping[str, tuple[int, ...]]
"""Axis -> bucket sizes, ascending."""

RowCost = Callable[[np.ndarray], np.ndarray]
"""Padded elements of a row -> what it costs; never falls."""

_MAX_SWEEPS = 20  # of the search on two axes; it settles after 2 to 5. Arbitrary.


@dataclass(frozen=True, slots=True)
class Rules:
    """What the sizes must obey.

    Attributes:
        ends: axis -> largest size, always a bucket; no row is longer.
        align: every other size is a multiple of it, except those in ``forced``.
        forced: axis -> further sizes that must be buckets.
        row_cost: cost of a row by its padded elements; None: their number.
        variant_cost: what one more row shape costs, in the unit of ``row_cost``.
    """

    ends: Mapping[str, int]
    align: int = 1
    forced: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    row_cost: RowCost | None = None
    variant_cost: float = 0.0

    def edges(self, axis: str) -> tuple[int, ...]:
        """Return the sizes along ``axis`` that every ladder has, ascending."""
        return tuple(sorted({*self.forced.get(axis, ()), self.ends[axis]}))

    def cost(self, areas: np.ndarray) -> np.ndarray:
        """Return what rows of these padded elements cost."""
        return areas if self.row_cost is None else self.row_cost(areas)


@dataclass(frozen=True, slots=True)
class Fit:
    """Bucket sizes, and how good they are for the rows they were fitted to.

    Attributes:
        ladders: axis -> sizes; the buckets are all combinations.
        cost: of all rows, in the unit of ``Rules.row_cost``.
        bound: no ladders of so many combinations cost less; equals ``cost`` on one axis.
    """

    ladders: Ladders
    cost: float
    bound: float

    @property
    def shapes(self) -> int:
        """Row shapes: all combinations of sizes."""
        return math.prod(len(sizes) for sizes in self.ladders.values())

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
        numbers: of row shapes; those too small for the forced sizes are left out.
        on_step: called after each number.
        expect_longer: allow for about one row beyond the longest, which unseen traffic brings;
            False gives the optimum for these very rows.

    Raises:
        ConfigError: there are three axes or more, or all numbers are too small.
    """
    if len(traffic.axes) > 2:
        raise ConfigError(
            f"the trace has the axes {', '.join(traffic.axes)}; at most two can be tuned together"
        )
    needed = math.prod(len(rules.edges(axis)) for axis in traffic.axes)
    if needed > max(numbers):
        raise ConfigError(
            f"{max(numbers)} buckets are too few: {needed} row shapes are forced (the largest is "
            f"one of them); allow {needed} or force fewer"
        )
    search = _OneAxis if len(traffic.axes) == 1 else _TwoAxes
    if expect_longer:
        traffic = with_tail(traffic, rules.ends)
    solver = search(traffic, rules, max(numbers))
    fits = {}
    for number in numbers:
        if number >= needed:
            fits[number] = solver.solve(number)
        on_step()
    return fits


def executed(traffic: Traffic, ladders: Ladders) -> np.ndarray:
    """Return the padded elements of every row."""
    areas = np.ones(len(traffic.sizes))
    for column, axis in enumerate(traffic.axes):
        areas *= padded(traffic.sizes[:, column], ladders[axis])
    return areas


def padded(lengths: np.ndarray, ladder: Sequence[int]) -> np.ndarray:
    """Return the bucket size of every length; none may be beyond the last."""
    sizes = np.asarray(ladder)
    return np.asarray(sizes[np.searchsorted(sizes, lengths)])


def waste(traffic: Traffic, ladders: Ladders) -> float:
    """Return padding / all elements that the rows execute, along the axes of a row."""
    real = float((traffic.counts * traffic.sizes.prod(axis=1, dtype=np.float64)).sum())
    return 1 - real / float((traffic.counts * executed(traffic, ladders)).sum())


class _OneAxis:
    """Exact, all numbers at once."""

    def __init__(self, traffic: Traffic, rules: Rules, most: int) -> None:
        (self._axis,) = traffic.axes
        self._least = len(rules.edges(self._axis))
        beside = np.ones(len(traffic.sizes))
        self._ladders = best_ladders(
            demand_beside(traffic, rules, self._axis, beside, rules.variant_cost), most
        )

    def solve(self, most: int) -> Fit:
        ladder = self._ladders[most - self._least]
        return Fit({self._axis: ladder.sizes}, ladder.cost, ladder.cost)


class _TwoAxes:
    """Searches every way to share the combinations between the axes.

    From the ladders that are best while the other axis is not padded at all, one axis at a time is
    set to its exact optimum given the other, until neither changes.
    """

    def __init__(self, traffic: Traffic, rules: Rules, most: int) -> None:
        self._traffic, self._rules = traffic, rules
        self._unpadded = self._cost(traffic.sizes.prod(axis=1, dtype=np.float64))
        self._alone = {axis: self._ladders_alone(axis, most) for axis in traffic.axes}

    def _ladders_alone(self, axis: str, most: int) -> dict[int, Ladder]:
        """Return number of sizes -> best ladder of one axis while the other is not padded."""
        other = self._traffic.sizes[:, 1 - self._traffic.axes.index(axis)]
        demand = demand_beside(self._traffic, self._rules, axis, other)
        return dict(enumerate(best_ladders(demand, most), len(self._rules.edges(axis))))

    def solve(self, most: int) -> Fit:
        one, other = self._traffic.axes
        bound = math.inf
        found: list[tuple[float, Ladders]] = []
        # As many along one axis as its share allows, then as many along the other as fit.
        for first in sorted({most // (most // n) for n in range(1, most + 1)}):
            numbers = {one: first, other: most // first}
            if all(numbers[axis] in self._alone[axis] for axis in numbers):
                bound = min(bound, self._bound(numbers))
                found += [self._descend(numbers, start) for start in numbers]
        cost, ladders = min(found, key=lambda pair: pair[0])
        return Fit(ladders, cost, bound)

    def _bound(self, numbers: Mapping[str, int]) -> float:
        """Return what no pair of ladders with so many sizes can cost less than."""
        alone = [self._alone[axis][number].cost for axis, number in numbers.items()]
        if self._rules.row_cost is not None:
            return max(alone)  # padding the other axis as well never makes a row cheaper
        # (H - h) w + h (W - w) is less than all padding by (H - h) (W - w).
        return sum(alone) - self._unpadded

    def _descend(self, numbers: Mapping[str, int], start: str) -> tuple[float, Ladders]:
        """Improve one axis at a time, given at first the ladder that ``start`` has alone."""
        traffic, rules = self._traffic, self._rules
        ladders = {axis: self._alone[axis][number].sizes for axis, number in numbers.items()}
        best: tuple[float, Ladders] = (math.inf, ladders)
        for _ in range(_MAX_SWEEPS):
            for axis in sorted(traffic.axes, key=lambda axis: axis == start):
                (other,) = (name for name in traffic.axes if name != axis)
                beside = padded(traffic.sizes[:, traffic.axes.index(other)], ladders[other])
                variant_cost = rules.variant_cost * len(ladders[other])
                demand = demand_beside(traffic, rules, axis, beside, variant_cost)
                ladders = {**ladders, axis: best_ladders(demand, numbers[axis])[-1].sizes}
            shapes = math.prod(map(len, ladders.values()))
            cost = self._cost(executed(traffic, ladders)) + rules.variant_cost * shapes
            if cost >= best[0]:
                break
            best = cost, ladders
        return best

    def _cost(self, areas: np.ndarray) -> float:
        return float((self._traffic.counts * self._rules.cost(areas)).sum())


def demand_beside(
    traffic: Traffic, rules: Rules, axis: str, beside: np.ndarray, variant_cost: float = 0.0
) -> Demand:
    """Return the demand along ``axis`` of rows that are ``beside`` wide along all others.

    Rows are counted by the smallest size that rules allow for them, and by their width.
    """
    lengths, rows = traffic.sizes[:, traffic.axes.index(axis)], traffic.counts
    if rules.row_cost is None:  # a row twice as wide costs what two rows do
        rows, beside = rows * beside, np.ones(len(lengths))
    widths, classes = np.unique(beside, return_inverse=True)
    edges = np.array(rules.edges(axis))
    aligned = -(-lengths // rules.align) * rules.align
    needed = np.minimum(aligned, edges[np.searchsorted(edges, lengths)])
    sizes = np.union1d(needed, edges)
    counts = np.zeros((len(sizes), len(widths)))
    np.add.at(counts, (np.searchsorted(sizes, needed), classes), rows)
    return Demand(
        sizes=sizes,
        counts=counts,
        costs=rules.cost(sizes[:, None] * widths[None, :].astype(np.float64)),
        variant_costs=np.full(len(sizes), variant_cost),
        forced=tuple(np.searchsorted(sizes, edges[:-1]).tolist()),
    )
