"""Host buffers, their copies on the device, and the streams between them.

On the CPU a static buffer is the host buffer itself and nothing is copied. On a GPU a batch goes::

    pinned host buffer --copy stream--> device buffer --compute stream--> static buffer
    static output --compute stream--> device buffer --copy-back stream--> pinned host buffer

The host and device buffers exist twice (*slots*), so that the next batch is written and copied
while the device still works on this one. The static buffers exist once: the graphs read their
addresses, and only the compute stream touches them, in order (I5).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

SLOTS = 2
"""Batches that may be on their way at a time: one runs while the next is written."""


class Streams:
    """The streams of one device and the events that order them; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.upload = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.download = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def compute(self) -> torch.cuda.Stream:
        """The stream that programs and replays run on: the calling thread's current one."""
        return torch.cuda.current_stream(self.device)


class Upload:
    """One static input buffer and how the host fills it.

    Args:
        capacity: elements of the largest executed area.
        dtype: element type on the device.
        host_dtype: element type on the host; rounded on the way where it differs.
        streams: of the device.
    """

    def __init__(
        self, capacity: int, dtype: torch.dtype, host_dtype: torch.dtype, streams: Streams
    ) -> None:
        self._streams = streams
        slots = SLOTS if streams.cuda else 1
        self._host = [
            torch.zeros(capacity, dtype=host_dtype, pin_memory=streams.cuda) for _ in range(slots)
        ]
        self._arrays = [host.numpy() for host in self._host]
        if streams.cuda:
            self._staged = [host.to(streams.device) for host in self._host]
        # Outside inference mode, and never reallocated: graphs read this address.
        shared = not streams.cuda and host_dtype == dtype
        self.static = (
            self._host[0] if shared else torch.zeros(capacity, dtype=dtype, device=streams.device)
        )

    def view(self, shape: tuple[int, ...], slot: int) -> np.ndarray:
        """The front of a slot's host buffer in ``shape``: writable, contiguous."""
        return self._arrays[slot % len(self._arrays)][: prod(shape)].reshape(shape)

    def send(self, n: int, slot: int) -> None:
        """Bring the first ``n`` elements of a slot into the static buffer."""
        if self._streams.cuda:
            staged, streams = self._staged[slot], self._streams
            with torch.cuda.stream(streams.upload):
                staged[:n].copy_(self._host[slot][:n], non_blocking=True)
            streams.compute.wait_stream(streams.upload)
            self.static[:n].copy_(staged[:n], non_blocking=True)
        elif self.static is not self._host[0]:
            self.static[:n].copy_(self._host[0][:n])

    def poison(self, value: float) -> None:
        """Fill every buffer with ``value``, so that a leak shows (I4)."""
        for host in self._host:
            host.fill_(value)
        self.static.copy_(self._host[0])


@dataclass(frozen=True, slots=True)
class Landing:
    """Outputs on their way to the host; :meth:`arrays` waits for them."""

    hosts: tuple[torch.Tensor, ...]
    done: torch.cuda.Event | None

    def arrays(self) -> list[np.ndarray]:
        """Return the outputs as arrays of the caller's own; no view of a buffer survives (I5)."""
        if self.done is None:
            return [host.numpy() for host in self.hosts]
        self.done.synchronize()
        return [host.numpy().copy() for host in self.hosts]


class Download:
    """Copies outputs out of the static tensors before the next run overwrites them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        # (slot, output) -> device and pinned host buffer; grows to the largest output seen, which
        # the warm-up is sure to show.
        self._buffers: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def start(self, outputs: list[torch.Tensor], slot: int) -> Landing:
        """Begin to copy ``outputs`` (any shapes) to the host."""
        if not self._streams.cuda:
            return Landing(tuple(_to_host(output) for output in outputs), None)
        buffers = [self._buffer(slot, i, output) for i, output in enumerate(outputs)]
        streams = self._streams
        for output, (device, _) in zip(outputs, buffers, strict=True):
            device.copy_(output, non_blocking=True)
        streams.download.wait_stream(streams.compute)
        with torch.cuda.stream(streams.download):
            for device, host in buffers:
                host.copy_(device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Landing(tuple(host for _, host in buffers), done)

    def _buffer(
        self, slot: int, index: int, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The front of a slot's buffers in the shape of ``output``."""
        n, dtype = output.numel(), _host_dtype(output.dtype)
        kept = self._buffers.get((slot, index))
        if kept is None or kept[0].numel() < n or kept[0].dtype != dtype:
            device = torch.empty(n, dtype=dtype, device=output.device)
            host = torch.empty(n, dtype=dtype, pin_memory=True)
            kept = self._buffers[slot, index] = (device, host)
        return kept[0][:n].view(output.shape), kept[1][:n].view(output.shape)


def _host_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which numpy can hold ``dtype``; it has no bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory: a program may answer with its own input."""
    return tensor.detach().to(_host_dtype(tensor.dtype), copy=True)
