"""Which buckets are measured, and how much of the traffic each of them stands for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from shapeserve.buckets import BATCH, Bucket, Grid
from shapeserve.errors import ConfigError
from shapeserve.evaluate.result import Traffic
from shapeserve.expect import Expectation

SAMPLED, ALL = "sampled", "all"
# Each costs a compile of its own (5 to 30 s) and some seconds of calls; arbitrary.
_SAMPLE = 5
_SIZES = re.compile(r"\d+(x\d+)*")


def choose(grid: Grid, wanted: str) -> list[Bucket]:
    """Return the buckets that ``--grid`` asks for, the smallest area first.

    Args:
        grid: of the engine.
        wanted: ``sampled`` (the smallest, the largest, and some between them by area), ``all``, or
            sizes in the order of the grid's axes: ``1x16,8x128``.

    Raises:
        ConfigError: a bucket is not in the grid, or is not written like one.
    """
    buckets = sorted(grid.buckets, key=lambda b: (b.area, b.sizes))
    if wanted == ALL:
        return buckets
    if wanted == SAMPLED:
        last, steps = len(buckets) - 1, min(_SAMPLE, len(buckets)) - 1
        return [buckets[last * i // max(steps, 1)] for i in range(steps + 1)]
    named = {"x".join(str(size) for _, size in bucket.sizes): bucket for bucket in buckets}
    asked = [part.strip() for part in wanted.split(",")]
    for name in asked:
        if name not in named:
            raise ConfigError(_unknown(name, named, grid))
    return [bucket for name, bucket in named.items() if name in asked]


def _unknown(name: str, named: Mapping[str, Bucket], grid: Grid) -> str:
    axes = " x ".join(grid.axes)
    if not _SIZES.fullmatch(name):
        return (
            f"--grid {name!r} is neither {SAMPLED}, {ALL}, nor sizes along {axes}; write them as "
            f"{next(iter(named))}"
        )
    return (
        f"--grid {name}: the grid has no such bucket ({axes}); it has {', '.join(named)}. "
        "Choose from these, or change `policy`"
    )


def traffic(
    measured: Sequence[Bucket], expected: Expectation | None, shapes: int | None
) -> Traffic:
    """Share the calls among the measured buckets.

    A recorded row counts for the smallest measured row shape that holds it (the largest one, if
    none does), shared evenly by the batch sizes measured there; a call of a batch of n takes n
    rows. Packed rows have no shape of their own, so every bucket counts alike there.

    Args:
        measured: the buckets.
        expected: of the recorded rows; None if there are none.
        shapes: how many different row shapes were recorded.
    """
    weights = dict.fromkeys(measured, 1.0)
    if expected is not None and expected.by_size:
        weights = _weights(measured, expected.by_size)
    whole = sum(weights.values()) or 1.0
    return Traffic(
        observed=expected is not None,
        shares={bucket.label: weight / whole for bucket, weight in weights.items()},
        shapes=shapes,
        waste=None if expected is None else expected.waste.ratio,
    )


def _weights(
    measured: Sequence[Bucket], by_size: Mapping[tuple[int, ...], int]
) -> dict[Bucket, float]:
    keys = sorted({bucket.without(BATCH) for bucket in measured}, key=lambda k: _area(_sizes(k)))
    rows: Counter[object] = Counter()
    for sizes, count in by_size.items():
        holds = (k for k in keys if all(a >= b for a, b in zip(_sizes(k), sizes, strict=True)))
        rows[next(holds, keys[-1])] += count
    batches = Counter(bucket.without(BATCH) for bucket in measured)
    return {
        bucket: rows[key] / batches[key] / bucket.as_dict().get(BATCH, 1)
        for bucket in measured
        for key in (bucket.without(BATCH),)
    }


def _sizes(key: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(size for _, size in key)


def _area(sizes: Sequence[int]) -> int:
    return prod(sizes)
