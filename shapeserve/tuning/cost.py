"""What executing a batch costs, as a formula: a launch, every element, every pair that attends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shapeserve.buckets import BATCH
from shapeserve.policy import Device

Sizes = Mapping[str, int]
"""Axis -> executed size, ``batch`` or ``tokens`` included."""


class Cost(Protocol):
    """Seconds of device time."""

    @property
    def source(self) -> str:
        """Where the numbers come from, for people to read."""

    @property
    def overhead_elements(self) -> float:
        """Cost of a launch, in padded elements; what the batcher weighs against padding."""

    def seconds(self, sizes: Sizes, pairs: float | None = None) -> float:
        """Return the seconds of one batch.

        Args:
            sizes: what is executed.
            pairs: pairs of elements that attend to each other; if not given, all elements of a
                padded row do, and those of packed rows are not known and cost nothing.
        """


@dataclass(frozen=True, slots=True)
class Formula:
    """``launch_s + linear_s * elements + quadratic_s * pairs``.

    Attributes:
        launch_s: seconds of a batch without elements.
        linear_s: seconds of one padded element.
        quadratic_s: seconds of one pair of elements that attend to each other.
        source: where the numbers come from.
    """

    launch_s: float
    linear_s: float
    quadratic_s: float
    source: str

    @property
    def overhead_elements(self) -> float:
        """Cost of a launch, in padded elements."""
        if self.linear_s:
            return self.launch_s / self.linear_s
        return math.inf if self.launch_s else 0.0

    def seconds(self, sizes: Sizes, pairs: float | None = None) -> float:
        """Return the seconds of one batch; see :class:`Cost`."""
        elements = math.prod(sizes.values())
        if pairs is None:
            pairs = padded_pairs(sizes)
        return self.launch_s + self.linear_s * elements + self.quadratic_s * pairs


def padded_pairs(sizes: Sizes) -> float:
    """Return the pairs that attend in a padded batch, 0 for packed rows."""
    batch = sizes.get(BATCH)
    return 0.0 if batch is None else batch * (math.prod(sizes.values()) / batch) ** 2


# MiniLM (6 layers, 384) in docs/benchmarks.md. CPU: 8x16, 32x16 and 32x40 tokens take 16, 51 and
# 127 ms on two cores in fp32. CUDA: 2x16 and 32x128 take 0.21 and 0.57 ms as graphs on an H200 in
# bf16. In each layer attention does 4 * 384 operations a pair, the rest 2 * 1.77 million an
# element: 4.3e-4 as many a pair.
_ATTENTION_SHARE = 4.3e-4
ANALYTIC: Mapping[Device, Formula] = {
    "cpu": Formula(3e-3, 1e-4, 1e-4 * _ATTENTION_SHARE, "analytic: MiniLM on two CPU cores, fp32"),
    "cuda": Formula(
        2.1e-4, 8.8e-8, 8.8e-8 * _ATTENTION_SHARE, "analytic: MiniLM on an H200, bf16, graphs"
    ),
}
"""Used where nothing was measured: right in its form, not in its seconds for another model."""


def row_seconds(cost: Cost, area: int, max_batch_tokens: int, max_rows: int = 32) -> float:
    """Return the seconds of one row of a padded ``area`` in the largest batch that it can be in.

    Args:
        cost: of a batch.
        area: padded elements of the row.
        max_batch_tokens: padded elements that a batch may have.
        max_rows: rows that a batch may have.
    """
    batch = min(max_rows, max(max_batch_tokens // area, 1))
    batch = 1 << (batch.bit_length() - 1)  # batch sizes are powers of two by default
    return cost.seconds({BATCH: batch, "row": area}) / batch
