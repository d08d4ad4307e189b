"""Which buckets are measured: few, spread over the grid on a logarithmic scale."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shapeserve.buckets import Bucket, Grid
from shapeserve.tuning.cost import Cost

_HELD_OUT_SHARE = 0.25  # of the measured buckets; arbitrary
_LEAST_FITTED = 4  # batches; a fit of three factors with fewer says nothing about its error


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured.

    Attributes:
        fitted: buckets that the formula is fitted to.
        held_out: those that only judge it, as far as can be from all fitted ones.
    """

    fitted: tuple[Bucket, ...]
    held_out: tuple[Bucket, ...]


def choose(grid: Grid, points: int, each: int = 1) -> Choice:
    """Choose buckets of a grid for at most ``points`` batches, its corners first.

    After them always the bucket that is farthest from all chosen ones, where twice the size along
    any axis is as far from everywhere. So the last ones, which are held out, are where the fit has
    least to go by.

    Args:
        grid: of the engine.
        points: batches to measure.
        each: batches in a bucket.
    """
    most = max(points // each, 1)
    buckets = sorted(grid.buckets, key=lambda b: (b.area, b.sizes))
    places = np.log([[size for _, size in bucket.sizes] for bucket in buckets])
    chosen = _corners(places)[:most]
    near = np.full(len(buckets), np.inf)
    for index in chosen:
        near = np.minimum(near, _distances(places, index))
    while len(chosen) < min(most, len(buckets)):
        chosen.append(int(near.argmax()))
        near = np.minimum(near, _distances(places, chosen[-1]))
    spare = len(chosen) - _LEAST_FITTED // each
    held = max(min(round(len(chosen) * _HELD_OUT_SHARE), spare), 0)
    picked = [buckets[index] for index in chosen]
    return Choice(tuple(picked[: len(picked) - held]), tuple(picked[len(picked) - held :]))


def _corners(places: np.ndarray) -> list[int]:
    """Return the smallest and the largest bucket, then the other corners of the grid."""
    signs: Sequence[tuple[int, ...]] = sorted(
        itertools.product((-1, 1), repeat=places.shape[1]), key=lambda s: -abs(sum(s))
    )
    return [*dict.fromkeys(int((places @ sign).argmax()) for sign in signs)]


def _distances(places: np.ndarray, index: int) -> np.ndarray:
    return np.asarray(((places - places[index]) ** 2).sum(axis=1))


def costliest(
    buckets: Sequence[Bucket], shares: Mapping[str, float], cost: Cost, number: int
) -> list[Bucket]:
    """Return the buckets that keep the device longest.

    Args:
        buckets: of the grid.
        shares: label of a bucket -> share of the calls.
        cost: of a call.
        number: how many, at most.
    """

    def seconds(bucket: Bucket) -> float:
        return shares[bucket.label] * cost.seconds(bucket.as_dict())

    return sorted(buckets, key=seconds, reverse=True)[:number]
