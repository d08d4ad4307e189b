"""Random rows in a bucket, and what the model must answer for them.

The probe row sits at a random index among random neighbours; its answer must be the one that the
eager model gives it alone and unpadded (I4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from shapeserve.buckets import BATCH, TOKENS, Bucket, Grid, RowKey
from shapeserve.errors import ModelError
from shapeserve.layout import MIN_ROW_TOKENS, RowArrays, positions
from shapeserve.models.spec import ModelSpec, TensorSpec

TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""Largest norm-wise relative error of a row against the eager model in the same dtype.

fp32: kernels of different shapes sum in another order, seen up to 5e-6 on MiniLM. fp16 and bf16:
one unit in the last place is 1e-3 and 8e-3, and flash kernels were seen at 3e-3 to 1.4e-2.
"""


# How often a packed probe batch ends before it is full, so that tails are tested too; arbitrary.
_TAIL_SHARE = 0.05
_SMALL = 16  # elements along each axis; arbitrary
_TYPICAL_ROWS = 8  # whose median says how large logits are; arbitrary


class Probe:
    """Random rows of a model, and the answer of the eager model for each alone and unpadded."""

    def __init__(self, spec: ModelSpec, eager: torch.nn.Module, device: torch.device) -> None:
        self._spec = spec
        self._eager = eager
        self._typical: list[float] | None = None
        self.device = device
        self.rng = np.random.default_rng(0)

    def row(self, sizes: Mapping[str, int]) -> RowArrays:
        """Make a random row of these sizes (ids inside the vocabulary, floats standard normal)."""
        arrays = {
            name: self._random(spec, spec.shape({BATCH: 1, **sizes})[1:])
            for name, spec in self._spec.inputs.items()
            if spec.make is None
        }
        return RowArrays(arrays, dict(sizes))

    def size(self, axis: str, low: int, high: int) -> int:
        """A random size that the model runs; ``high`` for a model that must not be padded."""
        if self._spec.padding_invariant is False:
            return high
        low = min(max(low, self._spec.min_length.get(axis, 1)), high)
        return int(self.rng.integers(low, high + 1))

    def small(self) -> RowArrays:
        """Make a row that costs little and is no special case."""
        ends = self._spec.max_length.items()
        low = self._spec.min_length
        return self.row({axis: max(min(_SMALL, end), low.get(axis, 1)) for axis, end in ends})

    def row_for(self, grid: Grid, bucket: Bucket) -> RowArrays:
        """Make a row that is padded in ``bucket`` but fits no smaller size of an axis.

        In a packed bucket, where rows are not padded to a size, it is of any length.
        """
        if BATCH not in grid.axes:
            return self.row(self._packed_size(bucket.size(TOKENS)))
        sizes = {}
        for axis, size in bucket.without(BATCH):
            below = [b.size(axis) for b in grid.buckets if b.size(axis) < size]
            sizes[axis] = self.size(axis, max(below, default=0) + 1, size)
        return self.row(sizes)

    def padded_row(self, bucket: Bucket) -> RowArrays | None:
        """Make a row that is shorter than ``bucket`` along every axis where one can be.

        None if no row that the model runs is shorter than the bucket.
        """
        whole = dict(bucket.without(BATCH))
        shorter = {
            axis: self.size(axis, 1, size - 1)
            for axis, size in whole.items()
            if size > self._spec.min_length.get(axis, 1)
        }
        return self.row({**whole, **shorter}) if shorter else None

    def plant(self, row: RowArrays, bucket: Bucket) -> tuple[int, list[RowArrays]]:
        """Put ``row`` among random neighbours that fit the bucket; return its index and all."""
        rows = self._neighbours(row, bucket)
        index = int(self.rng.integers(0, len(rows) + 1))
        rows.insert(index, row)
        return index, rows

    def fill(self, sizes: Mapping[str, int]) -> list[RowArrays]:
        """Rows that fill the executed ``sizes`` exactly."""
        if BATCH not in sizes:
            (axis,) = self._spec.row_axes
            whole, rest = divmod(sizes[TOKENS], self._spec.hard_limit[axis])
            lengths = [self._spec.hard_limit[axis]] * whole + [rest] * bool(rest)
            return [self.row({axis: length}) for length in lengths]
        row = self.row({axis: size for axis, size in sizes.items() if axis != BATCH})
        return [row] * sizes[BATCH]

    def _neighbours(self, row: RowArrays, bucket: Bucket) -> list[RowArrays]:
        if BATCH in bucket.axes:
            count = int(self.rng.integers(0, bucket.size(BATCH)))
            key = bucket.without(BATCH)
            return [
                self.row({axis: self.size(axis, 1, s) for axis, s in key}) for _ in range(count)
            ]
        (length,) = row.sizes.values()
        left = bucket.size(TOKENS) - max(length, MIN_ROW_TOKENS)
        rows = []
        while left >= MIN_ROW_TOKENS and self.rng.random() > _TAIL_SHARE:
            sizes = self._packed_size(left)
            left -= max(*sizes.values(), MIN_ROW_TOKENS)
            rows.append(self.row(sizes))
        return rows

    def _packed_size(self, most: int) -> dict[str, int]:
        """A random length of a row that may take up to ``most`` tokens."""
        (axis,) = self._spec.row_axes
        longest = min(most, self._spec.hard_limit[axis])
        return {axis: int(self.rng.integers(1, longest + 1))}

    def _random(self, spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
        if spec.dtype.startswith(("float", "bfloat")):
            return self.rng.standard_normal(shape).astype(np.float32)
        if spec.dtype == "uint8":
            return self.rng.integers(0, 256, shape, dtype=np.uint8)
        high = spec.below or 2
        ids = self.rng.integers(0, high, shape)
        # The pad id itself is kept out: some encoders derive positions from it.
        return np.where(ids == spec.pad, (int(spec.pad) + 1) % high, ids) if high > 2 else ids

    def answer(self, row: RowArrays) -> list[np.ndarray]:
        """Return the eager outputs for ``row`` alone, unpadded: float64 arrays in spec order.

        Raises:
            ModelError: the model cannot run it.
        """
        try:
            outputs = self._eager(*self.inputs(row))
        except torch.AcceleratorError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(
                f"{self._spec.name} cannot run a row of {label(row.sizes)}: {error}; if other "
                "sizes run, set limits.min_length to the shortest, or limits.hard_limit to the "
                "longest; else correct `inputs`, which are passed in their order"
            ) from error
        return [np.asarray(o[0].detach().double().cpu()) for o in outputs]

    def error(self, got: list[np.ndarray], expected: list[np.ndarray]) -> float:
        """Norm-wise relative error of a row's answer; see :func:`relative_error`.

        Logits may be anything, 0 among it, so that an error is small or large beside those of
        other rows, not beside the row's own.
        """
        if self._spec.task == "classify" and self._typical is None:
            sizes = [
                {a: self.size(a, 1, self._spec.max_length[a]) for a in self._spec.row_axes}
                for _ in range(_TYPICAL_ROWS)
            ]
            norms = [[np.linalg.norm(a) for a in self.answer(self.row(size))] for size in sizes]
            self._typical = [float(np.median(norm)) for norm in zip(*norms, strict=True)]
        return relative_error(got, expected, self._typical)

    def inputs(self, row: RowArrays) -> list[torch.Tensor]:
        """The model's inputs for ``row`` alone, unpadded."""
        return [self._exact(spec, row) for spec in self._spec.inputs.values()]

    def _exact(self, spec: TensorSpec, row: RowArrays) -> torch.Tensor:
        shape = spec.shape({BATCH: 1, **row.sizes})
        dtype = getattr(torch, spec.dtype)
        if spec.make == "mask":
            return torch.ones(shape, dtype=dtype, device=self.device)
        if spec.make == "positions":
            count = torch.as_tensor(positions(spec, row.sizes), dtype=dtype, device=self.device)
            return count.expand(shape)
        return torch.as_tensor(row.arrays[spec.name]).to(self.device, dtype).reshape(shape)


def relative_error(
    got: list[np.ndarray], expected: list[np.ndarray], least: Sequence[float] | None = None
) -> float:
    """Norm-wise relative error of the worst output; infinite if a value is not finite.

    Args:
        got: the outputs.
        expected: what they should be.
        least: for each output a norm; the error is relative to this one where it is larger.
    """
    worst = 0.0
    for a, b, floor in zip(got, expected, least or [0.0] * len(got), strict=True):
        if a.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(a, b) else float("inf"))
            continue
        gap = float(np.linalg.norm(a.astype(np.float64) - b))
        norm = max(float(np.linalg.norm(b)), floor, 1e-12)
        worst = max(worst, gap / norm if np.isfinite(gap) else float("inf"))
    return worst


def row_area(row: RowKey) -> int:
    """Elements of one padded row."""
    return prod(size for _, size in row)


def label(sizes: Mapping[str, int]) -> str:
    """Sizes as they are written everywhere: ``batch=8,seq=128``."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
