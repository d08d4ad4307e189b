"""The packed layout: rows end to end along one axis of tokens, each attending only to itself.

A bucket is a number of tokens; what is padded is only its tail. The program is given the tokens
and where each row begins, and makes positions, attention bounds and pooling from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shapeserve.buckets import MIN_ROW_TOKENS, TOKENS, padding
from shapeserve.layout.base import Forward
from shapeserve.layout.rows import RowArrays
from shapeserve.layout.tokens import TokenLayout


def max_rows(tokens: int) -> int:
    """Rows that a packed batch of ``tokens`` may have."""
    return max(tokens // MIN_ROW_TOKENS, 1)


class PackedLayout(TokenLayout):
    """Packs the token rows of a text encoder."""

    def write(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], slot: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens [tokens] and offsets [max_rows + 1], both int32."""
        tokens = sizes[TOKENS]
        return self.buffers.write(rows, tokens, max_rows(tokens), slot)

    def bind(self, program: Forward, sizes: Mapping[str, int]) -> Forward:
        """Return the program itself: it takes what is written."""
        return program

    def split(self, rows: Sequence[RowArrays], sizes: Mapping[str, int]) -> dict[str, int]:
        """Split the executed tokens into real ones and the tail."""
        return padding((TOKENS,), [row.sizes for row in rows], sizes)
