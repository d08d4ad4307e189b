"""What the runner asks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shapeserve.layout.rows import RowArrays
from shapeserve.layout.transfer import Landing

Forward = Callable[..., tuple[torch.Tensor, ...]]
"""Tensors in spec order -> outputs in spec order."""

RowOutputs = dict[str, np.ndarray]
"""Output name -> array of one row, of its real size, owned by the caller."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A batch's outputs on their way to the host."""

    landing: Landing
    cut: Callable[[Sequence[np.ndarray]], list[RowOutputs]]

    def rows(self) -> tuple[list[RowOutputs], list[bool]]:
        """Wait, then return each row's outputs, and whether all of a row's values are finite."""
        arrays = self.landing.arrays()
        rows = self.cut(arrays)
        if all(bool(np.isfinite(a).all()) for a in arrays if a.dtype.kind == "f"):
            return rows, [True] * len(rows)
        return rows, [_finite(row) for row in rows]


class Layout(Protocol):
    """How the rows of a batch lie in the tensors of a program, and how they are found again.

    Attributes:
        capacity: elements of the largest area that may be executed.
        slots: batches that may be on their way at a time.
    """

    capacity: int
    slots: int

    def write(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], slot: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Bring ``rows`` into the static tensors of the executed ``sizes``."""

    def bind(self, program: Forward, sizes: Mapping[str, int]) -> Forward:
        """Return what runs ``program`` on the tensors of :meth:`write`; it is what is captured."""

    def read(
        self,
        outputs: Sequence[torch.Tensor],
        rows: Sequence[RowArrays],
        sizes: Mapping[str, int],
        slot: int = 0,
    ) -> Reading:
        """Begin to copy the rows out of the outputs of a bound program."""

    def split(self, rows: Sequence[RowArrays], sizes: Mapping[str, int]) -> dict[str, int]:
        """Split the executed area into ``real`` elements and ``padding_<axis>`` (I7)."""

    def poison(self) -> None:
        """Fill every buffer with what must never reach an answer (I4)."""


def _finite(outputs: RowOutputs) -> bool:
    return all(
        bool(np.isfinite(array).all()) for array in outputs.values() if array.dtype.kind == "f"
    )
