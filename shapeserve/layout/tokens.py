"""Layouts that are given the real tokens of a batch end to end, and where each row begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from shapeserve.layout.base import Reading, RowOutputs
from shapeserve.layout.rows import RowArrays
from shapeserve.layout.transfer import SLOTS, Download, Streams, Upload
from shapeserve.models.spec import ModelSpec, TensorSpec

_ALIGN = 64  # int32 elements: the 256 bytes that CUDA's own allocations are aligned to

_KEPT_VIEWS = 4096  # of static buffers; the fallback has as many sizes as clients care to send


class TokenBuffers:
    """Static buffers for tokens and row offsets.

    Args:
        name: the input that holds the tokens, one array of one dimension for each row.
        axis: the rows' only axis.
        tokens: most tokens of a batch.
        rows: most rows of a batch.
        streams: of the device.
    """

    def __init__(self, name: str, axis: str, tokens: int, rows: int, streams: Streams) -> None:
        self._name = name
        self._axis = axis
        # One buffer, so that a batch is one copy: offsets in front, tokens behind those of the
        # most rows. The place is the same for every bucket: what a batch leaves behind its tokens
        # is then always a token, never an offset, which may be no valid id.
        self._first = -(-(rows + 1) // _ALIGN) * _ALIGN
        self._buffer = Upload(self._first + tokens, torch.int32, torch.int32, streams)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, rows: Sequence[RowArrays], capacity: int, max_rows: int, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``rows``; return tokens [capacity] and offsets [max_rows + 1], both int32.

        Offsets beyond the last row repeat the total, so that filler rows have no tokens. Tokens
        beyond the total keep what an earlier batch left there, or the poison.
        """
        first, count, axis, name = self._first, len(rows), self._axis, self._name
        buffer = self._buffer.view((first + capacity,), slot)
        ends = [*accumulate([row.sizes[axis] for row in rows])]
        total = ends[-1]
        buffer[0] = 0
        buffer[1 : count + 1] = ends
        buffer[count + 1 : max_rows + 1] = total
        parts = [row.arrays[name] for row in rows]
        np.concatenate(parts, out=buffer[first : first + total], casting="unsafe")
        self._buffer.send(first + total, slot)
        views = self._views.get((capacity, max_rows))
        if views is None:
            static = self._buffer.static
            views = static[first : first + capacity], static[: max_rows + 1]
            if len(self._views) < _KEPT_VIEWS:
                self._views[capacity, max_rows] = views
        return views

    def poison(self) -> None:
        """Fill the tokens with a valid id: one out of the table would fault instead of leaking."""
        self._buffer.poison(1)


class TokenLayout:
    """What the ragged and the packed layout share: buffers, and reading rows out.

    Thread rule: as for ``PaddedLayout``.

    Args:
        spec: the model's tensors; :func:`takes_tokens` must be true of it.
        capacity: elements of the largest executed area.
        rows: most rows of a batch.
        device: where the model runs.
    """

    def __init__(self, spec: ModelSpec, capacity: int, rows: int, device: torch.device) -> None:
        streams = Streams(device)
        self.spec = spec
        self.sent = next(t for t in spec.inputs.values() if t.make is None)
        self.axis = str(self.sent.dims[1])
        self.buffers = TokenBuffers(self.sent.name, self.axis, capacity, rows, streams)
        self.capacity = capacity
        self.slots = SLOTS if streams.cuda else 1
        self._download = Download(streams)
        self._names = tuple(spec.outputs)
        self._ragged = tuple(self.is_ragged(output) for output in spec.outputs.values())

    def poison(self) -> None:
        """Fill every buffer with what must never reach an answer (I4)."""
        self.buffers.poison()

    def is_ragged(self, output: TensorSpec) -> bool:
        """Whether an output has a value for each token, real ones first in its tensor."""
        return len(output.dims) > 1 and output.dims[1] == self.axis

    def read(
        self,
        outputs: Sequence[torch.Tensor],
        rows: Sequence[RowArrays],
        sizes: Mapping[str, int],
        slot: int = 0,
    ) -> Reading:
        """Begin to copy the rows out: the real tokens of ragged outputs, else the real rows."""
        ragged = self._ragged
        # Only what has a value for each token needs to know where rows end.
        ends = [*accumulate([row.sizes[self.axis] for row in rows])] if any(ragged) else [0]
        real = [
            output[: ends[-1] if is_ragged else len(rows)]
            for is_ragged, output in zip(ragged, outputs, strict=True)
        ]
        landing = self._download.start(real, slot)

        def cut(arrays: Sequence[np.ndarray]) -> list[RowOutputs]:
            columns = [
                np.split(array, ends[:-1]) if is_ragged else array
                for is_ragged, array in zip(ragged, arrays, strict=True)
            ]
            if len(columns) == 1:  # the rule, and half the time
                (name,) = self._names
                return [{name: row} for row in columns[0]]
            rows_of = zip(*columns, strict=True)
            return [dict(zip(self._names, row, strict=True)) for row in rows_of]

        return Reading(landing, cut)


def takes_tokens(spec: ModelSpec) -> bool:
    """Whether a row is one input of integer ids [batch, axis], and outputs follow the ids or not.

    An output that has the axis in another place, or at a lower rate, is cut on the host.
    """
    sent = [t for t in spec.inputs.values() if t.make is None]
    rest = [dim for out in spec.outputs.values() for dim in out.dims[2:]]
    rest += [dim for out in spec.outputs.values() for dim in out.dims[1:2] if dim not in spec.axes]
    return (
        len(sent) == 1
        and len(sent[0].dims) == 2
        and isinstance(sent[0].dims[1], str)
        and all(t.dims == sent[0].dims and t.dtype == "int64" for t in spec.inputs.values())
        and all(isinstance(dim, int) for dim in rest)
    )
