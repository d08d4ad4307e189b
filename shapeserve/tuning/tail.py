"""What lies beyond the longest row that was seen.

A ladder fitted to the rows alone ends one bucket at the longest of them, and pads the first longer
row to the end of the grid: with queries of up to 83 tokens and a grid to 8,192, one row of 93 costs
as much as 600 others. So a little is assumed about rows that have not come yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shapeserve.traces import Traffic

# Largest rows that the tail is fitted to: n ** 0.4, between 39 and 57 for the traces under
# benchmarks/data. Over all neighbouring halves, quarters and eighths of them (77 pairs) the ladder
# of 8 sizes loses 1.74 points of waste on the unseen part on average with 0.4 and one row, 1.86
# with 0.5, 2.06 with 0.6, and 3.53 without a tail.
_TAIL_EXPONENT = 0.4
# If rows come in no particular order, as many as were seen bring on average one that is longer than
# all of them: the longest row of both lots, the second longest ... are each in either lot alike.
_ROWS_BEYOND = 1.0
# Lengths that the tail is put at, each a candidate: if there are more, with equal ratios.
_MOST_LENGTHS = 2**14
_MIN_INDEX = 1e-3  # keeps a tail of equal lengths from dividing by zero


def with_tail(traffic: Traffic, ends: Mapping[str, int]) -> Traffic:
    """Return rows of one axis, and about one more if the longest is below the end."""
    (axis,) = traffic.axes
    lengths, places = np.unique(traffic.sizes[:, 0], return_inverse=True)
    beyond, rows = tail_beyond(lengths, np.bincount(places, traffic.counts), ends[axis])
    sizes = np.concatenate((traffic.sizes, beyond[:, None]))
    return replace(
        traffic, sizes=sizes, counts=np.concatenate((traffic.counts, rows)), times_s=None
    )


def tail_beyond(lengths: np.ndarray, counts: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths beyond the longest one, and how many rows of each to expect.

    A power law (Hill's estimator: B. M. Hill, Annals of Statistics 3, 1975), cut at ``end``; its
    rows add up to one. Empty if the longest row is ``end`` long, or there are fewer than two rows.

    Args:
        lengths: distinct lengths, ascending.
        counts: rows of each length.
        end: longest length that a row can have.
    """
    longest = int(lengths[-1])
    rows = float(counts.sum())
    if longest >= end or rows < 2:
        return np.zeros(0, np.int64), np.zeros(0)
    index = _tail_index(lengths, counts, min(max(int(rows**_TAIL_EXPONENT), 2), int(rows) - 1))
    edges = np.arange(longest, end + 1) if end - longest < _MOST_LENGTHS else _thin(longest, end)
    survival = (edges / longest) ** (-1 / index)
    survival[-1] = 0.0  # what would be longer is cut to the end
    return edges[1:], -np.diff(survival) * _ROWS_BEYOND


def _thin(longest: int, end: int) -> np.ndarray:
    """Return lengths from the one to the other whose ratios are alike."""
    return np.unique(np.rint(np.geomspace(longest, end, _MOST_LENGTHS)).astype(np.int64))


def _tail_index(lengths: np.ndarray, counts: np.ndarray, top: int) -> float:
    """Return the mean of ln(length / threshold) over the ``top`` longest rows."""
    from_top = np.cumsum(counts[::-1])
    threshold = lengths[::-1][np.searchsorted(from_top, top, side="right")]
    weights = np.diff(np.minimum(from_top, top), prepend=0.0)
    logs = np.log(lengths[::-1] / threshold)
    return max(float((weights * logs).sum() / top), _MIN_INDEX)
