"""The padded layout: rows x padded row shape, padding masked.

One flat host buffer per input serves every bucket: a bucket's tensor is the contiguous front of it,
seen in the bucket's shape. So the memory is that of the largest bucket, a CUDA graph finds its
inputs at a fixed address, and nothing is allocated on the request path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shapeserve.models.spec import ModelSpec, TensorSpec

# numpy has no bfloat16: such inputs are staged as float32 and rounded by torch on the way out.
_NUMPY_DTYPES: dict[str, type] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.float32,
    "int64": np.int64,
    "int32": np.int32,
    "uint8": np.uint8,
    "bool": np.bool_,
}


_Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """One row as the model's author thinks of it.

    Attributes:
        arrays: input name -> array without the batch axis, unpadded.
        sizes: row axis -> real size, for example ``{"seq": 17}``.
    """

    arrays: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]


class _Staging:
    """The flat buffers of one input: on the host, and on the device where that differs."""

    def __init__(self, spec: TensorSpec, capacity: int, device: torch.device) -> None:
        self.spec = spec
        self.torch_dtype: torch.dtype = getattr(torch, spec.dtype)
        pinned = device.type == "cuda"
        host = torch.zeros(
            capacity,
            dtype=torch.float32 if spec.dtype == "bfloat16" else self.torch_dtype,
            pin_memory=pinned,
        )
        self.host = host
        self.array = host.numpy()
        same = not pinned and host.dtype == self.torch_dtype
        self.device = host if same else torch.zeros(capacity, dtype=self.torch_dtype, device=device)

    def view(self, shape: tuple[int, ...]) -> np.ndarray:
        """The front of the host buffer in ``shape``: writable, contiguous."""
        return self.array[: prod(shape)].reshape(shape)

    def upload(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Copy the front of the host buffer to the device (a no-op on the CPU)."""
        n = prod(shape)
        if self.device is not self.host:
            self.device[:n].copy_(self.host[:n], non_blocking=True)
        return self.device[:n].view(shape)


class PaddedLayout:
    """Writes rows into static buffers and reads rows out of the outputs.

    Thread rule: one user at a time (the device thread); the tensors that :meth:`write` returns are
    views of the buffers and are valid until the next call.

    Args:
        spec: the model's tensors.
        capacity: elements of the largest executed area, channels not counted (batch x row axes).
        device: where the model runs.
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device) -> None:
        self._spec = spec
        self._staging = [
            _Staging(tensor, capacity * _channels(tensor), device)
            for tensor in spec.inputs.values()
        ]
        self.capacity = capacity

    def poison(self) -> None:
        """Fill every buffer with NaN (or the dtype's largest value): a leak must show (I4)."""
        for staging in self._staging:
            spec = staging.spec
            if spec.make is None and "int" in spec.dtype:
                # An id out of the table would fault instead of leaking; a wrong valid one shows.
                staging.array.fill(1)
            elif spec.make is not None or spec.dtype == "bool":
                staging.array.fill(1)
            else:
                staging.array.fill(np.nan)
            staging.device.copy_(staging.host)

    def write(
        self, rows: Sequence[RowArrays], sizes: Mapping[str, int]
    ) -> tuple[torch.Tensor, ...]:
        """Pad ``rows`` into tensors of the executed shape.

        Args:
            rows: at most ``sizes["batch"]`` rows, each within the row axes of ``sizes``.
            sizes: axis -> executed size, ``batch`` included.

        Filler rows (beyond the given ones) hold the pad value and one valid mask element, because
        a fully masked row makes NaN in some attention kernels.

        Returns:
            One device tensor per input in spec order, shaped by its dims.
        """
        tensors = []
        for staging in self._staging:
            shape = staging.spec.shape(sizes)
            view = staging.view(shape)
            if staging.spec.make == "mask":
                _write_mask(view, rows, staging.spec)
            elif staging.spec.make == "positions":
                _write_positions(view, rows, staging.spec)
            else:
                _write_data(view, rows, staging.spec)
            tensors.append(staging.upload(shape))
        return tuple(tensors)

    def read(
        self, outputs: Sequence[torch.Tensor], rows: Sequence[RowArrays]
    ) -> list[dict[str, np.ndarray]]:
        """Copy the rows out of ``outputs``, cut to their real sizes; filler rows are left behind.

        The arrays are owned by the caller: no view of a static buffer survives (I5).
        """
        n = len(rows)
        copies = {
            spec.name: _to_numpy(output[:n])
            for spec, output in zip(self._spec.outputs.values(), outputs, strict=True)
        }
        results: list[dict[str, np.ndarray]] = [{} for _ in rows]
        for spec in self._spec.outputs.values():
            batch = copies[spec.name]
            ragged = any(isinstance(d, str) for d in spec.dims[1:])
            for i, row in enumerate(rows):
                cut = batch[_at(i, _region(spec, row.sizes))] if ragged else batch[i]
                results[i][spec.name] = cut.copy() if ragged else cut
        return results


def _channels(spec: TensorSpec) -> int:
    return prod(d for d in spec.dims if isinstance(d, int))


def _region(spec: TensorSpec, sizes: Mapping[str, int]) -> _Index:
    """The part of a row's padded tensor that is real: named dims are cut, fixed ones whole."""
    return tuple(slice(sizes[d]) if isinstance(d, str) else slice(None) for d in spec.dims[1:])


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
    view[_at(slice(len(rows), None), (0,) * (view.ndim - 1))] = 1


def _write_positions(view: np.ndarray, rows: Sequence[RowArrays], spec: TensorSpec) -> None:
    # Beyond a row's end the positions stay 0, a valid entry of every position table.
    view.fill(0)
    axis = spec.dims[1]
    for i, row in enumerate(rows):
        length = row.sizes[str(axis)]
        view[i, :length] = np.arange(length)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    host = tensor.detach().cpu()
    # .cpu() of a CPU tensor is the tensor itself: the copy is what makes it the caller's.
    return host.numpy().copy() if host.data_ptr() == tensor.data_ptr() else host.numpy()
