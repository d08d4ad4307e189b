"""The sizes of one axis that cost least: an exact optimum for every number of sizes.

A *ladder* is the ascending sizes of one axis; a row goes to the smallest that covers it. With the
distinct sizes of the traffic as candidates, the best ladder of at most k sizes that ends at
candidate j is the best of k - 1 that ends at some i < j, plus one bucket for the rows between::

    f[k][j] = min over i < j of  f[k-1][i] + rows(i, j) * cost(j) + variant_cost(j)

Because a row never costs less in a larger bucket, the best i does not fall as j grows (the
quadrangle inequality), so divide and conquer finds all of f[k] in O(n log n): the middle j bounds
the i of both sides. Every level of that recursion is one pass of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Ladder:
    """Bucket sizes of one axis, ascending, and what all rows cost on them."""

    sizes: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a ladder is to be made for.

    Attributes:
        sizes: [n] the candidates, ascending; the last is in every ladder.
        counts: [n] float64, rows whose smallest candidate this is; 0 is fine.
        costs: [n] float64, cost of one row in a bucket of this size; never falls.
        variant_costs: [n] float64, cost of having a bucket of this size at all.
        forced: ascending indices of further candidates that are in every ladder.
    """

    sizes: np.ndarray
    counts: np.ndarray
    costs: np.ndarray
    variant_costs: np.ndarray
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if np.any(np.diff(self.sizes) <= 0) or np.any(np.diff(self.costs) < 0):
            raise ValueError("sizes must ascend, and costs must not fall with the size")


def best_ladders(demand: Demand, most: int) -> list[Ladder]:
    """Return for every number from 1 to ``most`` the ladder of at most so many sizes.

    Ladders of fewer sizes than are forced are left out, so that the result may be shorter. Cost:
    O(most * n * log n).

    Raises:
        ValueError: more sizes are forced than ``most`` allows.
    """
    bounds = (*demand.forced, len(demand.sizes) - 1)
    if len(bounds) > most:
        raise ValueError(f"{len(bounds)} sizes are forced, at most {most} are allowed")
    spare = most - len(bounds) + 1
    # No bucket reaches across a forced size, so what lies between two of them is on its own.
    joined: list[Ladder] = []
    start = 0
    for end in bounds:
        segment = _segment(demand, start, end + 1, spare)
        joined = _join(joined, segment) if joined else segment
        start = end + 1
    return joined


def _join(left: Sequence[Ladder], right: Sequence[Ladder]) -> list[Ladder]:
    """Combine two neighbouring segments: entry x has x spare sizes, spent on either side."""
    best = []
    for spare in range(len(right)):
        cost, mine = min((left[spare - x].cost + right[x].cost, x) for x in range(spare + 1))
        best.append(Ladder(left[spare - mine].sizes + right[mine].sizes, cost))
    return best


def _segment(demand: Demand, start: int, stop: int, most: int) -> list[Ladder]:
    """Solve the candidates ``start`` to ``stop``; the last of them is in every ladder."""
    costs, extra = demand.costs[start:stop], demand.variant_costs[start:stop]
    below = np.zeros(stop - start + 1)  # rows below candidate i
    np.cumsum(demand.counts[start:stop], out=below[1:])
    totals = np.zeros(stop - start + 1)  # f[k], index 0: no candidate yet
    totals[1:] = below[1:] * costs + extra
    best = [totals]
    origins = [np.zeros(stop - start + 1, np.int64)]
    for _ in range(1, most):
        totals, origin = _one_more(best[-1], below, costs, extra)
        best.append(totals)
        origins.append(origin)
    sizes = demand.sizes[start:stop]
    return [Ladder(_walk(sizes, origins[: k + 1]), float(f[-1])) for k, f in enumerate(best)]


def _walk(sizes: np.ndarray, origins: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Follow the best predecessors from the last candidate down."""
    end, found = len(sizes), []
    for origin in reversed(origins):
        if end == 0:
            break  # fewer sizes were better, or there are no more candidates
        found.append(int(sizes[end - 1]))
        end = int(origin[end])
    return tuple(reversed(found))


def _one_more(
    fewer: np.ndarray, below: np.ndarray, costs: np.ndarray, extra: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return f[k] and its best predecessors from f[k-1]: all middles of a level at a time."""
    n = len(costs)
    totals, origins = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    first, last = np.array([1]), np.array([n])  # candidates of each open interval
    low, high = np.array([0]), np.array([n - 1])  # where their best predecessors are
    while len(first):
        middle = (first + last) // 2
        cost = costs[middle - 1]
        low_cost, origin = _cheapest(fewer, below, cost, low, np.minimum(high, middle - 1))
        totals[middle] = low_cost + below[middle] * cost + extra[middle - 1]
        origins[middle] = origin
        left, right = first < middle, middle < last
        first, last, low, high = (
            np.concatenate((first[left], middle[right] + 1)),
            np.concatenate((middle[left] - 1, last[right])),
            np.concatenate((low[left], origin[right])),
            np.concatenate((origin[left], high[right])),
        )
    return totals, origins


def _cheapest(
    fewer: np.ndarray, below: np.ndarray, cost: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least of ``fewer[i] - below[i] * cost`` over low..high, and the first such i."""
    lengths = high - low + 1
    starts = np.cumsum(lengths) - lengths
    # All ranges end to end in one vector.
    index = np.arange(lengths.sum()) - np.repeat(starts - low, lengths)
    values = fewer[index] - below[index] * np.repeat(cost, lengths)
    least = np.minimum.reduceat(values, starts)
    hits = np.flatnonzero(values == np.repeat(least, lengths))
    return least, index[hits[np.searchsorted(hits, starts)]]
