"""The padded layout with the padding made on the device.

Only real tokens travel: ids, mask and positions are made from them inside the captured graph, and
of outputs along the row axis only the real part travels back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from shapeserve.buckets import BATCH, padding
from shapeserve.layout.base import Forward
from shapeserve.layout.rows import RowArrays
from shapeserve.layout.tokens import TokenLayout
from shapeserve.models.spec import TensorSpec
from shapeserve.ops import pad_ragged, unpad_ragged


class RaggedLayout(TokenLayout):
    """Pads the token rows of a model on the device."""

    def write(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], slot: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens [batch x axis] and offsets [batch + 1], both int32."""
        return self.buffers.write(rows, prod(sizes.values()), sizes[BATCH], slot)

    def bind(self, program: Forward, sizes: Mapping[str, int]) -> Forward:
        """Return ``program`` with the padding before it and the unpadding behind it."""
        inputs, size = [*self.spec.inputs.values()], sizes[self.axis]
        ragged = [self.is_ragged(output) for output in self.spec.outputs.values()]

        def run(tokens: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ids, mask = pad_ragged(tokens, offsets, size, int(self.sent.pad))
            outputs = program(*(_made(spec, ids, mask) for spec in inputs))
            return tuple(
                unpad_ragged(output, offsets, tokens.shape[0]) if is_ragged else output
                for output, is_ragged in zip(outputs, ragged, strict=True)
            )

        return run

    def split(self, rows: Sequence[RowArrays], sizes: Mapping[str, int]) -> dict[str, int]:
        """Split the executed area; see ``buckets.padding``."""
        return padding(self.spec.axes, [row.sizes for row in rows], sizes)


def _made(spec: TensorSpec, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The input that ``spec`` describes; positions beyond a row's end are 0, as on the host."""
    if spec.make is None:
        return ids
    if spec.make == "mask":
        return mask
    positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    return positions * mask
