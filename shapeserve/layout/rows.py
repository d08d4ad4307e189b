"""What a layout takes: rows of plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowArrays:
    """One row as the model's author thinks of it.

    Attributes:
        arrays: input name -> array without the batch axis, unpadded.
        sizes: row axis -> real size, for example ``{"seq": 17}``.
    """

    arrays: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]
