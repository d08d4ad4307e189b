"""Shapes along two axes that cost least together: a search, with a bound on what it can miss.

Photos have few aspect ratios, so that most of the product of two ladders would never be used; joint
shapes are placed where rows are. No polynomial exact method is known for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shapeserve.tuning.ladder import Demand, best_ladders

Shape = tuple[int, int]
Cost = Callable[[np.ndarray], np.ndarray]
"""Padded elements of a row -> what it costs; never falls."""

_CANDIDATES = 48  # sizes along each axis that a new shape may have, before it shrinks to its rows
_MAX_MOVES = 200  # it settles after a few dozen; arbitrary


class JointSearch:
    """Grows a set of shapes by the one that saves most, then replaces single ones while that helps.

    After each step every shape shrinks to the rows that it is the cheapest for.

    Args:
        sizes: [rows, 2] distinct sizes of rows, as the rules round them.
        counts: [rows] how many there are of each.
        end: the largest shape, always there.
        cost: of a row by its padded elements.
        variant_cost: what one more shape must save.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        counts: np.ndarray,
        end: Shape,
        cost: Cost,
        variant_cost: float = 0.0,
    ) -> None:
        self._rows = (sizes, counts)
        self._end, self._cost, self._variant_cost = end, cost, variant_cost
        spread = [_spread(np.unique(sizes[:, axis])) for axis in (0, 1)]
        grid = np.meshgrid(*spread, indexing="ij")
        self._candidates = np.stack([side.ravel() for side in grid], axis=1)
        self._sizes, self._counts = sizes, counts
        if len(sizes) > len(self._candidates):  # rows that a candidate cannot tell apart are one
            self._sizes, self._counts = _rounded_up(sizes, counts, spread)
        covered = self._sizes[:, None, :] <= self._candidates[None, :, :]
        self._covers = covered.all(axis=2)  # [rows, candidates]
        self._candidate_costs = cost(self._candidates.prod(axis=1, dtype=np.float64))
        self._found: tuple[Shape, ...] = (end,)

    def solve(self, most: int) -> tuple[tuple[Shape, ...], float]:
        """Return at most ``most`` shapes and their cost; cheaper if asked in ascending order."""
        shapes = self._found if len(self._found) <= most else (self._end,)
        shapes = self._grown(shapes, most)
        cost = self._total(shapes)
        for _ in range(_MAX_MOVES):
            better = self._replaced(shapes, most, cost)
            if better is None:
                break
            shapes, cost = better
        self._found = shapes
        sizes, counts = self._rows
        areas = assign(sizes, shapes).prod(axis=1, dtype=np.float64)
        real = float(counts @ self._cost(areas)) + self._variant_cost * len(shapes)
        return tuple(sorted(shapes)), real

    def _replaced(
        self, shapes: tuple[Shape, ...], most: int, cost: float
    ) -> tuple[tuple[Shape, ...], float] | None:
        """Return the first set that is cheaper with one shape taken out and others put in."""
        for shape in shapes:
            if shape != self._end:
                made = self._grown(tuple(s for s in shapes if s != shape), most)
                now = self._total(made)
                if now < cost * (1 - 1e-9):
                    return made, now
        return None

    def _grown(self, shapes: tuple[Shape, ...], most: int) -> tuple[Shape, ...]:
        """Add what saves most until there are ``most`` or nothing saves enough."""
        while len(shapes) < most:
            now = self._cost(assign(self._sizes, shapes).prod(axis=1, dtype=np.float64))
            saved = np.maximum(now[:, None] - self._candidate_costs[None, :], 0.0) * self._covers
            gains = self._counts @ saved
            best = int(gains.argmax())
            if gains[best] <= self._variant_cost:
                break
            height, width = self._candidates[best].tolist()
            more = self._shrunk((*shapes, (height, width)))
            if len(more) <= len(shapes):  # it took all rows of another, which is gone
                return more if self._total(more) < self._total(shapes) else shapes
            shapes = more
        return shapes

    def _shrunk(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        assigned = assign(self._sizes, shapes)
        kept = {self._end}
        for shape in set(shapes) - {self._end}:
            rows = self._sizes[(assigned == shape).all(axis=1)]
            if len(rows):
                height, width = rows.max(axis=0).tolist()
                kept.add((height, width))
        return tuple(sorted(kept))

    def _total(self, shapes: Sequence[Shape]) -> float:
        areas = assign(self._sizes, shapes).prod(axis=1, dtype=np.float64)
        return float(self._counts @ self._cost(areas)) + self._variant_cost * len(shapes)

    def bound(self, most: int, *, elements: bool) -> float:
        """Return what no ``most`` shapes can cost less than.

        Args:
            most: how many shapes.
            elements: whether a row costs the number of its elements.

        So many shapes have at most so many areas, heights and widths. A row costs at least the
        smallest of these areas that is not below its own: a ladder of areas. And it costs
        at least its area, its padding along one axis alone, and that along the other, whose product
        only adds to them: two ladders, if the cost is the number of elements.
        """
        sizes, counts = self._rows
        areas = sizes.prod(axis=1, dtype=np.float64)
        least = _ladder_cost(areas, counts, float(np.prod(self._end)), most, self._cost)
        if not elements:
            return least
        unpadded = float(counts @ areas)
        alone = sum(
            _ladder_cost(
                sizes[:, axis],
                counts * sizes[:, 1 - axis],
                self._end[axis],
                most,
                self._cost,
            )
            for axis in (0, 1)
        )
        return max(least, alone - unpadded)


def assign(sizes: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the shape [rows, axes] of least area that covers each row; one covers them all."""
    assigned = np.zeros_like(sizes)
    for shape in sorted(shapes, key=lambda s: -float(np.prod(s, dtype=np.float64))):
        assigned[(sizes <= shape).all(axis=1)] = shape
    return assigned


def _spread(sizes: np.ndarray) -> np.ndarray:
    """Return some of many sizes, the smallest and the largest among them."""
    if len(sizes) <= _CANDIDATES:
        return sizes
    return np.unique(sizes[np.linspace(0, len(sizes) - 1, _CANDIDATES).astype(int)])


def _rounded_up(
    sizes: np.ndarray, counts: np.ndarray, spread: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Round sizes up to those of ``spread`` and add up the rows that are alike then."""
    rounded = [side[np.searchsorted(side, sizes[:, axis])] for axis, side in enumerate(spread)]
    alike, places = np.unique(np.stack(rounded, axis=1), axis=0, return_inverse=True)
    return alike, np.bincount(places.ravel(), counts)


def _ladder_cost(
    lengths: np.ndarray, counts: np.ndarray, end: float, most: int, cost: Cost
) -> float:
    """Return what the best ladder of one axis costs."""
    distinct, places = np.unique(lengths, return_inverse=True)
    rows = np.bincount(places, counts, len(distinct))
    if distinct[-1] != end:
        distinct, rows = np.append(distinct, end), np.append(rows, 0.0)
    costs = cost(distinct.astype(np.float64))
    demand = Demand(distinct, rows, costs, np.zeros(len(distinct)))
    return best_ladders(demand, most)[-1].cost
