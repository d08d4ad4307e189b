"""The padded layout: rows x padded row shape, padding masked.

One flat host buffer per input serves every bucket: a bucket's tensor is the contiguous front of it,
seen in the bucket's shape. So the memory is that of the largest bucket, a CUDA graph finds its
inputs at a fixed address, and nothing is allocated on the request path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from shapeserve.buckets import BATCH, padding
from shapeserve.layout.base import Forward, Reading
from shapeserve.layout.rows import RowArrays
from shapeserve.layout.transfer import SLOTS, Download, Streams, Upload
from shapeserve.models.spec import ModelSpec, TensorSpec, size_along

_Index = tuple[int | slice, ...]


class PaddedLayout:
    """Pads rows on the host; reads rows out of the outputs.

    Thread rule: one user at a time (the device thread); the tensors that :meth:`write` returns are
    views of the static buffers and hold one batch until the next call.

    Args:
        spec: the model's tensors.
        capacity: elements of the largest executed area, channels not counted (batch x row axes).
        device: where the model runs.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device) -> None:
        self._spec = spec
        streams = Streams(device)
        self._uploads = [
            _upload(tensor, capacity * _channels(tensor), streams)
            for tensor in spec.inputs.values()
        ]
        self._download = Download(streams)
        self.capacity = capacity
        self.slots = SLOTS if streams.cuda else 1

    def poison(self) -> None:
        """Fill every buffer with NaN (or a valid id): a leak must show (I4)."""
        for spec, upload in zip(self._spec.inputs.values(), self._uploads, strict=True):
            # An id out of the table would fault instead of leaking; a wrong valid one shows.
            exact = spec.make is not None or spec.dtype == "bool" or "int" in spec.dtype
            upload.poison(1 if exact else np.nan)

    def write(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int], slot: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Pad ``rows`` into the static tensors of the executed shape.

        Args:
            rows: at most ``sizes["batch"]`` rows, each within the row axes of ``sizes``.
            sizes: axis -> executed size, ``batch`` included.
            slot: which host buffers to use; their previous batch must be finished.

        Filler rows (beyond the given ones) hold the pad value and one valid mask element, because
        a fully masked row makes NaN in some attention kernels.

        Returns:
            One device tensor per input in spec order, shaped by its dims.
        """
        tensors = []
        for spec, upload in zip(self._spec.inputs.values(), self._uploads, strict=True):
            shape = spec.shape(sizes)
            view = upload.view(shape, slot)
            if spec.make == "mask":
                _write_mask(view, rows, spec)
            elif spec.make == "positions":
                _write_positions(view, rows, spec)
            else:
                _write_data(view, rows, spec)
            upload.send(prod(shape), slot)
            tensors.append(upload.static[: prod(shape)].view(shape))
        return tuple(tensors)

    def bind(self, program: Forward, sizes: Mapping[str, int]) -> Forward:
        """Return what runs ``program`` on the tensors of :meth:`write`: the program itself."""
        return program

    def read(
        self,
        outputs: Sequence[torch.Tensor],
        rows: Sequence[RowArrays],
        sizes: Mapping[str, int],
        slot: int = 0,
    ) -> Reading:
        """Begin to copy the rows out of ``outputs``; filler rows are left behind."""
        landing = self._download.start([output[: len(rows)] for output in outputs], slot)
        return Reading(landing, lambda arrays: self._cut(arrays, rows))

    def _cut(
        self, arrays: Sequence[np.ndarray], rows: Sequence[RowArrays]
    ) -> list[dict[str, np.ndarray]]:
        """Cut each row to its real sizes along the axes that the outputs declare."""
        results: list[dict[str, np.ndarray]] = [{} for _ in rows]
        for spec, batch in zip(self._spec.outputs.values(), arrays, strict=True):
            ragged = any(isinstance(d, str) for d in spec.dims[1:])
            for i, row in enumerate(rows):
                cut = batch[_at(i, _region(spec, row.sizes))] if ragged else batch[i]
                results[i][spec.name] = cut.copy() if ragged else cut
        return results

    def split(self, rows: Sequence[RowArrays], sizes: Mapping[str, int]) -> dict[str, int]:
        """Split the executed area into real elements and padding; see ``buckets.padding``."""
        return padding(self._spec.axes, [row.sizes for row in rows], sizes)


def _upload(spec: TensorSpec, capacity: int, streams: Streams) -> Upload:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    # numpy has no bfloat16: such inputs are staged as float32 and rounded by torch on the way.
    host = torch.float32 if dtype == torch.bfloat16 else dtype
    return Upload(capacity, dtype, host, streams)


def _channels(spec: TensorSpec) -> int:
    return prod(d for d in spec.dims if isinstance(d, int))


def _region(spec: TensorSpec, sizes: Mapping[str, int]) -> _Index:
    """The part of a row's padded tensor that is real: named dims are cut, fixed ones whole."""
    return tuple(
        slice(size_along(d, sizes)) if isinstance(d, str) else slice(None) for d in spec.dims[1:]
    )


def _at(row: int | slice, rest: _Index) -> _Index:
    """The index of a region in one row (or several) of the batch."""
    return (row, *rest)


def _write_data(view: np.ndarray, rows: Sequence[RowArrays], spec: TensorSpec) -> None:
    view.fill(spec.pad)
    for i, row in enumerate(rows):
        view[_at(i, _region(spec, row.sizes))] = row.arrays[spec.name]


def _write_mask(view: np.ndarray, rows: Sequence[RowArrays], spec: TensorSpec) -> None:
    view.fill(0)
    for i, row in enumerate(rows):
        view[_at(i, _region(spec, row.sizes))] = 1
    smallest = {dim: 1 for dim in spec.dims if isinstance(dim, str)}
    view[_at(slice(len(rows), None), _region(spec, smallest))] = 1


def _write_positions(view: np.ndarray, rows: Sequence[RowArrays], spec: TensorSpec) -> None:
    # Beyond a row's end the positions stay 0, a valid entry of every position table.
    view.fill(0)
    for i, row in enumerate(rows):
        view[_at(i, _region(spec, row.sizes))] = positions(spec, row.sizes)


def positions(spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
    """Count along the one axis of a row, in a shape that broadcasts to the row's tensor."""
    (place,) = (i for i, dim in enumerate(spec.dims[1:]) if isinstance(dim, str))
    count = np.arange(spec.shape({**sizes, BATCH: 1})[1:][place])
    return count.reshape([-1 if i == place else 1 for i in range(len(spec.dims) - 1)])
