"""Host buffers and their copies on the device.

On the CPU a static buffer is the host buffer itself and nothing is copied. On a GPU a batch goes::

    pinned host buffer -> static input -> program -> static output -> pinned host buffer

The host buffers exist twice (*slots*), so that the next batch is written while the device works on
this one. The static ones exist once: graphs read their addresses, and only the compute stream
touches them, in order (I5).

Small copies run on the compute stream itself: without streams of their own (events, waits, a second
hop) writing and reading a batch of 32 short rows took the host 111 microseconds instead of 245 (on
an H200). Copies above ``DIRECT_BYTES`` go through a device buffer of the slot and a copy stream,
and overlap with the device's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

SLOTS = 2
"""Batches that may be on their way at a time: one runs while the next is written."""

DIRECT_BYTES = 1 << 20
"""1 MiB takes 20 microseconds at 50 GB/s, less than a hop costs the host; not measured further."""


class Streams:
    """The copy streams of one device; does nothing on the CPU."""

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
        self._direct = DIRECT_BYTES // host_dtype.itemsize if host_dtype == dtype else 0
        self._staged: list[torch.Tensor] = []
        if streams.cuda and capacity > self._direct:
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
        host = self._host[slot % len(self._host)]
        if self.static is host:
            return
        if not self._streams.cuda or n <= self._direct:
            self.static[:n].copy_(host[:n], non_blocking=True)
            return
        staged, streams = self._staged[slot], self._streams
        with torch.cuda.stream(streams.upload):
            staged[:n].copy_(host[:n], non_blocking=True)
        streams.compute.wait_stream(streams.upload)
        self.static[:n].copy_(staged[:n], non_blocking=True)

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
        self._done: list[torch.cuda.Event] = []
        if streams.cuda:
            event = torch.cuda.Event
            self._done = [event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        # (slot, output, on the host) -> buffer; grows to the largest output seen, which the
        # warm-up is sure to show.
        self._buffers: dict[tuple[int, int, bool], torch.Tensor] = {}

    def start(self, outputs: list[torch.Tensor], slot: int) -> Landing:
        """Begin to copy ``outputs`` (any shapes) to the host."""
        if not self._streams.cuda:
            return Landing(tuple(_to_host(output) for output in outputs), None)
        hosts = [self._buffer(slot, i, output, host=True) for i, output in enumerate(outputs)]
        done = self._done[slot]
        if sum(output.nbytes for output in outputs) <= DIRECT_BYTES:
            for output, host in zip(outputs, hosts, strict=True):
                host.copy_(output, non_blocking=True)
            done.record()
        else:
            self._overlapped(outputs, hosts, done, slot)
        return Landing(tuple(hosts), done)

    def _overlapped(
        self,
        outputs: list[torch.Tensor],
        hosts: list[torch.Tensor],
        done: torch.cuda.Event,
        slot: int,
    ) -> None:
        """Copy on the device first, so that the next run need not wait for the bus."""
        streams = self._streams
        kept = [self._buffer(slot, i, output, host=False) for i, output in enumerate(outputs)]
        for output, device in zip(outputs, kept, strict=True):
            device.copy_(output, non_blocking=True)
        streams.download.wait_stream(streams.compute)
        with torch.cuda.stream(streams.download):
            for device, host in zip(kept, hosts, strict=True):
                host.copy_(device, non_blocking=True)
            done.record()

    def _buffer(self, slot: int, index: int, output: torch.Tensor, *, host: bool) -> torch.Tensor:
        """The front of a slot's buffer in the shape of ``output``."""
        n, dtype = output.numel(), _host_dtype(output.dtype)
        kept = self._buffers.get((slot, index, host))
        if kept is None or kept.numel() < n or kept.dtype != dtype:
            place = {"pin_memory": True} if host else {"device": output.device}
            kept = self._buffers[slot, index, host] = torch.empty(n, dtype=dtype, **place)
        return kept[:n].view(output.shape)


def _host_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which numpy can hold ``dtype``; it has no bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory: a program may answer with its own input."""
    return tensor.detach().to(_host_dtype(tensor.dtype), copy=True)
